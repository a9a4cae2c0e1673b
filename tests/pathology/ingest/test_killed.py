"""Ingests that are killed at random moments end, sooner or later, with the store that an undisturbed one makes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from data.store.manifest import DONE, load_manifest, load_records
from data.store.slide_store import SlideStore, slide_path
from tests.conftest import ROOT
from tests.pathology.tiffs import stained, write_slide
from tests.patience import PATIENCE_S


def archive(folder: Path, sizes: list[tuple[int, int]]) -> Path:
    folder.mkdir()
    for number, (height, width) in enumerate(sizes):
        image = np.full((height, width, 3), 243, np.uint8)
        rows, columns = slice(height // 5, height // 5 + 1000), slice(width // 5, width // 5 + 1000)
        tissue = stained(2000, 2000, number)[500:1500, 500:1500]
        image[rows, columns] = tissue[: image[rows].shape[0], : image[:, columns].shape[1]]
        write_slide(folder / f"{number}.tiff", image, compression="jpeg")
    return folder


class Ingest:
    """An ingest that can be killed, and what of it is to stay."""

    def __init__(self, folder: Path, store: Path, workers: int) -> None:
        self.store = store
        words = ["ingest", str(folder), "--out", str(store), "--mpp", "0.5", "--workers", str(workers)]
        self.command = [sys.executable, "-m", "workflows.cli", *words]
        self.environment = os.environ | {"PYTHONPATH": str(ROOT)}
        self.finished: dict[str, tuple[int, int]] = {}
        """Shards that were finished at some kill: inode and time."""

    def killed_at(self, shards: int, delay_s: float) -> bool:
        """Run, and kill all of its processes so long after so many shards are finished.

        Returns:
            Whether it was killed; False when it ended before.
        """
        process = subprocess.Popen(
            self.command,
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            deadline_s = time.monotonic() + PATIENCE_S
            while process.poll() is None and len(self._finished_shards()) < shards and time.monotonic() < deadline_s:
                time.sleep(0.01)
            time.sleep(delay_s)
            return process.poll() is None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            self.attribute()

    def attribute(self) -> None:
        """Compare what was finished before with what is there, and note what is finished now."""
        now = self._finished_shards()
        for name, was in self.finished.items():
            assert now.get(name) == was, f"{name} was finished and has been written again"
        self.finished = now

    def _finished_shards(self) -> dict[str, tuple[int, int]]:
        found = {}
        for folder in [*self.store.glob("[!.]*.zarr"), *self.store.glob(".*.zarr.part-*")]:
            slide = folder.name.lstrip(".").partition(".zarr")[0]
            with contextlib.suppress(FileNotFoundError):  # published while we look
                for name in _listed(folder):
                    stat = (folder / name).stat()
                    found[f"{slide}/{name}"] = (stat.st_ino, stat.st_mtime_ns)
        return found

    def to_the_end(self) -> None:
        subprocess.run(self.command, env=self.environment, check=True, capture_output=True, timeout=300)
        self.attribute()


def _listed(folder: Path) -> list[str]:
    """Return the shards that a slide, finished or not, says are finished."""
    journal = folder / "journal.jsonl"
    if not journal.exists():
        if not (folder / "zarr.json").exists():
            return []
        return list(json.loads((folder / "zarr.json").read_text())["attributes"]["hyfi"]["shards"])
    names = []
    for line in journal.read_text().splitlines():
        try:
            names.append(json.loads(line)["name"])
        except (ValueError, KeyError):
            continue  # cut off by a kill
    return [name for name in names if (folder / name).exists()]


def digests(store: Path) -> dict[str, dict[str, dict[str, object]]]:
    return {name: SlideStore.open(slide_path(store, name)).attributes["shards"] for name in load_records(store)}


def check_loop(tmp_path: Path, sizes: list[tuple[int, int]], kills: int, workers: int) -> None:
    folder = archive(tmp_path / "archive", sizes)
    undisturbed = Ingest(folder, tmp_path / "undisturbed", workers)
    undisturbed.to_the_end()
    rng, disturbed = random.Random(kills), Ingest(folder, tmp_path / "store", workers)
    last = len(undisturbed.finished) - 1
    killed = []
    for number in range(kills):
        target = min(last, len(disturbed.finished) + rng.randint(0, 1 + 2 * last // kills))
        killed.append(disturbed.killed_at(target, rng.uniform(0, 0.4 if number % 2 else 0.02)))
    disturbed.to_the_end()
    assert digests(disturbed.store) == digests(undisturbed.store)
    assert all(row["status"] == DONE for row in load_manifest(disturbed.store))
    assert any(killed)
    left = [p.name for p in disturbed.store.iterdir() if ".part-" in p.name or ".tmp-" in p.name or ".old-" in p.name]
    assert not left and not list((disturbed.store / ".claims").iterdir())


def test_two_kills_leave_no_trace(tmp_path: Path) -> None:
    check_loop(tmp_path, [(4200, 1200), (1100, 1000)], kills=2, workers=1)


@pytest.mark.soak
def test_twenty_kills_leave_no_trace(tmp_path: Path) -> None:
    check_loop(tmp_path, [(9000, 9000), (6000, 5000), (4300, 9000), (2000, 2000)], kills=20, workers=2)
