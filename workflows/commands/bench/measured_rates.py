"""Measurements of ``hyfi doctor --measure`` on one rank while others wait, and on one rank for each core at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hyfi_core.comm.base import Communicator
from hyfi_core.cost.machines.machine_file import DTYPES
from workflows.commands.bench.measured_layers import HEAVY, LAYERS, NARROW, LayerBench, LayerTimes, MeasuredKind
from workflows.commands.bench.measured_operators import CASES, OperatorBench

_PAIR = 2
Pair = tuple[float, float]


@dataclass(frozen=True)
class AloneRates:
    """What one rank measures while the others wait.

    Attributes:
        rates: Kind of operator -> (forward, backward) rates.
        kinds: Kind -> times of its operators, for kinds measured in the engine.
        weight_bytes_per_s: As in ``MachineModel``.
        half_channels: As in ``MachineModel``.
        bound_layers_s: Seconds of layers bound by (arithmetic, memory).
        block: Times of a block with all kinds of operators.
        dtype_shares: Dtype -> its rate, relative to float32.
        copied_bytes_per_s: Memory bandwidth.
        kernel_s: Mean overhead of one operator.
        tensor_update_s: Seconds to update a small tensor.
        update_s_per_byte: Seconds to update one byte of weights.
    """

    rates: dict[str, Pair]
    kinds: dict[str, MeasuredKind]
    weight_bytes_per_s: dict[str, Pair]
    half_channels: dict[str, Pair]
    bound_layers_s: Pair
    block: LayerTimes
    dtype_shares: dict[str, float]
    copied_bytes_per_s: float
    kernel_s: float
    tensor_update_s: float
    update_s_per_byte: float


def measured_alone(bench: OperatorBench, layers: LayerBench) -> AloneRates:
    """Measure on one rank while others wait."""
    kinds = {kind: layers.kind(kind) for kind in LAYERS}
    # Kind -> ((forward, backward) bytes/s of large weights, seconds to update a byte of them).
    heavy = {kind: layers.heavy(kind, kinds[kind]) for kind in HEAVY}
    dtype_rates = {dtype: bench.dtype_rate(getattr(torch, dtype)) for dtype in DTYPES}
    rates = {kind: kinds[kind].rates if kind in kinds else bench.rates(kind) for kind in {**CASES, **kinds}}
    half: dict[str, Pair] = {}
    for kind, (_, wide) in NARROW.items():  # wide: channels of the operator whose rate is in `rates`
        overhead_s = kinds.get(kind, kinds["convolution"]).overhead_s
        half[kind] = channels = layers.half_channels(kind, rates[kind], overhead_s)
        # The model multiplies a rate by c / (c + h): undo that for the channels with which the rate was measured.
        rates[kind] = rates[kind][0] * (1 + channels[0] / wide), rates[kind][1] * (1 + channels[1] / wide)
    updates = [measured.tensor_update_s for measured in kinds.values() if measured.tensor_update_s is not None]
    return AloneRates(
        rates=rates,
        kinds=kinds,
        weight_bytes_per_s={kind: pair for kind, (pair, _) in heavy.items()},
        half_channels=half,
        bound_layers_s=layers.bound_layers_s(),
        block=layers.block(),
        dtype_shares={dtype: rate / dtype_rates["float32"] for dtype, rate in dtype_rates.items()},
        copied_bytes_per_s=bench.copied_bytes_per_s(),
        kernel_s=bench.kernel_s(),
        tensor_update_s=min(updates),
        update_s_per_byte=max(seconds for _, seconds in heavy.values()),
    )


@dataclass(frozen=True)
class TogetherRates:
    """What ranks measure at the same time, one on each core.

    Attributes:
        bound_layers_s: As in ``AloneRates``, on the slowest rank.
        shared_norm_rates: (Forward, backward) rates of a shared norm.
        tiny_shared_norm_s: (Forward, backward) seconds of a shared norm of a tiny map.
        strip_s: (Forward, backward) seconds of work on a neighbour's strip, message included; None with one rank, and
            on ranks other than the first two.
        block: Times of a block with all kinds of operators on each of two ranks; None as for ``strip_s``.
    """

    bound_layers_s: Pair
    shared_norm_rates: Pair
    tiny_shared_norm_s: Pair
    strip_s: Pair | None
    block: LayerTimes | None


def measured_together(bench: OperatorBench, layers: LayerBench, group: Communicator) -> TogetherRates:
    """Measure layers and norms on all ranks at the same time, strips and a block on the first two (collective)."""
    group.barrier()
    bound_layers_s = torch.tensor(layers.bound_layers_s(), dtype=torch.float64)
    group.all_reduce(bound_layers_s, "max")  # those of the slowest rank
    # The first two ranks; None on the others, and if there is only one.
    pair = group.split(0 if group.rank < _PAIR <= group.size else None)
    strip_s = None if pair is None else layers.strip_s(pair)
    block = None if pair is None else layers.block(pair)
    group.barrier()
    arithmetic_s, memory_s = bound_layers_s.tolist()
    return TogetherRates(
        bound_layers_s=(arithmetic_s, memory_s),
        tiny_shared_norm_s=bench.tiny_shared_norm_s(group),
        shared_norm_rates=bench.shared_norm_rates(group),
        strip_s=strip_s,
        block=block,
    )
