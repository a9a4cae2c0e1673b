"""An ingest that is killed again and again: what was finished stays, and the end is as if nothing had happened."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from data.store.manifest import DONE, record_path
from data.store.slide_store import SlideStore, slide_path
from data.store.unfinished import JOURNAL
from data.store.verify import verify_slide
from pathology.ingest.options import IngestOptions
from pathology.ingest.slide import ingest_slide
from tests.pathology.tiffs import write_slide

OPTIONS = {
    "zstd": IngestOptions(mpp=0.5),
    "jpeg": IngestOptions(mpp=0.5, codec="jpeg:80"),
    "unsharded": IngestOptions(mpp=0.5, sharded=False),
    "blank": IngestOptions(mpp=0.5, glass="blank"),
}


@pytest.fixture(scope="module")
def slide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A slide of six shards: grain that takes a while to encode, on glass."""
    rng = np.random.default_rng(0)
    image = np.full((5000, 9000, 3), 240, np.uint8)
    image[600:4600, 500:8500] = (np.array([200, 120, 180]) + rng.integers(-40, 40, (4000, 8000, 1))).astype(np.uint8)
    return write_slide(tmp_path_factory.mktemp("slides") / "s.tiff", image, mpp=0.5, compression="zlib")


def _ingest(slide: Path, store: Path, options: IngestOptions) -> None:
    assert ingest_slide(slide, store, options, slide_id="s").status == DONE


def _finished(store: Path) -> dict[str, tuple[int, int]]:
    """Return inode and time of every file that a journal names, by its place in the slide."""
    found = {}
    for journal in store.glob(f".s.zarr.part-*/{JOURNAL}"):
        for line in journal.read_text().splitlines():
            if line.endswith("}") and "size" in (entry := json.loads(line)):
                stat = (journal.parent / entry["name"]).stat()
                found[entry["name"]] = (stat.st_ino, stat.st_mtime_ns)
    return found


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "kills"), [("zstd", 20), ("jpeg", 5), ("unsharded", 5), ("blank", 5)])
def test_killed_at_random_moments_it_ends_as_if_undisturbed(tmp_path: Path, slide: Path, kind: str, kills: int) -> None:
    options = OPTIONS[kind]
    begin = time.monotonic()
    _ingest(slide, tmp_path / "whole", options)
    usual_s = time.monotonic() - begin
    store, chance = tmp_path / "store", random.Random(kind)
    before: dict[str, tuple[int, int]] = {}
    for _ in range(kills):
        child = multiprocessing.get_context("spawn").Process(target=_ingest, args=(slide, store, options))
        child.start()
        child.join(1.0 + chance.random() * usual_s)
        if child.exitcode is None:
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)
            child.join()
        now = _finished(store)
        if (store / "s.zarr").exists():
            break
        assert {name: now.get(name) for name in before} == before
        before = now
    if not record_path(store, "s").exists():  # otherwise the last one was quicker than its killer
        _ingest(slide, store, options)
    final = slide_path(store, "s")
    after = {name: ((final / name).stat().st_ino, (final / name).stat().st_mtime_ns) for name in before}
    assert after == before
    whole, killed = (SlideStore.open(slide_path(folder, "s")).attributes for folder in (tmp_path / "whole", store))
    assert killed == whole
    assert not verify_slide(final, 2).faults
    assert sorted(p.name for p in store.iterdir()) == [".records", "s.zarr"]
