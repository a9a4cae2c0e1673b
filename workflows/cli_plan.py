"""The commands that forecast runs: their options; what they do is in :mod:`workflows.commands`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from workflows import signals
from workflows.cli_options import Config, Json, MachineName, Overrides
from workflows.exit_codes import exit_code_of


def plan(
    config: Config,
    overrides: Overrides = None,
    machine: MachineName = None,
    ranks: Annotated[int | None, typer.Option("--ranks", min=1, help="Trainers; default: those of one node.")] = None,
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="16GB", help="What a trainer may need; default: the device's.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", min=1, help="Images of a step; default: data.batch_size.")
    ] = None,
    top: Annotated[int, typer.Option("--top", min=1, help="How many plans to show.")] = 5,
    write: Annotated[bool, typer.Option("--write", help="Put the best plan into CONFIG.yaml.")] = False,
    as_json: Json = False,
) -> None:
    """Find the best plans for the configuration's model and images on a machine, and say why others lose."""
    from workflows.commands import plan

    raise typer.Exit(
        exit_code_of(
            partial(plan.run, config, list(overrides or ()), machine, ranks, memory, batch, top, write, as_json),
            signals.interrupt_on_request,
        )
    )


def simulate(
    config: Config,
    overrides: Overrides = None,
    machine: MachineName = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", min=1, help="Trainers, in further replicas; default: the plan's.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE.json", help="Write the step for Perfetto.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what the configuration's plan will take on a machine: time, memory, communication; nothing is run."""
    from workflows.commands import simulate

    raise typer.Exit(exit_code_of(partial(simulate.run, config, list(overrides or ()), machine, ranks, trace, as_json)))
