"""The cache of recent slides gives each thread its value, whatever others drop meanwhile."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait

from data.tiles.recent import Recent
from tests.patience import PATIENCE_S


def test_values_stay_within_the_limit_and_the_last_used_are_kept() -> None:
    made: list[int] = []
    recent: Recent[int] = Recent(2, lambda value: 1)

    def get(index: int) -> int:
        return recent.get(index, lambda: made.append(index) or index)

    assert [get(index) for index in (0, 1, 0, 2, 0, 1)] == [0, 1, 0, 2, 0, 1]
    assert made == [0, 1, 2, 1]


def test_a_value_that_another_thread_drops_is_returned_all_the_same() -> None:
    """The other thread asks while the value is being entered; no more than the last one stays."""
    others: list[Future[str]] = []

    with ThreadPoolExecutor(1) as threads:

        def size(value: str) -> int:
            if value == "own" and not others:
                others.append(threads.submit(recent.get, 1, lambda: "other"))
                wait(others, timeout=0.5)  # it may have to wait for this thread
            return 1

        recent: Recent[str] = Recent(0, size)
        assert recent.get(0, lambda: "own") == "own"
        assert others[0].result(PATIENCE_S) == "other"
