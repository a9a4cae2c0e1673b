"""The check at start finds what no guard knows of, and leaves no trace of itself."""

from __future__ import annotations

import copy
import itertools
import random
import warnings
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import hyfi_core
from hyfi_core.capture import verify
from hyfi_core.capture.export import capture
from hyfi_core.capture.verify import mixes_images, verify_capture
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.comm.threads import run_ranks
from hyfi_core.errors import RequestError

pytestmark = pytest.mark.captures_each

SHAPE = (2, 3, 300, 90)
PLAN = hyfi_core.ParallelPlan(grids=((1, 1),))


class Remembers(nn.Module):
    """Adds what it saw first, for ever: not a buffer, so no capture knows of it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.seen is None:
            self.seen = x.detach().mean((0, 2, 3), keepdim=True)
        return x + self.seen


class Hooked(nn.Module):
    """Changes gradients where only autograd sees it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        if y.grad_fn is not None:
            y.grad_fn.register_hook(lambda inputs, outputs: tuple(i if i is None else 3 * i for i in inputs))
        return y


class Elsewhere(nn.Module):
    """Takes a number that a capture cannot see change."""

    numbers: ClassVar = itertools.count(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * next(self.numbers)


class ElsewhereInEvaluation(Elsewhere):
    """The same, but in evaluation mode only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.training else super().forward(x)


def net(middle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), middle, nn.Conv2d(4, 4, 3, 2, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_sides_are_accepted_and_nothing_is_left_behind(dtype: torch.dtype) -> None:
    model = net(nn.Sequential(nn.Dropout(0.4), nn.Dropout2d(0.2))).to(dtype)
    state, generators = copy.deepcopy(model.state_dict()), (random.getstate(), torch.get_rng_state())
    drawn = np.random.get_state()[1].copy()
    assert verify_capture(model, SHAPE, dtype) is None
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters()) and model.training
    assert random.getstate() == generators[0] and torch.equal(torch.get_rng_state(), generators[1])
    assert (np.random.get_state()[1] == drawn).all()


@pytest.mark.parametrize(
    ("middle", "words"),
    [
        (Remembers(), r"output 0 of step 2 has a relative error of"),
        (Hooked(), r"gradient of 1.bias in step 1 has a relative error of"),
        (Elsewhere(), r"output 0 of step 1 has a relative error of .*the first module that differs is 3 \(Elsewhere\)"),
        (
            ElsewhereInEvaluation(),
            r"output 0 of step 1 has a relative error of .*in evaluation mode; the first module ",
        ),
    ],
)
def test_a_difference_is_refused_with_where_it_is(middle: nn.Module, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        verify_capture(net(middle), SHAPE, torch.float32)


def test_parallelize_checks_unless_told_not_to_and_all_ranks_refuse() -> None:
    optimizer = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
    copies = [net(Remembers()) for _ in range(2)]
    plan = hyfi_core.ParallelPlan(grids=((1, 2),))

    def refused(comm: Any) -> str:
        with pytest.raises(RequestError, match="does not compute what Sequential computes") as refusal:
            hyfi_core.parallelize(copies[comm.rank], SHAPE, plan, comm, optimizer=optimizer)
        return str(refusal.value)

    assert len(set(run_ranks(2, refused))) == 1
    hyfi_core.parallelize(net(Remembers()), SHAPE, PLAN, AloneCommunicator(), optimizer=optimizer, verify=False)


def test_a_model_that_runs_on_no_small_image_is_said_to_be_unchecked() -> None:
    class Large(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x.shape[2] >= 2048
            return x.mean((2, 3))

    with pytest.warns(
        UserWarning, match="Large could not be compared with its capture: it fails on every image size tried"
    ):
        hyfi_core.parallelize(Large(), (1, 3, 2048, 2048), PLAN, AloneCommunicator())


def test_a_model_that_is_captured_in_its_own_dtype_alone_is_compared_in_it() -> None:
    """In float64 the module runs and its capture fails: what the two compute in float32 is compared, and no mixture."""
    model, shape = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten()), (2, 3, 8, 8)
    program = capture(model, shape, torch.float32)
    with mock.patch("hyfi_core.capture.verify.capture", side_effect=RequestError("float32 only")):
        expected = verify._of_program(model, program, shape, torch.float32, lambda output: output)
        assert not verify._exceeds_rounding(model, shape, torch.float32, lambda output: output, expected, program)


def test_a_model_of_one_size_is_checked_at_that_size() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.place, self.middle = nn.Parameter(torch.randn(1, 3, 200, 120)), Remembers()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.middle(x + self.place).mean((2, 3))

    with pytest.raises(RequestError, match=r"on images of shape \(1, 3, 200, 120\)"):
        verify_capture(Fixed(), (1, 3, 200, 120), torch.float32)


@pytest.mark.parametrize("side", [224, 384])
def test_a_model_that_takes_whole_tiles_only_is_compared(side: int) -> None:
    class OfTiles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 2, 32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            b, c, h, w = x.shape
            x = x.view(b, c, h // side, side, w // side, side).permute(0, 2, 4, 1, 3, 5).reshape(-1, c, side, side)
            return self.first(x).reshape(b, -1).mean(1)

    assert verify_capture(OfTiles(), (1, 3, 4 * side, 8 * side), torch.float32) is None


@pytest.mark.parametrize(
    ("norm", "microbatches", "is_said"),
    [
        (nn.BatchNorm2d(4, track_running_stats=False), 2, True),
        (nn.BatchNorm2d(4, track_running_stats=False), 1, False),
        (nn.BatchNorm2d(4), 2, False),
        (nn.InstanceNorm2d(4), 2, False),
    ],
)
def test_predictions_that_depend_on_micro_batches_are_said(norm: nn.Module, microbatches: int, is_said: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plan = hyfi_core.ParallelPlan(((1, 1),), microbatches=microbatches)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        hyfi_core.parallelize(model, (4, 3, 20, 22), plan, AloneCommunicator())
    assert any("mixes the images of a batch" in str(warning.message) for warning in said) == is_said
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_models_that_draw_or_count_in_evaluation_mode_do_not_mix_images() -> None:
    """Only what the other image changes is mixed; the second of two forwards had another count."""

    class Counting(nn.Module):
        count: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 2, 3)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            kept = nn.functional.dropout(self.conv(x + torch.randn_like(x)), 0.5, True)
            return kept.mean((2, 3)) * self.count

    for dtype in (torch.float32, torch.bfloat16):
        model = Counting().to(dtype)
        assert not mixes_images(model, (1, 3, 20, 22), dtype)
        assert model.count == 0
