"""Weights from a local file: what torchvision and timm publish for ResNet-18, -34 and -50 fits whole.

Their names are held in ``tests/hyfi_core/models/test_resnet.py``; here a file under them goes through the loader.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from hyfi_core.models import resnet
from workflows.training.weights import load_weights


def other_values(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.rand_like(t) if t.is_floating_point() else t + 7 for name, t in state.items()}


@pytest.mark.parametrize("make", [resnet.resnet18, resnet.resnet34, resnet.resnet50])
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_file_of_the_same_names_is_loaded_whole(make: Callable[..., nn.Module], suffix: str, tmp_path: Path) -> None:
    model = make(1000, width=8)
    given = other_values(model.state_dict())
    path = tmp_path / f"resnet{suffix}"
    if suffix == ".pth":
        torch.save(given, path)
    else:
        save_file(given, path)
    report = load_weights(model, path)
    assert not (report.missing or report.unexpected or report.reshaped)
    assert all(torch.equal(tensor, given[name]) for name, tensor in model.state_dict().items())


def test_a_head_for_other_classes_keeps_its_own_values_and_is_named(tmp_path: Path) -> None:
    model = resnet.resnet18(2, width=8)
    torch.save(resnet.resnet18(1000, width=8).state_dict(), tmp_path / "published.pth")
    head = model.fc.weight.clone()
    assert set(load_weights(model, tmp_path / "published.pth").reshaped) == {"fc.weight", "fc.bias"}
    assert torch.equal(model.fc.weight, head)
