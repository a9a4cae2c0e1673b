"""Errors in schedules, with the rank and action of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hyfi_core.schedule.action import Action, Schedule

MARK = "<-- ERROR HERE"
_SHOWN = 8  # places in a message; one wrong action may cause many others


@dataclass(frozen=True)
class Blame:
    """One faulty place of a schedule.

    Attributes:
        rank: number of the rank in its replica.
        index: index of the action in the rank's list; the length of the list if an action is missing at its end.
        why: what is wrong with the action, or what it waits for.
    """

    rank: int
    index: int
    why: str


class ScheduleError(Exception):
    """A schedule cannot be run: it deadlocks, or an action is missing, repeated or misplaced.

    Attributes:
        blames: the faulty places; of a deadlock, one for each rank of the cycle.
    """

    def __init__(self, schedule: Schedule, problem: str, blames: Sequence[Blame], grid: str = "") -> None:
        self.blames = tuple(blames)
        lines = [f"schedule {schedule.name}: {problem}"]
        for blame in self.blames[:_SHOWN]:
            lines.append(f"  rank {blame.rank}, action {blame.index}, {name_at(schedule, blame)}: {blame.why}")
        if len(self.blames) > _SHOWN:
            lines.append(f"  and {len(self.blames) - _SHOWN} more")
        super().__init__("\n".join([*lines, grid] if grid else lines))


def name_at(schedule: Schedule, blame: Blame) -> str:
    """Return the text of the action at the place of a blame, "end" after the last one."""
    row: Sequence[Action] = schedule.actions[blame.rank]
    return str(row[blame.index]) if blame.index < len(row) else "end"
