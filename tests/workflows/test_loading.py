"""Loaders of a real run: what they read and send, and what becomes of it when a child of theirs, or one, is killed."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hyfi_core.errors import RequestError
from tests.workflows.archive import SIZE_PX, make_config, make_store
from tests.workflows.test_failures import Job, start  # noqa: F401 (a fixture)
from tests.workflows.test_train import assert_same_run
from workflows import train
from workflows.config import load_config
from workflows.training.job import prepare
from workflows.training.stop import SIGNALS

pytestmark = pytest.mark.mpi
CONSTANT = "lr_schedule.name=constant"  # the rate must not depend on how long the run would have been
LOADED = ["roles.design=offload_data", "data.workers=2", CONSTANT]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return make_store(tmp_path)


@pytest.fixture(autouse=True)
def _one_thread_and_own_signals() -> Iterator[None]:
    before, threads = {number: signal.getsignal(number) for number in SIGNALS}, torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    for number, handler in before.items():
        signal.signal(number, handler)


def undisturbed(folder: Path, store: Path, steps: int) -> None:
    """Train inline, in this process, what the ``start`` fixture's jobs train."""
    config = make_config(folder, store, run={"steps": steps}, validation={"every_steps": 50})
    assert train.run(config, [CONSTANT, f"run.dir={folder / 'inline'}"], None, False, as_json=False) == 0


def children(job: Job) -> list[int]:
    """Return the decoding processes of a job."""
    return [pid for pid in job.pids() if b"data.decode_worker" in _command(pid)]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def kill_children(job: Job, kills: int, pause_s: tuple[float, float]) -> None:
    """Kill one child of the job after the other, at random moments."""
    rng, deadline_s = random.Random(kills), time.monotonic() + 120
    while kills and job.process.poll() is None and time.monotonic() < deadline_s:
        time.sleep(rng.uniform(*pause_s))
        if found := children(job):
            os.kill(rng.choice(found), signal.SIGKILL)
            kills -= 1
    assert kills == 0, job.process.communicate()


def disturbed(begin: Callable[..., Job], folder: Path, store: Path, kills: int, steps: int) -> None:
    job = begin(*LOADED, steps=steps)
    job.wait_for_step(2)
    kill_children(job, kills, (0.05, 0.4))
    code, errors = job.end(timeout_s=200)
    assert code == 0, errors
    undisturbed(folder, store, steps)
    assert_same_run(folder / "inline", folder / "run", steps)


def test_a_loaders_killed_child_changes_nothing(start: Any, tmp_path: Path, store: Path) -> None:  # noqa: F811
    disturbed(start, tmp_path, store, kills=2, steps=60)


@pytest.mark.soak
def test_twenty_killed_children_change_nothing(start: Any, tmp_path: Path, store: Path) -> None:  # noqa: F811
    disturbed(start, tmp_path, store, kills=20, steps=500)


def test_a_killed_loader_ends_all_and_the_run_goes_on_as_if_nothing_had_been(
    start: Any,  # noqa: F811
    tmp_path: Path,
    store: Path,
) -> None:
    """Its children end with it. The checkpoint of step 7 is in mid-epoch: three steps make one."""
    job = start(*LOADED, "run.checkpoint_every_steps=7", steps=2000)
    job.wait_for_step(8)
    (loader,) = job.pids(1)
    os.kill(loader, signal.SIGKILL)
    code, errors = job.end(timeout_s=10)
    assert code == 70, errors
    last = int((tmp_path / "run" / "checkpoints" / "latest").resolve().name.removeprefix("step-"))
    resumed = start(*LOADED, "--resume", steps=last + 4)
    code, errors = resumed.end(timeout_s=120)
    assert code == 0, errors
    undisturbed(tmp_path, store, last + 4)
    assert_same_run(tmp_path / "inline", tmp_path / "run", last + 4)


def test_loaders_say_what_they_read_and_sent(hyfi: Any, tmp_path: Path, store: Path) -> None:
    """Six epochs of six slides: with room for all of them in memory, the store is read once."""
    config = make_config(tmp_path, store, run={"steps": 18})
    done = hyfi("train", config, *LOADED, "data.cache_bytes=10_000_000", "data.prefetch=1", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    found = re.search(
        r"1 loader: (\d+) images, (\d+) of them from memory, ([\d.]+) MB of pixels read, (.*) MB sent", done.stdout
    )
    images, cached, read_mb, sent_mb = (float(text) for text in found.groups())
    image_mb = 3 * SIZE_PX**2 / 1e6
    assert images == 36 and 28 <= cached <= 30
    assert read_mb == pytest.approx((36 - cached) * image_mb, abs=0.06)
    assert sent_mb == pytest.approx(36 * image_mb, abs=0.06)


def test_sampling_is_as_configured(tmp_path: Path, store: Path) -> None:
    def job(**data: object) -> Any:
        return prepare(load_config(make_config(tmp_path, store, data={"class_weights": "none", **data})))

    assert job().draw_weights is None
    assert job(sampling="balanced").stream.weights == (1 / 3,) * 6
    assert "count twice over" in " ".join(job(sampling="balanced", class_weights="balanced").doubts())
    assert job(sampling="weighted", weights_column="tissue_fraction").stream.weights == (0.9,) * 6
    with pytest.raises(RequestError, match="0 for every training slide"):
        job(sampling="weighted", weights_column="bad_tiles")
    with pytest.raises(RequestError, match="weighted needs a column"):
        job(sampling="weighted")
