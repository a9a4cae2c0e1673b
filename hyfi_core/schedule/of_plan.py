"""The lowered schedules of one plan, made when they are first needed."""

from __future__ import annotations

from collections.abc import Iterable

from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.plan.placement import Placement
from hyfi_core.schedule.action import Action, Schedule, Verb
from hyfi_core.schedule.generate import forward_only, forwards_first, generate, only_forwards
from hyfi_core.schedule.in_flight import followed_at_once
from hyfi_core.schedule.lower import lower
from hyfi_core.schedule.simulate import validate

Edges = Iterable[tuple[int, int]]


class PlanSchedules:
    """The schedules of training steps, of their forwards alone, and of predictions, with all communication.

    Args:
        plan: with every cell as a rank.
        placement: which ranks hold which stage.
    """

    def __init__(self, plan: ParallelPlan, placement: Placement) -> None:
        self._plan, self._placement = plan, placement
        self._recomputed: dict[tuple[tuple[tuple[int, int], ...], int, bool], frozenset[Action]] = {}
        self._lowered: dict[tuple[tuple[tuple[int, int], ...], str], Schedule] = {}

    def training(self, edges: Edges) -> Schedule:
        """Return the schedule of a training step: every action of every rank of a replica."""
        pairs, mirror = tuple(edges), self._plan.mirror
        key = (pairs, "training")
        if key not in self._lowered:
            lowered = lower(generate(self._plan, self._placement), self._placement, pairs, mirror=mirror)
            validate(lowered, self._placement, pairs, mirror=mirror)  # detects deadlocks before they can occur
            self._lowered[key] = lowered
        return self._lowered[key]

    def forwards_first(self, edges: Edges) -> bool:
        """Whether a training step runs all forwards before all backwards, so that all outputs exist at once."""
        return forwards_first(self.training(edges))

    def recomputed(self, edges: Edges, rank: int, in_turn: bool) -> frozenset[Action]:
        """Return a rank's forwards of a training step that are computed again in backward.

        Args:
            edges: pairs (from, to) of stages that exchange values.
            rank: number of the rank in its replica.
            in_turn: whether the ranks are cells that take turns, so that each forward waits for its backward.
        """
        key = (tuple(edges), rank, in_turn)
        if key not in self._recomputed:
            actions = self.training(key[0]).actions[rank]
            forwards = frozenset(a for a in actions if a.verb is Verb.F and self._plan.recomputes(a.stage))
            # A forward whose backward follows at once is not recomputed: that would free nothing.
            at_once = frozenset() if in_turn else followed_at_once(actions, self._plan.stages - 1)
            self._recomputed[key] = forwards - at_once
        return self._recomputed[key]

    def outputs(self, edges: Edges) -> Schedule:
        """Return the forwards of a training step without its backwards, in the same order on each rank."""
        key = (tuple(edges), "outputs")
        if key not in self._lowered:
            self._lowered[key] = lower(only_forwards(generate(self._plan, self._placement)), self._placement, key[0])
        return self._lowered[key]

    def prediction(self, edges: Edges, microbatches: int) -> Schedule:
        """Return the forwards of a prediction."""
        key = (tuple(edges), f"prediction of {microbatches}")
        if key not in self._lowered:
            self._lowered[key] = lower(forward_only(self._placement, microbatches), self._placement, key[0])
        return self._lowered[key]
