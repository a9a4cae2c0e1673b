"""A file of blocks: what is free is taken again, and what was written is read."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import torch

from hyfi_core.cells.spill_store import BLOCK_BYTES, FreeBlocks, SpillFile, SpillMemory, SpillPlace, SpillStore


def test_blocks_of_any_sizes_are_taken_again_before_the_file_grows() -> None:
    blocks, draw, held = FreeBlocks(), random.Random(0), list[tuple[int, tuple[tuple[int, int], ...]]]()
    used = most = 0
    for _ in range(2000):
        if held and draw.random() < 0.5:
            size, runs = held.pop(draw.randrange(len(held)))
            blocks.give_back(runs)
            used -= size
        else:
            size = draw.randrange(1, 9) * BLOCK_BYTES
            held.append((size, blocks.take(size - draw.randrange(100))))
            used += size
        most = max(most, used)
        owned = sorted(run for _, runs in held for run in runs)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(owned))
        assert sum(stop - start for start, stop in owned) == used
    assert blocks.end_bytes == most


def test_maps_in_several_runs_are_read_as_they_were_written(tmp_path: Path) -> None:
    stores: list[SpillStore] = [SpillFile(tmp_path), SpillMemory()]
    for store in stores:
        maps = [torch.randn(n * 9_000) for n in (2, 1, 5, 1, 9)]
        places = [store.take(tensor.untyped_storage()) for tensor in maps]
        for at in (0, 2):
            store.give_back(places[at])
        maps[0], maps[2] = torch.randn(100_000), torch.randn(10)
        places[0], places[2] = (store.take(maps[at].untyped_storage()) for at in (0, 2))
        for tensor, place in zip(maps, places, strict=True):
            store.write(tensor.untyped_storage(), place)
        assert isinstance(store, SpillMemory) or len(places[0].ranges) > 1
        for tensor, place in zip(maps, places, strict=True):
            found = torch.empty_like(tensor)
            store.read(found.untyped_storage(), place)
            assert torch.equal(found, tensor)
        assert store.held_bytes > 0 and isinstance(places[0], SpillPlace)
