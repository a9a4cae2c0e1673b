"""Benchmark of gradient reduction: how much of it is hidden behind backward on a slow link.

    python -m workflows.benchmarks.reduction [--rounds 3]

Two replicas (threads of one process) that sleep instead of computing. The link carries one bucket after the other.
Three variants alternate: a link without cost, buckets sent during backward, all buckets after backward. Prints one JSON
line.

`Sleep`, which other benchmarks use, too, follows a convolution and sleeps in proportion to the pixels of a rank's part,
in backward twice as long. To the engine it is an operator with a rule like any other.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn

import hyfi_core
from hyfi_core.capture.program import Operator
from hyfi_core.comm.base import Communicator, ForwardingCommunicator, Pending, ReduceOp
from hyfi_core.comm.threads import run_ranks
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.rules.builder import Builder
from hyfi_core.rules.operator_facts import OperatorFacts
from hyfi_core.rules.table import OPERATORS
from hyfi_core.runtime import gradients

BLOCKS, BLOCK_S, SIZE_PX, CHANNELS = 16, 0.01, 16, 64
LINK_S = 0.24
"""Seconds of all gradients on the link: three quarters of backward."""


@torch.library.custom_op("hyfi_benchmarks::sleep", mutates_args=())
def sleep(x: torch.Tensor, seconds_per_px: float) -> torch.Tensor:
    """Sleep ``seconds_per_px`` for every pixel of every image; return a copy of ``x``."""
    time.sleep(seconds_per_px * x.shape[0] * x.shape[2] * x.shape[3])
    # A custom operator must not return its argument.
    return x.clone()


@sleep.register_fake
def _(x: torch.Tensor, seconds_per_px: float) -> torch.Tensor:
    return torch.empty_like(x)


class _SleepFunction(torch.autograd.Function):
    """`sleep` with a backward that sleeps twice as long."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds_per_px: float) -> torch.Tensor:
        ctx.seconds_per_px = seconds_per_px
        result: torch.Tensor = sleep(x, seconds_per_px)
        return result

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor, None]:
        return sleep(cotangents[0], 2 * ctx.seconds_per_px), None


def _rule(builder: Builder, op: Operator) -> None:
    """Lower `sleep`: each rank sleeps for its part of the map."""
    x, seconds_per_px = op.args
    split = builder.splits[x.name]
    part = builder.part(x.name, split)
    builder.compute(lambda tensor: _SleepFunction.apply(tensor, seconds_per_px), (part,), op.outputs, split)  # type: ignore[no-untyped-call]


# The engine refuses operators without a rule.
OPERATORS["hyfi_benchmarks.sleep.default"] = OperatorFacts(_rule)


@torch.library.custom_op("hyfi_benchmarks::sleeping_product", mutates_args=())
def sleeping_product(x: torch.Tensor, weight: torch.Tensor, seconds_per_px: float) -> torch.Tensor:
    """Sleep as `sleep` does and return a copy of ``x``; ``weight`` is not used, but gets a gradient."""
    result: torch.Tensor = sleep(x, seconds_per_px)
    return result


@sleeping_product.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, seconds_per_px: float) -> torch.Tensor:
    return torch.empty_like(x)


class _OnceBack(torch.autograd.Function):
    """Zeros like ``x``, computed from ``source`` for autograd; backward sleeps as long as `sleep` does for ``x``."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, x: torch.Tensor, seconds_per_px: float) -> torch.Tensor:
        ctx.seconds_per_px, ctx.source = seconds_per_px, source.shape
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        result: torch.Tensor = sleep(cotangents[0], ctx.seconds_per_px)
        # The gradient of a map is that of `sleep`. A weight has another shape, and its gradient is 0.
        return result if result.shape == ctx.source else result.new_zeros(ctx.source), None, None


def _product_rule(builder: Builder, op: Operator) -> None:
    """Lower `sleeping_product`: for its part of the map, a rank sleeps in forward and for each gradient."""
    x, weight, seconds_per_px = op.args
    split = builder.splits[x.name]  # how the ranks divide the map; the result is divided in the same way
    part = builder.part(x.name, split)

    def call(tensor: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        slept = sleep(tensor.detach(), seconds_per_px)
        # Adding zeros changes no value, but autograd calls the backward of both: one for the map, one for the weight.
        zeros = (_OnceBack.apply(source, slept, seconds_per_px) for source in (tensor, factor))  # type: ignore[no-untyped-call]
        result: torch.Tensor = sum(zeros, slept)
        return result

    builder.compute(call, (part, weight.name), op.outputs, split, op)


OPERATORS["hyfi_benchmarks.sleeping_product.default"] = OperatorFacts(_product_rule, kind="linear")


class SleepingProduct(nn.Module):
    """A module with a weight that sleeps for every pixel: once in forward, and once for each gradient in backward."""

    def __init__(self, seconds_per_px: float) -> None:
        super().__init__()
        self.seconds_per_px = seconds_per_px
        self.weight = nn.Parameter(torch.zeros(1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``x`` after sleeping."""
        result: torch.Tensor = sleeping_product(x, self.weight, self.seconds_per_px)
        return result


class Sleep(nn.Module):
    """A module that sleeps for every pixel and returns its input."""

    def __init__(self, seconds_per_px: float) -> None:
        super().__init__()
        self.seconds_per_px = seconds_per_px

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``x`` after sleeping."""
        result: torch.Tensor = sleep(x, self.seconds_per_px)
        return result


class SleepingNetwork(nn.Module):
    """Blocks of a small convolution and a `Sleep`, then a mean over pixels and a linear layer.

    Args:
        blocks: Number of blocks.
        block_s: Seconds of one block's forward for one whole image.
        size_px: Height and width of the image.
        channels: Channels of every feature map.
        sleep: The module that sleeps.
    """

    def __init__(
        self, blocks: int, block_s: float, size_px: int, channels: int = 4, sleep: Callable[[float], nn.Module] = Sleep
    ) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, channels, 1)
        pixels = size_px * size_px  # a rank sleeps for those of its part
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), sleep(block_s / pixels))
                for _ in range(blocks)
            )
        )
        self.fc = nn.Linear(channels, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits ``(B, 2)``."""
        logits: torch.Tensor = self.fc(self.blocks(self.enter(x)).mean((2, 3)))
        return logits


class _DelayedReduction:
    """A pending reduction that is done at ``done_s`` of the performance counter, or later."""

    def __init__(self, pending: Pending, done_s: float) -> None:
        self._pending, self._done_s = pending, done_s

    @property
    def needs_polls(self) -> bool:
        return self._pending.needs_polls

    def test(self) -> bool:
        return time.perf_counter() >= self._done_s and self._pending.test()

    def wait(self) -> None:
        # The sleep stands for the slow link; the message itself arrived long before.
        time.sleep(max(0.0, self._done_s - time.perf_counter()))
        self._pending.wait()


class SlowLinkCommunicator(ForwardingCommunicator):
    """A communicator whose reductions follow one after the other on a slow link."""

    def __init__(self, comm: Communicator, seconds_per_byte: float) -> None:
        super().__init__(comm)
        self._seconds_per_byte, self._free_s = seconds_per_byte, 0.0

    def start_all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Pending:
        """Start a reduction; it is done when the link has carried its bytes."""
        # One bucket after the other: this one starts when the link has carried those before it.
        self._free_s = max(time.perf_counter(), self._free_s) + tensor.nbytes * self._seconds_per_byte
        return _DelayedReduction(self._comm.start_all_reduce(tensor, op), self._free_s)

    def split(self, color: int | None, key: int = 0) -> Any:
        """Return a subgroup with a link of the same speed."""
        group = self._comm.split(color, key)
        return None if group is None else SlowLinkCommunicator(group, self._seconds_per_byte)

    def subgroup(self, members: Sequence[int]) -> Any:
        """Return the group of ``members`` with a link of the same speed."""
        group = self._comm.subgroup(members)
        return None if group is None else SlowLinkCommunicator(group, self._seconds_per_byte)


def _step_s(link_s: float, overlapped: bool) -> float:
    """Return the seconds of a step whose reduction takes ``link_s``, during backward or after it."""

    def body(comm: Communicator) -> float:
        """Return the seconds of the second step of this replica; the first lowers the program."""
        torch.manual_seed(0)
        model = SleepingNetwork(BLOCKS, BLOCK_S, SIZE_PX, CHANNELS)
        gradient_bytes = sum(p.nbytes for p in model.parameters())
        slow: Any = SlowLinkCommunicator(comm, seconds_per_byte=link_s / gradient_bytes)
        engine = hyfi_core.parallelize(model, (1, 3, SIZE_PX, SIZE_PX), ParallelPlan(((1, 1),), replicas=2), slow)
        images, labels = torch.zeros(1, 3, SIZE_PX, SIZE_PX), torch.zeros(1, dtype=torch.long)
        engine.accumulate(images, labels)
        begin = time.perf_counter()
        engine.accumulate(images, labels)
        return time.perf_counter() - begin

    def do_nothing(self: Any, parameters: Sequence[Any]) -> None:
        """Start no reduction during backward; all are started after it."""

    # Small buckets, because one bucket of the usual size would hold all gradients of this small network.
    with mock.patch.object(gradients, "BUCKET_BYTES", 128 << 10):
        if overlapped:
            return max(run_ranks(2, body))
        with mock.patch.object(gradients.ReductionGroup, "complete", do_nothing):
            return max(run_ranks(2, body))


def main() -> None:
    """Run the variants in turns; print their median times, and the share of the reduction that is hidden, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    # Variant -> (seconds of the reduction, whether it runs during backward).
    variants = {"free": (0.0, True), "overlapped": (LINK_S, True), "after": (LINK_S, False)}
    seconds_of: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, variant in variants.items():
            seconds_of[name].append(_step_s(*variant))
    seconds = {name: statistics.median(times) for name, times in seconds_of.items()}
    # 1: as fast as with a free link; 0: as slow as sending everything after backward.
    hidden = 1.0 - (seconds["overlapped"] - seconds["free"]) / (seconds["after"] - seconds["free"])
    print(json.dumps({**{f"{k}_s": round(v, 3) for k, v in seconds.items()}, "hidden": round(hidden, 3)}))


if __name__ == "__main__":
    main()
