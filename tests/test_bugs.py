"""What once broke, each with the smallest thing that shows it."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import hyfi_core
from hyfi_core.capture.verify import verify_capture
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.comm.base import Communicator
from hyfi_core.comm.threads import run_ranks
from hyfi_core.comm.waits import waited
from hyfi_core.ops.redistribute import Redistribute
from hyfi_core.plan import Box, plan_transfer
from hyfi_core.rules.moves.axis import Selection
from hyfi_core.runtime import executor
from hyfi_core.runtime.mirror import finish_all
from tests.harness import OffsetImages, assert_equal_to_one_process, run_copies
from tests.patience import PATIENCE_S


def test_channels_last_is_still_recognised_behind_the_entry_of_a_segment() -> None:
    """``view_as`` gave a batch of one another stride, and every pool behind it copied its map to the plain layout."""
    image = torch.randn(1, 8, 6, 6).contiguous(memory_format=torch.channels_last)
    anchor = torch.zeros((), requires_grad=True)
    entered = executor._Entry.apply(anchor, image, [])
    assert entered.stride() == image.stride()
    assert F.max_pool2d(entered, 2).is_contiguous(memory_format=torch.channels_last)


def test_a_slice_of_everything_keeps_the_memory_format_of_cotangents() -> None:
    """Of ``x[:, :, 1:]`` it was a view along x; its derivative copied the map to the plain layout."""
    selection = Selection(torch.arange(6))
    image = torch.randn(2, 8, 6, 6).contiguous(memory_format=torch.channels_last).requires_grad_()
    kept = selection.of(selection.of(image * 2, 2), 3)
    (found,) = torch.autograd.grad(kept, image, torch.ones_like(image))
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert Selection(torch.arange(5)).of(image, 2).shape[2] == 5


class _Shifted(nn.Module):
    """AmoebaNet's reduction: every other pixel of a map that is shifted by one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.odd, self.last = (
            nn.Conv2d(*c, 1, stride=s) for c, s in (((3, 8), 1), ((8, 8), 2), ((8, 2), 1))
        )
        self.shift, self.kept = nn.ZeroPad2d((0, 1, 0, 1)), nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return two logits of an image."""
        odd = self.odd(self.shift(self.first(x)[:, :, 1:, 1:]))
        return self.last(F.max_pool2d(self.kept(odd), 2)).mean((2, 3))


class _Formats(TorchDispatchMode):
    """Notes convolutions and pools that return the plain layout."""

    def __init__(self) -> None:
        super().__init__()
        self.plain: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        made = found[0] if isinstance(found, tuple) else found
        if func.__name__.startswith(("convolution.", "max_pool2d")):
            self.plain += [func.__name__] * (not made.is_contiguous(memory_format=torch.channels_last))
        return found


def test_a_padded_map_of_one_image_is_still_recognised_as_channels_last() -> None:
    """Padding by nothing was a view with another stride: a step of AmoebaNet with one image took 1.3 times as long."""
    plan, alone = hyfi_core.ParallelPlan(grids=((1, 1),)), AloneCommunicator()
    engine = hyfi_core.parallelize(_Shifted(), (1, 3, 16, 16), plan, alone, memory_format="channels_last", verify=False)
    images = torch.randn(1, 3, 16, 16).contiguous(memory_format=torch.channels_last)
    with _Formats() as formats:
        engine.accumulate(images, torch.zeros(1, dtype=torch.long))
    assert formats.plain == []


def test_a_part_that_owns_nothing_keeps_the_shape_of_what_it_owns() -> None:
    """Its cotangent came back as 0 x 0 where it owns 3 x 0 pixels, and autograd refused it."""
    have, need = [Box(0, 3, 0, 4), Box(0, 3, 4, 4)], [Box(0, 3, 0, 4), Box(0, 3, 2, 4)]

    def body(comm: Communicator) -> Any:
        op = Redistribute(plan_transfer(have, need, Box(0, 3, 0, 4), comm.rank))
        own = torch.zeros(1, 2, *have[comm.rank].shape)
        (out,), saved = waited(op.forward(comm, (own,)))
        (back,) = waited(op.backward(comm, saved, (torch.ones_like(out),)))
        assert back is not None
        return out.shape[2:] == need[comm.rank].shape, back.shape == own.shape

    assert run_ranks(2, body) == [(True, True), (True, True)]


def test_half_empty_boxes_of_other_shapes_are_not_the_same_need() -> None:
    """A rank that owns 0 x 3 and needs 4 x 0 pixels got its own back, with the wrong height."""

    def body(comm: Communicator) -> torch.Size:
        boxes = [Box(0, 2, 0, 3), Box(2, 2, 0, 3)], [Box(0, 2, 0, 3), Box(0, 4, 1, 1)]
        op = Redistribute(plan_transfer(*boxes, Box(0, 2, 0, 3), comm.rank))
        return waited(op.forward(comm, (torch.zeros(1, 1, *boxes[0][comm.rank].shape),)))[0][0].shape

    assert tuple(run_ranks(2, body)[1]) == (1, 1, 4, 0)


def test_a_shared_norm_folds_its_statistics_twice() -> None:
    """One batch norm used twice in a forward chains its running statistics, as in one process."""

    class UsedTwice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.conv(self.norm(x))).mean((2, 3))

    model = UsedTwice().double()
    images = torch.randn(2, 3, 9, 11, dtype=torch.float64)

    def body(comm: Communicator, module: nn.Module) -> Any:
        plan = hyfi_core.ParallelPlan(grids=((2, 2),))
        engine = hyfi_core.parallelize(module, (2, 3, 9, 11), plan, comm)
        engine.accumulate(images, torch.tensor([0, 1]))
        return engine.gather_state_dict()

    state = run_copies(model, 4, body)[0]
    alone = copy.deepcopy(model)
    alone(images)
    torch.testing.assert_close(state["norm.running_mean"], alone.norm.running_mean)
    assert state["norm.num_batches_tracked"] == 2


def test_a_norm_that_is_registered_twice_trains_as_in_one_process() -> None:
    """Its buffers have two names each; PyTorch makes no graph functional that changes a tensor with two names."""
    norm = nn.BatchNorm2d(3)
    model = nn.Sequential(norm, nn.Conv2d(3, 3, 3, padding=1), norm, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    assert verify_capture(model.double(), (2, 3, 9, 11), torch.float64) is None
    result = assert_equal_to_one_process(model, (2, 3, 9, 11), (1, 2), classes=3)
    assert result.state["0.num_batches_tracked"] == result.state["2.num_batches_tracked"] == 2


def test_narrow_strided_pointwise_convolutions_keep_to_their_memory() -> None:
    """oneDNN's weight gradient of a 1 x 1 convolution with stride 2 and 8 channels-last channels corrupts the heap."""
    code = """
import torch, hyfi_core
from hyfi_core.capture.verify import verify_capture
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.models.resnet import resnet10
torch.manual_seed(0)
model = resnet10(2, width=8).to(memory_format=torch.channels_last)
images = torch.randn(1, 3, 256, 256).contiguous(memory_format=torch.channels_last)
plan = hyfi_core.ParallelPlan(((1, 1),))
engine = hyfi_core.parallelize(model, (1, 3, 256, 256), plan, AloneCommunicator(), verify=False)
for _ in range(4):
    engine.accumulate(images, torch.zeros(1, dtype=torch.long))
"""
    environment = {**os.environ, "MALLOC_CHECK_": "3", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("grid", "size"), [((1, 1), (32, 48)), ((2, 2), (33, 47)), ((1, 3), (16, 16))])
@pytest.mark.parametrize("padding", [0, 1])
def test_thinned_convolutions_equal_one_process(grid: tuple[int, int], size: tuple[int, int], padding: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 1, 2, padding), nn.Conv2d(6, 4, 1, (3, 2), padding, groups=2)
    )
    head = nn.Sequential(net, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    assert_equal_to_one_process(head, (2, 3, *size), grid)


def test_weights_under_way_are_waited_for_when_an_engine_goes() -> None:
    """The mirror's receives went on into memory that had been freed: a process that ended behind an update crashed.

    What is under way outlives the engine; a process waits for it before it ends, and no finaliser waits.
    """
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    plan = hyfi_core.ParallelPlan(((1, 1), (1, 1)), ("0",), 2, "chimera", mirror="point_to_point")

    def body(comm: Communicator) -> Any:
        model = copy.deepcopy(net)
        engine = hyfi_core.parallelize(
            model, (2, 3, 8, 8), plan, comm, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)
        )
        engine.train_step(torch.ones(2, 3, 8, 8), torch.tensor([0, 1]))
        mirror = engine._mirrors.current
        assert mirror is not None
        under = list(mirror._weights)
        del engine, mirror
        gc.collect()
        finish_all()
        comm.barrier()  # both threads may finish the same
        return [item.pending.test() for item in under], [p.detach().clone() for p in model.parameters()]

    (first, one), (second, two) = run_ranks(2, body)
    assert first == second == [True]
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_norms_without_statistics_are_each_replicas_own_in_evaluation_mode() -> None:
    """Synchronised over replicas in training, they divided a replica's own sums by the pixels of all in ``predict``."""
    body_of = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False), nn.ReLU())
    net = nn.Sequential(body_of, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)).double()
    plan = hyfi_core.ParallelPlan(((1, 2),), replicas=2, sync_batch_norm=True)
    images = [torch.randn(1, 3, 12, 12).double() for _ in range(2)]

    def body(comm: Communicator) -> Any:
        engine = hyfi_core.parallelize(copy.deepcopy(net), (1, 3, 12, 12), plan, comm)
        return engine.predict(images[comm.rank // 2])

    with torch.no_grad():
        wanted = [net.eval()(image) for image in images]
    for rank, found in enumerate(run_ranks(4, body)):
        torch.testing.assert_close(found, wanted[rank // 2], rtol=1e-12, atol=1e-12)


def of_every_pixel(answer: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (answer * torch.linspace(-1.0, 1.0, answer.numel(), dtype=answer.dtype).view(answer.shape)).sum()


@pytest.mark.parametrize("grid", [(1, 1), (1, 2)])
def test_a_branch_that_ends_in_running_statistics_leaves_cotangents_alone(grid: tuple[int, int]) -> None:
    """It has no cotangent; what was held instead counted as memory of its own, and a sum was written into it."""

    class Branched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.moved(self.conv(x))
            doubled, moved = x * 2, self.moved(x)
            self.norm(F.avg_pool2d(self.moved(x), 3, 1, 1))
            return F.avg_pool2d(moved + doubled + x, 3, 1, 1)

        def moved(self, x: torch.Tensor) -> torch.Tensor:
            return F.pad(x[:, :, 1:], (0, 0, 0, 1))

    shape = (2, 3, 14, 13)
    assert_equal_to_one_process(OffsetImages(Branched(), shape), shape, grid, loss=of_every_pixel)


class _BatchNormByFormula(nn.BatchNorm2d):
    """Batch norm as arithmetic."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        mean, variance = self.running_mean, self.running_var
        if self.training:
            mean, variance = input.mean((0, 2, 3)), input.var((0, 2, 3), unbiased=False)
        assert mean is not None and variance is not None
        numbers = (item.view(1, -1, 1, 1) for item in (mean, variance + self.eps, self.weight, self.bias))
        mean, variance, weight, bias = numbers
        return (input - mean) * variance.rsqrt() * weight + bias


@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
@pytest.mark.parametrize(
    "plan",
    [
        hyfi_core.ParallelPlan(((1, 1),)),
        hyfi_core.ParallelPlan(((1, 2),)),
        hyfi_core.ParallelPlan(((2, 1),), cells=(1, 2)),
    ],
    ids=["one rank", "1x2", "2x1, cells"],
)
def test_tokens_of_one_image_do_not_spoil_the_gradient_of_batch_norm(
    plan: hyfi_core.ParallelPlan, frozen: bool
) -> None:
    """PyTorch's kernel took the tokens' cotangent for one of another memory format; in plain PyTorch it still does."""

    class Tokens(nn.Module):
        def __init__(self, norm: type[nn.BatchNorm2d]) -> None:
            super().__init__()
            self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3, 2, 1), norm(4), nn.Linear(4, 2)

        def train(self, mode: bool = True) -> Tokens:
            super().train(mode)
            self.norm.train(mode and not frozen)
            return self

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            tokens = self.norm(self.conv(x)).flatten(2).transpose(1, 2)
            return self.head(F.layer_norm(tokens, (4,)).square().mean(1))

    torch.manual_seed(0)
    net, truth = Tokens(nn.BatchNorm2d).double().train(), Tokens(_BatchNormByFormula).double().train()
    truth.load_state_dict(net.state_dict())
    images, labels = torch.randn(1, 3, 12, 16).double(), torch.tensor([1])
    F.cross_entropy(truth(images), labels).backward()

    def body(comm: Communicator) -> Any:
        engine = hyfi_core.parallelize(copy.deepcopy(net), tuple(images.shape), plan, comm)
        engine.accumulate(images, labels)
        return engine.gather_gradients()

    gradients = run_ranks(plan.ranks, body)[0]
    for name, parameter in truth.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-12, msg=name)
