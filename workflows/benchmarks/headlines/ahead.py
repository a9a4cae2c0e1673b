"""Our plans for the published networks and sizes, against the published systems on equal hardware."""

from __future__ import annotations

from dataclasses import dataclass

from hyfi_core.cost.simulator import StepForecast
from hyfi_core.plan.parallel_plan import ParallelPlan
from workflows.benchmarks.headlines.forecasts import Forecasts
from workflows.benchmarks.headlines.points import BASIC_SPATIAL, LARGE, LASSEN, LAYER, SMALL, scaling

CANDIDATES = (
    ParallelPlan(grids=((2, 4),)),
    ParallelPlan(grids=((2, 4),), microbatches=2),
    ParallelPlan(grids=((2, 2),), replicas=2),
    ParallelPlan(grids=((2, 2), (2, 2)), microbatches=2),
    ParallelPlan(grids=((2, 2), (2, 2)), microbatches=2, schedule="chimera"),
    ParallelPlan(grids=((1, 2),) * 4, microbatches=2, schedule="chimera"),
    ParallelPlan(grids=((1, 1),) * 8, microbatches=2, schedule="chimera"),
)
"""Plans for 8 ranks and 2 images; the fastest is taken of those that fit into 16 GB, or of all if none does."""


@dataclass(frozen=True)
class _Case:
    """A published system to be compared with: two images on 8 V100s."""

    network: str
    size: int
    name: str
    baseline: ParallelPlan


_CASES = (
    _Case(SMALL, 2048, "layer parallelism", LAYER),
    _Case(LARGE, 8192, "basic spatial", BASIC_SPATIAL),
    _Case(LARGE, 16384, "basic spatial", BASIC_SPATIAL),
)


def print_ahead(forecasts: Forecasts) -> None:
    """Print the fastest of the candidates for each case, and plans for 22,528² on H100s."""
    print("\nOur plans on equal hardware, 2 images on 8 V100s; only compute and messages are modelled, no slow ranks")
    for case in _CASES:
        slow = forecasts.step(case.network, case.size, 2, case.baseline, LASSEN)
        fast = _fastest(forecasts, case)
        gain = slow.step_s / fast.step_s
        print(
            f"  {case.network}, {case.size}²: {_named(fast.plan)}: {fast.step_s:.3g} s, {gain:.2f} x {case.name} "
            f"({slow.step_s:.3g} s); {_most(fast):.1f} GB a rank, there {_most(slow):.1f} GB",
            flush=True,
        )
        if case.network == SMALL:
            kept = scaling(forecasts, case.network, case.size, 2 // fast.plan.replicas, fast.plan, 2048)
            print(f"    scaling to 2,048 V100s: {kept:.1%}")
    _print_largest(forecasts)


def _fastest(forecasts: Forecasts, case: _Case) -> StepForecast:
    found = [_step(forecasts, case, plan) for plan in CANDIDATES]
    limit = forecasts.machine(LASSEN).memory_bytes
    fitting = [forecast for forecast in found if max(forecast.memory_bytes) <= limit]
    return min(fitting or found, key=lambda forecast: forecast.step_s)


def _print_largest(forecasts: Forecasts) -> None:
    cells = ParallelPlan(grids=((1, 1),), cells=(8, 8), spill="memory", memory_bytes=80_000_000_000)
    for plan, words in ((ParallelPlan(grids=((8, 8),)), ""), (cells, ", without the time of moving maps to the host")):
        found = forecasts.step("ResNet-50", 22528, 1, plan, "h100")
        print(
            f"  ResNet-50, 22528², {plan.ranks} H100 (efficiencies assumed), {_named(plan)}: {found.step_s:.3g} s an "
            f"image{words}; {_most(found):.1f} GB a rank"
        )


def _step(forecasts: Forecasts, case: _Case, plan: ParallelPlan) -> StepForecast:
    return forecasts.step(case.network, case.size, 2 // plan.replicas, plan, LASSEN)


def _named(plan: ParallelPlan) -> str:
    grids = " - ".join(f"{rows}x{columns}" for rows, columns in plan.grids)
    words = [
        *([plan.schedule] if plan.stages > 1 else []),
        *([f"{plan.microbatches} micro-batches"] if plan.microbatches > 1 else []),
        *([f"{plan.replicas} replicas"] if plan.replicas > 1 else []),
        *([f"{plan.cells[0]} x {plan.cells[1]} cells"] if isinstance(plan.cells, tuple) else []),
    ]
    return ", ".join([grids, *words])


def _most(forecast: StepForecast) -> float:
    return max(forecast.memory_bytes) / 1e9
