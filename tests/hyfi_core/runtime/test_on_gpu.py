"""Steps on a GPU equal plain PyTorch there; they wait for the device only where the loss is read."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

import hyfi_core
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.models.resnet import resnet6

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
