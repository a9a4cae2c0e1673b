"""Loaders of a real run: what they read and send, and what becomes of it when a child of theirs, or one, is killed."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hyfi_core.errors import RequestError
from tests.patience import PATIENCE_S
from tests.workflows.archive import SIZE_PX, make_config, make_store
from tests.workflows.runs import assert_same_run, losses, run_on
from tests.workflows.training.test_failures import TrainingRun, start  # noqa: F401 (a fixture)
from workflows.commands import status, train
from workflows.config.load import load_config
from workflows.training import feeding
from workflows.training.job import prepare
from workflows.training.metrics_log import read_metrics

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("in_process")]
CONSTANT = "lr_schedule.name=constant"  # the rate must not depend on how long the run would have been
LOADED = ["roles.design=offload_data", "data.workers=2", CONSTANT]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return make_store(tmp_path)


def undisturbed(folder: Path, store: Path, steps: int) -> None:
    """Train inline, in this process, what the ``start`` fixture's jobs train."""
    config = make_config(folder, store, run={"steps": steps}, validation={"every_steps": 50})
    assert train.run(train.TrainArguments(config=config, overrides=[CONSTANT, f"run.dir={folder / 'inline'}"])) == 0


def children(job: TrainingRun) -> list[int]:
    """Return the decoding processes of a job."""
    return [pid for pid in job.pids() if b"data.loading.decode_worker" in _command(pid)]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def kill_children(job: TrainingRun, kills: int, pause_s: tuple[float, float]) -> None:
    """Kill one child of the job after the other, at random moments."""
    rng, deadline_s = random.Random(kills), time.monotonic() + PATIENCE_S
    while kills and job.process.poll() is None and time.monotonic() < deadline_s:
        time.sleep(rng.uniform(*pause_s))
        if found := children(job):
            os.kill(rng.choice(found), signal.SIGKILL)
            kills -= 1
    assert kills == 0, job.process.communicate()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def loader_of(job: TrainingRun) -> int:
    """Return the process of rank 1; for a moment, a child that it starts has its environment, too."""
    wait_for(lambda: len(job.pids(1)) == 1)
    return job.pids(1)[0]


def test_killed_children_and_a_killed_loader_change_nothing(start: Any, tmp_path: Path, store: Path) -> None:
    """Children are replaced; the loader ends all, and the run goes on from a checkpoint in mid-epoch."""
    job = start(*LOADED, "run.checkpoint_every_steps=7", steps=2000)
    job.wait_for_step(2)
    kill_children(job, 2, (0.05, 0.4))
    job.wait_for_step(8)
    wait_for((tmp_path / "run" / "checkpoints" / "latest").exists)  # written while the run goes on
    os.kill(loader_of(job), signal.SIGKILL)
    code, errors = job.end()
    assert code == 70, errors
    last = int((tmp_path / "run" / "checkpoints" / "latest").resolve().name.removeprefix("step-"))
    resumed = start(*LOADED, "--resume", steps=last + 4)
    code, errors = resumed.end()
    assert code == 0, errors
    undisturbed(tmp_path, store, last + 4)
    assert_same_run(tmp_path / "inline", tmp_path / "run", last + 4)


@pytest.mark.soak
def test_twenty_killed_children_change_nothing(start: Any, tmp_path: Path, store: Path) -> None:
    job = start(*LOADED, steps=500)
    job.wait_for_step(2)
    kill_children(job, 20, (0.05, 0.4))
    code, errors = job.end()
    assert code == 0, errors
    undisturbed(tmp_path, store, 500)
    assert_same_run(tmp_path / "inline", tmp_path / "run", 500)


def test_a_request_that_reaches_a_loader_alone_ends_the_run_with_a_checkpoint(tmp_path: Path, store: Path) -> None:
    """See ``test_failures.py`` for the same with processes and a signal."""
    config, run = make_config(tmp_path, store, run={"steps": 2000}), tmp_path / "run"

    def requested(rank: int) -> bool:
        return rank == 1 and any(record["step"] >= 2 for record in read_metrics(run / "metrics.jsonl"))

    assert run_on(2, config, *LOADED, requested=requested) == [3, 3]
    assert (run / "checkpoints" / "latest").exists() and max(step for _, step in losses(run)) < 2000


def test_loaders_say_what_they_read_and_sent(tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Six epochs of six slides: with room for all of them in memory, the store is read once."""
    config = make_config(tmp_path, store, run={"steps": 18})
    assert run_on(2, config, *LOADED, "data.cache_bytes=10_000_000", "data.prefetch=1") == [0, 0]
    found = re.search(
        r"1 loader: (\d+) images, (\d+) of them from memory, ([\d.]+) MB of pixels read, (.*) MB sent",
        capfd.readouterr().out,
    )
    images, cached, read_mb, sent_mb = (float(text) for text in found.groups())
    image_mb = 3 * SIZE_PX**2 / 1e6
    assert images == 36 and 26 <= cached <= 30
    assert read_mb == pytest.approx((36 - cached) * image_mb, abs=0.06)
    assert sent_mb == pytest.approx(36 * image_mb, abs=0.06)


def test_counters_show_that_a_node_reads_each_part_of_the_store_once(
    tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two loaders, one epoch and three: the same bytes come from the store, all others from the node's cache."""
    found = {}
    for steps in (3, 9):
        folder = tmp_path / str(steps)
        (folder / "cache").mkdir(parents=True)
        data = {"node_cache_bytes": 10**8, "node_cache": str(folder / "cache")}
        config = make_config(folder, store, data=data, run={"steps": steps})
        assert run_on(3, config, "roles.loaders=2", "data.workers=1") == [0] * 3
        found[steps] = json.loads((folder / "run" / "status.json").read_text())["loading"]
        capfd.readouterr()
        assert status.run(folder / "run", as_json=False) == 0
        stored, shared = (found[steps][key] / 1e6 for key in ("store_bytes", "shared_bytes"))
        text = f"({stored:.1f} MB of chunks from the store, {shared:.1f} MB from the nodes' caches)"
        assert f"2 loaders: {2 * steps} images, " in (said := capfd.readouterr().out) and text in said
    assert found[3]["store_bytes"] == found[9]["store_bytes"] > 6 * 3 * 512**2
    assert found[9]["shared_bytes"] - found[3]["shared_bytes"] >= 12 * 3 * 512**2


def test_each_trainer_is_sent_its_part_of_an_image(
    tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tmp_path, store)
    assert run_on(5, config, "plan.grids=[[2,2]]", "roles.loaders=1", "data.workers=1") == [0] * 5
    said = re.search(r"(\d+) images,.* at most ([\d.]+) MB to one trainer", capfd.readouterr().out)
    images, sent_mb = (float(text) for text in said.groups())
    share_mb = images * 3 * SIZE_PX**2 / 4 / 1e6
    assert images == 12
    assert share_mb < sent_mb < 1.1 * share_mb


def test_two_pipelines_in_opposite_directions_are_fed_as_inline(tmp_path: Path, store: Path) -> None:
    """The last rank holds the second direction's first stage, so it gets other images of the batch."""
    plan = ["plan.grids=[[1,2],[1,1]]", "plan.schedule=chimera", "plan.microbatches=2", "plan.cuts=[conv1]"]
    config = make_config(tmp_path, store, run={"precision": "float64", "steps": 3}, model={"norm": "group"})
    assert run_on(3, config, *plan, f"run.dir={tmp_path / 'inline'}") == [0] * 3
    assert run_on(5, config, *plan, "roles.loaders=2", "data.workers=1") == [0] * 5
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "inline"), rel=1e-12)


@pytest.mark.parametrize(
    "plan",
    [
        ["plan.grids=[[1,1]]", "plan.cells=[2,2]"],
        ["plan.grids=[[1,2]]", "plan.cells=[2,1]", "plan.memory_bytes=5000000000", "plan.spill=."],
        [
            *("plan.grids=[[1,1],[1,1]]", "plan.cells=[2,2]", "plan.schedule=chimera", "plan.microbatches=2"),
            "plan.cuts=[conv1]",
        ],
    ],
)
def test_cells_are_sent_their_boxes_one_after_the_other(
    tmp_path: Path, store: Path, plan: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = make_config(tmp_path, store, run={"precision": "float64", "steps": 3}, model={"norm": "group"})
    trainers = 1 if "[[1,1]]" in plan[0] else 2
    assert run_on(trainers, config, *plan, f"run.dir={tmp_path / 'inline'}") == [0] * trainers
    capfd.readouterr()
    monkeypatch.setattr(feeding, "RemoteFeed", None)  # it receives all parts of a turn at once
    assert run_on(trainers + 1, config, *plan, "roles.loaders=1", "data.workers=1") == [0] * (trainers + 1)
    assert losses(tmp_path / "run") == losses(tmp_path / "inline")
    assert "1 loader: 6 images, 0 of them from memory" in capfd.readouterr().out


def test_sampling_is_as_configured(tmp_path: Path, store: Path) -> None:
    def job(**data: object) -> Any:
        return prepare(load_config(make_config(tmp_path, store, data={"class_weights": "none", **data})))

    assert job().draw_weights is None
    assert job(sampling="balanced").stream.weights == (1 / 3,) * 6
    assert "a step of 99 has each of 6 training samples several times" in job(batch_size=99).warnings()
    assert not [line for line in job().warnings() if "several times" in line]
    assert "are weighted twice" in " ".join(job(sampling="balanced", class_weights="balanced").warnings())
    assert job(sampling="weighted", weights_column="tissue_fraction").stream.weights == (0.9,) * 6
    with pytest.raises(RequestError, match="0 for every training slide"):
        job(sampling="weighted", weights_column="bad_tiles")
    with pytest.raises(RequestError, match="weighted needs a column"):
        job(sampling="weighted")
