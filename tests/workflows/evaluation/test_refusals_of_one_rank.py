"""What one rank alone refuses before a collective call is refused by all, and none waits for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hyfi_core.comm.agreement.agree import agree
from hyfi_core.comm.base import Communicator
from hyfi_core.comm.threads import run_ranks
from hyfi_core.errors import RequestError
from hyfi_core.plan.parallel_plan import ParallelPlan
from tests.workflows.archive import make_config
from tests.workflows.evaluation.test_devices import CONFIG
from workflows.config.load import load_config
from workflows.evaluation import validation_child
from workflows.evaluation.evaluator import Evaluator
from workflows.training import pace
from workflows.training.job import TrainingJob
from workflows.training.start import Roles

TIMEOUT_S = 60.0
DATASET: Any = type("Slides", (), {"size_px": (64, 64), "samples": ()})


def refusals(build: Any) -> list[str]:
    """Return what each of two ranks raises in ``build``, called as commands do."""

    def body(comm: Communicator) -> str:
        with pytest.raises(RequestError) as raised:
            agree(comm, lambda: build(comm))
        return str(raised.value)

    return run_ranks(2, body, TIMEOUT_S)


def test_a_model_that_one_rank_cannot_build() -> None:
    def build(comm: Communicator) -> Evaluator:
        model = {**CONFIG, "model": {"name": "resnet6" if comm.rank == 0 else "absent", "classes": 2}}
        return Evaluator.of(model, DATASET, ParallelPlan(grids=((1, 2),)), comm)

    first, second = refusals(build)
    assert first == second and "absent" in first


def test_slides_that_one_validator_cannot_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workflows.evaluation.evaluator.dataset_of", lambda *_: DATASET)
    monkeypatch.setattr("workflows.evaluation.tile_evaluator.bags_of", lambda model, *_: bags(model))

    def bags(model: dict[str, Any]) -> None:
        if model["rank"] == 1:
            raise RequestError("features are on the other node")

    def build(comm: Communicator) -> Evaluator:
        model = {**CONFIG, "rank": comm.rank}
        description = {"model": model, "slides": [], "cells": None, "features": None, "store": "s", "device": "cpu"}
        return validation_child._build_evaluator(description, ParallelPlan(grids=((1, 2),)), comm)

    assert refusals(build) == ["features are on the other node"] * 2


def test_a_replica_whose_pace_cannot_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["roles.design=offload_naive", "roles.spare=1", "model.norm=group"]
    config = load_config(make_config(tmp_path, tmp_path / "store"), words)

    def timed(job: TrainingJob, roles: Roles) -> Any:
        if roles.world.rank == 1:
            raise RequestError("its GPU has too little memory")
        return lambda number: None

    monkeypatch.setattr(pace, "_timed_turn", timed)

    def build(comm: Communicator) -> TrainingJob:
        job = TrainingJob(config, (), None, None, (), None)  # type: ignore[arg-type]
        return pace.with_shares(job, Roles.of(comm, config))

    assert refusals(build) == ["its GPU has too little memory"] * 2
