"""What a hook stores outside of the model has no value after capture, and says so when it is used."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hyfi_core
from hyfi_core.capture.module_state import module_state
from hyfi_core.capture.storing.stored_tensors import StoredTensor
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.errors import RequestError

pytestmark = pytest.mark.captures_each

SHAPE = (2, 3, 12, 10)
FEATURES: dict[str, Any] = {}


class Extractor:
    """Stores what passes, and may scale it."""

    def __init__(self) -> None:
        self.maps: dict[str, Any] = {}
        self.calls = 0
        self.scale = 1.0

    def store(self, name: str, module: nn.Module, given: Any, output: torch.Tensor) -> torch.Tensor:
        self.maps[name] = (output, given[0])
        return output * self.scale

    def __call__(self, module: nn.Module, given: Any, output: torch.Tensor) -> torch.Tensor:
        return self.store("map", module, given, output)

    def scaled(self, module: nn.Module, given: Any, output: torch.Tensor) -> torch.Tensor:
        return self("map", given, output)  # type: ignore[arg-type]

    def count(self, module: nn.Module, given: Any, output: torch.Tensor) -> None:
        self.calls += 1


def network(hook: Any = None) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    if hook is not None:
        model[0].register_forward_hook(hook)
    return model.double()


def engine_of(model: nn.Module) -> hyfi_core.Engine:
    return hyfi_core.parallelize(model, SHAPE, hyfi_core.ParallelPlan(((1, 1),)), AloneCommunicator())


def step(engine: hyfi_core.Engine) -> float:
    images = torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return engine.accumulate(images, torch.tensor([0, 1]))


def store(module: nn.Module, given: Any, output: torch.Tensor) -> None:
    FEATURES["map"] = output.detach().clone()


@pytest.mark.parametrize(
    "use",
    [
        lambda tensor: tensor + 1,
        torch.mean,
        np.asarray,
        float,
        lambda tensor: torch.stack([tensor]),
        lambda tensor: tensor[0],
        lambda tensor: tensor.detach().cpu().numpy(),
        list,
    ],
)
def test_a_stored_tensor_is_an_error_when_it_is_used(use: Callable[[torch.Tensor], Any]) -> None:
    step(engine_of(network(store)))
    tensor = FEATURES.pop("map")
    assert isinstance(tensor, StoredTensor) and tensor.shape == (2, 4, 10, 8) and "without values" in repr(tensor)
    with pytest.raises(RequestError, match=r"shape \(2, 4, 10, 8\) is used at .*stored while the engine captured"):
        use(tensor)


def test_no_stored_tensor_holds_what_the_check_at_start_computed() -> None:
    stored: list[Any] = []
    engine_of(network(lambda module, given, output: stored.append((output, given[0]))))
    assert len(stored) > 2  # captures, and runs of the comparison
    assert all(type(tensor) is StoredTensor for pair in stored for tensor in pair)


@pytest.mark.parametrize("kind", ["function", "list", "method", "object", "partial"])
def test_what_capture_stores_is_no_new_state(kind: str) -> None:
    extractor, stored = Extractor(), list[Any]()
    hooks = {
        "function": store,
        "list": lambda module, given, output: stored.append(output),
        "method": extractor.scaled,
        "object": extractor,
        "partial": functools.partial(extractor.store, "map"),
    }
    model = network(hooks[kind])
    engine = engine_of(model)
    before = module_state(model)
    step(engine)
    assert module_state(model) == before and len(stored) == len({id(tensor) for tensor in stored})
    FEATURES.clear()


@pytest.mark.parametrize("kind", ["method", "object", "partial"])
def test_the_object_behind_a_hook_counts(kind: str) -> None:
    extractor = Extractor()
    hooks = {"method": extractor.scaled, "object": extractor, "partial": functools.partial(extractor.store, "map")}
    engine = engine_of(network(hooks[kind]))
    before = step(engine)
    extractor.scale = 3.0
    assert step(engine) != before


def test_a_hook_that_counts_in_its_object_is_refused() -> None:
    with pytest.raises(RequestError, match=r"changes 'Extractor.count' outside of the model"):
        engine_of(network(Extractor().count))


def test_weights_that_a_hook_holds_are_no_state() -> None:
    model = network()
    weights = list(model.parameters())
    model[0].register_forward_hook(lambda module, given, output: output * len(weights))
    before = module_state(model)
    with torch.no_grad():
        model[0].weight.mul_(2.0)
    assert module_state(model) == before


CACHE: dict[Any, torch.Tensor] = {}


class WithCache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape not in CACHE:
            CACHE[x.shape] = x.mean((0, 1, 2))
        return self.head((x * CACHE[x.shape]).mean((2, 3)))


def test_a_cache_that_depends_on_an_image_is_refused_at_the_next_capture_with_its_line() -> None:
    CACHE.clear()
    engine = hyfi_core.parallelize(
        WithCache(), SHAPE, hyfi_core.ParallelPlan(((1, 1),)), AloneCommunicator(), verify=False
    )
    with pytest.raises(RequestError, match=r"shape \(10,\) is used at .*CACHE\[x.shape\]"):
        engine.predict(torch.randn(SHAPE))
    CACHE.clear()
