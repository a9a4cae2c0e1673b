"""Benchmarks of layers in the engine, in chains: by the time of backward, the maps of forward have left the caches.

t(8 layers) - t(2 layers)  =  6 (overhead + work / rate)

Tiny maps give the overhead, large maps the rate.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

import hyfi_core
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.comm.base import Communicator
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.schedule.action import Verb
from workflows.evaluation.models import convert_model

LENGTHS = (2, 8)
TINY_LENGTHS = (4, 28)
STEPS, TINY_STEPS = 6, 12
TINY_CHANNELS, TINY_PX = 32, 4
STRIP_PX, TURN_PX, BLOCK_PX = 32, 48, 16
_BYTES = 4  # of a value in float32


@dataclass(frozen=True)
class LayerCase:
    """A layer whose output has the size of its input.

    Attributes:
        make: Creates the layer for a number of channels.
        channels: Channels of its input.
        side_px: Height and width of its input.
        operators: Number of operators in the layer.
        flops: Operations of its forward, of all operators together; 0 if memory bounds it.
        maps: Number of maps that its operators read and write; used if memory bounds it.
    """

    make: Callable[[int], nn.Module]
    channels: int
    side_px: int
    operators: int = 1
    flops: float = 0.0
    maps: int = 2

    @property
    def work(self) -> float:
        """Flops of a forward, or its memory traffic in bytes."""
        return self.flops or float(self.maps * self.channels * self.side_px**2 * _BYTES)


class ReluAndSum(nn.Module):
    """Two operators that read and write five maps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a map of the same size."""
        return torch.relu(x) + x


class MixedBlock(nn.Module):
    """Operators of all kinds in turn, two batch norms among them.

    Args:
        width: Channels.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.narrow = nn.Sequential(nn.ReLU(), nn.Conv2d(width, width, 1, bias=False), nn.BatchNorm2d(width))
        self.square = nn.Sequential(nn.ReLU(), nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a map of the same size."""
        return torch.max_pool2d(self.square(self.narrow(x)), 3, 1, 1) + x


def _square(channels: int, side_px: int, groups: int = 1, kernel: int = 3) -> LayerCase:
    """Return the case of a convolution with a square kernel and as many output as input channels."""

    def make(width: int) -> nn.Module:
        return nn.Conv2d(width, width, kernel, padding=kernel // 2, groups=min(width, groups), bias=False)

    return LayerCase(make, channels, side_px, flops=2.0 * (kernel * channels * side_px) ** 2 / groups)


def _bottleneck(channels: int, inner: int, side_px: int) -> LayerCase:
    """Return the case of two 1 x 1 convolutions, to ``inner`` channels and back."""

    def make(width: int) -> nn.Module:
        # The same ratio for tiny channels.
        middle = width * inner // channels
        return nn.Sequential(nn.Conv2d(width, middle, 1, bias=False), nn.Conv2d(middle, width, 1, bias=False))

    # A multiplication and an addition for each pixel, channel and inner channel, in both convolutions.
    return LayerCase(make, channels, side_px, operators=2, flops=2 * 2.0 * channels * inner * side_px**2)


def _maximum(width: int) -> nn.Module:
    return nn.MaxPool2d(3, 1, 1)


def _average(width: int) -> nn.Module:
    return nn.AvgPool2d(3, 1, 1, count_include_pad=False)


LAYERS: dict[str, tuple[LayerCase, ...]] = {
    "convolution": (_square(64, 64), _square(128, 32)),
    "pointwise_convolution": (_bottleneck(256, 64, 64), _bottleneck(1024, 256, 16)),
    "grouped_convolution": (_square(64, 64, 64), _square(256, 32, 32)),
    "norm": (LayerCase(nn.BatchNorm2d, 64, 192),),
    "pool": (LayerCase(_maximum, 64, 128), LayerCase(_average, 64, 128)),
    "elementwise": (LayerCase(lambda width: ReluAndSum(), 64, 192, 2, maps=5),),
}
"""Typical layers of residual networks and of AmoebaNet, by kind."""
HEAVY: dict[str, LayerCase] = {"convolution": _square(512, 8), "pointwise_convolution": _bottleneck(2048, 512, 8)}
"""Convolutions of small maps with large weights: 9.4 and 8.4 MB in each layer."""
NARROW: dict[str, tuple[LayerCase, int]] = {
    "convolution": (_square(16, 128), 85),
    "pointwise_convolution": (_square(16, 128, kernel=1), 102),
    "thin_convolution": (_square(8, 128), 43),
}
"""Convolutions of few channels, each with the channels of the other benchmarks of its kind (their harmonic mean)."""
BLOCK = LayerCase(MixedBlock, TINY_CHANNELS, BLOCK_PX)
"""A block of a network: no two operators of one kind follow each other, so that each has a larger overhead."""
NORMS_OF_BLOCK = 2
WEIGHTS_OF_BLOCK = 6
"""Number of weight tensors in a block."""


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of one layer: its forward, its backward, its part of the optimizer's update and of the rest of a step."""

    forward_s: float
    backward_s: float
    update_s: float
    rest_s: float

    def less(self, other: LayerTimes) -> LayerTimes:
        """Return the differences, at least 1 ns each."""
        return LayerTimes(
            max(1e-9, self.forward_s - other.forward_s),
            max(1e-9, self.backward_s - other.backward_s),
            max(1e-9, self.update_s - other.update_s),
            max(1e-9, self.rest_s - other.rest_s),
        )

    def divided(self, count: int) -> LayerTimes:
        """Return the times divided by a number of layers."""
        return LayerTimes(self.forward_s / count, self.backward_s / count, self.update_s / count, self.rest_s / count)


@dataclass(frozen=True)
class MeasuredKind:
    """Measured times of an operator of one kind.

    Attributes:
        overhead_s: Overhead of its forward, and of each gradient of its backward.
        rates: (Forward, backward) in flops/s for products, else in bytes/s of inputs and outputs.
        tensor_update_s: Time to update one small weight tensor; None if the operator has no weights.
    """

    overhead_s: tuple[float, float]
    rates: tuple[float, float]
    tensor_update_s: float | None


def half_channels(narrow_rate: float, narrow: int, wide_rate: float, wide: int) -> float:
    """Return h, at most ``wide``, such that a rate proportional to c / (c + h) has two measured values.

    Args:
        narrow_rate: The rate with few channels.
        narrow: That number of channels.
        wide_rate: The rate with many channels.
        wide: That number of channels.
    """
    if wide_rate <= narrow_rate:
        return 1e-3  # no loss with few channels; a machine's numbers must be greater than 0
    # From narrow_rate / wide_rate = [n / (n + h)] / [w / (w + h)], solved for h.
    denominator = narrow_rate * wide - wide_rate * narrow
    if denominator <= 0:
        return float(wide)
    return min(float(wide), narrow * wide * (wide_rate - narrow_rate) / denominator)


def _weight_bytes(case: LayerCase) -> int:
    return sum(parameter.numel() * _BYTES for parameter in case.make(case.channels).parameters())


def chain(case: LayerCase, length: int) -> nn.Module:
    """Return a network of ``length`` layers, in training mode."""
    layers = (case.make(case.channels) for _ in range(length))
    ends = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(case.channels, 2)
    return nn.Sequential(nn.Conv2d(3, case.channels, 1), *layers, *ends).train()


class LayerBench:
    """Times layers on one device.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def times(self, case: LayerCase, tiny: bool = False, typical: bool = False) -> LayerTimes:
        """Return the times of one layer, from chains of two lengths.

        Args:
            case: The layer.
            tiny: Use few channels and small maps, so that overhead dominates.
            typical: Use medians instead of the shortest times.
        """
        lengths = TINY_LENGTHS if tiny else LENGTHS
        few, many = (self._chain(case, length, tiny, typical=typical) for length in lengths)
        return many.less(few).divided(lengths[1] - lengths[0])

    def kind(self, kind: str) -> MeasuredKind:
        """Return the measured times of one operator of a kind."""
        cases = LAYERS[kind]
        tiny = [self.times(case, tiny=True) for case in cases]
        # Tiny maps take only the overhead: what large ones take beyond it is work.
        beyond = [self.times(case).less(overhead) for case, overhead in zip(cases, tiny, strict=True)]
        gradients = 2 if cases[0].flops else 1  # of inputs and of weights; without weights, of inputs only
        operators = sum(case.operators for case in cases)
        overhead_s = sum(t.forward_s for t in tiny) / operators, sum(t.backward_s for t in tiny) / operators / gradients
        work = sum(case.work for case in cases)
        rates = work / sum(t.forward_s for t in beyond), gradients * work / sum(t.backward_s for t in beyond)
        weights = sum(parameter.numel() for parameter in cases[0].make(TINY_CHANNELS).parameters())
        return MeasuredKind(overhead_s, rates, tiny[0].update_s / cases[0].operators if weights else None)

    def heavy(self, kind: str, measured: MeasuredKind) -> tuple[tuple[float, float], float]:
        """Return what large weights of a kind cost: ((forward, backward) in bytes/s, seconds to update a byte).

        Args:
            kind: A key of ``HEAVY``.
            measured: Times of its operators with small weights.
        """
        case = HEAVY[kind]
        times = self.times(case)
        (forward_overhead_s, gradient_overhead_s), (forward_rate, backward_rate) = measured.overhead_s, measured.rates
        predicted = LayerTimes(
            forward_s=case.operators * forward_overhead_s + case.flops / forward_rate,
            # Backward computes two gradients, of inputs and of weights, each as much work as the forward.
            backward_s=2 * (case.operators * gradient_overhead_s + case.flops / backward_rate),
            update_s=case.operators * (measured.tensor_update_s or 0.0),
            rest_s=0.0,
        )
        # What large weights take beyond small ones.
        beyond, weight_bytes = times.less(predicted), _weight_bytes(case)
        update_s = beyond.update_s + beyond.rest_s
        return (weight_bytes / beyond.forward_s, weight_bytes / beyond.backward_s), update_s / weight_bytes

    def half_channels(
        self, kind: str, rates: tuple[float, float], overhead_s: tuple[float, float]
    ) -> tuple[float, float]:
        """Return the channels with which convolutions reach half of their highest rate, for (forward, backward).

        Args:
            kind: A key of ``NARROW``.
            rates: (Forward, backward) in flops/s of convolutions with many channels.
            overhead_s: As in ``MeasuredKind``.
        """
        case, wide = NARROW[kind]
        times = self.times(case)
        # Backward has two products, the gradients of inputs and of weights, each with its overhead.
        products_s = times.forward_s - overhead_s[0], times.backward_s / 2 - overhead_s[1]
        forward, backward = (
            half_channels(case.flops / max(1e-9, seconds), case.channels, rate, wide)
            for rate, seconds in zip(rates, products_s, strict=True)
        )
        return forward, backward

    def block(self, comm: Communicator | None = None) -> LayerTimes:
        """Return the typical times of a block, on one rank or on each rank of ``comm`` (collective)."""
        few, many = (self._chain(BLOCK, length, comm=comm, typical=True) for length in LENGTHS)
        return many.less(few).divided(LENGTHS[1] - LENGTHS[0])

    def turn_s(self, comm: Communicator, cores: int) -> float:
        """Return how long an exchange waits for the turns of other ranks, with more ranks than cores (collective).

        Computing alone would take ``ranks / cores`` times as long as with one rank on each core. The time beyond that
        is waiting, half of it in forward and half in backward.
        """
        case = replace(LAYERS["convolution"][0], side_px=TURN_PX)
        one_each = comm.split(0 if comm.rank < cores else None)
        alone_s = 0.0 if one_each is None else self._forward_and_backward_s(case, one_each)
        comm.barrier()
        return max(1e-9, (self._forward_and_backward_s(case, comm) - alone_s * comm.size / cores) / 2)

    def _forward_and_backward_s(self, case: LayerCase, comm: Communicator) -> float:
        """Return the typical seconds of a layer's forward and backward together, on each of several ranks."""
        few, many = (self._chain(case, length, comm=comm, typical=True) for length in LENGTHS)
        difference = many.less(few).divided(LENGTHS[1] - LENGTHS[0])
        return difference.forward_s + difference.backward_s

    def bound_layers_s(self) -> tuple[float, float]:
        """Return the typical seconds of layers bound by (arithmetic, memory), forward and backward together.

        The shortest times would be those of moments in which other ranks did not compute.
        """
        # Large weights, and maps that are only read and written: both are bound by memory.
        heavy = self.times(HEAVY["convolution"], typical=True)
        elementwise = self.times(LAYERS["elementwise"][0], typical=True)
        convolution = self.times(LAYERS["convolution"][0], typical=True)
        memory_s = elementwise.forward_s + elementwise.backward_s + heavy.forward_s + heavy.backward_s
        return convolution.forward_s + convolution.backward_s, memory_s

    def strip_s(self, comm: Communicator) -> tuple[float, float]:
        """Return the (forward, backward) seconds of a convolution's work on a neighbour's strip, message included.

        Args:
            comm: Two ranks (collective).
        """
        case = replace(LAYERS["convolution"][0], side_px=STRIP_PX)
        few, many = (self._chain(case, length, comm=comm, typical=True) for length in LENGTHS)
        few_alone, many_alone = (self._chain(case, length, typical=True) for length in LENGTHS)
        # What a layer takes longer if it has a neighbour.
        difference = many.less(few).less(many_alone.less(few_alone)).divided(LENGTHS[1] - LENGTHS[0])
        return difference.forward_s, difference.backward_s

    def _chain(
        self,
        case: LayerCase,
        length: int,
        tiny: bool = False,
        comm: Communicator | None = None,
        typical: bool = False,
    ) -> LayerTimes:
        """Return the times of a chain of ``length`` equal layers in the engine.

        The shortest times count, because other processes only add time. Chains that wait for other ranks need medians
        of forward and backward (``typical``), because waiting is part of what they measure.

        Args:
            case: The layer.
            length: Number of layers.
            tiny: Use few channels and small maps, so that overhead dominates.
            comm: Ranks that share the map, each with a part of the case's size; None: this rank alone.
            typical: Use medians instead of the shortest times.
        """
        torch.manual_seed(0)
        case = replace(case, channels=TINY_CHANNELS, side_px=TINY_PX) if tiny else case
        side_px, model = case.side_px, chain(case, length)
        convert_model(model.to(self._device), "float32", "channels_last")
        ranks, moments = 1 if comm is None else comm.size, list[float]()
        shape, plan = (1, 3, side_px, ranks * side_px), ParallelPlan(grids=((1, ranks),), fused_halo=1)
        engine = hyfi_core.parallelize(
            model,
            shape,
            plan,
            comm or AloneCommunicator(),
            optimizer=partial(self._timed, moments),
            memory_format="channels_last",
            verify=False,
            cuda_graphs="off",  # its actions are timed one by one
        )
        images, labels = torch.rand(shape, device=self._device), torch.zeros(1, dtype=torch.long, device=self._device)
        spans: dict[Verb, list[float]] = {Verb.F: [], Verb.B: []}
        updates, remainders = [], []
        for _ in range((TINY_STEPS if tiny or typical else STEPS) + 1):
            step_s = self._seconds(lambda: engine.train_step(images, labels))
            for action, begin_s, end_s in engine.events:
                if action.verb in spans:
                    spans[action.verb].append(end_s - begin_s)
            # Each step of the optimizer appends when it began and when it ended.
            updates.append(moments[-1] - moments[-2])
            remainders.append(step_s - spans[Verb.F][-1] - spans[Verb.B][-1] - updates[-1])
        of_steps = statistics.median if typical else min
        # Without the first step, which allocates.
        forward_s, backward_s = of_steps(spans[Verb.F][1:]), of_steps(spans[Verb.B][1:])
        return LayerTimes(forward_s, backward_s, update_s=min(updates[1:]), rest_s=min(remainders[1:]))

    def _timed(self, moments: list[float], parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        """Return an optimizer that appends to ``moments`` the times before and after each of its steps."""
        optimizer = torch.optim.AdamW(parameters, lr=1e-6)
        optimizer.register_step_pre_hook(lambda *_: moments.append(self._now()))
        optimizer.register_step_post_hook(lambda *_: moments.append(self._now()))
        return optimizer

    def _seconds(self, call: Callable[[], object]) -> float:
        begin_s = self._now()
        call()
        return self._now() - begin_s

    def _now(self) -> float:
        if self._device.type == "cuda":
            # Kernels run later than they are launched.
            torch.cuda.synchronize()
        return time.perf_counter()
