"""Prediction, validation and validators compute where they are told to; seen here on pretended GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.errors import RequestError
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.runtime import launch
from pathology.predict import cohort
from pathology.predict.members import Member
from pathology.predict.options import PredictOptions
from tests.workflows.archive import make_config, make_store
from workflows.commands import validate
from workflows.config.load import load_config
from workflows.evaluation import evaluator, validation_child
from workflows.training.start import Roles, device_of

ALONE = AloneCommunicator()


class MovedError(Exception):
    """The network was moved; nothing after it can run here."""


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Pretend two GPUs; note which became current and where networks go, which ends the command."""
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: seen.append(f"current {device}"))

    def to(self: nn.Module, *where: Any, **_: Any) -> nn.Module:
        if isinstance(where[0], torch.device) and where[0].type == "cuda":
            seen.append(f"to {where[0]}")
            raise MovedError
        return plain(self, *where)

    plain: Callable[..., nn.Module] = nn.Module.to
    monkeypatch.setattr(nn.Module, "to", to)
    return seen


CONFIG = {
    "model": {"name": "resnet6", "classes": 2},
    "class_names": ["a", "b"],
    "task": "multiclass",
    "mpp": 1.0,
    "size_px": [64, 64],
    "view": "pack",
    "align_px": 32,
    "normalisation": {"mean": [0.5] * 3, "std": [0.2] * 3},
}


def predict(folder: Path, device: str) -> None:
    member = Member("c", nn.Linear(2, 2), CONFIG)
    cohort.predict_slides([member], [], folder / "out", ALONE, PredictOptions(device=device))  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_prediction_moves_its_networks_to_the_gpu(device: str, moves: list[str], tmp_path: Path) -> None:
    with pytest.raises(MovedError):
        predict(tmp_path, device)
    assert moves == ["current cuda:0", "to cuda:0"]


def test_on_the_cpu_nothing_touches_a_gpu(moves: list[str], tmp_path: Path) -> None:
    predict(tmp_path, "cpu")
    assert moves == []


def test_validation_and_validators_move_their_network(moves: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluator, "evaluation_set_of", lambda *_: None)
    dataset: Any = type("Slides", (), {"size_px": (64, 64), "samples": ()})
    plan = ParallelPlan(grids=((1, 1),))
    with pytest.raises(MovedError):
        evaluator.Evaluator.of(CONFIG, dataset, plan, ALONE, device=launch.own_device("auto", ALONE))
    assert moves == ["current cuda:0", "to cuda:0"]
    monkeypatch.setattr(evaluator, "dataset_of", lambda *_: dataset)
    description = {"model": CONFIG, "slides": [], "cells": None, "features": None, "store": "s", "device": "cuda:1"}
    with pytest.raises(MovedError):
        validation_child._build_evaluator(description, plan, ALONE)
    assert moves[2:] == ["current cuda:1", "to cuda:1"]


def test_without_a_gpu_cuda_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(RequestError, match=r"--device is cuda, but 1 rank on .* sees no GPU; .*--device cpu"):
        predict(tmp_path, "cuda")
    assert not (tmp_path / "out").exists()
    predict(tmp_path, "auto")
    with pytest.raises(RequestError, match="--device gpu"):
        validate.run(validate.EvaluationRequest(tmp_path, tmp_path, device="gpu"))


@pytest.mark.parametrize(("gpus", "expected"), [(0, "cpu"), (1, "cuda:0")])
def test_a_run_finds_its_trainers_device(
    gpus: int, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    roles = Roles.of(ALONE, load_config(make_config(tmp_path, make_store(tmp_path)), []))
    assert device_of("auto", roles) == expected and device_of("cpu", roles) == "cpu"
    if not gpus:
        with pytest.raises(RequestError, match=r"run\.device is cuda"):
            device_of("cuda", roles)
