"""What may be given as images, and what is said of anything else."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyfi_core
from hyfi_core import ParallelPlan
from hyfi_core.capture.export import capture
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.errors import RequestError
from hyfi_core.ops.redistribute import is_channels_last
from hyfi_core.runtime.batch_reader import lays_channels_last
from tests.harness import run_copies

NET = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
IMAGES = torch.ones(2, 3, 16, 16)


@pytest.fixture(scope="module")
def engine() -> Any:
    return hyfi_core.parallelize(NET, (2, 3, 16, 16), hyfi_core.ParallelPlan(((1, 1),)), AloneCommunicator())


@pytest.mark.parametrize(
    ("images", "named"), [(list(IMAGES), "list"), (IMAGES.numpy(), "numpy.ndarray"), (None, "NoneType")]
)
def test_images_of_another_kind_are_refused(engine: Any, images: Any, named: str) -> None:
    labels = torch.tensor([0, 1])
    expected = rf"images are a {named}; pass a tensor of shape \(2, 3, H, W\), or a function Box -> tensor"
    for call in (lambda: engine.accumulate(images, labels), lambda: engine.predict(images)):
        with pytest.raises(RequestError, match=expected):
            call()


def test_a_function_of_a_box_returns_a_tensor(engine: Any) -> None:
    wanted = NET(IMAGES)
    torch.testing.assert_close(engine.predict(lambda box: IMAGES[..., box.y0 : box.y1, box.x0 : box.x1]), wanted)
    with pytest.raises(RequestError, match=r"returned a numpy.ndarray; it must return a tensor \(B, C, h, w\)"):
        engine.predict(lambda box: np.ones((2, 3, *box.shape), np.float32))


class Viewed(nn.Module):
    """Convolutions with views between them that only contiguous maps allow, and maps in the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 1, 1)
        self.one, self.norm, self.fc = nn.Conv2d(8, 4, 1), nn.BatchNorm2d(8), nn.Linear(4 * 6 * 8, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.norm(self.first(x)).relu()
        b, c, h, w = x.shape
        x = x.view(b, 2, c // 2, h, w).transpose(1, 2).reshape(b, c, h, w)  # the channel shuffle
        y = self.one(self.second(x))
        return self.fc(y.view(b, -1)), y.permute(0, 1, 3, 2)


@pytest.mark.parametrize("grid", [(1, 1), (2, 1)])
def test_maps_may_lie_channels_last_and_answers_are_as_in_one_process(grid: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model, shape = Viewed(), (2, 3, 12, 16)
    images, labels = torch.randn(shape), torch.tensor([0, 1])

    def loss(answer: Any, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(answer[0], targets) + answer[1].square().mean()

    reference = copy.deepcopy(model)
    loss(reference(images), labels).backward()
    wanted = reference.eval()(images)

    def body(comm: Any, module: nn.Module) -> Any:
        plan, seen = ParallelPlan((grid,)), []
        engine = hyfi_core.parallelize(module, shape, plan, comm, loss=loss, memory_format="channels_last")
        engine.accumulate(images, labels)
        part = engine._runners[0].reader.read(images, {(0, 0): engine.input_parts[0]})[0, 0]
        seen.append(is_channels_last(part))
        as_given = hyfi_core.parallelize(module, shape, plan, comm, loss=loss, memory_format="as_given")
        seen.append(is_channels_last(as_given._runners[0].reader.read(images, {(0, 0): engine.input_parts[0]})[0, 0]))
        return seen, {n: p.grad for n, p in module.named_parameters()}, engine.predict(images), module.state_dict()

    for seen, gradients, answer, state in run_copies(model, grid[0], body):
        assert seen == [True, False]
        for found, one in zip(answer, wanted, strict=True):
            torch.testing.assert_close(found, one.detach(), rtol=1e-4, atol=1e-5)
            assert found.is_contiguous()
        for name, p in reference.named_parameters():
            torch.testing.assert_close(gradients[name], p.grad, rtol=1e-4, atol=1e-5)
            assert gradients[name].stride() == p.stride() == state[name].stride(), name


@pytest.mark.parametrize(
    ("model", "autocast", "last"),
    [
        (nn.Conv2d(3, 4, 3), None, True),
        (nn.Conv2d(3, 4, 3).double(), None, False),
        (nn.Conv2d(3, 4, 3).double(), torch.bfloat16, True),
        (nn.Conv2d(3, 4, 1), None, False),
        (nn.Conv2d(4, 4, 3, groups=4), None, False),
        (nn.Linear(3, 4), None, False),
    ],
)
def test_channels_last_is_chosen_where_there_are_kernels_for_it(model: Any, autocast: Any, last: bool) -> None:
    def program() -> Any:
        return capture(model, (1, model.in_channels, 32, 32), torch.float32)

    def chosen(asked: Any) -> bool:
        return lays_channels_last(asked, model, autocast, program, [(1, 1)])

    assert chosen("auto") is last
    assert chosen("channels_last") and not chosen("as_given")
    on_meta = copy.deepcopy(model).to("meta")  # its weights will be read to another device
    assert lays_channels_last("auto", on_meta, autocast, program, [(1, 1)], torch.device("cpu")) is last


@pytest.mark.parametrize(
    ("size", "grid", "cells", "last"),
    [(20, (1, 1), None, False), (48, (1, 1), None, True), (48, (2, 1), None, False), (48, (1, 1), (2, 1), False)],
)
def test_weights_are_reordered_only_if_they_are_used_at_enough_positions(
    size: int, grid: tuple[int, int], cells: tuple[int, int] | None, last: bool
) -> None:
    """The layer of four fifths of the weights has a quarter of the positions: 0.8 x 24 x 24 + 0.2 x 48 x 48 = 922."""
    model = nn.Sequential(
        nn.Conv2d(4, 4, 3, 1, 1), nn.Conv2d(4, 16, 3, 2, 1, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )

    def body(comm: Any, module: nn.Module) -> bool:
        plan = ParallelPlan((grid,), cells=cells)
        return hyfi_core.parallelize(module, (1, 4, size, size), plan, comm, verify=False)._subject.channels_last

    assert run_copies(model, grid[0] * grid[1], body) == [last] * grid[0]


def test_parametrized_weights_are_not_computed_outside_of_a_step() -> None:
    """Reading the weight of a spectral norm in training mode advances its power iteration."""
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 4, 3, 2, 1)), nn.Flatten())
    before = copy.deepcopy(model.state_dict())
    hyfi_core.parallelize(model, (1, 3, 6, 8), ParallelPlan(((1, 1),)), AloneCommunicator(), verify=False)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
