"""Checkpoints written while training continues: what is copied, when it appears, what a failure leaves."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.comm.base import Communicator
from hyfi_core.comm.threads import run_ranks
from hyfi_core.runtime.checkpoint import load_checkpoint, load_training_state
from hyfi_core.runtime.saving import checkpoint_writer
from hyfi_core.runtime.saving.checkpoint_writer import CheckpointPart, CheckpointWriter
from hyfi_core.runtime.saving.kept_checkpoints import saved_steps, step_folder
from tests.conftest import PROGRAM_PATH
from tests.patience import PATIENCE_S


def part_of(rank: int, value: float) -> CheckpointPart:
    name = f"layer{rank}.weight"
    groups = [{"lr": 0.1, "names": [name], "values": {name: {"count": rank}}}]
    moments = {"tensors": {f"{name}/moment": torch.full((5,), 10 * value)}, "groups": groups}
    return CheckpointPart({name: torch.full((3, 2), value)}, moments, {name: torch.full((3, 2), -value)})


def begin(writer: CheckpointWriter, folder: Path, step: int, part: CheckpointPart) -> None:
    writer.begin(step_folder(folder, step), part, step=step, model={"step": step}, state={"step": step})


def agreed(comm: Communicator, writer: CheckpointWriter) -> int | None:
    """Vote as trainers do between two steps; return a step that is published."""
    vote = torch.tensor([int(writer.busy())])
    comm.all_reduce(vote, "max")
    return None if vote[0] else writer.advance()


def test_what_changes_after_the_copy_is_not_saved(tmp_path: Path) -> None:
    def body(comm: Communicator) -> None:
        writer = CheckpointWriter(comm, True)
        part = part_of(comm.rank, 1.0)
        begin(writer, tmp_path, 1, part)
        assert part.optimizer is not None and part.averaged is not None
        for tensors in (part.weights, part.optimizer["tensors"], part.averaged):
            for tensor in tensors.values():
                tensor.zero_()
        assert writer.finish() == 1

    run_ranks(3, body)
    saved, training = load_checkpoint(step_folder(tmp_path, 1)), load_training_state(step_folder(tmp_path, 1))
    assert saved.averaged is not None
    for rank in range(3):
        name = f"layer{rank}.weight"
        assert torch.equal(saved.weights[name], torch.ones(3, 2)) and torch.equal(
            saved.averaged[name], -torch.ones(3, 2)
        )
        assert torch.equal(training.optimizer["tensors"][f"{name}/moment"], torch.full((5,), 10.0))
        assert training.optimizer["groups"][0]["values"][name] == {"count": rank}
    assert len(list(step_folder(tmp_path, 1).glob("model-*"))) == 3
    assert not list(tmp_path.glob(".*"))


def slow_on(rank: int, goes_on: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the writing of one rank wait."""
    write = checkpoint_writer.write_tensors

    def waits(temporary: Path, weights: Any, *others: Any, **number: Any) -> Any:
        if f"layer{rank}.weight" in weights:
            assert goes_on.wait(PATIENCE_S)
        return write(temporary, weights, *others, **number)

    monkeypatch.setattr(checkpoint_writer, "write_tensors", waits)


def test_it_appears_when_the_last_rank_has_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps go on meanwhile; the third rank has no weights."""
    goes_on = threading.Event()
    slow_on(1, goes_on, monkeypatch)

    def body(comm: Communicator) -> list[int | None]:
        writer = CheckpointWriter(comm, comm.rank < 2)
        begin(writer, tmp_path, 7, part_of(comm.rank, 2.0) if comm.rank < 2 else CheckpointPart({}))
        steps = [agreed(comm, writer) for _ in range(3)]
        assert saved_steps(tmp_path) == [] and writer.open_step == 7
        comm.barrier()
        goes_on.set()
        deadline_s = time.monotonic() + PATIENCE_S
        while writer.open_step is not None:
            assert time.monotonic() < deadline_s
            steps.append(agreed(comm, writer))
        return steps

    for steps in run_ranks(3, body):
        assert set(steps[:-1]) == {None} and steps[-1] == 7
    assert sorted(load_checkpoint(step_folder(tmp_path, 7)).weights) == ["layer0.weight", "layer1.weight"]


def test_a_rank_that_cannot_write_says_so_and_the_previous_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, full = checkpoint_writer.write_tensors, False

    def fails(temporary: Path, weights: Any, *others: Any, **number: Any) -> Any:
        if full and "layer1.weight" in weights:
            raise OSError(28, "No space left on device")
        return write(temporary, weights, *others, **number)

    monkeypatch.setattr(checkpoint_writer, "write_tensors", fails)

    def body(comm: Communicator) -> str:
        nonlocal full
        writer = CheckpointWriter(comm, True)
        begin(writer, tmp_path, 1, part_of(comm.rank, 1.0))
        writer.finish()
        full = True
        comm.barrier()
        begin(writer, tmp_path, 2, part_of(comm.rank, 2.0))
        try:
            while writer.busy():
                time.sleep(0.01)
        except OSError as error:
            return str(error)
        return ""

    assert ["No space" in said for said in run_ranks(2, body)] == [False, True]
    assert saved_steps(tmp_path) == [1]
    assert torch.equal(load_checkpoint(step_folder(tmp_path, 1)).weights["layer1.weight"], torch.ones(3, 2))


SAVES_FOR_EVER = """
import sys, torch
from pathlib import Path
from hyfi_core.comm.threads import run_ranks
from hyfi_core.runtime.saving.checkpoint_writer import CheckpointPart, CheckpointWriter
from hyfi_core.runtime.saving.kept_checkpoints import point_link, prune, step_folder

def body(comm):
    folder, writer, step = Path(sys.argv[1]), CheckpointWriter(comm, True), int(sys.argv[2])
    while True:
        step += 1
        tensors = {f"{comm.rank}.{n}": torch.full((20000,), float(step)) for n in range(5)}
        moments = {"tensors": {f"{name}/m": t for name, t in tensors.items()}, "groups": [{"names": [], "values": {}}]}
        part = CheckpointPart(tensors, moments)
        writer.begin(step_folder(folder, step), part, step=step, model={"step": step}, state={"step": step})
        while writer.open_step is not None:
            vote = torch.tensor([int(writer.busy())])
            comm.all_reduce(vote, "max")
            if not vote[0] and writer.advance() is not None and comm.rank == 0:
                point_link(folder / "latest", step_folder(folder, step).name)
                prune(folder, 2)
                print(step, flush=True)
run_ranks(3, body, timeout_s=600)
"""


def kill_while_saving(folder: Path, after_s: Callable[[], float], first: int) -> int:
    """Save on three ranks until the process is killed; return the step of the latest checkpoint, all of it checked."""
    child = subprocess.Popen(
        [sys.executable, "-c", SAVES_FOR_EVER, str(folder), str(first)],
        env=os.environ | {"PYTHONPATH": PROGRAM_PATH, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    reported = int(child.stdout.readline())
    time.sleep(after_s())
    child.send_signal(signal.SIGKILL)
    reported = max([reported, *map(int, child.stdout.read().split())])
    child.wait()
    latest = load_checkpoint(folder / "latest")
    step = latest.model["step"]
    assert step >= reported
    assert len(latest.weights) == 15
    assert all(torch.equal(value, torch.full((20000,), float(step))) for value in latest.weights.values())
    state = load_training_state(folder / "latest")
    assert state.state["step"] == step
    assert all(bool((value == step).all()) for value in state.optimizer["tensors"].values())
    for other in saved_steps(folder):  # nothing incomplete under a final name, the newest one not yet linked among them
        assert load_checkpoint(step_folder(folder, other)).model["step"] == other
    return int(step)


def test_a_kill_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    kill_while_saving(tmp_path, lambda: 0.05, 0)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_kills_at_any_moment_leave_a_whole_checkpoint(tmp_path: Path) -> None:
    step = 0
    for _ in range(30):
        after = kill_while_saving(tmp_path, lambda: random.random() * 0.3, step)
        assert after > step
        step = after


def test_a_rank_that_cannot_write_removes_what_others_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is still writing, and may not leave anything either."""
    write, discarded = checkpoint_writer.write_tensors, threading.Event()

    def full(temporary: Path, *tensors: Any) -> Any:
        number = tensors[-1]
        if number[0] == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        if number[0] == 2:
            assert discarded.wait(PATIENCE_S)
        return write(temporary, *tensors)

    monkeypatch.setattr(checkpoint_writer, "write_tensors", full)

    def body(comm: Communicator) -> None:
        writer = CheckpointWriter(comm, True)
        begin(writer, tmp_path, 4, part_of(comm.rank, 1.0))
        if comm.rank == 0:
            assert writer._open is not None and writer._open.job.result()  # its part is there
        comm.barrier()
        if comm.rank == 1:
            with pytest.raises(OSError, match="No space left"):
                while writer.busy():  # its thread may not have tried yet
                    time.sleep(1e-3)
            writer.discard()
            discarded.set()
        if comm.rank == 2:
            with pytest.raises(OSError, match="No such file"):
                writer.finish()

    run_ranks(3, body)
    assert list(tmp_path.iterdir()) == []


def test_one_rank_alone(tmp_path: Path) -> None:
    writer = CheckpointWriter(AloneCommunicator(), True)
    assert writer.finish() is None and writer.advance() is None and not writer.busy()
    begin(writer, tmp_path, 3, part_of(0, 1.0))
    assert writer.finish() == 3
    assert (step_folder(tmp_path, 3) / "model.safetensors").is_file()
    assert not (step_folder(tmp_path, 3) / "model.safetensors.index.json").exists()
