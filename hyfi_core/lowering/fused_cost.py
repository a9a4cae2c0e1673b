"""The rule behind ``fused_halo="auto"``: what an exchange costs against what computing margins costs."""

from __future__ import annotations

from dataclasses import dataclass

from hyfi_core.lowering.fused_halo import Sketch, Spread, spread, unfused
from hyfi_core.plan.fused_runs import FusedRuns
from hyfi_core.plan.transfer import plan_transfer

DEPTHS = (2, 3, 4, 6)
"""Lengths of runs that "auto" looks at, besides 1."""


@dataclass(frozen=True)
class Prices:
    """What things cost, in seconds, to processes on shared memory, each with one thread of a server's CPU.

    Rounded from what ``workflows.benchmarks.prices`` finds on such a machine; it says what they are on yours.

    Attributes:
        message_s: one message with all that surrounds it, whatever its size.
        bytes_per_s: of a message.
        flops_per_s: of a convolution.
        touched_bytes_per_s: of operators that do little with each pixel.
    """

    message_s: float = 50e-6
    bytes_per_s: float = 2.5e9
    flops_per_s: float = 100e9
    touched_bytes_per_s: float = 16e9


PRICES = Prices()


def choose(sketch: Sketch, fused_halo: int | str) -> FusedRuns:
    """Return the runs for ``plan.fused_halo``.

    A number n: runs of at most n windows along any path; 1 leaves every operator its own exchange. "auto": of the
    lengths 1, 2, 3, 4 and 6 the one whose step costs least, the shorter one of equals, by this rule::

        cost = 2 · Σ exchanges  max over ranks (messages received · 50 µs + bytes received / 2.5 GB/s)
             + 3 · Σ operators  max over ranks (margin pixels · max(flops / 100 GF/s, bytes touched / 16 GB/s))

    Twice for the exchange, since backward sends as much as forward; three times for the work, since backward does it
    for inputs and for weights. What is read wider of the image costs no message. The work is over-estimated a little
    (its maxima fall on different ranks), so runs are fused where it clearly pays.
    """
    if fused_halo == 1:
        return FusedRuns()
    if fused_halo != "auto":
        return spread(sketch, int(fused_halo)).runs(sketch)
    plain = unfused(sketch)
    best, least = None, cost(sketch, plain, shares=False)
    for depth in DEPTHS:
        candidate = spread(sketch, depth)
        price = cost(sketch, candidate)
        if price < least:
            best, least = candidate, price
    return FusedRuns() if best is None else best.runs(sketch)


def cost(sketch: Sketch, plan: Spread, shares: bool = True, prices: Prices = PRICES) -> float:
    """Return the seconds of a step that depend on the runs, by the rule of ``choose``.

    Args:
        sketch: the program.
        plan: where it exchanges, and what it computes.
        shares: whether operators that need the same value share one exchange.
        prices: what things cost.
    """
    total = 0.0
    wanted = plan.runs(sketch).shared if shares else {}
    for value, needs in plan.wanted.items():
        for need in (wanted[value],) if value in wanted else needs:
            total += 2 * _exchange(sketch, value, need, prices)
    for flow in sketch.flows:
        boxes = plan.computed.get(flow.name)
        if boxes is not None:
            parts = sketch.layouts[flow.makes[0]].parts
            margin = max(box.area - part.area for box, part in zip(boxes, parts, strict=True))
            total += 3 * margin * max(flow.flops / prices.flops_per_s, flow.touched_bytes / prices.touched_bytes_per_s)
    return total


def _exchange(sketch: Sketch, value: str, need: tuple[object, ...], prices: Prices) -> float:
    layout = sketch.layouts[value]
    worst = 0.0
    for rank in range(len(layout.parts)):
        transfer = plan_transfer(layout.parts, need, layout.map, rank)  # type: ignore[arg-type]
        received = transfer.received_px * sketch.pixel_bytes[value]
        worst = max(worst, len(transfer.receives) * prices.message_s + received / prices.bytes_per_s)
    return worst
