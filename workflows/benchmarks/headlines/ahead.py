"""Our plans for the published networks and sizes, against the published systems on equal hardware.

Each printed line is followed by the assumption on which it depends most.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from hyfi_core.cost.step.simulator import StepForecast
from hyfi_core.errors import MemoryLimitError
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
"""Plans for 8 ranks and 2 images."""
_LASSEN_HOST_BYTES = 256e9
"""LLNL, "Using LC's Sierra systems": main memory of a node."""
_SIDES = (4, 8, 16)
"""Numbers of rows and columns of cells to try where no plan fits without cells."""


@dataclass(frozen=True)
class _Case:
    """A published system to be compared with: two images on 8 V100s.

    Attributes:
        network: One of ``NETWORKS``.
        size: Height and width of the images.
        name: Name of the system.
        baseline: The plan that stands for it.
        carried_by: The assumption on which the ratio to the published system depends most.
    """

    network: str
    size: int
    name: str
    baseline: ParallelPlan
    carried_by: str


_WHOLE_MAPS = (
    "basic spatial has 5 stages (assumed), the first on 2 x 2 ranks; one rank each computes the later ones on whole "
    "maps; 208 filters stand for 214"
)
_CASES = (
    _Case(SMALL, 2048, "layer parallelism", LAYER, "layer parallelism has 8 stages (assumed), and one computes"),
    _Case(LARGE, 8192, "basic spatial", BASIC_SPATIAL, _WHOLE_MAPS),
    _Case(LARGE, 16384, "basic spatial", BASIC_SPATIAL, _WHOLE_MAPS),
)


def print_ahead(forecasts: Forecasts) -> None:
    """Print the fastest of the candidates for each case, and plans for 22,528² on H100s."""
    print(
        "\nOur plans on equal hardware, 2 images on 8 V100s; compute, messages, moved maps are modelled, no slow ranks"
    )
    for case in _CASES:
        slow = forecasts.step(case.network, case.size, 2, case.baseline, LASSEN)
        steps = [_step(forecasts, case, plan) for plan in CANDIDATES]
        fitting = [step for step in steps if _fits(forecasts, step)]
        fast = min(fitting or steps, key=lambda forecast: forecast.step_s)
        gain = slow.step_s / fast.step_s
        print(
            f"  {case.network}, {case.size}²: {_plan_text(fast.plan)}: {fast.step_s:.3g} s, {gain:.2f} x {case.name} "
            f"({slow.step_s:.3g} s); {_memory_text(forecasts, fast)}, there {_memory_text(forecasts, slow)}"
        )
        print(f"    assumed: {case.carried_by}; efficiencies of a V100 are those of the fit to P40s", flush=True)
        if not fitting:
            _print_fitting(forecasts, case, slow)
        if case.network == SMALL:
            _print_scaling(forecasts, case, fast.plan)
    _print_largest(forecasts)


def _print_fitting(forecasts: Forecasts, case: _Case, slow: StepForecast) -> None:
    """Print the fastest plan that fits by computing in cells and spilling to the host; called if no candidate fits.

    Args:
        forecasts: The forecasts.
        case: The published system.
        slow: The forecast of the published system's plan, with which the plan is compared.
    """
    machine = forecasts.machine(LASSEN)
    # The two candidates with the fewest messages.
    plans = [
        replace(plan, cells=(side, side), spill="memory", memory_bytes=machine.memory_bytes)
        for plan in (CANDIDATES[0], CANDIDATES[2])
        for side in _SIDES
    ]
    fitting = [step for step in _possible(forecasts, case, plans) if _fits(forecasts, step)]
    if not fitting:
        print("    no plan in cells fits either", flush=True)
        return
    fast = min(fitting, key=lambda forecast: forecast.step_s)
    # `moved_bytes` counts each map twice, to the host and back; the host holds each once.
    host_bytes = fast.moved_bytes / 2 * machine.devices_per_node
    verdict = (
        "fits with spilling" if host_bytes <= _LASSEN_HOST_BYTES else "fits with spilling, on hosts with more memory"
    )
    print(
        f"    {verdict}: {_plan_text(fast.plan)}: {fast.step_s:.3g} s, {slow.step_s / fast.step_s:.2f} x; "
        f"{_memory_text(forecasts, fast)}; {_spill_text(fast)}"
    )
    print(
        f"    assumed: messages between cells by MPI (NCCL has no tags); {_link_text(forecasts, LASSEN)}; a host has "
        f"the {host_bytes / 1e9:.0f} GB that its {machine.devices_per_node} GPUs spill (of Lassen: "
        f"{_LASSEN_HOST_BYTES / 1e9:.0f} GB)",
        flush=True,
    )


def _possible(forecasts: Forecasts, case: _Case, plans: Iterable[ParallelPlan]) -> Iterable[StepForecast]:
    """Yield the forecasts of the plans that can run within their memory limit."""
    for plan in plans:
        try:
            yield _step(forecasts, case, plan)
        # These cells are too large as well.
        except MemoryLimitError:
            continue


def _print_scaling(forecasts: Forecasts, case: _Case, plan: ParallelPlan) -> None:
    """Print the scaling efficiency of a plan's replicas on 2,048 GPUs."""
    # `scaling` takes the images of one replica; a step of the plan has two.
    efficiency = scaling(forecasts, case.network, case.size, 2 // plan.replicas, plan, 2048)
    machine = forecasts.machine(LASSEN)
    print(f"    scaling to 2,048 V100s: {efficiency:.1%}")
    print(
        f"    assumed: gradients are summed within a node first, then by one of its GPUs over a rail of "
        f"{(machine.rail_bytes_per_s or machine.network.bytes_per_s) / 1e9:.3g} GB/s that nobody else uses; all ranks "
        f"are equally fast",
        flush=True,
    )


def _print_largest(forecasts: Forecasts) -> None:
    """Print seconds and memory of ResNet-50 on the largest published image, on 64 H100s and on one with cells."""
    machine = forecasts.machine("h100")
    cells = ParallelPlan(grids=((1, 1),), cells=(8, 8), spill="memory", memory_bytes=machine.memory_bytes)
    for plan in (ParallelPlan(grids=((8, 8),)), cells):
        step = forecasts.step("ResNet-50", 22528, 1, plan, "h100")
        spills = f"; {_spill_text(step)}" if plan.spill is not None else ""
        print(
            f"  ResNet-50, 22528², {plan.ranks} H100, {_plan_text(plan)}: {step.step_s:.3g} s an image; "
            f"{_most_gb(step, plan):.1f} GB a rank{spills}"
        )
        host = (
            f"; {_link_text(forecasts, 'h100')}, and a host with {step.moved_bytes / 2e9:.0f} GB for maps"
            if spills
            else ""
        )
        print(f"    assumed: efficiencies of an H100, float32 as TF32{host}", flush=True)


def _step(forecasts: Forecasts, case: _Case, plan: ParallelPlan) -> StepForecast:
    return forecasts.step(case.network, case.size, 2 // plan.replicas, plan, LASSEN)


def _fits(forecasts: Forecasts, step: StepForecast) -> bool:
    return max(step.memory_bytes) <= forecasts.machine(LASSEN).memory_bytes


def _memory_text(forecasts: Forecasts, step: StepForecast) -> str:
    """Return the memory of a rank, and whether a V100 has it."""
    more = "" if _fits(forecasts, step) else f" (a V100 has {forecasts.machine(LASSEN).memory_bytes / 1e9:.0f})"
    return f"{_most_gb(step, step.plan):.1f} GB a rank{more}"


def _spill_text(step: StepForecast) -> str:
    return (
        f"{step.moved_bytes / 1e9:.0f} GB of maps a rank to the host and back, {step.moving_s:.3g} s of moving, "
        f"{step.exposed_s['spill']:.3g} s of it not hidden"
    )


def _link_text(forecasts: Forecasts, machine: str) -> str:
    rate = forecasts.machine(machine).host_bytes_per_s
    assert rate is not None
    return f"{rate / 1e9:.3g} GB/s between a GPU and its host, one direction at a time, while it computes"


def _plan_text(plan: ParallelPlan) -> str:
    """Return a plan in words."""
    grids = " - ".join(f"{rows}x{columns}" for rows, columns in plan.grids)
    # Only what the plan uses.
    words = [
        *([plan.schedule] if plan.stages > 1 else []),
        *([f"{plan.microbatches} micro-batches"] if plan.microbatches > 1 else []),
        *([f"{plan.replicas} replicas"] if plan.replicas > 1 else []),
        *([f"{plan.cells[0]} x {plan.cells[1]} cells"] if isinstance(plan.cells, tuple) else []),
    ]
    return ", ".join([grids, *words])


def _most_gb(forecast: StepForecast, plan: ParallelPlan) -> float:
    """Return the GB of the rank that needs most; with spill its limit, as it keeps as many maps as fit."""
    if plan.spill is not None and plan.memory_bytes is not None:
        return plan.memory_bytes / 1e9
    return max(forecast.memory_bytes) / 1e9
