"""The output of ``hyfi plan`` and ``hyfi simulate`` for runs with bags, as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from hyfi_core.cost.machine import MachineModel
from hyfi_core.errors import RequestError
from hyfi_core.plan.parallel_plan import ParallelPlan
from workflows.config.run import Config
from workflows.console import counted, emit_json, say
from workflows.tile_plans.bag_costs import BagCosts
from workflows.tile_plans.bag_forecast import BagForecast, bag_plans, forecast_bags


def plan_bags(config: Config, machine: MachineModel, ranks: int, slides: int, top: int) -> list[BagForecast]:
    """Print the ``top`` best plans of a run of bags and return their forecasts, the fastest first.

    Raises:
        RequestError: The run cannot be used, or no plan fits.
    """
    costs = BagCosts.of(config)
    plans, refused = bag_plans(costs, ranks, slides, machine)
    if not plans:
        raise RequestError("no plan fits:\n" + "\n".join(f"  {line}" for line in refused))
    say(f"machine: {machine.name}; {_slides_text(costs)}")
    for number, forecast in enumerate(plans[:top], 1):
        slower = f" ({forecast.step_s / plans[0].step_s:.2f}× as long as the first)" if number > 1 else ""
        say(f"\n{number}. {_plan_text(forecast.plan)}{slower}")
        for line in describe_bags(forecast, machine):
            say(f"   {line}")
    for line in refused:
        say(line)
    return plans[:top]


def simulate_bags(config: Config, plan: ParallelPlan, slides: int, machine: MachineModel, as_json: bool) -> None:
    """Print the forecast of a plan.

    Args:
        config: The configuration of the run.
        plan: Its plan, perhaps with another number of replicas.
        slides: Number of slides of a step, over all replicas.
        machine: The machine model.
        as_json: Print it as one JSON object, too.

    Raises:
        RequestError: The run cannot be used, or its plan does not fit.
    """
    costs = BagCosts.of(config)
    forecast = forecast_bags(costs, plan, slides, machine)
    say(f"machine: {machine.name}; {_slides_text(costs)}")
    for line in (_plan_text(forecast.plan), *describe_bags(forecast, machine)):
        say(line)
    if as_json:
        emit_json({"machine": machine.name, "ranks": plan.ranks, **bags_json(forecast)})


def describe_bags(forecast: BagForecast, machine: MachineModel) -> list[str]:
    """Return a forecast as lines of text."""
    # Parts that would show as 0 % are left out.
    shares = {name: seconds / forecast.step_s for name, seconds in forecast.parts_s.items()}
    parts = ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005)
    kept = "no tile is encoded twice"
    if forecast.kept < 1:
        kept = f"activations of {forecast.kept:.0%} of the tiles are kept, the others computed again"
    return [
        f"{forecast.step_s:.3g} s per step, {forecast.slides / forecast.step_s:.3g} slides/s; bound by "
        f"{forecast.bound_by} ({parts})",
        f"memory: {forecast.memory_bytes / 1e9:.2g} GB for each rank of {machine.memory_bytes / 1e9:.2g} GB, at least "
        f"{forecast.least_bytes / 1e9:.2g} GB; chunks of {forecast.chunk} tiles; {kept}",
    ]


def bags_json(forecast: BagForecast) -> dict[str, Any]:
    """Return a forecast as one JSON object; of its plan only what bags have."""
    plan = forecast.plan
    fields = asdict(forecast)
    # The keys that every plan has; no rank waits for another stage, because there is one.
    fields |= {"bubble": 0.0, "bound_by": forecast.bound_by}
    fields["plan"] = {"tiles": plan.tiles, "replicas": plan.replicas, "memory_bytes": plan.memory_bytes}
    return fields


def _plan_text(plan: ParallelPlan) -> str:
    """Return a plan as keys of the configuration, and in words."""
    return (
        f"plan.tiles={plan.tiles} plan.replicas={plan.replicas}: {counted(plan.tiles or 1, 'rank')} for a slide, "
        f"{counted(plan.replicas, 'slide')} at a time"
    )


def _slides_text(costs: BagCosts) -> str:
    mean = sum(costs.tiles) / len(costs.tiles)
    return f"{counted(len(costs.tiles), 'slide')} of {mean:,.0f} tiles in the mean, {max(costs.tiles):,} at most"
