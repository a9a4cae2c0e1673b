"""Scales the overheads of operators to those in a network, by the measured time of a block.

In a chain of operators of one kind, code and tensors stay in the caches and ranks stay in step. In a network they do
not, and overheads are 1.5 to 2 times as large. So the overheads from chains are multiplied until the model agrees with
a block of all kinds on one rank. The overhead of a shared norm is the remaining difference of the block on two ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch

from hyfi_core.capture.export import capture
from hyfi_core.capture.program import Program
from hyfi_core.cost.machine import MachineModel
from hyfi_core.cost.step.stage_cost import StageCosts
from hyfi_core.plan.parallel_plan import ParallelPlan
from workflows.commands.bench.measured_layers import BLOCK, LENGTHS, NORMS_OF_BLOCK, LayerTimes, chain
from workflows.commands.bench.measured_rates import Pair

_SHARED = "shared_norm"
_LEAST_S = 1e-9


def calibrated(machine: MachineModel, alone: LayerTimes, together: LayerTimes | None) -> MachineModel:
    """Return a machine whose overheads are those of operators in a network.

    Args:
        machine: The machine with overheads measured in chains.
        alone: Times of a block on one rank.
        together: Times of a block on each of two ranks; None if only one rank measures.
    """
    modelled, overheads = _modelled(machine, ranks=1), _overheads_s(machine)
    measured = alone.forward_s, alone.backward_s
    # A time s has a part o of overheads, which must grow by this factor so that the time becomes the measured m.
    forward_factor, backward_factor = (
        max(1.0, 1 + (m - s) / o) for m, s, o in zip(measured, modelled, overheads, strict=True)
    )
    scaled = _with_overheads(machine, lambda kind, pair: (pair[0] * forward_factor, pair[1] * backward_factor))
    if together is None:
        return scaled
    # Almost 0, since a machine's numbers must be greater than 0.
    without_waiting = _with_overheads(scaled, lambda kind, pair: (_LEAST_S, _LEAST_S) if kind == _SHARED else pair)
    forward_s, backward_s = _modelled(without_waiting, ranks=2)
    # What two ranks need beyond the model is waiting at the block's norms; at least the overhead of a norm alone.
    norm_s = scaled.overhead_s["norm"]
    shared_norm_s = (
        max(norm_s[0], (together.forward_s - forward_s) / NORMS_OF_BLOCK),
        max(norm_s[1], (together.backward_s - backward_s) / NORMS_OF_BLOCK),
    )
    return _with_overheads(scaled, lambda kind, pair: shared_norm_s if kind == _SHARED else pair)


def _modelled(machine: MachineModel, ranks: int) -> Pair:
    """Return the modelled (forward, backward) seconds of a block on each rank."""
    plan = ParallelPlan(grids=((1, ranks),), fused_halo=1)
    few, many = (StageCosts(_program(length, ranks), plan, machine).stages[0] for length in LENGTHS)
    count = LENGTHS[1] - LENGTHS[0]
    # The ends of the chain cancel.
    return (many.forward_s - few.forward_s) / count, (many.backward_s - few.backward_s) / count


@cache
def _program(length: int, ranks: int) -> Program:
    return capture(chain(BLOCK, length), (1, 3, BLOCK.side_px, ranks * BLOCK.side_px), torch.float32)


def _overheads_s(machine: MachineModel) -> Pair:
    """Return the overhead of all operators of a block, in (forward, backward) seconds on one rank."""
    # Almost 0, since a machine's numbers must be greater than 0.
    without_overheads = _with_overheads(machine, lambda kind, pair: (_LEAST_S, _LEAST_S))
    forward_s, backward_s = _modelled(machine, 1)
    forward_work_s, backward_work_s = _modelled(without_overheads, 1)
    return max(_LEAST_S, forward_s - forward_work_s), max(_LEAST_S, backward_s - backward_work_s)


def _with_overheads(machine: MachineModel, changed: Callable[[str, Pair], Pair]) -> MachineModel:
    """Return a machine with the overheads ``changed(kind, (forward, backward) seconds of the kind)``."""
    return replace(
        machine, overhead_s={kind: _rounded(changed(kind, pair)) for kind, pair in machine.overhead_s.items()}
    )


def _rounded(pair: Pair) -> Pair:
    return float(f"{pair[0]:.3g}"), float(f"{pair[1]:.3g}")
