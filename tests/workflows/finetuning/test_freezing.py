"""What ``model.freeze`` freezes, and lets go."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hyfi_core.errors import RequestError
from hyfi_core.models.resnet import resnet10
from workflows.config.data import ModelConfig
from workflows.finetuning.freezing import freeze


def frozen_names(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if not parameter.requires_grad}


def evaluated(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if not module.training}


def test_parameters_and_statistics_of_frozen_modules_stay() -> None:
    model = resnet10(2, width=8)
    report = freeze(model, ModelConfig(freeze=("conv1", "bn1", "layer1")))
    wanted = {name for name, _ in model.named_parameters() if name.split(".")[0] in ("conv1", "bn1", "layer1")}
    assert report is not None and frozen_names(model) == wanted == set(report.parameters)
    assert evaluated(model) == set(report.norms) == {"bn1", "layer1.0.bn1", "layer1.0.bn2"}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model(torch.rand(2, 3, 32, 32)).sum().backward()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed and not any(name.startswith(("bn1", "layer1")) for name in changed)
    assert str(report) == "frozen: 9 of 38 parameters; batch norm with its loaded statistics: 3"


def test_a_frozen_convolution_leaves_its_norm_alone() -> None:
    model = resnet10(2, width=8)
    report = freeze(model, ModelConfig(freeze=("*.conv1",)))
    assert report is not None and not report.norms and not evaluated(model)


def test_norms_without_parameters_are_frozen_with_their_module() -> None:
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, affine=False)), nn.Linear(4, 2))
    report = freeze(model, ModelConfig(freeze=("0",)))
    assert report is not None and report.norms == ("0.1",)


def test_release_trains_what_was_frozen_here_and_nothing_else() -> None:
    model = resnet10(2, width=8)
    model.conv1.weight.requires_grad_(False)  # by the factory
    model.bn1.eval()
    report = freeze(model, ModelConfig(freeze=("conv1", "bn1", "layer1"), freeze_epochs=2))
    assert report is not None and "conv1.weight" not in report.parameters and "bn1" not in report.norms
    assert not report.is_over(1) and report.is_over(2)
    report.release(model)
    assert frozen_names(model) == {"conv1.weight"} and evaluated(model) == {"bn1"}


def test_a_model_without_anything_to_train_is_refused() -> None:
    with pytest.raises(RequestError, match="matches every parameter of the model; leave the head"):
        freeze(resnet10(2, width=8), ModelConfig(freeze=("*",)))
