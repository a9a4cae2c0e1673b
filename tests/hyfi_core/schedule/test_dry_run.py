"""The dry run against the definitions of its times, applied again and again until nothing changes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from hyfi_core.schedule.action import COMPUTE, TO_WEIGHTS, Action, Schedule, Verb
from hyfi_core.schedule.check import find_faults
from hyfi_core.schedule.fault import Blame
from hyfi_core.schedule.routes import counterpart, receivers
from hyfi_core.schedule.simulate import Costs, simulate
from tests.hyfi_core.schedule.cases import RECEIVES, SENDS, Case, draw_case

Span = tuple[int, str, float, float, str]
"""(rank, action, start, end, kind)."""
Received = tuple[int, Action]
"""A rank and a receive of it."""


@dataclass
class Plain:
    """All times of a lowered schedule: each is the largest of what it waits for, which is asked until none grows."""

    case: Case
    schedule: Schedule
    costs: Costs
    posted: dict[Received, float] = field(default_factory=lambda: defaultdict(float))
    arrived: dict[Received, float] = field(default_factory=lambda: defaultdict(float))
    ended: dict[Action, float] = field(default_factory=lambda: defaultdict(float))

    def spans(self) -> list[Span]:
        before: list[Span] = []
        while (now := self._pass()) != before:
            before = now
        return now

    def _pass(self) -> list[Span]:
        spans, begins = list[Span](), dict[Action, float]()
        messages = list[tuple[int, Action, int, float]]()
        reduced = dict[Action, list[tuple[int, float]]]()
        for rank, row in enumerate(self.schedule.actions):
            clock = last_reduce = 0.0
            for action in row:
                if action.verb in RECEIVES:
                    self.posted[rank, action] = clock
                elif action.verb in SENDS:
                    messages += [(rank, action, to, clock) for to in receivers(self.case.placement, rank, action)]
                elif action.verb in COMPUTE:
                    needed = (self.arrived[rank, need] for need in self._needs(row, action))
                    begins[action] = max(begins.get(action, 0.0), clock, *needed, 0.0)
                    clock = self.ended[action]
                else:
                    gradients = [
                        self.arrived[rank, a] for a in row if a.verb is Verb.RECV_G and a.stage == action.stage
                    ]
                    reduced.setdefault(action, []).append((rank, max(clock, last_reduce, *gradients, 0.0)))
                    last_reduce = self.ended[action]
        for action, start in begins.items():
            self.ended[action] = start + self._compute_s(action)
            gang = self.case.placement.group(action.stage, action.direction)
            spans += [(rank, str(action), start, self.ended[action], action.verb) for rank in gang]
        for action, waits in reduced.items():
            start = max(time for _, time in waits)
            self.ended[action] = start + _of(self.costs.reduce_s, action.stage)
            spans += [(rank, str(action), start, self.ended[action], action.verb) for rank, _ in waits]
        for rank, action, to, sent in messages:
            receive = counterpart(action)
            start = max(sent, self.posted[to, receive])
            end = sent if to == rank else start + self._message_s(action)
            self.arrived[to, receive] = max(self.arrived[to, receive], end)
            spans += [] if to == rank else [(rank, str(action), start, end, action.verb)]
        return sorted(spans)

    def _needs(self, row: tuple[Action, ...], action: Action) -> list[Action]:
        """What a rank receives for an action; W needs nothing but its I."""
        if action.verb is Verb.W:
            return []
        verb, own = Verb.RECV_F if action.verb is Verb.F else Verb.RECV_B, (action.stage, action.direction)
        return [a for a in row if (a.verb, a.microbatch, a.stage, a.direction) == (verb, action.microbatch, *own)]

    def _compute_s(self, action: Action) -> float:
        whole, weight_s = _of(self.costs.backward_s, action.stage), _of(self.costs.weight_s, action.stage)
        return {
            Verb.F: _of(self.costs.forward_s, action.stage),
            Verb.B: whole,
            Verb.I: whole - weight_s,
            Verb.W: weight_s,
        }[action.verb]

    def _message_s(self, send: Action) -> float:
        usual = _of(self.costs.message_s, send.stage)
        if send.verb is Verb.SEND_G or send.peer is None:
            return usual
        first, second = sorted((send.stage, send.peer))
        return self.costs.edge_s.get((first, second), usual)


def _of(seconds: object, stage: int) -> float:
    assert callable(seconds)
    return float(seconds(stage))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_every_event_is_when_what_it_waits_for_has_ended(data: st.DataObject) -> None:
    """Durations are whole numbers, so that times are equal exactly."""
    case = draw_case(lambda low, high: data.draw(st.integers(low, high)))
    stages = case.plan.stages
    numbers = data.draw(st.lists(st.integers(0, 9), min_size=5 * stages, max_size=5 * stages))
    of = [[float(number) for number in numbers[at::5]] for at in range(5)]
    edges = data.draw(st.sets(st.sampled_from(case.edges), max_size=3)) if case.edges else set[tuple[int, int]]()
    costs = Costs(
        forward_s=lambda stage: of[0][stage],
        backward_s=lambda stage: of[1][stage] + of[4][stage],
        message_s=lambda stage: of[2][stage],
        reduce_s=lambda stage: of[3][stage],
        weight_s=lambda stage: of[4][stage],
        edge_s={edge: 11.0 + edge[0] for edge in edges},
    )
    schedule = case.lowered()
    found = simulate(schedule, case.placement, case.edges, mirror=case.mirror, costs=costs)
    spans = Plain(case, schedule, costs).spans()
    assert sorted((e.rank, e.name, e.start_s, e.end_s, e.kind) for e in found.events) == spans
    assert found.makespan_s == max(end for *_, end, _ in spans)
    for rank, row in enumerate(schedule.actions):
        mine = [(start, end) for r, _, start, end, kind in spans if r == rank and kind in COMPUTE]
        assert found.busy_s[rank] == sum(end - start for start, end in mine)
        live = [0]
        for action in row:
            live.append(live[-1] + (action.verb is Verb.F) - (action.verb in TO_WEIGHTS))
        assert found.peak_live[rank] == max(live)


def test_a_missing_action_is_blamed_on_what_needs_it_or_on_the_last_that_it_needs() -> None:
    """All lists of some of five actions, in their order."""
    a, b, c, d, e = (Action(Verb.F, stage, 0, 0) for stage in range(5))
    wanted = {a: [], b: [], c: [a, b], d: [c], e: [b]}
    for kept in product((False, True), repeat=5):
        row = tuple(action for action, keep in zip(wanted, kept, strict=True) if keep)
        blames = []
        for action in [lost for lost in wanted if lost not in row]:
            users = [index for index, user in enumerate(row) if action in wanted[user]]
            before = [row.index(need) for need in wanted[action] if need in row]
            if users:
                blames.append(Blame(0, users[0], f"needs {action}, which is missing"))
            elif before:
                blames.append(Blame(0, before[-1], f"{action} is missing after it"))
            else:
                blames.append(Blame(0, len(row), f"{action} is missing"))
        assert find_faults(Schedule("x", (row,)), [wanted]) == blames


def test_extra_and_misplaced_actions_are_blamed_where_they_are() -> None:
    a, b, c = (Action(Verb.F, stage, 0, 0) for stage in range(3))
    wanted = {a: [], b: [a], c: [a, b]}

    def faults(*row: Action) -> list[tuple[int, str]]:
        return [(blame.index, blame.why) for blame in find_faults(Schedule("x", (row,)), [wanted])]

    assert faults(a, b, c) == []
    assert faults(b, a, c) == [(0, f"comes before {a}, which it needs")]
    assert faults(c, a, b) == [(0, f"comes before {a}, which it needs"), (0, f"comes before {b}, which it needs")]
    alien = Action(Verb.F, 9, 0, 0)
    assert faults(a, alien, b, c) == [(1, "does not belong to this rank in this plan")]
    assert faults(a, b, a, c) == [(2, "occurs twice, first as action 0"), (0, "occurs twice, again as action 2")]
