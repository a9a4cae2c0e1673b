"""Plans with branches: the fastest plans for fewer ranks, with each rank repeated in every plane.

    best plans of 4 ranks      1.0 s   1.1 s   …
    best plans of 2 ranks      1.7 s   1.8 s   …     with branches=2     0.9 s   1.0 s   …

Branches pay where a batch has fewer images than ranks and maps are too small to be divided. They are searched only if
the model's parallel branches, packed onto planes, would save enough even if exchanging their values took no time. Of
the plans for fewer ranks, only those are searched for that could then be among the best.
"""

from __future__ import annotations

import math
from dataclasses import replace

from hyfi_core.cost.branch_packing import pack_branches
from hyfi_core.cost.machine import MachineModel
from hyfi_core.cost.operators import operator_costs
from hyfi_core.cost.search.plan_bounds import Programs
from hyfi_core.cost.search.plan_family import PlanRequest
from hyfi_core.cost.search.planner import ModelStudies, PlanSearch, best_plans
from hyfi_core.cost.step.simulator import StepForecast, forecast_step
from hyfi_core.errors import RequestError

_PLANES = (2, 3, 4)
"""Numbers of planes to try; cells of AmoebaNet and Inception modules have four to ten branches."""


def best_of_all_plans(programs: Programs, request: PlanRequest, top: int = 1) -> PlanSearch:
    """Return the fastest plans that fit, with and without branches.

    Args:
        programs: captures the model.
        request: ranks, batch, machine and limits.
        top: number of plans.

    Raises:
        RequestError: as ``best_plans``.
    """
    studies = ModelStudies(programs)
    try:
        search = best_plans(programs, request, top, studies=studies)
        for planes in _PLANES:
            if request.ranks % planes:
                continue
            share = _remaining_share(programs, request, planes, search.plans[0])
            if share is not None:  # planes may pay
                search = _with_planes(programs, request, top, planes, search, share, studies)
    finally:
        studies.clear()
    return search


def _with_planes(
    programs: Programs,
    request: PlanRequest,
    top: int,
    planes: int,
    search: PlanSearch,
    share: float,
    studies: ModelStudies,
) -> PlanSearch:
    """Return the result of a search after adding plans with ``planes`` planes.

    Args:
        programs: captures the model.
        request: ranks, batch, machine and limits.
        top: number of plans to return.
        planes: number of planes.
        search: the result without these plans.
        share: the smallest fraction of a step that remains with this number of planes.
        studies: what the search without planes has computed.
    """
    # A plan with planes has to be faster than the slowest plan of the result.
    slowest_s = search.plans[-1].step_s if len(search.plans) == top else math.inf
    # Without spilling, which needs cells: cells of a rank take turns, and cannot wait for another plane.
    fewer_ranks = replace(request, ranks=request.ranks // planes, spill=None)
    try:
        # Planes shorten a step to at least ``share``: without them, it may take 1 / share as long and still win.
        fewer = best_plans(programs, fewer_ranks, top, slowest_s / share, studies)
    except RequestError:  # none can be run
        return search
    plans: list[StepForecast] = list(search.plans)
    for forecast in fewer.plans:
        program = programs(request.batch // forecast.plan.replicas // forecast.plan.microbatches)
        try:
            plan = replace(forecast.plan, branches=planes)
            plans.append(forecast_step(program, plan, request.machine, request.dtype))
        except RequestError:  # no stage has branches
            continue
    return replace(
        search,
        plans=tuple(sorted(plans, key=lambda plan: plan.step_s)[:top]),
        simulated=search.simulated + fewer.simulated + len(fewer.plans),
        candidates=search.candidates + fewer.candidates,
    )


def _remaining_share(programs: Programs, request: PlanRequest, planes: int, best: StepForecast) -> float | None:
    """Return the fraction of a step's computation that remains with ``planes`` planes; None if they cannot pay.

    Args:
        programs: captures the model.
        request: ranks, batch, machine and limits.
        planes: number of planes.
        best: the forecast of the best plan without planes, which they would have to beat.
    """
    # Micro-batches of the best plan, for which the model has been captured: another capture takes seconds.
    images = request.batch // best.plan.replicas // best.plan.microbatches
    program, crowded = programs(images), request.ranks > 1 and request.machine.devices_per_node > 1
    # A lower bound: without the overhead of starting operators, which planes may save.
    bare: MachineModel = replace(request.machine, kernel_s=0.0)
    costs = zip(program.operators, operator_costs(program, request.machine, request.dtype), strict=True)
    seconds = {op.name: cost.forward_s(bare, 1.0, crowded) + cost.backward_s(bare, 1.0, crowded) for op, cost in costs}
    branches = pack_branches(program, program.outputs, (), planes)
    if not branches.owners:
        return None
    least_s = whole_s = 0.0  # of a micro-batch on one rank for each plane, and on one rank for all
    for region in branches.regions:
        loads = [0.0] * planes
        for name in region:
            whole_s += seconds[name]
            for plane in (branches.owners[name],) if name in branches.owners else range(planes):
                loads[plane] += seconds[name]
        least_s += max(loads)
    microbatches, ranks_per_plane = request.batch / images, request.ranks / planes
    # They do not pay even if exchanges between planes take no time.
    if microbatches * least_s / ranks_per_plane >= best.step_s:
        return None
    return least_s / whole_s
