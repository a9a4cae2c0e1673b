"""Runs that fine-tune: a frozen body, a head at ten times the rate, weights of another network; exact on any plan."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from hyfi_core.runtime.checkpoint import load_checkpoint
from tests.workflows.archive import make_config
from tests.workflows.faults import tiny
from tests.workflows.runs import losses, run_here, run_on, weights_of

pytestmark = pytest.mark.usefixtures("in_process")
PLANS = {
    "parts": (2, "plan.grids=[[1,2]]"),
    "stages": (2, "plan.grids=[[1,1],[1,1]]", "plan.cuts=[norm1]"),  # all that the first rank has is frozen
    "replicas": (2, "plan.replicas=2", "plan.microbatches=1"),
}
PUBLISHED = 9  # classes of the network that the weights were trained for


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights under a prefix, with the head of another task, as training scripts save them."""
    torch.manual_seed(5)
    state = {f"module.backbone.{name}": value for name, value in tiny(PUBLISHED).state_dict().items()}
    state["module.backbone.norm1.running_mean"] = torch.linspace(-1, 1, 8)
    path = tmp_path_factory.mktemp("published") / "weights.pth"
    torch.save({"state_dict": state, "epoch": 7}, path)
    return path


def config_of(folder: Path, store: Path, weights: Path, **model: Any) -> Path:
    return make_config(
        folder,
        store,
        model={"name": "tests.workflows.faults:tiny", "weights": str(weights), **model},
        data={"batch_size": 2},
        plan={"microbatches": 2},
        optimizer={"lr": 1e-3, "weight_decay": 0.1, "groups": [{"match": "fc", "lr": 1e-2}]},
        lr_schedule={"name": "constant", "warmup_steps": 0},
        validation={"every_steps": 2},
        run={"precision": "float64", "steps": 4},
    )


def test_a_frozen_body_and_its_head_are_those_of_one_rank_on_any_plan(
    tmp_path: Path, store: Path, published: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path, store, published, freeze=["conv1", "norm1"])
    assert run_here(config, f"run.dir={tmp_path / 'one'}") == 0
    said = capfd.readouterr().out
    assert "7 of 9 tensors loaded ('state_dict' of the file) (names without 'module.backbone.' before them)" in said
    assert "fc 0 of 2 keeps initial values" in " ".join(said.split())
    assert "frozen: 3 of 7 parameters; batch norm with its loaded statistics: 1" in said
    assert "learning rate 0.001; weight decay 0.1, of norms and biases, too; fc: learning rate 0.01\n" in said  # sgd
    state, wanted = torch.load(published)["state_dict"], weights_of(tmp_path / "one", 4)
    for name in ("conv1.weight", "norm1.weight", "norm1.running_mean", "norm1.running_var"):
        assert torch.equal(wanted[name], state[f"module.backbone.{name}"].double())
    assert not torch.equal(wanted["conv2.weight"], state["module.backbone.conv2.weight"].double())
    for name, (ranks, *plan) in PLANS.items():
        assert run_on(ranks, config, *plan, f"run.dir={tmp_path / name}") == [0] * ranks
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "one"), rel=1e-9)
        weights = load_checkpoint(tmp_path / name / "checkpoints" / "latest").weights
        assert all(torch.allclose(weights[key], wanted[key], rtol=1e-8, atol=1e-10) for key in wanted)


def test_the_head_moves_at_its_own_rate(tmp_path: Path, store: Path, published: Path) -> None:
    """The first step of Adam moves every weight by its learning rate."""
    config = config_of(tmp_path, store, published, freeze=["conv1", "norm1"])
    settings = ("run.steps=1", "optimizer.weight_decay=0", "optimizer.name=adam")
    assert run_here(config, *settings) == 0
    assert (
        run_here(config, *settings, f"run.dir={tmp_path / 'still'}", "optimizer.lr=1e-12", "optimizer.groups=[]") == 0
    )
    moved, initial = weights_of(tmp_path / "run", 1), weights_of(tmp_path / "still", 1)
    for name, rate in (("fc.weight", 1e-2), ("conv2.weight", 1e-3), ("conv1.weight", 0.0)):
        assert (moved[name] - initial[name]).abs().max() == pytest.approx(rate, rel=1e-2)


def test_what_is_frozen_for_an_epoch_is_trained_afterwards_also_after_a_resume(
    tmp_path: Path, store: Path, published: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Six slides in batches of two: an epoch is three steps."""
    config = config_of(tmp_path, store, published, freeze=["conv1", "norm1"], freeze_epochs=1)
    settings = ("run.keep=9", "run.checkpoint_every_steps=1", "run.steps=6")
    assert run_here(config, *settings, f"run.dir={tmp_path / 'one'}") == 0
    assert "from step 4 on, 3 frozen parameters are trained, too" in capfd.readouterr().out
    third, fourth = (weights_of(tmp_path / "one", step) for step in (3, 4))
    start = torch.load(published)["state_dict"]
    for name in ("conv1.weight", "norm1.running_mean"):
        assert torch.equal(third[name], start[f"module.backbone.{name}"].double())
        assert not torch.equal(fourth[name], third[name])
    for step, plan in ((2, PLANS["stages"]), (5, PLANS["parts"])):  # before and after the release
        assert run_on(plan[0], config, *plan[1:], *settings[:2], f"run.steps={step}", resume=step > 2) == [0, 0]
    assert run_here(config, *settings, resume=True) == 0
    found, wanted = weights_of(tmp_path / "run", 6), weights_of(tmp_path / "one", 6)
    assert all(torch.allclose(found[key], wanted[key], rtol=1e-8, atol=1e-10) for key in wanted)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.freeze=[layer1]", "model.freeze: 'layer1' matches no parameter of the model; .*its modules are conv1"),
        ("model.freeze=['*']", "matches every parameter"),
        ("optimizer.groups=[{match: head, lr: 1}]", r"optimizer.groups\[0\].match: 'head' matches no parameter"),
        ("optimizer.name=torch.optim:Nothing", "torch.optim has no 'Nothing'"),
        ("optimizer.options={momentums: 1}", "optimizer.options.momentums: sgd does not take it"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    tmp_path: Path, store: Path, published: Path, override: str, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_here(config_of(tmp_path, store, published), override) == 2
    assert re.search(words, capfd.readouterr().err)
    assert not (tmp_path / "run").exists()


def test_a_run_with_decay_for_all_resumes_with_it_and_says_so_without(
    tmp_path: Path, store: Path, published: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path, store, published)
    adamw = ("optimizer.name=adamw", "optimizer.groups=[]")
    assert run_here(config, *adamw, "optimizer.decay_norms=true", "run.steps=2") == 0
    assert run_here(config, *adamw, "run.steps=4", resume=True) == 2
    assert "7 in 1 saved, 7 in 2 now" in (said := capfd.readouterr().err) and "optimizer.decay_norms=true" in said
    assert run_here(config, *adamw, "optimizer.decay_norms=true", "run.steps=4", resume=True) == 0


def test_random_weights_that_are_frozen_are_warned_of(
    tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = {"name": "resnet6", "options": {"width": 8}, "freeze": ["conv1"]}
    assert run_here(make_config(tmp_path, store, model=model, run={"steps": 1})) == 0
    assert "model.freeze without model.weights: what is frozen keeps random values" in capfd.readouterr().err
