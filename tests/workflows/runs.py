"""Runs of ``hyfi train`` inside the tests' own process: on one rank, or on thread-ranks."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hyfi_core.comm.base import Communicator
from hyfi_core.comm.threads import run_ranks
from tests.patience import PATIENCE_S
from workflows import signals
from workflows.commands import train
from workflows.config.load import load_config
from workflows.launch import launch
from workflows.launch.resumption import Resumption
from workflows.launch.stop import StopFlag
from workflows.training import start
from workflows.training.inputs.features import FeatureInputs
from workflows.training.inputs.tiles import TileInputs
from workflows.training.metrics_log import read_metrics

PARTS, STAGES, REPLICAS = ("grids=[[1, 2]]",), ("grids=[[1, 1], [1, 1]]", "microbatches=2"), ("replicas=2",)
"""Plans of two ranks."""


@contextmanager
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread for each rank, the process's own signals back afterwards, and faults that do not end it."""
    before = {number: signal.getsignal(number) for number in signals.SIGNALS}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(start, "make_model", _one_at_a_time(start.make_model))
    for inputs in (TileInputs, FeatureInputs):
        monkeypatch.setattr(inputs, "make_model", _one_at_a_time(inputs.make_model))
    monkeypatch.setattr(launch, "_fail", _raise_on)
    monkeypatch.setattr(signals, "_requested", False)
    yield
    torch.set_num_threads(threads)
    for number, handler in before.items():
        signal.signal(number, handler)


def _one_at_a_time(function: Callable[..., Any]) -> Callable[..., Any]:
    lock = threading.Lock()

    def guarded(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return function(*args, **kwargs)

    return guarded


def _raise_on(*_: object) -> None:
    raise


def run_here(
    config: Path,
    *overrides: str,
    resume: bool = False,
    ranks: int | None = None,
    accepts_changes: bool = False,
    source: str | None = None,
) -> int:
    """Train on one rank, in this process; a refusal is raised as the launcher raises it."""
    signals._requested = False  # a process runs once; the tests' own does so again and again
    resumption = Resumption.of(resume, source, accepts_changes)
    return train.run(train.TrainArguments(config=config, overrides=overrides, ranks=ranks, resumption=resumption))


def weights_of(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step-{step:08d}" / "model.safetensors")


def assert_same_run(one: Path, other: Path, step: int, losses_within: float = 0.0) -> None:
    """Weights, optimiser and losses are equal bit for bit; losses, where asked for, up to rounding."""
    for name in ("model.safetensors", "optimizer.safetensors"):
        here, there = (load_file(run / "checkpoints" / f"step-{step:08d}" / name) for run in (one, other))
        assert here.keys() == there.keys()
        assert [key for key in here if not torch.equal(here[key], there[key])] == []
    assert losses(one) == pytest.approx(losses(other), rel=losses_within, abs=0.0)


def losses(run: Path) -> dict[tuple[str, int], float]:
    return {(r["kind"], r["step"]): r["loss"] for r in read_metrics(run / "metrics.jsonl")}


def assert_plans_agree(config: Path, plans: Sequence[Sequence[str]], *overrides: str) -> None:
    """Losses of two ranks with each plan are those of one rank, which runs once; ``plans``: keys of ``plan`` each."""
    assert run_here(config, *overrides) == 0
    expected = losses(config.parent / "run")
    for number, plan in enumerate(plans):
        folder = config.parent / f"run-{number}"
        keys = [f"plan.{key}" for key in plan]
        assert run_on(2, config, *overrides, *keys, f"run.dir={folder}") == [0, 0], plan
        assert losses(folder) == pytest.approx(expected, rel=1e-8), plan


def run_on(
    ranks: int,
    config: Path,
    *overrides: str,
    resume: bool = False,
    requested: Callable[[int], bool] = lambda rank: False,
    timeout_s: float = PATIENCE_S,
) -> list[int]:
    """Train on thread-ranks of this process; return their exit codes.

    ``requested`` says whether a rank was requested to stop. Threads share one random generator: only one of them may
    draw a model's first weights at a time.
    """
    settings = load_config(config, overrides)

    def body(world: Communicator) -> int:
        torch.set_num_threads(1)  # each thread has a number of its own
        return train.train_in(world, settings, Resumption(resume), False, StopFlag(lambda: requested(world.rank)))

    return run_ranks(ranks, body, timeout_s=timeout_s)
