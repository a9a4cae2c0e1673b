"""The cache of recent slides gives each thread its value, whatever others drop meanwhile."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from data.tiles.recent import Recent


def test_values_stay_within_the_limit_and_the_last_used_are_kept() -> None:
    made: list[int] = []
    recent: Recent[int] = Recent(2, lambda value: 1)

    def get(index: int) -> int:
        return recent.get(index, lambda: made.append(index) or index)

    assert [get(index) for index in (0, 1, 0, 2, 0, 1)] == [0, 1, 0, 2, 0, 1]
    assert made == [0, 1, 2, 1]


def test_a_value_that_another_thread_drops_while_it_is_made_is_returned() -> None:
    recent: Recent[int] = Recent(1, lambda value: 1)

    def make() -> int:
        with ThreadPoolExecutor(1) as other:
            assert other.submit(recent.get, "other", lambda: 2).result(10) == 2
        return 1

    assert recent.get("own", make) == 1

    def busy(thread: int) -> bool:
        return all(recent.get((thread, k % 3), lambda k=k: k % 3) == k % 3 for k in range(2000))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(busy, range(4)))
