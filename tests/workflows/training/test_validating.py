"""Late results, killed children, runs that end early, averaged weights: each against the undisturbed run."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hyfi_core.runtime.checkpoint import load_checkpoint
from tests.workflows.archive import make_config
from tests.workflows.runs import assert_same_run, losses, run_here, run_on
from workflows.commands import predict, validate
from workflows.evaluation import validation_child
from workflows.evaluation.validation_client import QUEUE
from workflows.training.metrics_log import read_metrics

pytestmark = pytest.mark.usefixtures("in_process")

TINY = {"name": "tests.workflows.faults:tiny"}


def validations(run: Path) -> dict[int, Any]:
    return {r["step"]: r for r in read_metrics(run / "metrics.jsonl") if r["kind"] == "validation"}


def children() -> list[int]:
    """Return this process's children that validate."""
    found = []
    for entry in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread or a child that has just ended
            for pid in (entry / "children").read_text().split():
                words = Path(f"/proc/{pid}/cmdline").read_bytes()
                found += [int(pid)] if b"validation_child" in words else []
    return found


class Killer(threading.Thread):
    """Kills the child that validates, so many times, at random moments: as it begins, or after it has done something.

    Never twice before something was done in between: after three such deaths there is no child to kill any more.

    Args:
        folder: the run's; nothing is killed before its first validation.
        times: kills.
        within_s: longest while that a child is left alone.
    """

    def __init__(self, folder: Path, times: int, within_s: float = 0.0) -> None:
        super().__init__(daemon=True)
        self.killed: list[int] = []
        self._folder, self._times, self._within_s = folder, times, within_s

    def run(self) -> None:
        done_before, in_vain = 0, True
        while len(self.killed) < self._times:
            time.sleep(0.01)
            done = len(validations(self._folder))
            fresh = [pid for pid in children() if pid not in self.killed]
            idle = done <= done_before + QUEUE  # so many may have been done before the last kill and told after it
            if not fresh or (idle and (in_vain or random.random() < 0.99)):
                continue
            time.sleep(random.random() * self._within_s)
            with contextlib.suppress(ProcessLookupError):
                os.kill(fresh[0], signal.SIGKILL)
                self.killed.append(fresh[0])
                done_before, in_vain = len(validations(self._folder)), idle


def test_late_results_and_a_killed_child_change_nothing(
    tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The run ends early, by results that the trainer has long run away from; the child is killed on the way."""
    config = make_config(
        tmp_path,
        store,
        model=TINY,
        optimizer={"lr": 0.3},
        validation={"every_steps": 1, "metric": "loss"},
        run={"steps": 60, "early_stop": 3, "keep": 1},
    )
    assert run_here(config, f"run.dir={tmp_path / 'inline'}") == 0
    killer = Killer(tmp_path / "run", times=1)
    killer.start()
    assert run_on(2, config, "roles.validators=1") == [0, 0]
    assert len(killer.killed) == 1
    found = validations(tmp_path / "inline")
    last = max(found)
    assert 3 < last < 60
    assert min(found, key=lambda step: found[step]["loss"]) == last - 3
    assert_same_run(tmp_path / "inline", tmp_path / "run", last)
    assert validations(tmp_path / "run") == found
    for link, step in (("latest", last), ("best", last - 3)):
        assert (tmp_path / "run" / "checkpoints" / link).resolve().name == f"step-{step:08d}"
    said = capfd.readouterr()
    assert said.out.count(f"ended after step {last}: 3 validations without a better loss") == 2
    assert said.err.count("ended with signal 9 (SIGKILL); restarting it") == 1
    assert run_here(config, resume=True) == 0  # nothing is left to do
    assert losses(tmp_path / "run") == losses(tmp_path / "inline")


@pytest.mark.parametrize("kills", [0, pytest.param(1, marks=pytest.mark.soak)])  # above: one without cells is killed
def test_validators_that_go_cell_by_cell_say_the_same_and_may_die(
    tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str], kills: int
) -> None:
    """Six cells; ``hyfi validate --cells`` says the same, too."""
    precise = {"steps": 8, "keep": 1, "precision": "float64"}
    config = make_config(tmp_path, store, model=TINY, validation={"every_steps": 1}, run=precise)
    assert run_here(config, f"run.dir={tmp_path / 'inline'}") == 0
    killer = Killer(tmp_path / "run", times=kills)
    killer.start()
    assert run_on(2, config, "roles.validators=1", "validation.cells=[3,2]") == [0, 0]
    assert len(killer.killed) == kills
    assert capfd.readouterr().err.count("ended with signal 9 (SIGKILL); restarting it") == kills
    assert_same_run(tmp_path / "inline", tmp_path / "run", 8, losses_within=1e-10)
    found, wanted = validations(tmp_path / "run"), validations(tmp_path / "inline")
    for step, metrics in wanted.items():
        for name in ("auroc", "balanced_accuracy", "f1", "quadratic_kappa", "calibration_error", "slides"):
            assert found[step][name] == pytest.approx(metrics[name], rel=1e-10), name
    checkpoint = tmp_path / "run" / "checkpoints" / "latest"
    assert validate.run(validate.EvaluationRequest(checkpoint, store, split="val", cells="2,5", as_json=True)) == 0
    said = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert said["loss"] == pytest.approx(wanted[8]["loss"], rel=1e-10)


def test_trainers_go_on_alone_where_children_always_die(
    tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = {"steps": 8, "ema": 0.9, "keep": 1}
    config = make_config(tmp_path, store, model=TINY, validation={"every_steps": 1}, run=run)
    assert run_here(config, f"run.dir={tmp_path / 'inline'}") == 0
    monkeypatch.setattr(validation_child, "PROGRAM", [str(Path(__file__).parent / "dying_child.py")])
    assert run_on(3, config, "plan.grids=[[1,1]]", "roles.validators=2") == [0, 0, 0]
    assert_same_run(tmp_path / "inline", tmp_path / "run", 8)
    assert validations(tmp_path / "run") == validations(tmp_path / "inline")
    said = capfd.readouterr()
    assert said.err.count("ended with exit code 9") == 3
    assert "the trainers validate from now on, starting with step 1" in said.out


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_twenty_kills_at_random_moments_change_nothing(tmp_path: Path, store: Path) -> None:
    config = make_config(tmp_path, store, model=TINY, validation={"every_steps": 1}, run={"steps": 200, "keep": 3})
    assert run_here(config, f"run.dir={tmp_path / 'inline'}") == 0
    killer = Killer(tmp_path / "run", times=20, within_s=0.3)
    killer.start()
    assert run_on(2, config, "roles.validators=1", timeout_s=900) == [0, 0]
    assert len(killer.killed) == 20
    assert_same_run(tmp_path / "inline", tmp_path / "run", 200)
    assert validations(tmp_path / "run") == validations(tmp_path / "inline")


def test_the_average_of_the_weights(tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It is what its definition says, survives a resume, is what is judged and what predicts."""
    config = make_config(
        tmp_path,
        store,
        model=TINY,
        run={"ema": 0.5, "keep": 9, "checkpoint_every_steps": 1},
        lr_schedule={"name": "constant"},
    )
    run = tmp_path / "run"
    assert run_here(config, "run.steps=3") == 0
    assert run_here(config, resume=True) == 0
    assert run_here(config, f"run.dir={tmp_path / 'straight'}") == 0
    steps = [load_checkpoint(run / "checkpoints" / f"step-{step:08d}") for step in range(1, 7)]
    average = {name: value.double() for name, value in steps[0].averaged.items()}
    for step, saved in enumerate(steps[1:], 2):
        decay = min(0.5, (1 + step) / (10 + step))
        for name, value in average.items():
            if saved.weights[name].is_floating_point():
                average[name] = decay * value + (1 - decay) * saved.weights[name].double()
                assert torch.allclose(average[name], saved.averaged[name].double(), rtol=1e-5, atol=1e-6)
            else:
                assert torch.equal(saved.averaged[name], saved.weights[name])
    assert not torch.equal(steps[5].averaged["fc.weight"], steps[5].weights["fc.weight"])
    straight = load_file(tmp_path / "straight/checkpoints/step-00000006/ema.safetensors")
    assert all(torch.equal(straight[name], value) for name, value in steps[5].averaged.items())
    capfd.readouterr()
    assert validate.run(validate.EvaluationRequest(run / "checkpoints/latest", store, split="val", as_json=True)) == 0
    said = capfd.readouterr().out
    assert "average of the weights" in said
    assert json.loads(said.splitlines()[-1])["loss"] == validations(run)[6]["loss"]
    member = predict.load_member(run / "checkpoints/latest")
    assert torch.equal(member.model.state_dict()["fc.weight"], steps[5].averaged["fc.weight"])
    assert "predicting with the average of the weights" in capfd.readouterr().out


def test_the_average_is_the_same_on_another_plan(tmp_path: Path, store: Path) -> None:
    model = {"name": "tests.workflows.faults:tiny", "norm": "group"}
    config = make_config(tmp_path, store, model=model, run={"precision": "float64", "ema": 0.7, "steps": 3})
    assert run_here(config, f"run.dir={tmp_path / 'inline'}") == 0
    assert run_on(4, config, "plan.grids=[[1,2]]", "plan.replicas=2") == [0] * 4
    one, other = (load_checkpoint(tmp_path / name / "checkpoints/latest").averaged for name in ("inline", "run"))
    assert all(torch.allclose(other[name], one[name], rtol=1e-8, atol=1e-10) for name in one)


def test_time_and_updates_are_told(tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = make_config(
        tmp_path,
        store,
        model=TINY,
        optimizer={"accumulate": 2, "lr_scaling": "sqrt", "lr_batch": 1, "lr": 0.01},
        lr_schedule={"name": "constant", "warmup_steps": 0},
    )
    assert run_here(config) == 0
    said = capfd.readouterr().out
    assert "effective batch 4 (2 × 2 accumulated), learning rate 0.02: 0.01 for 1, scaled sqrt" in said
    records = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "train"]
    assert [r["lr"] for r in records] == [0.02] * 6
    parts = ("compute", "halo", "stage", "reduce", "wait")
    for record in records:
        assert sum(record[f"{part}_seconds"] for part in parts) == pytest.approx(record["seconds"])
    assert records[3]["validation_seconds"] > records[1]["validation_seconds"]
    epochs = [line for line in said.splitlines() if line.startswith("epoch ")]
    assert [line.split(":")[0] for line in epochs] == ["epoch 0", "epoch 1", "epoch 2", "epoch 3"]
