"""Training goes on while a checkpoint is written; a stop waits for it; a writer that fails ends the run."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from hyfi_core.runtime.saving import checkpoint_writer
from hyfi_core.runtime.saving.kept_checkpoints import saved_steps
from tests.patience import PATIENCE_S
from tests.workflows.archive import make_config
from tests.workflows.runs import assert_same_run, run_here, run_on
from workflows.interruption import RunInterruptedError
from workflows.launch.stop import StopFlag
from workflows.training.metrics_log import read_metrics
from workflows.training.recorder import Recorder

pytestmark = pytest.mark.usefixtures("in_process")
TINY = {"name": "tests.workflows.faults:tiny"}
write_tensors = checkpoint_writer.write_tensors


def config_of(folder: Path, store: Path, steps: int) -> Path:
    run = {"steps": steps, "checkpoint_every_steps": 2, "keep": 9}
    return make_config(folder, store, model=TINY, validation={"every_steps": 99}, run=run)


class SlowWriter:
    """The writing of a step's checkpoint waits until a later step has been trained."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: int, until: int) -> None:
        self._step, self._until, self._trained = f"step-{step:08d}", until, threading.Event()
        monkeypatch.setattr(checkpoint_writer, "write_tensors", self._write)
        trained = Recorder.trained

        def noticed(recorder: Recorder, step: int, *others: Any) -> None:
            trained(recorder, step, *others)
            if step >= self._until:
                self._trained.set()

        monkeypatch.setattr(Recorder, "trained", noticed)

    def _write(self, temporary: Path, *tensors: Any, **number: Any) -> Any:
        if self._step in temporary.name:
            assert self._trained.wait(PATIENCE_S), "training waits for the checkpoint"
        return write_tensors(temporary, *tensors, **number)


def test_steps_go_on_while_a_checkpoint_is_written(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two ranks; what is saved is what a run without delays saves, bit for bit, and a resumed run is, too."""
    config = config_of(tmp_path, store, 6)
    assert run_on(2, config, "plan.grids=[[1,2]]", f"run.dir={tmp_path / 'straight'}") == [0, 0]
    SlowWriter(monkeypatch, step=2, until=4)
    assert run_on(2, config, "plan.grids=[[1,2]]") == [0, 0]
    assert saved_steps(tmp_path / "run" / "checkpoints") == [2, 4, 6]
    for step in (2, 4, 6):
        assert_same_run(tmp_path / "straight", tmp_path / "run", step)


def test_a_request_to_stop_waits_for_the_checkpoint(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path, store, 50)
    SlowWriter(monkeypatch, step=2, until=3)
    monkeypatch.setattr(StopFlag, "poll", lambda self, world: last_step(tmp_path / "run") >= 3)
    assert run_here(config) == 3
    assert saved_steps(tmp_path / "run" / "checkpoints") == [2, 3]
    assert (tmp_path / "run" / "checkpoints" / "latest").resolve().name == "step-00000003"
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))


def last_step(run: Path) -> int:
    return max((record["step"] for record in read_metrics(run / "metrics.jsonl")), default=0)


def test_a_full_disk_ends_the_run_at_the_next_step(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The previous checkpoint stays, and with room the run continues from it to the same end."""
    config = config_of(tmp_path, store, 6)
    assert run_here(config, f"run.dir={tmp_path / 'straight'}") == 0

    def full(temporary: Path, *tensors: Any, **number: Any) -> Any:
        if "step-00000004" in temporary.name:
            raise OSError(28, "No space left on device")
        return write_tensors(temporary, *tensors, **number)

    monkeypatch.setattr(checkpoint_writer, "write_tensors", full)
    with pytest.raises(RunInterruptedError, match="No space left"):
        run_here(config)
    assert last_step(tmp_path / "run") in (4, 5)
    assert saved_steps(tmp_path / "run" / "checkpoints") == [2]
    monkeypatch.setattr(checkpoint_writer, "write_tensors", write_tensors)
    (tmp_path / "run" / "checkpoints" / ".step-00000004.tmp-killed").mkdir()
    assert run_here(config, resume=True) == 0
    assert_same_run(tmp_path / "straight", tmp_path / "run", 6)
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))
