"""What operators reach on this device, by kind: the rates of a machine's ``efficiency``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

import hyfi_core
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.comm.base import Communicator
from hyfi_core.ops.batch_norm import BatchNorm
from hyfi_core.plan.parallel_plan import ParallelPlan

ROUNDS = 7
_LAYERS = (4, 24)
_COPIED = 16 * 2**20
Rates = tuple[float, float]
"""Of (forward, backward): flops a second for products, bytes a second of maps taken and made for all else."""


@dataclass(frozen=True)
class OperatorCase:
    """An operator on a map of (1, channels, side_px, side_px).

    Attributes:
        make: makes it.
        channels: of the map that it takes.
        side_px: of the map that it takes.
        flops: of its forward; 0 where only memory counts.
        given: whether the map's own gradient is asked for: it is not at a network's first operator.
    """

    make: Callable[[], nn.Module]
    channels: int
    side_px: int
    flops: float = 0.0
    given: bool = True


def _window(inputs: int, outputs: int, kernel: int, side_px: int, groups: int = 1) -> OperatorCase:
    def make() -> nn.Module:
        return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, groups=groups, bias=False)

    return OperatorCase(make, inputs, side_px, 2.0 * kernel**2 * inputs / groups * outputs * side_px**2, inputs > 3)


CASES: dict[str, tuple[OperatorCase, ...]] = {
    "convolution": (_window(64, 64, 3, 112), _window(256, 256, 3, 28)),
    "pointwise_convolution": (_window(64, 256, 1, 112), _window(1024, 256, 1, 28)),
    "thin_convolution": (_window(3, 64, 7, 96), _window(8, 32, 3, 128)),
    "grouped_convolution": (_window(64, 64, 3, 112, 64), _window(256, 256, 3, 28, 32)),
    "product": (OperatorCase(lambda: nn.Linear(512, 512, bias=False), 512, 1, 2.0 * 512**3),),
    "norm": (OperatorCase(lambda: nn.BatchNorm2d(64), 64, 192),),
    "pool": (OperatorCase(lambda: nn.MaxPool2d(3, 2, 1), 64, 192),),
    "elementwise": (OperatorCase(nn.ReLU, 64, 192),),
}
"""Typical ones of residual networks; of a kind with several all count alike."""


class OperatorBench:
    """Times operators on one device.

    Args:
        device: where.
        rounds: times that each is run, None for ``ROUNDS``; the shortest counts: other processes only ever add.
    """

    def __init__(self, device: torch.device, rounds: int | None = None) -> None:
        self._device = device
        self._rounds = ROUNDS if rounds is None else rounds

    def rates(self, kind: str) -> Rates:
        """Return what a kind of operator reaches: the mean over its cases of work over time."""
        found = [self._case(case, torch.float32, self._rounds) for case in CASES[kind]]
        return statistics.mean(f for f, _ in found), statistics.mean(b for _, b in found)

    def type_rate(self, dtype: torch.dtype) -> float:
        """Return what the forward of a convolution reaches that computes in a type."""
        return self._case(CASES["convolution"][0], dtype, min(2, self._rounds))[0]

    def shared_norm(self, comm: Communicator) -> Rates:
        """Return what a batch norm over all ranks of a group reaches (collective)."""
        (case,) = CASES["norm"]
        own = self._map(case, torch.float32)
        pixels = own.numel() // case.channels * comm.size
        norm, weight = BatchNorm(pixels, 1e-5), torch.ones(case.channels, device=self._device)
        forward, backward = [], []
        for _ in range(self._rounds + 1):
            cotangent = torch.ones_like(own)
            comm.barrier()
            begin = self._now()
            _, saved = norm.forward(comm, (own, weight, torch.zeros_like(weight)))
            middle = self._now()
            norm.backward(comm, saved, (cotangent, None, None))
            forward.append(middle - begin)
            backward.append(self._now() - middle)
        touched = 2 * own.numel() * own.element_size()
        return touched / min(forward[1:]), touched / min(backward[1:])

    def copied_bytes_per_s(self) -> float:
        """Return bytes read and written by a sum of two maps, larger than caches, into a new one."""
        large = torch.ones(_COPIED, device=self._device)
        seconds = self._shortest_s(lambda: large + large)
        return 3 * large.numel() * large.element_size() / seconds

    def kernel_s(self) -> float:
        """Return the seconds of one operator of a small map, through the engine; backward counts as two."""
        few, many = (self._step_s(layers) for layers in _LAYERS)
        return max(1e-7, (many - few) / (_LAYERS[1] - _LAYERS[0]) / 3)

    def _step_s(self, layers: int) -> float:
        model = nn.Sequential(
            nn.Conv2d(3, 16, 1),
            *(nn.Conv2d(16, 16, 3, padding=1) for _ in range(layers)),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        ).to(self._device)
        alone = AloneCommunicator()
        engine = hyfi_core.parallelize(model, (1, 3, 8, 8), ParallelPlan(grids=((1, 1),)), alone, verify=False)
        images, labels = torch.rand(1, 3, 8, 8), torch.zeros(1, dtype=torch.long)
        return self._shortest_s(lambda: engine.accumulate(images, labels))

    def _case(self, case: OperatorCase, dtype: torch.dtype, rounds: int) -> Rates:
        taken = self._map(case, torch.float64 if dtype is torch.float64 else torch.float32)
        module = case.make().to(self._device, taken.dtype).train()
        for parameter in module.parameters():
            if parameter.dim() == 4:
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
        if isinstance(module, nn.Linear):
            taken = torch.rand(case.channels, case.channels, dtype=taken.dtype, device=self._device)
        taken.requires_grad_(case.given)
        forward, backward, made = [], [], taken
        for _ in range(rounds + 1):
            with torch.autocast(self._device.type, dtype, enabled=dtype in (torch.bfloat16, torch.float16)):
                begin = self._now()
                made = module(taken)
                forward.append(self._now() - begin)
            cotangent = torch.ones_like(made)
            begin = self._now()
            torch.autograd.backward(made, cotangent)
            backward.append(self._now() - begin)
        work, back = case.flops, case.flops * (2 if case.given else 1)
        if not work:
            work = back = float((taken.numel() + made.numel()) * taken.element_size())
        return work / min(forward[1:]), back / min(backward[1:])

    def _map(self, case: OperatorCase, dtype: torch.dtype) -> torch.Tensor:
        made = torch.rand(1, case.channels, case.side_px, case.side_px, dtype=dtype, device=self._device)
        return made.contiguous(memory_format=torch.channels_last)

    def _shortest_s(self, call: Callable[[], object]) -> float:
        times = []
        for _ in range(self._rounds + 2):
            begin = self._now()
            call()
            times.append(self._now() - begin)
        return min(times[2:])

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()
