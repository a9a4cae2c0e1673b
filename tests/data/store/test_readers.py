"""Readers opened, and their threads started, before workers are forked or spawned: never a wrong pixel."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import numpy as np
import pytest

from data.store.codec import PixelCodec
from data.store.layout import LevelSize
from data.store.slide_store import SlideStore
from hyfi_core.plan.box import Box
from tests.data.store.test_writer import pixels_of, smooth, write_slide

SIZE = LevelSize(1100, 4700)


def _wrong(slide: SlideStore, seed: int, reads: int, expected: np.ndarray) -> int:
    """Return how many of ``reads`` random boxes are not those of ``expected``."""
    rng = np.random.default_rng(seed)
    wrong = 0
    for _ in range(reads):
        height, width = (int(n) for n in rng.integers(1, 700, 2))
        y, x = int(rng.integers(0, SIZE.height_px - height)), int(rng.integers(0, SIZE.width_px - width))
        box = Box(y, y + height, x, x + width)
        found = slide.read(box, threads=int(rng.integers(1, 4)))
        wrong += not np.array_equal(found, expected[(slice(None), *box.slices())])
    return wrong


def _work(slide: SlideStore, seed: int, reads: int, picture: Path, results: object) -> None:
    results.put(_wrong(slide, seed, reads, np.load(picture, mmap_mode="r")))  # type: ignore[attr-defined]


def _run(tmp_path: Path, slide: SlideStore, workers: int, reads: int, repeats: int) -> None:
    picture = tmp_path / "picture.npy"
    np.save(picture, slide.read(Box(0, SIZE.height_px, 0, SIZE.width_px), threads=3))
    for repeat in range(repeats):
        started = []
        for method in ("fork", "spawn"):
            context = multiprocessing.get_context(method)
            for seed in range(workers):
                results = context.SimpleQueue()
                child = context.Process(target=_work, args=(slide, repeat * 100 + seed, reads, picture, results))
                child.start()
                started.append((child, results))
        # The parent reads on meanwhile.
        assert _wrong(slide, repeat, reads // 10, np.load(picture)) == 0
        for child, results in started:
            child.join(300)
            assert child.exitcode == 0 and results.get() == 0


@pytest.mark.parametrize("codec", ["zstd:1", "jpeg:90"])
def test_one_forked_and_one_spawned_worker(tmp_path: Path, codec: str) -> None:
    picture = smooth(SIZE.height_px, SIZE.width_px)
    slide = write_slide(tmp_path / "store", [picture], codec=PixelCodec.parse(codec))
    _run(tmp_path, slide, workers=1, reads=20, repeats=1)


@pytest.mark.soak
@pytest.mark.parametrize("sharded", [True, False])
def test_four_forked_and_four_spawned_workers_eight_times(tmp_path: Path, sharded: bool) -> None:
    slide = write_slide(tmp_path / "store", pixels_of([SIZE]), sharded=sharded)
    _run(tmp_path, slide, workers=4, reads=300, repeats=8)
