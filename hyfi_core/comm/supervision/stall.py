"""When ranks count as stalled: decided from their heartbeats.

::

    no heartbeat                       frozen: stopped, swapped out, its node or disk hangs
    heartbeats, computes, no event     stuck: a GPU or a call does not return         only once training has begun,
    heartbeats, all wait, no event     all wait for something that never comes        where steps tell what is long
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hyfi_core.comm.supervision.heartbeat import Beat

LEAST_S = 300.0
"""The smallest automatic limit."""
STEPS = 10.0
"""The automatic limit as a multiple of the longest step."""
SLOW_S = 1800.0
"""The smallest limit while a rank compiles, writes a checkpoint, or takes its first step."""
STOPPING_S, STOPPING_STEPS = 10.0, 3.0
"""``LEAST_S`` and ``STEPS`` after a request to stop: schedulers kill soon."""
_SHOWN = 8


@dataclass(frozen=True)
class Place:
    """Where a rank runs: its host and process id."""

    host: str
    pid: int


@dataclass(frozen=True)
class Stall:
    """Ranks that do not go on.

    Attributes:
        ranks: Those that hold up the others; all if none of them computes.
        text: The report about them.
    """

    ranks: tuple[int, ...]
    text: str


@dataclass
class _Health:
    """The last heartbeat of a rank, when it came, and when the rank last moved."""

    beat: Beat
    heard_s: float
    moved_s: float


@dataclass
class StallRule:
    """Decides whether ranks are stalled, from their heartbeats.

    Args:
        places: Where the ranks run.
        limit_s: Seconds without heartbeats or events after which a rank is stalled; None: from the time of the steps;
            0: ranks are never stalled, unless they were requested to stop.
    """

    places: Mapping[int, Place]
    limit_s: float | None = None
    _ranks: dict[int, _Health] = field(default_factory=dict)
    _begun: int = 0
    _step_began_s: float = 0.0
    _longest_s: float = 0.0

    def hear(self, rank: int, beat: Beat, now_s: float) -> None:
        """Record a heartbeat; the first of a new step also gives the time of the step before it."""
        before = self._ranks.get(rank)
        moved_s = now_s if beat.moved or before is None else before.moved_s
        self._ranks[rank] = _Health(beat, now_s, moved_s)
        if beat.begun > self._begun:
            if self._begun > 1:  # the first step captures and compiles
                self._longest_s = max(self._longest_s, now_s - self._step_began_s)
            self._begun, self._step_began_s = beat.begun, now_s

    def forgive(self, now_s: float) -> None:
        """Forget how long ranks have been silent: this process itself was stopped in the meantime."""
        for health in self._ranks.values():
            health.heard_s = health.moved_s = now_s
        self._step_began_s = now_s

    def leave(self, rank: int) -> None:
        """Forget a rank that has ended."""
        self._ranks.pop(rank, None)

    def frozen(self, now_s: float) -> Stall | None:
        """Return the ranks that do not beat any more."""
        limit_s = self._limit_s(STOPPING_S)
        silent = {rank: now_s - health.heard_s for rank, health in self._ranks.items()}
        late = [rank for rank, seconds in silent.items() if limit_s and seconds > limit_s]
        if not late:
            return None
        lines = [
            f"{self._named(rank)} has shown no sign of life for {silent[rank]:.0f} s ({self._why(limit_s)}): it is "
            f"stopped, or its node or disk hangs; last seen in {self._ranks[rank].beat.where}"
            for rank in late
        ]
        return Stall(tuple(late), "\n".join(lines + self._others(late)))

    def stuck(self, now_s: float) -> Stall | None:
        """Return the ranks that hold up training although they beat; None before training has begun."""
        if not self._begun:
            return None
        still = {rank: now_s - health.moved_s for rank, health in self._ranks.items()}
        limits_s = {rank: self._event_limit_s(health.beat) for rank, health in self._ranks.items()}
        late = [rank for rank, seconds in still.items() if limits_s[rank] and seconds > limits_s[rank]]
        # Ranks that wait are held up by those that compute.
        computing = [rank for rank in late if not self._ranks[rank].beat.waits]
        if computing:
            lines = [
                f"{self._named(rank)} has made no progress for {still[rank]:.0f} s ({self._why(limits_s[rank])}) in "
                f"{self._ranks[rank].beat.where}: its GPU, its disk or a call hangs"
                for rank in computing
            ]
            return Stall(tuple(computing), "\n".join(lines + self._others(computing)))
        if late and len(late) == len(self._ranks):
            head = f"no rank has made progress for {min(still.values()):.0f} s ({self._why(min(limits_s.values()))})"
            return Stall(tuple(late), "\n".join([head + ", all wait:", *self._others([])]))
        return None

    def _limit_s(self, stopping_s: float) -> float:
        """Return the limit for heartbeats; 0: none."""
        limit_s = max(LEAST_S, STEPS * self._longest_s) if self.limit_s is None else self.limit_s
        if any(health.beat.stops for health in self._ranks.values()):
            # Even if there is no limit otherwise: after a request to stop, a scheduler kills soon.
            return min(limit_s or float("inf"), max(stopping_s, STOPPING_STEPS * self._longest_s))
        return limit_s

    def _event_limit_s(self, beat: Beat) -> float:
        limit_s = self._limit_s(3 * STOPPING_S)
        # The first step captures and compiles, and no earlier step shows how long one takes.
        return max(limit_s, SLOW_S) if limit_s and (beat.slow or self._begun == 1) else limit_s

    def _why(self, limit_s: float) -> str:
        if any(health.beat.stops for health in self._ranks.values()):
            return f"{limit_s:.3g} s are allowed after a request to stop"
        return f"run.stall_s: {limit_s:.3g} s{', from the time of the steps' if self.limit_s is None else ''}"

    def _named(self, rank: int) -> str:
        return f"rank {rank} on {self.places[rank].host}"

    def _others(self, named: list[int]) -> list[str]:
        waiting = [rank for rank in sorted(self._ranks) if rank not in named]
        lines = [f"  {self._named(rank)}: {self._ranks[rank].beat.where}" for rank in waiting[:_SHOWN]]
        return lines + ([f"  … and {len(waiting) - _SHOWN} more ranks"] if len(waiting) > _SHOWN else [])
