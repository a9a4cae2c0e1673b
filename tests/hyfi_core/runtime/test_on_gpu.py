"""Steps on a GPU equal plain PyTorch there; they wait for the device only where the loss is read."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hyfi_core
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.models.resnet import resnet6
from hyfi_core.runtime.settings import GraphMode

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("cells", [None, (2, 2)])
def test_a_step_on_a_gpu_equals_plain_pytorch_there(cells: tuple[int, int] | None) -> None:
    torch.manual_seed(0)
    model = resnet6(2).double().cuda()
    reference = copy.deepcopy(model)
    images = torch.randn(2, 3, 96, 80, dtype=torch.float64).cuda()
    labels = torch.tensor([0, 1]).cuda()
    plan = hyfi_core.ParallelPlan(grids=((1, 1),), cells=cells)
    engine = hyfi_core.parallelize(model, (2, 3, 96, 80), plan, AloneCommunicator())
    loss = engine.accumulate(images, labels)
    expected = F.cross_entropy(reference(images), labels)
    expected.backward()
    assert abs(loss - expected.item()) <= 1e-10
    everything = torch.cat([p.grad.flatten() for p in reference.parameters() if p.grad is not None]).norm()
    for (name, found), wanted in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert found.grad is not None and wanted.grad is not None
        assert found.grad.is_cuda
        error = (found.grad - wanted.grad).norm()
        assert error <= 1e-10 * max(wanted.grad.norm(), 1e-3 * everything), name
    output = engine.predict(images)
    with torch.no_grad():
        assert (output - reference.eval()(images)).abs().max() <= 1e-10


@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"interleave": 3, "recompute": True},
        {"cells": (2, 2)},
        {"cells": (2, 1), "interleave": 2, "recompute": True},
    ],
)
def test_steps_that_repeat_graphs_equal_those_that_run_as_they_are(plan: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    images = [torch.randn((2, 3, 96, 80), dtype=torch.float64, generator=generator).cuda() for _ in range(6)]
    states, losses = [], []
    modes: tuple[GraphMode, ...] = ("off", "auto")
    for mode in modes:
        torch.manual_seed(0)
        model = resnet6(2).double().cuda()
        engine = hyfi_core.parallelize(
            model,
            (2, 3, 96, 80),
            hyfi_core.ParallelPlan(grids=((1, 1),), **plan),
            AloneCommunicator(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
            cuda_graphs=mode,
        )
        losses.append([engine.train_step(x, torch.tensor([0, step % 2]).cuda()) for step, x in enumerate(images)])
        assert (engine._replayed._recorded is not None) == (mode == "auto")
        states.append({name: value.clone() for name, value in model.state_dict().items()})
        engine.predict(images[0])
        assert engine._replayed._recorded is None
    assert losses[1] == pytest.approx(losses[0], rel=1e-10)
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-8, atol=1e-10)
