"""A million random plans and schedules, each dry, and each again with a planted fault."""

from __future__ import annotations

import os
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.hyfi_core.schedule.cases import run_batch

BATCH = 2000


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_million_schedules(capsys: pytest.CaptureFixture[str]) -> None:
    count = int(os.environ.get("HYFI_SOAK_SCHEDULES", "1000000"))
    began_s = time.monotonic()
    with ProcessPoolExecutor() as pool:
        kinds = sum(map(Counter, pool.map(run_batch, range(count // BATCH), [BATCH] * (count // BATCH))), Counter())
    with capsys.disabled():
        print(f"\n{count} schedules ran dry, {kinds.total()} planted faults found: {dict(kinds)}; ", end="")
        print(f"{time.monotonic() - began_s:.0f} s on {os.cpu_count()} processes")
    assert min(kinds.values()) > 0
