"""Benchmarks of operators on this device, by kind, for ``MachineModel.efficiency``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

import hyfi_core
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.comm.base import Communicator
from hyfi_core.comm.waits import waited
from hyfi_core.ops.norms.batch_norm import BatchNorm
from hyfi_core.plan.parallel_plan import ParallelPlan

ROUNDS = 7
SHARED_ROUNDS = 31
_LAYERS = (4, 24)
_TINY_PX = 4
_TURNS = 25
_APART_S = 0.4
_COPIED_VALUES = 16 * 2**20
Rates = tuple[float, float]
"""(Forward, backward) in flops/s for convolutions and products, else in bytes/s of inputs and outputs."""


@dataclass(frozen=True)
class OperatorCase:
    """An operator on an input of (1, channels, side_px, side_px).

    Attributes:
        make: Creates the module.
        channels: Channels of the input.
        side_px: Height and width of the input.
        flops: Operations of the forward; 0 if only memory traffic counts.
        input_gradient: Whether backward computes the gradient of the input, as all but a network's first operator do.
    """

    make: Callable[[], nn.Module]
    channels: int
    side_px: int
    flops: float = 0.0
    input_gradient: bool = True


def _window(inputs: int, outputs: int, kernel: int, side_px: int, groups: int = 1) -> OperatorCase:
    """Return the case of a convolution from ``inputs`` to ``outputs`` channels; RGB inputs need no gradient."""

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
"""Typical operators of residual networks; the rate of a kind is the mean over its cases."""


class OperatorBench:
    """Times operators on one device.

    Args:
        device: The device.
        rounds: Number of timed runs, None: ``ROUNDS``. The shortest time counts, because other processes only add.
    """

    def __init__(self, device: torch.device, rounds: int | None = None) -> None:
        self._device = device
        self._rounds = ROUNDS if rounds is None else rounds

    def rates(self, kind: str) -> Rates:
        """Return the rates of a kind of operator, the mean over its cases."""
        rates = [self._case(case, torch.float32, self._rounds) for case in CASES[kind]]
        return statistics.mean(f for f, _ in rates), statistics.mean(b for _, b in rates)

    def dtype_rate(self, dtype: torch.dtype) -> float:
        """Return the forward rate of a convolution in ``dtype``."""
        return self._case(CASES["convolution"][0], dtype, min(2, self._rounds))[0]

    def shared_norm_rates(self, comm: Communicator) -> Rates:
        """Return the rates of a batch norm over all ranks of ``comm`` (collective)."""
        (case,) = CASES["norm"]
        touched = 2 * case.channels * case.side_px**2 * 4
        seconds, tiny_s = self._time_shared_norm_s(comm, case, self._rounds), self.tiny_shared_norm_s(comm)
        forward_s, backward_s = (max(1e-9, s - t) for s, t in zip(seconds, tiny_s, strict=True))
        return touched / forward_s, touched / backward_s

    def tiny_shared_norm_s(self, comm: Communicator) -> Rates:
        """Return the (forward, backward) seconds of a shared norm of a tiny map, all-reduces included (collective)."""
        (case,) = CASES["norm"]
        return self._time_shared_norm_s(comm, replace(case, side_px=_TINY_PX), SHARED_ROUNDS)

    def _time_shared_norm_s(self, comm: Communicator, case: OperatorCase, rounds: int) -> Rates:
        """Return the (forward, backward) seconds of a batch norm whose statistics all ranks share (collective)."""
        own = self._map(case, torch.float32)
        pixels = own.numel() // case.channels * comm.size  # of all ranks' maps, over which the mean is taken
        norm, weight = BatchNorm(pixels, 1e-5), torch.ones(case.channels, device=self._device)
        forward, backward = [], []
        for _ in range(rounds + 1):
            cotangent = torch.ones_like(own)
            comm.barrier()
            begin = self._now()
            _, saved = waited(norm.forward(comm, (own, weight, torch.zeros_like(weight))))
            middle = self._now()
            waited(norm.backward(comm, saved, (cotangent, None, None)))
            forward.append(middle - begin)
            backward.append(self._now() - middle)
        return statistics.median(forward[1:]), statistics.median(backward[1:])

    def waiting(self, comm: Communicator, count: int) -> float:
        """Return the fraction of a core that a waiting rank takes, with more ranks than cores (collective).

        ``count`` ranks, one for each core, compute for about a quarter of a second: first while the others sleep, then
        while the others wait in an all-reduce.
        """
        case = CASES["convolution"][1]
        module, own = case.make().to(self._device), self._map(case, torch.float32)

        def turns_s(wait: bool) -> float:
            """Let the first ``count`` ranks compute; return this rank's seconds; ``wait``: all meet after a round."""
            begin, total = self._now(), torch.zeros(1, device=self._device)
            for _ in range(self._rounds):
                for _ in range(_TURNS if comm.rank < count else 0):
                    module(own)
                if wait:
                    comm.all_reduce(total)
            return self._now() - begin

        with torch.no_grad():
            comm.barrier()
            if comm.rank >= count:
                # Ranks without a core of their own stay away while the others are timed alone.
                time.sleep(_APART_S)
            seconds = torch.tensor([turns_s(wait=False), 0.0])
            comm.barrier()
            seconds[1] = turns_s(wait=True)
        # The slowest rank's: the others were done, and waited.
        comm.all_reduce(seconds, "max")
        asleep_s, waiting_s = seconds.tolist()
        # With w the fraction, `count` cores have count + w (size - count) equal shares, so that
        # waiting_s / asleep_s = 1 + w (size - count) / count: solved for w.
        fraction = (waiting_s / asleep_s - 1) * count / (comm.size - count)
        return float(min(1.0, max(1e-9, fraction)))

    def copied_bytes_per_s(self) -> float:
        """Return the memory bandwidth in bytes/s: two tensors larger than the caches are added into a new one."""
        large = torch.ones(_COPIED_VALUES, device=self._device)
        seconds = self._shortest_s(lambda: large + large)
        # Two are read, one is written.
        return 3 * large.numel() * large.element_size() / seconds

    def kernel_s(self) -> float:
        """Return the overhead of one operator in seconds, in the engine on a tiny map."""
        few_s, many_s = (self._step_s(layers) for layers in _LAYERS)
        # A layer is three operators: its forward, and two in backward.
        return max(1e-7, (many_s - few_s) / (_LAYERS[1] - _LAYERS[0]) / 3)

    def _step_s(self, layers: int) -> float:
        """Return the seconds of a step of a chain of tiny layers."""
        model = nn.Sequential(
            nn.Conv2d(3, 16, 1),
            *(nn.Conv2d(16, 16, 3, padding=1) for _ in range(layers)),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        ).to(self._device)
        alone = AloneCommunicator()
        plan = ParallelPlan(grids=((1, 1),))
        engine = hyfi_core.parallelize(model, (1, 3, 8, 8), plan, alone, verify=False, cuda_graphs="off")
        images, labels = torch.rand(1, 3, 8, 8), torch.zeros(1, dtype=torch.long)
        return self._shortest_s(lambda: engine.accumulate(images, labels))

    def _case(self, case: OperatorCase, dtype: torch.dtype, rounds: int) -> Rates:
        """Return the (forward, backward) rates of an operator in plain PyTorch, by its shortest times."""
        inputs = self._map(case, torch.float64 if dtype is torch.float64 else torch.float32)
        module = case.make().to(self._device, inputs.dtype).train()
        for parameter in module.parameters():
            if parameter.dim() == 4:
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
        # A product takes a matrix, not a map.
        if isinstance(module, nn.Linear):
            inputs = torch.rand(case.channels, case.channels, dtype=inputs.dtype, device=self._device)
        inputs.requires_grad_(case.input_gradient)
        forward, backward, outputs = [], [], inputs
        for _ in range(rounds + 1):
            with torch.autocast(self._device.type, dtype, enabled=dtype in (torch.bfloat16, torch.float16)):
                begin = self._now()
                outputs = module(inputs)
                forward.append(self._now() - begin)
            cotangent = torch.ones_like(outputs)
            begin = self._now()
            torch.autograd.backward(outputs, cotangent)
            backward.append(self._now() - begin)
        # In backward, a product for the gradient of the weights, and one for that of the input.
        forward_work, backward_work = case.flops, case.flops * (2 if case.input_gradient else 1)
        if not forward_work:
            forward_work = backward_work = float((inputs.numel() + outputs.numel()) * inputs.element_size())
        # Without the first round, which allocates.
        return forward_work / min(forward[1:]), backward_work / min(backward[1:])

    def _map(self, case: OperatorCase, dtype: torch.dtype) -> torch.Tensor:
        values = torch.rand(1, case.channels, case.side_px, case.side_px, dtype=dtype, device=self._device)
        return values.contiguous(memory_format=torch.channels_last)

    def _shortest_s(self, call: Callable[[], object]) -> float:
        """Return the seconds of the shortest call, after two that are not counted."""
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
