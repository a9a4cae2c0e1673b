"""Strategies: predefined plans for a number of ranks, as in HyPar-Flow.

    data      replicas of the whole model                       4 ranks: four copies
    model     a pipeline, one rank a stage                      4 ranks: s0 ─ s1 ─ s2 ─ s3
    spatial   the image cut over all ranks                      4 ranks: 2 x 2 parts
    hybrid    the first layers cut over a grid, a pipeline      4 ranks: 1 x 2 parts ─ s1 ─ s2
              of single ranks after it, where maps are small      5 ranks: 2 x 2 parts ─ s1

Source: Awan et al., HyPar-Flow, ISC'20, names the first, the second and the last.
"""

from __future__ import annotations

from typing import Literal, get_args

from hyfi_core.errors import RequestError
from hyfi_core.plan.parallel_plan import ParallelPlan

Strategy = Literal["data", "model", "spatial", "hybrid"]


def plan_for(strategy: Strategy, ranks: int, batch: int) -> ParallelPlan:
    """Return the plan of a strategy for a number of ranks.

    Args:
        strategy: one of the four names.
        ranks: all of them are used.
        batch: images of one replica's batch; pipelines cut it into as many micro-batches as there are images.

    Raises:
        RequestError: there is no such strategy.
    """
    if strategy == "data":
        return ParallelPlan(grids=((1, 1),), replicas=ranks)
    if strategy == "spatial":
        return ParallelPlan(grids=(squarest(ranks),))
    if strategy == "model":
        return ParallelPlan(grids=((1, 1),) * ranks, microbatches=batch)
    if strategy == "hybrid":
        # A grid of two ranks and a pipeline after it need three ranks.
        if ranks < 3:
            return ParallelPlan(grids=(squarest(ranks),))
        # The largest grid for the large maps of the first layers that is at most twice as wide as high: parts that are
        # long strips have long borders, and so large halos, for their area.
        parts = max(n for n in range(1, ranks) if _aspect(squarest(n)) <= 2)
        return ParallelPlan(grids=(squarest(parts), *((1, 1),) * (ranks - parts)), microbatches=batch)
    raise RequestError(f"strategy is {strategy!r}; use one of {', '.join(get_args(Strategy))}")


def squarest(ranks: int) -> tuple[int, int]:
    """Return the (rows, columns) of ``ranks`` closest to a square, with rows <= columns."""
    rows = max(n for n in range(1, int(ranks**0.5) + 1) if ranks % n == 0)
    return rows, ranks // rows


def _aspect(grid: tuple[int, int]) -> float:
    return grid[1] / grid[0]
