"""``hyfi plan``: the best plans for a configuration's model, images and batch on a machine, and why."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from hyfi_core.errors import RequestError
from workflows.commands.simulate import classes_of, describe, drawn, forecast_json, machine_of
from workflows.config.load import Config, load_config
from workflows.console import emit_json, say, warn
from workflows.exit_codes import DONE

if TYPE_CHECKING:
    from hyfi_core.cost.machine import MachineModel
    from hyfi_core.cost.planner import PlanSearch
    from hyfi_core.cost.simulator import StepForecast
    from hyfi_core.plan.parallel_plan import ParallelPlan


def run(
    config: Path,
    overrides: list[str],
    machine: str | None,
    ranks: int | None,
    memory: str | None,
    batch: int | None,
    top: int,
    write: bool,
    as_json: bool,
) -> int:
    """Search plans for ``config``.

    Args:
        config: the YAML of the run.
        overrides: ``section.key=value``, put over it.
        machine: name of a machine of the package, or a file; None: as for ``hyfi simulate``.
        ranks: trainers; None: those of one node.
        memory: what a trainer may need, as ``16GB``; None: what a device of the machine has.
        batch: images of a step; None: ``data.batch_size``.
        top: how many plans.
        write: put the best plan into ``config``.
        as_json: print the plans as one JSON object.

    Raises:
        RequestError: the request is wrong, or no plan fits; nothing is written then.
    """
    settings = load_config(config, overrides, ignore_plan=True)
    model = machine_of(settings, machine)
    images = settings.data.batch_size if batch is None else batch
    if write and images != settings.data.batch_size:
        raise RequestError(
            f"--batch {batch} with --write: {config} has data.batch_size {settings.data.batch_size}; change it there "
            "first"
        )
    model = model if memory is None else replace(model, memory_bytes=bytes_of(memory))
    ranks = ranks or model.devices_per_node
    found = _found(settings, model, ranks, images, top)
    _tell(found, settings, images, model)
    if write:
        write_plan(config, found.plans[0].plan)
        say(f"{config}: plan written")
    if as_json:
        plans = [forecast_json(one, images) for one in found.plans]
        emit_json({"machine": model.name, "ranks": ranks, "plans": plans, "alternatives": _others(found)})
    return DONE


def _found(settings: Config, machine: MachineModel, ranks: int, images: int, top: int) -> PlanSearch:
    from hyfi_core.cost.planner import PlanRequest, best_plans
    from workflows.evaluation.programs import ModelPrograms
    from workflows.training.memory import PROCESS_BYTES

    programs = ModelPrograms(settings, classes_of(settings))
    request = PlanRequest(
        ranks=ranks,
        batch=images,
        machine=machine,
        memory_bytes=machine.memory_bytes,
        held_bytes=PROCESS_BYTES,
        dtype=programs.computed_in,
        base=replace(settings.plan.build(), grids=((1, 1),), cuts="auto", interleave=1, recompute=False),
        spill="memory" if machine.device == "cuda" else ".",
    )
    return best_plans(programs.of, request, top)


def chosen_plan(config: Path, overrides: list[str], ranks: int | None, resume: bool) -> list[str]:
    """Return overrides that put the best plan for this node in place of ``plan: auto``.

    A run that is resumed keeps the plan that it began with: other micro-batches would be another run.

    Args:
        config: the YAML of the run.
        overrides: of the command line.
        ranks: of the whole run, loaders and validators among them; None: one for each core or GPU.
        resume: whether the run may have begun.

    Raises:
        RequestError: no plan fits, or roles leave no rank to train.
    """
    settings = load_config(config, overrides, ignore_plan=True)
    saved = settings.run.dir / "config.yaml"
    if resume and saved.is_file():
        return _as_overrides(load_config(saved).plan.build())
    machine, devices = _this_node(settings)
    if settings.roles.by_host or settings.roles.design == "offload_naive":
        raise RequestError("plan: auto needs roles by number, and no spare ranks; write the plan: hyfi plan … --write")
    others = settings.ranks - settings.trainers
    trainers = (ranks or max(devices, others + 1)) - others
    if trainers < 1:
        raise RequestError(f"--ranks {ranks}: loaders and validators take {others}, and none is left to train")
    machine = replace(machine, memory_bytes=machine.memory_bytes // max(1, -(-trainers // devices)))
    found = _found(settings, machine, trainers, settings.data.batch_size, 1)
    _tell(found, settings, settings.data.batch_size, machine)
    return _as_overrides(found.plans[0].plan)


def _this_node(settings: Config) -> tuple[MachineModel, int]:
    """Return a machine with this node's devices and free memory, and how many devices there are."""
    import torch

    from data.cores import usable_cores
    from hyfi_core.process_memory import available_bytes

    machine = machine_of(settings, None)
    if machine.device == "cuda" and torch.cuda.is_available():
        devices, memory_bytes = torch.cuda.device_count(), torch.cuda.mem_get_info()[0]
    else:
        devices = usable_cores()
        memory_bytes = available_bytes() // devices
    return replace(machine, devices_per_node=devices, memory_bytes=memory_bytes), devices


def _as_overrides(plan: ParallelPlan) -> list[str]:
    return [f"plan.{key}={json.dumps(value)}" for key, value in _chosen(plan).items()]


def _chosen(plan: ParallelPlan) -> dict[str, Any]:
    """Return the fields of a plan that a configuration has to state, as a section of its YAML would."""
    defaults = type(plan)(grids=((1, 1),)).to_json()
    return {k: v for k, v in plan.to_json().items() if k == "grids" or v != defaults[k]}


def bytes_of(text: str) -> int:
    """Return the bytes of ``16GB``, ``16G`` or ``16000000000``.

    Raises:
        RequestError: it is no amount.
    """
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        amount = int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        amount = 0
    if amount < 1:
        raise RequestError(f"--memory {text!r}: not an amount; write it like 16GB, 800MB or 16000000000")
    return amount


def write_plan(config: Path, plan: ParallelPlan) -> None:
    """Put a plan into a run's YAML in place of the one that is there; all else stays as it is, comments too.

    Raises:
        RequestError: with it the file would not be a run's; it stays as it was.
    """
    import tempfile

    from data.files import write_atomically

    lines = config.read_text(encoding="utf-8").splitlines()
    first = next((n for n, line in enumerate(lines) if line.startswith("plan:")), len(lines))
    after = first + 1
    while after < len(lines) and (not lines[after].strip() or lines[after][0] in " \t"):
        after += 1
    while after > first + 1 and after <= len(lines) and not lines[after - 1].strip():
        after -= 1  # an empty line before the next section
    section = "plan: " + yaml.safe_dump(_chosen(plan), default_flow_style=True, sort_keys=False, width=10**6).strip()
    text = "\n".join([*lines[:first], section, *lines[after:]]) + "\n"
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as trial:
        trial.write(text)
        trial.flush()
        if load_config(Path(trial.name)).plan.build() != plan:
            raise RequestError(
                f"{config}: its plan is not a section of its own; write it as `plan: {{…}}` in one place"
            )
    write_atomically(config, text.encode())


def _tell(found: PlanSearch, settings: Config, batch: int, machine: MachineModel) -> None:
    say(f"machine: {machine.name}; {found.candidates} plans, {found.simulated} simulated")
    for number, one in enumerate(found.plans, 1):
        say(f"\n{number}. {drawn(one.plan)}")
        for line in describe(one, batch, machine):
            say(f"   {line}")
    best = found.plans[0]
    for name, other in found.alternatives.items():
        say(f"{name}: {other if isinstance(other, str) else _compared(other, best)}")
    before = settings.plan
    changed = (best.plan.replicas, best.plan.microbatches) != (before.replicas, before.microbatches)
    if changed and settings.model.norm == "train":
        warn(
            "hyfi: batch norm takes its statistics over each replica's micro-batch, now "
            f"{batch // best.plan.replicas // best.plan.microbatches} image(s); model.norm=group or frozen does not"
        )


def _compared(other: StepForecast, best: StepForecast) -> str:
    """Return how much slower an alternative is, and what it loses its time to."""
    ratio = other.step_s / best.step_s
    if ratio < 1.005:
        return "as fast as the best"
    shares = {f"{kind} takes": seconds / other.step_s for kind, seconds in other.exposed_s.items()}
    shares["ranks wait"] = other.bubble
    why = max(shares, key=lambda name: shares[name])
    return f"{ratio:.1f}× slower" + (f", {why} {shares[why]:.0%}" if shares[why] >= 0.05 else "")


def _others(found: PlanSearch) -> dict[str, Any]:
    return {
        name: {"refused": other} if isinstance(other, str) else {"step_s": other.step_s, "bubble": other.bubble}
        for name, other in found.alternatives.items()
    }
