"""Runs with optimizers that keep an average of the weights: it is judged and saved, and changes no step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hyfi_core.errors import RequestError
from hyfi_core.runtime.checkpoint import Checkpoint, load_checkpoint
from tests.workflows.archive import make_config
from tests.workflows.runs import losses, run_here, run_on
from tests.workflows.training.test_tile_runs import tile_config
from workflows.config.load import load_config
from workflows.finetuning.optimizers.schedule_free import ScheduleFreeSGD
from workflows.training.inputs.tiles import TileInputs
from workflows.training.job import prepare

pytestmark = pytest.mark.usefixtures("in_process")
CHIMERA = ("plan.grids=[[1,1],[1,1]]", "plan.cuts=[norm1]", "plan.schedule=chimera", "plan.mirror=point_to_point")
PLANS = {"parts": (3, "plan.grids=[[1,2]]", "roles.validators=1"), "chimera": (2, *CHIMERA)}
OWN = "tests.workflows.finetuning.test_optimizer_class:BeginsInEvaluation"
Tensors = Any


def saved(run: Path, link: str = "latest") -> Checkpoint:
    return load_checkpoint(run / "checkpoints" / link)


def config_of(folder: Path, store: Path, name: str = "schedulefree", **sections: dict[str, Any]) -> Path:
    return make_config(
        folder,
        store,
        model={"name": "tests.workflows.faults:tiny", "norm": "group"},
        optimizer={"name": name, "lr": 0.01, "weight_decay": 0.1},
        lr_schedule={"name": "constant", "warmup_steps": 2},
        plan={"microbatches": 2},
        validation={"every_steps": 1},
        run={"precision": "float64", "steps": 4, "keep": 9},
        **sections,
    )


def near(here: Tensors, there: Tensors) -> bool:
    return all(torch.allclose(here[name], there[name], rtol=1e-8, atol=1e-10) for name in there)


def same(here: Tensors, there: Tensors) -> bool:
    return all(torch.equal(here[name], there[name]) for name in there)


def test_any_plan_has_the_average_of_one_rank_and_a_resume_goes_on_bitwise(tmp_path: Path, store: Path) -> None:
    config = config_of(tmp_path, store)
    assert run_here(config, f"run.dir={tmp_path / 'one'}") == 0
    one = saved(tmp_path / "one")
    assert not same(one.weights, one.averaged)
    for name, (ranks, *plan) in PLANS.items():
        assert run_on(ranks, config, *plan, f"run.dir={tmp_path / name}") == [0] * ranks
        two = saved(tmp_path / name)
        assert near(two.weights, one.weights) and near(two.averaged, one.averaged)
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "one"), rel=1e-8)
    assert run_here(config, "run.steps=2") == 0
    assert run_here(config, resume=True) == 0
    again = saved(tmp_path / "run")
    assert same(again.weights, one.weights) and same(again.averaged, one.averaged)
    assert losses(tmp_path / "run") == losses(tmp_path / "one")
    other = f"run.dir={tmp_path / 'other'}"  # half of it on two ranks with two directions
    assert run_on(2, config, *CHIMERA, "run.steps=2", other) == [0, 0]
    assert run_here(config, other, resume=True) == 0
    assert near(saved(tmp_path / "other").averaged, one.averaged)


def test_validation_and_saving_change_no_step(tmp_path: Path, store: Path) -> None:
    config = config_of(tmp_path, store, "schedulefree_sgd")
    assert run_here(config) == 0
    assert run_here(config, "validation.every_steps=4", f"run.dir={tmp_path / 'seldom'}") == 0
    often, seldom = saved(tmp_path / "run"), saved(tmp_path / "seldom")
    assert same(often.weights, seldom.weights) and same(often.averaged, seldom.averaged)


def test_what_is_released_later_has_its_own_average(tmp_path: Path, store: Path) -> None:
    config = config_of(tmp_path, store)
    frozen = ("model.freeze=[conv1]", "model.freeze_epochs=1", "run.steps=4")  # an epoch is three steps
    assert run_here(config, *frozen) == 0
    third, fourth = (load_checkpoint(tmp_path / "run" / "checkpoints" / f"step-{n:08d}") for n in (3, 4))
    assert torch.equal(third.weights["conv1.weight"], third.averaged["conv1.weight"])  # type: ignore[index]
    moved = (fourth.weights["conv1.weight"] - third.weights["conv1.weight"]).abs().max()
    assert 0 < moved < 2 * 0.01  # the step of an Adam that begins, not 1 / sqrt(1 - beta2) times as long


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("lr_schedule.name=cosine", "given cosine; allowed with optimizer.name=schedulefree: constant"),
        ("run.ema=0.9", "run.ema: given 0.9; allowed with optimizer.name=schedulefree: none"),
    ],
)
def test_two_averages_or_a_falling_rate_are_refused(tmp_path: Path, store: Path, override: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        load_config(config_of(tmp_path, store), [override])


def test_a_moving_average_beside_that_of_an_own_optimizer_is_refused(
    tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_here(config_of(tmp_path, store), f"optimizer.name={OWN}", "run.ema=0.9") == 2
    assert "leave run.ema out" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


def test_lamb_on_two_directions_and_after_a_resume_is_that_of_one_rank(tmp_path: Path, store: Path) -> None:
    """Its norms are those of whole tensors, whoever computes the gradient."""
    config = config_of(tmp_path, store, "lamb")
    assert run_here(config, f"run.dir={tmp_path / 'one'}", "run.steps=3") == 0
    assert run_on(2, config, *CHIMERA, "run.steps=2") == [0, 0]
    assert run_here(config, "run.steps=3", resume=True) == 0
    assert near(saved(tmp_path / "run").weights, saved(tmp_path / "one").weights)
    assert saved(tmp_path / "run").averaged is None


def test_tiles_whose_batch_norm_is_not_averaged_are_warned_of(store: Path, tmp_path: Path) -> None:
    encoder = {"name": "tests.workflows.tile_networks:normed_cnn", "batch_norm": "exact"}
    config = tile_config(tmp_path, store, model={"encoder": encoder})
    inputs = TileInputs(prepare(load_config(config)))
    model, _ = inputs.make_model("cpu", False, lambda line: None)
    averaged: Any = SimpleNamespace(optimizer=ScheduleFreeSGD(model.parameters()))
    plain: Any = SimpleNamespace(optimizer=torch.optim.SGD(model.parameters()))
    said = [[line for line in inputs.warnings(engine) if "running statistics" in line] for engine in (averaged, plain)]
    assert len(said[0]) == 1 and not said[1]
