"""What a faulty schedule says: eight places, the number of the others, and the picture."""

from __future__ import annotations

import pytest

from hyfi_core.schedule.action import Schedule, Verb, act
from hyfi_core.schedule.fault import Blame, ScheduleError, name_at

SCHEDULE = Schedule("s", ((act(Verb.F, 0, 0, 0), act(Verb.B, 0, 0, 0)),))


@pytest.mark.parametrize(("count", "more"), [(1, 0), (8, 0), (9, 1), (20, 12)])
def test_eight_places_are_named_and_the_others_counted(count: int, more: int) -> None:
    error = ScheduleError(SCHEDULE, "deadlock", [Blame(0, k, f"why {k}") for k in range(count)], "GRID")
    lines = str(error).splitlines()
    assert lines[0] == "schedule s: deadlock" and lines[-1] == "GRID" and len(error.blames) == count
    assert lines[1 : count + 1 - more] == [
        f"  rank 0, action {k}, {name_at(SCHEDULE, Blame(0, k, ''))}: why {k}" for k in range(count - more)
    ]
    assert lines[count + 1 - more : -1] == ([f"  and {more} more"] if more else [])
    assert name_at(SCHEDULE, Blame(0, 2, "")) == "end" != name_at(SCHEDULE, Blame(0, 1, ""))
