"""The commands that forecast runs: their options; what they do is in :mod:`workflows.commands`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from workflows.cli_options import Config, Json, MachineName, Overrides
from workflows.exit_codes import exit_code_of


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
