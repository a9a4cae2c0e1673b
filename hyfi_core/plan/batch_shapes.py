"""The shapes of a replica's batch and of its micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

from hyfi_core.plan.parallel_plan import ParallelPlan

Shape = tuple[int, int, int, int]
"""(B, C, H, W) of images."""


@dataclass(frozen=True)
class BatchShapes:
    """The shapes with which a plan trains.

    Attributes:
        whole: shape of the batch of one replica.
        micro: shape of each of its micro-batches.
        widest: shape of the largest micro-batch of any replica, by which all replicas choose the same cuts.
    """

    whole: Shape
    micro: Shape
    widest: Shape

    @classmethod
    def of(cls, plan: ParallelPlan, whole: Shape) -> BatchShapes:
        """Return the shapes for a batch of one replica, whose size ``plan.microbatches`` divides."""
        samples, channels, height, width = whole
        widest = max(plan.shares or (samples,)) // plan.microbatches
        micro = (samples // plan.microbatches, channels, height, width)
        return cls(whole, micro, (widest, channels, height, width))
