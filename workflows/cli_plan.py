"""The options of ``hyfi plan`` and ``hyfi simulate``; implemented in :mod:`workflows.commands`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from workflows import signals
from workflows.cli_options import Config, Json, MachineName, Overrides
from workflows.exit_codes import exit_code_of

PlanSource = Annotated[
    Path, typer.Argument(metavar="CONFIG|CHECKPOINT", help="The run's YAML; for predictions also a checkpoint.")
]


def plan(
    config: PlanSource,
    overrides: Overrides = None,
    machine: MachineName = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", min=1, help="Number of trainers; default: those of one node.")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option("--memory", metavar="16GB", help="Memory limit of a trainer; default: the device's memory."),
    ] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", min=1, help="Images in a step; default: data.batch_size.")
    ] = None,
    top: Annotated[int, typer.Option("--top", min=1, help="How many plans to show.")] = 5,
    write: Annotated[bool, typer.Option("--write", help="Put the best plan into CONFIG.yaml.")] = False,
    purpose: Annotated[
        str,
        typer.Option(
            "--for",
            metavar="train|predict|validate",
            help="What to plan; predictions also for a checkpoint, with data.size_px=N for slides of that size.",
        ),
    ] = "train",
    as_json: Json = False,
) -> None:
    """Find the best plans for the configuration's model and images on a machine, and say why others are worse."""
    from workflows.commands import plan

    raise typer.Exit(
        exit_code_of(
            partial(
                plan.run, config, list(overrides or ()), machine, ranks, memory, batch, top, write, as_json, purpose
            ),
            signals.interrupt_on_request,
        )
    )


def simulate(
    config: Config,
    overrides: Overrides = None,
    machine: MachineName = None,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", min=1, help="Number of trainers, in additional replicas; default: the plan's."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE.json", help="Write a trace of the step for Perfetto.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Forecast time, memory and communication of the configuration's plan on a machine, without running it."""
    from workflows.commands import simulate

    raise typer.Exit(exit_code_of(partial(simulate.run, config, list(overrides or ()), machine, ranks, trace, as_json)))
