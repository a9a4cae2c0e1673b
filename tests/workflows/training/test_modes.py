"""Modules train in the mode in which their factory returned them; a model wholly in evaluation mode is trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from hyfi_core.errors import RequestError
from tests.workflows.archive import make_config
from tests.workflows.faults import tiny
from tests.workflows.runs import run_here, run_on, weights_of
from workflows.config.data import ModelConfig
from workflows.config.load import load_config
from workflows.evaluation.models import convert_to_train, other_normalisation, set_training
from workflows.evaluation.programs import ModelPrograms

pytestmark = pytest.mark.usefixtures("in_process")
HERE = "tests.workflows.training.test_modes"


def frozen(classes: int) -> nn.Module:
    """Return a network whose norm keeps its statistics, as recipes of fine-tuning freeze a backbone."""
    model = tiny(classes)
    model.norm1.eval()
    return model


def pretrained(classes: int) -> nn.Module:
    """Return a network as ``from_pretrained`` does: ready to predict."""
    return tiny(classes).eval()


def sure(classes: int) -> nn.Module:
    """Return a network that returns probabilities."""
    return nn.Sequential(tiny(classes), nn.Softmax(1))


def likely(classes: int) -> nn.Module:
    """Return a network that returns log-probabilities, which are logits, too."""
    return nn.Sequential(tiny(classes), nn.LogSoftmax(1))


def untrained(classes: int) -> nn.Module:
    return tiny(classes).requires_grad_(False)


def statistics(run: Path, step: int) -> torch.Tensor:
    return weights_of(run, step)["norm1.running_mean"]


def test_a_frozen_norm_stays_frozen_after_validation_and_resume(
    tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tmp_path, store, model={"name": f"{HERE}:frozen"}, lr_schedule={"name": "constant"})
    assert run_here(config, "run.steps=4", "run.ema=0.9") == 0
    assert statistics(tmp_path / "run", 4).tolist() == [0.0] * 8
    said = capfd.readouterr().out
    assert said.count("1 module of the model stays in evaluation mode, as the factory returned it") == 1
    assert "fixed statistics): norm1\n" in said
    assert run_on(2, config, "plan.grids=[[1,2]]", "run.ema=0.9", resume=True) == [0, 0]
    assert statistics(tmp_path / "run", 6).tolist() == [0.0] * 8
    assert weights_of(tmp_path / "run", 6)["norm1.num_batches_tracked"] == 0


def test_a_model_returned_in_evaluation_mode_is_trained(
    tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tmp_path, store, model={"name": f"{HERE}:pretrained"}, run={"steps": 2})
    assert run_here(config) == 0
    assert "returned it in evaluation mode: all of it is set to training mode" in capfd.readouterr().out
    plain = make_config(tmp_path, store, model={"name": "tests.workflows.faults:tiny"}, run={"steps": 2})
    assert run_here(plain, f"run.dir={tmp_path / 'plain'}") == 0
    assert torch.equal(statistics(tmp_path / "run", 2), statistics(tmp_path / "plain", 2))


def test_a_new_head_on_a_model_in_evaluation_mode_is_a_mixture() -> None:
    backbone = tiny(3).eval()
    wrapped = nn.Sequential(backbone)  # a container says nothing about its layers
    assert "all of it is set to training mode" in str(set_training(wrapped))
    assert all(module.training for module in wrapped.modules())
    backbone.eval()
    headed = nn.Sequential(backbone, nn.Linear(3, 2))
    assert "stay in evaluation mode" in str(set_training(headed)) and "): 0" in str(set_training(headed))
    assert headed[1].training and not any(module.training for module in backbone.modules())
    assert set_training(tiny(2)) is None


def test_forecasts_capture_the_modes_that_train(tmp_path: Path, store: Path) -> None:
    config = load_config(make_config(tmp_path, store, model={"name": f"{HERE}:frozen"}))
    assert ModelPrograms(config, 2).of(2).mutations == {}  # of running statistics


def one_logit(classes: int) -> nn.Module:
    return tiny(1)


def per_position(classes: int) -> nn.Module:
    return nn.Conv2d(3, classes, 1)


def two_answers(classes: int) -> nn.Module:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = tiny(classes)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"logits": self.net(x)}

    return Both()


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("one_logit", "for 2 images and 2 classes it returns 1 output, as for a sigmoid"),
        ("per_position", "it returns a tensor of shape (2, 2, 250, 250) and dtype float32"),
        ("two_answers", "it returns a dict"),
    ],
)
@pytest.mark.parametrize("cells", [[], ["plan.cells=[1,2]"]])
def test_outputs_that_do_not_fit_the_classes_are_refused_before_anything_is_written(
    tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str], factory: str, words: str, cells: list[str]
) -> None:
    config = make_config(tmp_path, store, model={"name": f"{HERE}:{factory}"})
    assert run_here(config, *cells) == 2
    said = capfd.readouterr().err
    assert words in said and "logits of shape (2, 2), one for each class" in said and "Traceback" not in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("factory", "warned"), [("sure", True), ("likely", False)])
def test_probabilities_in_place_of_logits_are_warned_of(
    tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str], factory: str, warned: bool
) -> None:
    """Loss and predictions apply a softmax: with two of them, nothing was above 0.73, and nothing was said."""
    config = make_config(tmp_path, store, model={"name": f"{HERE}:{factory}"}, run={"steps": 1})
    assert run_here(config) == 0
    assert ("the model ends in a softmax or sigmoid" in capfd.readouterr().err) == warned


def test_a_model_that_trains_nothing_is_refused(tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = make_config(tmp_path, store, model={"name": f"{HERE}:untrained"}, run={"steps": 1})
    assert run_here(config) == 2
    assert "untrained: none of its 7 parameters is trained (requires_grad)" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


def bare(classes: int) -> nn.Module:
    """Return a model whose factory has neither norm nor pool, with the configuration that timm adds to its networks."""
    model = tiny(classes)
    model.norm1.pretrained_cfg = {"mean": (0.5,) * 3, "std": (0.5,) * 3}  # type: ignore[assignment]
    return model


def test_a_setting_that_the_factory_does_not_take_is_named_and_another_normalisation(
    tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert (
        run_here(make_config(tmp_path, store, model={"name": f"{HERE}:bare", "norm": "group"}, run={"steps": 1})) == 0
    )
    said = capfd.readouterr().out
    assert f"model.norm: group has no effect: {HERE}:bare has no parameter norm" in said
    assert said.count("states others: set model.mean: [0.5, 0.5, 0.5] and model.std: [0.5, 0.5, 0.5]") == 1
    assert other_normalisation(bare(2), ModelConfig(mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2))) is None
    assert other_normalisation(tiny(2), ModelConfig()) is None
    unstated = tiny(2)
    unstated.norm1.default_cfg = {"mean": None, "std": None}  # type: ignore[assignment]
    assert other_normalisation(unstated, ModelConfig()) is None
    normalises = tiny(2)
    normalises.register_buffer("pixel_mean", torch.zeros(1, 3, 1, 1))
    normalises.register_buffer("pixel_std", torch.ones(1, 3, 1, 1))
    assert "1 (Network) has a mean and a std of its own" in str(
        other_normalisation(nn.Sequential(nn.Identity(), normalises), ModelConfig())
    ).replace(type(normalises).__name__, "Network")
    assert other_normalisation(normalises, ModelConfig(mean=(0, 0, 0), std=(1, 1, 1))) is None


def test_weights_tied_by_their_data_are_refused() -> None:
    """The memory format of convolutions, a precision or a GPU separated them: each was trained by itself in silence."""
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
    model[1].bias = model[0].bias
    convert_to_train(model, "float32", "channels_last")
    model[1].weight.data = model[0].weight.data
    with pytest.raises(RequestError, match=r"'0.weight' and '1.weight' .* would be trained apart"):
        convert_to_train(model, "float32", "channels_last")
