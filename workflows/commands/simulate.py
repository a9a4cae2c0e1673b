"""``hyfi simulate``: forecasts a step of a configuration's plan on a machine, without running it."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyfi_core.errors import RequestError
from workflows.config.load import Config, load_config
from workflows.console import counted, emit_json, say
from workflows.exit_codes import DONE
from workflows.run_machine import machine_of

if TYPE_CHECKING:
    from hyfi_core.cost.machine import MachineModel
    from hyfi_core.cost.step.simulator import StepForecast
    from hyfi_core.plan.parallel_plan import ParallelPlan


def run(
    config: Path, overrides: list[str], machine: str | None, ranks: int | None, trace: Path | None, as_json: bool
) -> int:
    """Forecast a step of ``config``'s plan and print it.

    Args:
        config: The YAML of the run.
        overrides: ``section.key=value``, applied to it.
        machine: Name of a built-in machine model, or a file; None: see ``machine_of``.
        ranks: Number of trainers; the plan gets as many replicas as they allow. None: as the plan says.
        trace: File for a trace of the step for Perfetto; None: none.
        as_json: Print the forecast as one JSON object.

    Raises:
        RequestError: The request is not valid; nothing was written.
    """
    from data.files import write_atomically
    from hyfi_core.cells.spill_forecast import SpillForecast
    from hyfi_core.cost.step.simulator import forecast_step
    from hyfi_core.schedule.trace import to_json
    from workflows.evaluation.programs import ModelPrograms
    from workflows.paths import require_replaceable
    from workflows.training.memory import PROCESS_BYTES

    settings = load_config(config, overrides)
    machine_model = machine_of(settings, machine)
    if settings.data.kind != "images":
        from workflows.tile_plans.report import simulate_bags

        if trace is not None:
            raise RequestError(f"--trace {trace}: steps of tiles and features have no trace; leave it out")
        simulate_bags(settings, *with_replicas(settings, ranks), machine_model, as_json)
        return DONE
    if trace is not None:
        require_replaceable(trace, lambda start: start.startswith(b'{"traceEvents"'), "a trace")
    plan, batch = with_replicas(settings, ranks)
    programs = ModelPrograms(settings, outputs_of(settings))
    program = programs.of(batch // plan.replicas // plan.microbatches)
    plan = resolved(plan, program, machine_model)
    spills = SpillForecast(machine_model, PROCESS_BYTES)
    forecast = forecast_step(program, plan, machine_model, programs.autocast_dtype, spills=spills)
    say(plan_text(plan))
    say(f"machine: {machine_model.name}")
    for line in (*describe(forecast, batch, machine_model), input_text(forecast, batch, settings)):
        say(line)
    if trace is not None:
        write_atomically(trace, to_json(forecast.events()).encode())
        say(f"trace: {trace} (open it with https://ui.perfetto.dev)")
    if as_json:
        needs = {"input_bytes_per_s": input_bytes_per_s(forecast, batch, settings)}
        emit_json({"machine": machine_model.name, "ranks": plan.ranks, **forecast_json(forecast, batch), **needs})
    return DONE


def plan_text(plan: ParallelPlan) -> str:
    """Return a plan as text; if it has several replicas, only the first is drawn."""
    head, *_ = plan.describe().splitlines()
    # Replicas are alike: the first line describes the whole plan, the others one replica.
    _, *lines = replace(plan, replicas=1, shares=None).describe().splitlines()
    return "\n".join([head, *lines])


def outputs_of(config: Config) -> int:
    """Return the number of the model's outputs, from the configuration or, if it does not say, from the labels.

    Raises:
        RequestError: The configuration does not say, and the labels or the store cannot be read.
    """
    classes, task = config.model.classes, config.data.facts
    if task.outputs is not None:
        return task.outputs
    # One output for each class; of ordinal grades, one fewer.
    if classes is not None and task.outputs_fewer is not None:
        return (classes if isinstance(classes, int) else len(classes)) - task.outputs_fewer
    from workflows.training.job import prepare

    return prepare(config).task.outputs


def with_replicas(config: Config, ranks: int | None) -> tuple[ParallelPlan, int]:
    """Return the configuration's plan with replicas for ``ranks`` trainers (None: as it is), and the images in a step.

    Each replica has as many images as in the configuration.

    Raises:
        RequestError: ``ranks`` is not a multiple of the ranks of one replica.
    """
    plan = config.plan.build()
    replica_images = config.data.batch_size // plan.replicas
    if ranks is None:
        return plan, config.data.batch_size
    if ranks % plan.ranks_per_replica:
        raise RequestError(
            f"--ranks {ranks}: one replica of the plan takes {plan.ranks_per_replica}; give a multiple of it"
        )
    plan = replace(plan, replicas=ranks // plan.ranks_per_replica)
    return plan, replica_images * plan.replicas


def resolved(plan: ParallelPlan, program: Any, machine: MachineModel) -> ParallelPlan:
    """Return the plan with ``auto`` cuts and cells chosen for ``machine``, which need not be this computer."""
    import torch

    from hyfi_core.cells.budget import with_cells
    from hyfi_core.cells.large_maps import fewest_cells
    from hyfi_core.cost.search.cuts import with_cuts
    from workflows.training.memory import PROCESS_BYTES

    plan = with_cuts(plan, program, machine)
    if plan.cells == "auto" and plan.memory_bytes is None:
        plan = replace(plan, memory_bytes=machine.memory_bytes // 2)  # a run takes half of the free memory
    # The same choice as ``runtime.calls.resolved_plan`` makes in a run; with several GPUs, ranks have no cells.
    fewest = fewest_cells(program, plan) if machine.device == "cuda" and plan.ranks == 1 else 1
    return with_cells(plan, program, PROCESS_BYTES, torch.device(machine.device), fewest=fewest)


def describe(forecast: StepForecast, batch: int, machine: MachineModel) -> list[str]:
    """Return the forecast as lines of text."""
    exposed = ", ".join(f"{kind} {1e3 * seconds:.3g} ms" for kind, seconds in forecast.exposed_s.items() if seconds)
    rank_bytes = needed_bytes(forecast)
    most, least = max(rank_bytes), min(rank_bytes)
    smallest = f"{least / 1e9:.2g} to " if most > 1.1 * least else ""
    lines = [
        f"step: {forecast.step_s:.3g} s, {forecast.images_per_s(batch):.3g} images/s in batches of {batch}; ranks are "
        f"busy {forecast.busy:.0%} of it, bubble {forecast.bubble:.0%}; bound by {forecast.bound_by}",
        f"exposed communication: {exposed or 'none'}",
        f"memory: {smallest}{most / 1e9:.2g} GB for each trainer, of {machine.memory_bytes / 1e9:.2g} GB",
    ]
    if forecast.plan.spill is not None:
        lines.append(_spilling(forecast))
    return lines


def input_bytes_per_s(forecast: StepForecast, batch: int, config: Config) -> float:
    """Return the bytes of pixels that all trainers together read in a second."""
    height, width = config.data.image_px
    return 3 * height * width * forecast.images_per_s(batch)


def input_text(forecast: StepForecast, batch: int, config: Config) -> str:
    """Return the rates that loaders and storage must reach, as a line of text."""
    from data.loading.rates import core_bytes_per_s

    bytes_per_s = input_bytes_per_s(forecast, batch, config)
    core_rate = core_bytes_per_s(config.data.augment.build(), config.data.stain_normalisation)
    cores = counted(ceil(bytes_per_s / core_rate), "core")
    return (
        f"input: {bytes_per_s / 1e9:.2g} GB/s of pixels; loaders need about {cores} "
        f"({core_rate / 1e9:.2g} GB/s each with this data.augment), and storage must read this rate divided by the "
        "store's compression"
    )


def _spilling(forecast: StepForecast) -> str:
    """Return which maps leave memory and how long that takes, as a line of text."""
    destination = "the host's memory" if forecast.plan.spill == "memory" else "the disk"
    return (
        f"spilled maps: {forecast.moved_bytes / 1e9:.3g} GB of each trainer go to {destination} and back in "
        f"{forecast.moving_s:.3g} s; computing hides all but {forecast.exposed_s['spill']:.3g} s of them; other maps "
        f"are computed again in {forecast.recomputing_s:.3g} s"
    )


def needed_bytes(forecast: StepForecast) -> list[int]:
    """Return the bytes of each trainer's process, libraries included; with ``spill``, its memory limit."""
    from workflows.training.memory import PROCESS_BYTES

    plan = forecast.plan
    if plan.spill is not None and plan.memory_bytes is not None:
        return [plan.memory_bytes] * len(forecast.resident_bytes)
    return [PROCESS_BYTES + length for length in forecast.resident_bytes]


def forecast_json(forecast: StepForecast, batch: int) -> dict[str, Any]:
    """Return the forecast of a step as one JSON object; ``busy`` and ``bubble`` are fractions, see `StepForecast`."""
    rank_bytes = needed_bytes(forecast)  # of each rank
    return {
        "plan": forecast.plan.to_json(),
        "step_s": forecast.step_s,
        "images_per_s": forecast.images_per_s(batch),
        "busy": forecast.busy,
        "bubble": forecast.bubble,
        "bound_by": forecast.bound_by,
        "exposed_s": dict(forecast.exposed_s),
        "moving_s": forecast.moving_s,
        "moved_bytes": round(forecast.moved_bytes),
        "recomputing_s": forecast.recomputing_s,
        "memory_bytes": max(rank_bytes),
        "rank_memory_bytes": rank_bytes,
    }
