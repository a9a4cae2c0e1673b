"""The ranks that write a checkpoint: all tensors once, shares of equal size, few files."""

import random

import pytest

from hyfi_core.runtime.saving import shares
from hyfi_core.runtime.saving.shares import LEAST_BYTES, deal


def loads(sizes: dict[str, int], writers: dict[str, int]) -> dict[int, int]:
    found: dict[int, int] = {}
    for name, rank in writers.items():
        found[rank] = found.get(rank, 0) + sizes[name]
    return found


def test_small_weights_are_written_by_the_first_rank() -> None:
    assert deal({"a": LEAST_BYTES, "b": LEAST_BYTES - 1}, [3, 4, 5]) == {"a": 3, "b": 3}
    assert deal({}, [3, 4]) == {}


def test_large_weights_are_written_by_ranks_that_are_far_apart() -> None:
    sizes = {f"layer{number}": LEAST_BYTES // 4 for number in range(16)}
    assert loads(sizes, deal(sizes, range(64))) == {rank: LEAST_BYTES for rank in (0, 16, 32, 48)}


@pytest.mark.parametrize("seed", range(20))
def test_no_share_is_larger_than_the_mean_and_one_tensor(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "LEAST_BYTES", 1000)
    draw = random.Random(seed)
    sizes = {str(number): draw.choice((1, 10, 300, 5000)) * draw.randrange(1, 9) for number in range(60)}
    ranks = sorted(draw.sample(range(100), draw.randrange(1, 30)))
    writers = deal(sizes, ranks)
    assert (
        writers == deal(dict(sizes), ranks) and writers.keys() == sizes.keys() and set(writers.values()) <= set(ranks)
    )
    found = loads(sizes, writers)
    assert max(found.values()) <= sum(sizes.values()) / len(found) + max(sizes.values())
