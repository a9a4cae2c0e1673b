"""``hyfi plan``: the best plans for a configuration's model, images and batch on a machine, and why."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from hyfi_core.errors import RequestError
from workflows.commands.simulate import (
    describe,
    forecast_json,
    input_bytes_per_s,
    input_text,
    outputs_of,
    plan_text,
)
from workflows.config.load import Config, load_config
from workflows.config.run import refuse_tiles
from workflows.console import emit_json, say, warn
from workflows.exit_codes import DONE
from workflows.run_machine import default_machine, machine_of

if TYPE_CHECKING:
    from hyfi_core.cost.machine import MachineModel
    from hyfi_core.cost.search.planner import PlanSearch
    from hyfi_core.cost.step.simulator import StepForecast
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
    purpose: str = "train",
) -> int:
    """Search the best plans for ``config`` and print them.

    Args:
        config: The YAML of the run; for predictions also the folder of a checkpoint.
        overrides: ``section.key=value``, applied to it.
        machine: Name of a built-in machine model, or a file; None: see ``machine_of``.
        ranks: Number of trainers; None: those of one node.
        memory: Memory limit of a trainer, as ``16GB``; None: the memory of the machine's device.
        batch: Images in a step; None: ``data.batch_size``.
        top: Number of plans to show.
        write: Write the best plan into ``config``.
        as_json: Print the plans as one JSON object.
        purpose: train, predict or validate.

    Raises:
        RequestError: The request is not valid, or no plan fits; nothing was written.
    """
    if purpose != "train":
        return _plan_predictions(config, overrides, machine, ranks, memory, batch, top, write, as_json, purpose)
    if config.is_dir():
        raise RequestError(f"{config} is a folder; give the YAML of a run, or --for predict with a checkpoint")
    settings = load_config(config, overrides, ignore_plan=True)
    machine_model = machine_of(settings, machine)
    images = settings.data.batch_size if batch is None else batch
    if write and images != settings.data.batch_size:
        raise RequestError(
            f"--batch {batch} with --write: {config} has data.batch_size {settings.data.batch_size}; change it there "
            "first"
        )
    machine_model = machine_model if memory is None else replace(machine_model, memory_bytes=bytes_of(memory))
    ranks = ranks or machine_model.devices_per_node
    if settings.data.kind != "images":
        from workflows.tile_plans.report import bags_json, plan_bags

        bags = plan_bags(settings, machine_model, ranks, images, top)
        if write:
            _write(config, bags[0].plan)
        if as_json:
            _emit(machine_model, ranks, [bags_json(forecast) for forecast in bags])
        return DONE
    search = _search(settings, machine_model, ranks, images, top)
    _print_plans(search, settings, images, machine_model)
    if write:
        _write(config, search.plans[0].plan)
    if as_json:
        alternatives = {"alternatives": _alternatives(search)}
        _emit(machine_model, ranks, _plans_json(search, settings, images), alternatives)
    return DONE


def _plans_json(search: PlanSearch, settings: Config, images: int) -> list[dict[str, Any]]:
    """Return plans for batches of ``images`` as JSON objects."""
    return [
        {**forecast_json(forecast, images), "input_bytes_per_s": input_bytes_per_s(forecast, images, settings)}
        for forecast in search.plans
    ]


def _emit(machine: MachineModel, ranks: int, plans: list[dict[str, Any]], more: dict[str, Any] | None = None) -> None:
    """Print plans as one JSON object."""
    emit_json({"machine": machine.name, "ranks": ranks, "plans": plans, **(more or {})})


def _write(config: Path, plan: ParallelPlan) -> None:
    """Write a plan into the YAML of a run, and say so."""
    write_plan(config, plan)
    say(f"{config}: plan written")


def _plan_predictions(
    config: Path,
    overrides: list[str],
    machine: str | None,
    ranks: int | None,
    memory: str | None,
    batch: int | None,
    top: int,
    write: bool,
    as_json: bool,
    purpose: str,
) -> int:
    """Print the best ways to predict or to validate; the arguments are those of ``run``."""
    from hyfi_core.cells.prediction_plans import PredictionNeeds, prediction_plans
    from hyfi_core.cost.machines.machine_file import load_machine
    from workflows.evaluation.models import model_fields
    from workflows.evaluation.prediction_plan import EvaluatedModel, command_line, description, plans_json
    from workflows.training.memory import PROCESS_BYTES

    if purpose not in ("predict", "validate"):
        raise RequestError(f"--for {purpose}: use train, predict or validate")
    for is_given, option in ((write, "--write"), (batch is not None, "--batch")):
        if is_given:
            raise RequestError(f"{option} with --for {purpose}: it is for training; the plan is a command line")
    if config.is_dir():
        model, machine_model = EvaluatedModel.of_checkpoint(config, overrides), load_machine(machine or "cpu")
    else:
        settings = load_config(config, overrides, ignore_plan=True)
        refuse_tiles(settings, "hyfi plan")
        fields, run = model_fields(settings.model, outputs_of(settings)), settings.run
        model = EvaluatedModel(config, fields, settings.data.image_px, run.precision, run.tf32)
        machine_model = load_machine(machine or default_machine(settings))
    machine_model = machine_model.with_tf32() if model.rounds_to_tf32(purpose) else machine_model
    needs = PredictionNeeds(
        command=purpose,  # type: ignore[arg-type]
        ranks=ranks or machine_model.devices_per_node,
        machine=machine_model,
        memory_bytes=machine_model.memory_bytes if memory is None else bytes_of(memory),
        held_bytes=PROCESS_BYTES,
        # `hyfi predict` computes in float32, whatever the training did.
        dtype="bfloat16" if purpose == "validate" and model.precision == "bfloat16" else None,
    )
    search = prediction_plans(model.program(), needs)
    say(f"machine: {machine_model.name}; {needs.ranks} ranks, images of {model.size_px[0]} x {model.size_px[1]}")
    for number, forecast in enumerate(search.plans[:top], 1):
        slower = f" ({forecast.each_s / search.plans[0].each_s:.2f}× as long as the first)" if number > 1 else ""
        first, *lines = description(forecast, needs)
        say(f"\n{number}. {first}{slower}")
        for line in (*lines, " ".join(command_line(model, needs, forecast))):
            say(f"   {line}")
    for name, why in search.refused.items():
        say(f"{name}: {why}")
    if as_json:
        emit_json(plans_json(model, needs, search, top))
    return DONE


def _search(settings: Config, machine: MachineModel, ranks: int, images: int, top: int) -> PlanSearch:
    """Return the ``top`` best plans for ``ranks`` trainers and batches of ``images``."""
    from hyfi_core.cells.spill_forecast import SpillForecast
    from hyfi_core.cost.search.branch_plans import best_of_all_plans
    from hyfi_core.cost.search.plan_family import PlanRequest
    from workflows.evaluation.programs import ModelPrograms
    from workflows.training.memory import PROCESS_BYTES

    programs = ModelPrograms(settings, outputs_of(settings))
    request = PlanRequest(
        ranks=ranks,
        batch=images,
        machine=machine,
        memory_bytes=machine.memory_bytes,
        held_bytes=PROCESS_BYTES,
        dtype=programs.autocast_dtype,
        # All that the search does not choose itself comes from the configuration.
        base=replace(settings.plan.build(), grids=((1, 1),), cuts="auto", interleave=1, recompute=False),
        # What a GPU spills goes to the host's memory; on CPUs any folder does for a forecast.
        spill="memory" if machine.device == "cuda" else ".",
        spills=SpillForecast(machine, PROCESS_BYTES),
    )
    with _without_collections():
        return best_of_all_plans(programs.of, request, top)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Disable Python's cyclic garbage collector: it would scan the millions of objects that the search keeps."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def chosen_plan(config: Path, overrides: list[str], ranks: int | None, resume: bool) -> list[str]:
    """Return overrides that replace ``plan: auto`` by the best plan for this node.

    A resumed run keeps its first plan, because other micro-batches would change the result.

    Args:
        config: The YAML of the run.
        overrides: Those of the command line.
        ranks: Number of ranks of the whole run, loaders and validators included; None: one for each core or GPU.
        resume: Whether the run may have been started before.

    Raises:
        RequestError: No plan fits, or the roles leave no rank to train.
    """
    settings = load_config(config, overrides, ignore_plan=True)
    saved = settings.run.dir / "config.yaml"
    if resume and saved.is_file():
        return _as_overrides(load_config(saved).plan.build())
    machine, devices = _this_node(settings)  # with the free memory of one device
    if settings.roles.by_host or settings.roles.design == "offload_naive":
        raise RequestError("plan: auto needs roles by number, and no spare ranks; write the plan: hyfi plan … --write")
    helpers = settings.ranks - settings.trainers  # loaders and validators
    # At least one trainer, even on a node with fewer devices than roles.
    trainers = (ranks or max(devices, helpers + 1)) - helpers
    if trainers < 1:
        raise RequestError(f"--ranks {ranks}: loaders and validators take {helpers}, and none is left to train")
    # Several trainers may share a device, and so its memory.
    machine = replace(machine, memory_bytes=machine.memory_bytes // max(1, -(-trainers // devices)))
    if settings.data.kind != "images":
        from workflows.tile_plans.report import plan_bags

        return _as_overrides(plan_bags(settings, machine, trainers, settings.data.batch_size, top=1)[0].plan)
    search = _search(settings, machine, trainers, settings.data.batch_size, top=1)
    _print_plans(search, settings, settings.data.batch_size, machine)
    return _as_overrides(search.plans[0].plan)


def _this_node(settings: Config) -> tuple[MachineModel, int]:
    """Return (the machine model with this node's number of devices and free memory, that number of devices)."""
    import torch

    from data.cores import usable_cores
    from hyfi_core.process_memory import available_bytes

    machine = machine_of(settings, None)
    if machine.device == "cuda" and torch.cuda.is_available():
        devices, memory_bytes = torch.cuda.device_count(), torch.cuda.mem_get_info()[0]
    else:
        devices = usable_cores()
        # `devices` are the cores: one rank on each.
        memory_bytes = available_bytes() // devices
    return replace(machine, devices_per_node=devices, memory_bytes=memory_bytes), devices


def _as_overrides(plan: ParallelPlan) -> list[str]:
    return [f"plan.{key}={json.dumps(value)}" for key, value in _plan_section(plan).items()]


def _plan_section(plan: ParallelPlan) -> dict[str, Any]:
    """Return the section ``plan`` of a configuration: the fields of this plan that differ from their defaults."""
    defaults = type(plan)(grids=((1, 1),)).to_json()
    # Always written, even if it is the default: it says whether images or tiles are planned.
    needed = "grids" if plan.tiles is None else "tiles"
    return {k: v for k, v in plan.to_json().items() if k == needed or (v != defaults[k] and k != "grids")}


def bytes_of(text: str) -> int:
    """Return the bytes of ``16GB``, ``16G`` or ``16000000000``.

    Raises:
        RequestError: ``text`` is not an amount of memory.
    """
    from pathology.memory import parse_bytes

    try:
        amount = parse_bytes(text)  # takes what the options of all other commands take
    except RequestError:
        amount = 0  # refused below, with the name of this option
    if amount < 1:
        raise RequestError(f"--memory {text!r}: not an amount; write it like 16GB, 800MB or 16000000000")
    return amount


def write_plan(config: Path, plan: ParallelPlan) -> None:
    """Replace the plan in a run's YAML; everything else stays as it is, comments included.

    Raises:
        RequestError: The plan in the file is not written as one section, or the file with the plan in it is no
            configuration of a run; nothing was changed.
    """
    import tempfile

    from data.files import write_atomically

    lines = config.read_text(encoding="utf-8").splitlines()
    # Replace lines[first:after]; without a plan in the file, it goes to the end.
    first = next((n for n, line in enumerate(lines) if line.startswith("plan:")), len(lines))
    after = first + 1
    # A section goes on as long as lines are empty or indented.
    while after < len(lines) and (not lines[after].strip() or lines[after][0] in " \t"):
        after += 1
    while after > first + 1 and after <= len(lines) and not lines[after - 1].strip():
        after -= 1  # empty lines before the next section stay
    # On one line: PyYAML would wrap it at 80 characters.
    fields = yaml.safe_dump(_plan_section(plan), default_flow_style=True, sort_keys=False, width=10**6).strip()
    text = "\n".join([*lines[:first], f"plan: {fields}", *lines[after:]]) + "\n"
    # The lines were replaced as text, to keep comments: read the result as a run would before it replaces the file.
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as trial:
        trial.write(text)
        trial.flush()
        try:
            written = load_config(Path(trial.name)).plan.build()
        except RequestError as error:
            # Such as a key that an override gave, or a section with a comment that is not indented.
            reason = str(error).removeprefix(f"{trial.name}: ")
            raise RequestError(f"{config}: the plan cannot be written into it: {reason}") from None
        if written != plan:
            raise RequestError(f"{config}: its plan is not one section; write it as `plan: {{…}}` in one place")
    write_atomically(config, text.encode())


def _print_plans(search: PlanSearch, settings: Config, batch: int, machine: MachineModel) -> None:
    """Print the plans, and what other kinds of plans would take."""
    say(f"machine: {machine.name}; {search.candidates} plans, {search.simulated} simulated")
    for number, forecast in enumerate(search.plans, 1):
        say(f"\n{number}. {plan_text(forecast.plan)}")
        for line in (*describe(forecast, batch, machine), input_text(forecast, batch, settings)):
            say(f"   {line}")
    best = search.plans[0]
    for name, alternative in search.alternatives.items():
        say(f"{name}: {alternative if isinstance(alternative, str) else _comparison(alternative, best)}")
    configured = settings.plan
    # Batch norm then normalises other groups of images together, which changes the results of the run.
    changed = (best.plan.replicas, best.plan.microbatches) != (configured.replicas, configured.microbatches)
    if changed and settings.model.norm == "train":
        warn(
            "hyfi: batch norm takes its statistics over each replica's micro-batch, now "
            f"{batch // best.plan.replicas // best.plan.microbatches} image(s); model.norm=group or frozen does not"
        )


def _comparison(alternative: StepForecast, best: StepForecast) -> str:
    """Return how much slower an alternative is, and the main reason: ``1.3× slower, halo takes 20%``."""
    ratio = alternative.step_s / best.step_s
    if ratio < 1.005:
        return "as fast as the best plan"
    share_of_step = {f"{kind} takes": seconds / alternative.step_s for kind, seconds in alternative.exposed_s.items()}
    share_of_step["ranks wait"] = alternative.bubble
    reason = max(share_of_step, key=lambda text: share_of_step[text])
    digits = 2 if ratio < 1.1 else 1  # "1.0×" would say that it is as fast
    slower = f"{ratio:.{digits}f}× slower"
    return f"{slower}, {reason} {share_of_step[reason]:.0%}" if share_of_step[reason] >= 0.05 else slower


def _alternatives(search: PlanSearch) -> dict[str, Any]:
    """Return the alternatives as ``--json`` prints them."""
    return {
        name: {"refused": alternative}
        if isinstance(alternative, str)
        else {"step_s": alternative.step_s, "bubble": alternative.bubble}
        for name, alternative in search.alternatives.items()
    }
