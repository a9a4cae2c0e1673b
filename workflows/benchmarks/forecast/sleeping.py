"""Forecasts of schedules against eight ranks (threads) that sleep instead of computing.

A block sleeps in proportion to the pixels of a rank's part, in backward twice as long, so the seconds of every forward
and backward are known exactly. It also computes a small convolution and, on a grid, exchanges halos; the time for that
is measured on one stage alone, with short sleeps. The simulator gets both times. So the comparison shows how well it
models the order of actions: waits for stages, for gangs and for the other direction.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping
from itertools import pairwise
from math import prod

import torch

import hyfi_core
from hyfi_core.comm.base import Communicator
from hyfi_core.comm.threads import run_ranks
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.plan.placement import Placement
from hyfi_core.schedule.action import Verb
from hyfi_core.schedule.generate import generate
from hyfi_core.schedule.lower import lower
from hyfi_core.schedule.simulate import Costs, simulate
from workflows.benchmarks.reduction import SleepingNetwork

BLOCKS, BLOCK_S, SIZE_PX, BATCH = 16, 0.03, 16, 8
_SHORT_S, _SHORT_STEPS = 0.002, 15
_ONE = (1, 1)
_EIGHT = tuple(f"blocks.{block}" for block in range(1, BLOCKS - 1, 2))
_UNEVEN = ("blocks.0", "blocks.2", "blocks.4", "blocks.7", "blocks.9", "blocks.11", "blocks.14")
_FOUR = ("blocks.3", "blocks.7", "blocks.11")
PLANS = (
    ParallelPlan((_ONE,) * 8, _EIGHT, BATCH, "sequential"),
    ParallelPlan((_ONE,) * 8, _EIGHT, BATCH, "gpipe"),
    ParallelPlan((_ONE,) * 8, _EIGHT, BATCH, "1f1b"),
    ParallelPlan((_ONE,) * 8, _UNEVEN, BATCH, "1f1b"),
    ParallelPlan((_ONE,) * 8, _EIGHT, BATCH, "gems_mast"),
    ParallelPlan((_ONE,) * 8, _EIGHT, BATCH, "gems_master"),
    ParallelPlan((_ONE,) * 8, _EIGHT, BATCH, "chimera"),
    ParallelPlan(((2, 2), *(_ONE,) * 4), ("blocks.7", "blocks.9", "blocks.11", "blocks.13"), BATCH, "1f1b"),
    ParallelPlan((_ONE,) * 4, _FOUR, BATCH // 2, "1f1b", replicas=2),
    ParallelPlan((_ONE,) * 4, _FOUR, BATCH // 2, "chimera", replicas=2, recompute=True),
)


def compare_sleeping(steps: int) -> None:
    """Print a JSON line for each plan, and one with the median and the worst error.

    Args:
        steps: Number of measured steps; their median counts.
    """
    errors = []
    besides = {
        grid: besides_sleeping_s(grid, steps) for grid in sorted({grid for plan in PLANS for grid in plan.grids})
    }
    print(json.dumps({"besides_sleeping_s": {"x".join(map(str, grid)): pair for grid, pair in besides.items()}}))
    for plan in PLANS:
        predicted_s, measured_s = predicted_step_s(plan, besides=besides), measured_step_s(plan, steps)
        errors.append(abs(predicted_s / measured_s - 1))
        line = {"plan": _short(plan), "predicted_s": predicted_s, "measured_s": measured_s}
        print(json.dumps({**line, "ratio": round(predicted_s / measured_s, 3)}), flush=True)
    summary = {"plans": len(PLANS), "median_error": statistics.median(errors), "worst_error": max(errors)}
    print(json.dumps({name: round(value, 4) for name, value in summary.items()}), flush=True)


def besides_sleeping_s(grid: tuple[int, int], steps: int = _SHORT_STEPS) -> tuple[float, float]:
    """Return (forward, backward) seconds of a block besides its sleep, on a grid of threads, for one image.

    Args:
        grid: Rows and columns of ranks.
        steps: Number of measured steps; their median counts.
    """
    ranks = prod(grid)

    def body(comm: Communicator) -> tuple[float, float]:
        """Return the seconds of this rank, in forward and in backward."""
        torch.manual_seed(0)
        # A rank sleeps for its part of the image only: a whole block has to sleep `ranks` times as long.
        model = SleepingNetwork(BLOCKS, _SHORT_S * ranks, SIZE_PX)
        engine = hyfi_core.parallelize(model, (1, 3, SIZE_PX, SIZE_PX), ParallelPlan((grid,)), comm, verify=False)
        spans: dict[Verb, list[float]] = {Verb.F: [], Verb.B: []}
        for _ in range(steps + 2):
            engine.accumulate(torch.zeros(1, 3, SIZE_PX, SIZE_PX), torch.zeros(1, dtype=torch.long))
            for action, begin_s, end_s in engine.events:
                if action.verb in spans:
                    spans[action.verb].append(end_s - begin_s)
        # Without the first two steps, which capture the model and fill caches.
        forward_s, backward_s = (statistics.median(spans[verb][2:]) / BLOCKS for verb in (Verb.F, Verb.B))
        # Less the sleep itself, which is known: in backward it is twice as long.
        return forward_s - _SHORT_S, backward_s - 2 * _SHORT_S

    times = run_ranks(ranks, body)
    return max(0.0, *(forward_s for forward_s, _ in times)), max(0.0, *(backward_s for _, backward_s in times))


def predicted_step_s(
    plan: ParallelPlan,
    block_s: float = BLOCK_S,
    besides: Mapping[tuple[int, int], tuple[float, float]] | None = None,
) -> float:
    """Return the simulated seconds of a step in which only sleeping, and ``besides``, take time.

    Args:
        plan: The plan, with named cuts.
        block_s: Seconds of one block's forward for one image.
        besides: Grid -> (forward, backward) seconds of a block besides its sleep; None: 0.
    """
    more = {grid: (0.0, 0.0) for grid in plan.grids} | dict(besides or {})
    # A cut is the name of a stage's last block. Of each stage: the number of its blocks.
    ends = [-1, *(int(str(cut).removeprefix("blocks.")) for cut in plan.cuts), BLOCKS - 1]
    blocks = [last - before for before, last in pairwise(ends)]
    images = BATCH // plan.replicas // plan.microbatches
    forward_s, backward_s = [], []
    for count, grid in zip(blocks, plan.grids, strict=True):
        slept_s = images * block_s * count / prod(grid)
        forward_more_s, backward_more_s = more[grid]
        forward_s.append(slept_s + count * forward_more_s)
        # In backward, a block sleeps twice as long.
        backward_s.append(2 * slept_s + count * backward_more_s)
    durations = Costs(
        forward_s=lambda stage: forward_s[stage],
        backward_s=lambda stage: backward_s[stage] + plan.recomputes(stage) * forward_s[stage],
    )
    placement, edges = Placement.of(plan), [(stage, stage + 1) for stage in range(plan.stages - 1)]
    schedule = lower(generate(plan, placement), placement, edges, mirror=plan.mirror)
    return simulate(schedule, placement, edges, mirror=plan.mirror, costs=durations).makespan_s


def measured_step_s(plan: ParallelPlan, steps: int, block_s: float = BLOCK_S) -> float:
    """Return the median seconds of a step of the network that sleeps, measured on ranks that are threads."""

    def body(comm: Communicator) -> float:
        """Return the median seconds of a step on this rank."""
        torch.manual_seed(0)
        shape = (BATCH // plan.replicas, 3, SIZE_PX, SIZE_PX)
        model = SleepingNetwork(BLOCKS, block_s, SIZE_PX)
        engine = hyfi_core.parallelize(model, shape, plan, comm, verify=False)
        images, labels = torch.zeros(shape), torch.zeros(shape[0], dtype=torch.long)
        times = []
        for _ in range(steps + 1):
            comm.barrier()
            begin = time.perf_counter()
            engine.accumulate(images, labels)
            comm.barrier()
            times.append(time.perf_counter() - begin)
        return statistics.median(times[1:])  # the first step captures the model

    return max(run_ranks(plan.ranks, body))


def _short(plan: ParallelPlan) -> str:
    grids = " ".join(f"{rows}x{columns}" for rows, columns in plan.grids)
    words = [grids, plan.schedule, f"{plan.microbatches} micro-batches"]
    return ", ".join([*words, *["2 replicas"] * (plan.replicas == 2), *["recomputed"] * bool(plan.recompute)])
