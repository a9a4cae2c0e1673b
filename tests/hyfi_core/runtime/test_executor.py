"""What the executor runs without autograd leaves nothing behind for what it runs with it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import hyfi_core
from hyfi_core.runtime.executor import without_grad
from tests.harness import run_copies


class DetachedFirst(nn.Module):
    """The first use of a weight has no gradient, and an operator is between it and the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(2))
        self.shared, self.fc = nn.Conv2d(3, 3, 1), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> Any:
        gate = F.avg_pool2d(self.shared(x).detach(), 3, 1, 1).sigmoid()
        return self.fc((self.shared(self.wide(F.relu(self.first(x)))) * gate).mean((2, 3)))


class CachedConvolutions(TorchDispatchMode):
    """Notes for each convolution whether autograd records, and whether autocast caches its weight."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = set[tuple[bool, bool]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution.default:
            self.seen.add((torch.is_grad_enabled(), torch.is_autocast_cache_enabled()))
        return func(*args, **(kwargs or {}))


def test_weights_converted_without_a_graph_are_not_cached() -> None:
    """Before torch 2.11, the second use of the weight found the first one's copy in the cache, and had no gradient."""
    model, images, labels = DetachedFirst(), torch.randn(2, 3, 12, 12), torch.tensor([0, 1])

    def body(comm: Any, module: nn.Module) -> Any:
        plan = hyfi_core.ParallelPlan(grids=((1, 2),), fused_halo=1)
        engine = hyfi_core.parallelize(module, (2, 3, 12, 12), plan, comm, autocast=torch.bfloat16, verify=False)
        with CachedConvolutions() as convolutions:
            engine.accumulate(images, labels)
        return convolutions.seen, [parameter.grad for parameter in module.parameters()]

    seen, gradients = run_copies(copy.deepcopy(model), 2, body)[0]
    assert seen == {(False, False), (True, True)}
    with torch.autocast("cpu", torch.bfloat16):
        F.cross_entropy(model(images), labels).backward()
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=0.05, atol=2e-3)


def test_autocast_caches_again_after_a_context_without_gradients() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(RuntimeError, match="inside"), without_grad():
            assert not torch.is_autocast_cache_enabled() and not torch.is_grad_enabled()
            raise RuntimeError("inside")
        assert torch.is_autocast_cache_enabled() and torch.is_grad_enabled()
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        with without_grad():
            assert not torch.is_autocast_cache_enabled()
        assert not torch.is_autocast_cache_enabled()
