"""Length of fused runs: ``fused_halo="auto"`` weighs halo exchanges against redundant computation of margins."""

from __future__ import annotations

from typing import Any

from hyfi_core.capture.program import Program
from hyfi_core.cost.machine import DEFAULT_MACHINE, MachineModel
from hyfi_core.lowering.fused_halo import Margins, Sketch, margins_of, unfused
from hyfi_core.lowering.fused_sketch import sketch_of
from hyfi_core.lowering.lower import Target, lower, lowered_operators
from hyfi_core.plan.fused_runs import Boxes, FusedRuns
from hyfi_core.plan.transfer import plan_transfer

DEPTHS = (2, 3, 4, 6)
"""Lengths of runs that "auto" tries, besides 1."""


def fused_runs(
    program: Program,
    target: Target,
    outputs: tuple[Any, ...] | None = None,
    exits: tuple[str, ...] = (),
    fused_halo: int | str = "auto",
    machine: MachineModel = DEFAULT_MACHINE,
) -> FusedRuns:
    """Return the runs for ``plan.fused_halo``.

    A number n: runs of at most n windows along any path; with 1, every operator has its own exchange. "auto": the
    cheapest of the lengths 1, 2, 3, 4 and 6, the shorter of equals, by this rule::

        cost = 2 · Σ exchanges  max over ranks (time of the messages received)
             + 3 · Σ operators  max over ranks (margin pixels · time of a pixel)

    The factor of the exchange is 2, since backward sends as much as forward; that of the work is 3, since backward
    computes gradients of inputs and of weights. Wider boxes of the image cost no message. The work is slightly
    overestimated (its maxima are on different ranks), so runs are fused only if it clearly pays.

    Args:
        program: the captured model.
        target: the rank to lower for.
        outputs: as for ``lower``.
        exits: likewise.
        fused_halo: of the plan.
        machine: the machine model.

    Raises:
        RequestError: as of ``lower``.
    """
    if fused_halo == 1 or target.grid == (1, 1):
        return FusedRuns()
    trial = lower(program, target, outputs, exits)
    operators = lowered_operators(program, program.outputs if outputs is None else outputs, exits)
    sketch = sketch_of(program, operators, trial.splits, trial.fusible, exits)
    if fused_halo != "auto":
        return margins_of(sketch, int(fused_halo)).runs(sketch)
    best, least = None, cost(sketch, unfused(sketch), shares=False, machine=machine)
    for depth in DEPTHS:
        candidate = margins_of(sketch, depth)
        seconds = cost(sketch, candidate, machine=machine)
        if seconds < least:
            best, least = candidate, seconds
    return FusedRuns() if best is None else best.runs(sketch)


def cost(sketch: Sketch, margins: Margins, shares: bool = True, machine: MachineModel = DEFAULT_MACHINE) -> float:
    """Return the seconds of a step that depend on the runs, by the rule of ``fused_runs``.

    Args:
        sketch: the program.
        margins: the exchanges and the computed boxes.
        shares: whether operators that need the same value share one exchange.
        machine: the machine model.
    """
    total = 0.0
    shared = margins.runs(sketch).shared if shares else {}
    for value, needs in margins.exchanged.items():
        for need in (shared[value],) if value in shared else needs:
            total += 2 * _exchange_s(sketch, value, need, machine)
    for flow in sketch.flows:
        boxes = margins.computed.get(flow.name)
        if boxes is not None:
            parts = sketch.layouts[flow.makes[0]].parts
            margin = max(box.area - part.area for box, part in zip(boxes, parts, strict=True))
            total += 3 * margin * machine.operator_s(flow.flops, flow.touched_bytes)
    return total


def _exchange_s(sketch: Sketch, value: str, need: Boxes, machine: MachineModel) -> float:
    layout = sketch.layouts[value]
    worst = 0.0
    for rank in range(len(layout.parts)):
        transfer = plan_transfer(layout.parts, need, layout.map, rank)
        received_bytes = transfer.received_px * sketch.pixel_bytes[value]
        worst = max(worst, machine.messages_s(len(transfer.receives), received_bytes))
    return worst
