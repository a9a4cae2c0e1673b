"""Part of a check: training steps in float64 equal plain PyTorch on the same device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import hyfi_core
from hyfi_core.models.amoebanet import amoebanet_d
from hyfi_core.models.resnet import resnet18
from workflows.benchmarks.networks import networks, without_drops, worst
from workflows.gpu_check.measure_step import Row
from workflows.gpu_check.setting import Setting

TOLERANCE = 1e-10
"""Of gradients, relative to the norm of each; of loss, output and buffers."""
CLASSES = 3
GRIDS = {1: (1, 1), 2: (2, 1), 4: (2, 2)}
_THIRD_PARTY = ("monai/DenseNet121", "torchvision/densenet121", "timm/densenet121", "transformers/RegNet")


def equal(setting: Setting, network: str) -> Iterator[Row]:
    """Compare one step and one prediction of a network, on all ranks of the job."""
    comm = hyfi_core.init()
    torch.manual_seed(0)
    named_model = _network_of(network, setting)
    if named_model is None:
        yield {"what": network, "not run": f"no network of another package is installed ({', '.join(_THIRD_PARTY)})"}
        return
    name, model = named_model
    model = without_drops(model).double().train().to(setting.device)
    reference = copy.deepcopy(model)
    shape = (2, 3, setting.sizes.equal_px, setting.sizes.equal_px)
    images = torch.randn(shape, dtype=torch.float64).to(setting.device)
    labels = torch.randint(CLASSES, (2,)).to(setting.device)
    plan = hyfi_core.ParallelPlan(grids=(GRIDS[comm.size],))
    engine = hyfi_core.parallelize(model, shape, plan, comm, verify=False)
    loss = engine.accumulate(images, labels)
    gradients, state, logits = engine.gather_gradients(), engine.gather_state_dict(), engine.predict(images)
    if gradients is not None and state is not None:
        errors = _errors(reference, images, labels, (loss, gradients, state, logits))
        passed = all(error <= TOLERANCE for error in errors.values())
        yield {"what": f"{name}, float64, {comm.size} x {setting.device.type}", "passed": passed, **errors}


def _network_of(network: str, setting: Setting) -> tuple[str, nn.Module] | None:
    """Return (name, network); None if no package has one."""
    if network == "resnet18":
        return network, resnet18(CLASSES)
    if network == "amoebanet":
        layers, filters = setting.sizes.amoebanet
        return f"AmoebaNet-D ({layers}, {filters})", amoebanet_d(CLASSES, layers, filters)
    makers = dict(networks())
    name = next((name for name in _THIRD_PARTY if name in makers), None)
    return None if name is None else (name, makers[name](setting.sizes.equal_px))


def _errors(reference: nn.Module, images: torch.Tensor, labels: torch.Tensor, results: Any) -> dict[str, float]:
    """Return the largest errors of a step of the engine, by what was compared."""
    loss, gradients, state, logits = results
    mean = F.cross_entropy(reference(images), labels)
    torch.autograd.backward(mean)
    expected = float(mean.detach())
    buffers = [
        float((state[name] - value).abs().max() / max(1.0, float(value.abs().max())))
        for name, value in reference.named_buffers()
    ]
    with torch.no_grad():
        output = reference.eval()(images)
    return {
        "gradients": worst(gradients, {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}),
        "loss": abs(loss - expected) / max(1.0, abs(expected)),
        "buffers": max(buffers, default=0.0),
        "output": float((logits - output).abs().max() / max(1.0, float(output.abs().max()))),
    }
