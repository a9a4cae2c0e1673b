"""The options of ``hyfi sweep``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from workflows.cli_exit import exit_with
from workflows.cli_options import Config, FoldColumn, Json, Overrides, PlanRanks

Settings = Annotated[
    Path, typer.Argument(metavar="SETTINGS.yaml", help="Keys with lists of values: optimizer.lr: [1e-3, 1e-4].")
]
Trials = Annotated[
    int | None,
    typer.Option("--trials", min=1, help="Number of random or searched settings; default: every combination."),
]
Search = Annotated[
    str | None,
    typer.Option(
        "--search",
        metavar="grid|random|optuna",
        help="grid: every combination; random; optuna: each proposed from earlier results (pip install "
        "'hyfi[sweep]'). Default: grid, or random with --trials.",
    ),
]
Prune = Annotated[
    bool,
    typer.Option("--prune", help="With optuna: stop settings that are worse than the median at the same step."),
]
SweepFolds = Annotated[
    str | None,
    typer.Option("--folds", metavar="all|K,K", help="Choose a setting for each fold, by its validation fold only."),
]


def sweep(
    config: Config,
    settings: Settings,
    overrides: Overrides = None,
    trials: Trials = None,
    search: Search = None,
    prune: Prune = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of random or searched settings.")] = 0,
    ranks: PlanRanks = None,
    folds: SweepFolds = None,
    fold_column: FoldColumn = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a stopped sweep, or start it.")] = False,
    as_json: Json = False,
) -> None:
    """Train with several settings, and choose by validation; the test split is never used."""

    def body() -> int:
        from workflows.console import ignore_closed_stdout
        from workflows.launch.resumption import Resumption
        from workflows.sweep import command
        from workflows.sweep.optuna_search import requested_settings
        from workflows.sweep.sweep_runs import SweepRuns

        # It goes on when nobody reads its output any more, as in ``hyfi sweep … | head``: its results are files.
        ignore_closed_stdout()
        chosen, searched = requested_settings(settings, search, trials, seed, prune)
        resumption = Resumption(allowed=resume)
        runs = SweepRuns(config, tuple(overrides or ()), ranks, resumption, chosen, folds, fold_column)
        return command.run(runs, as_json, searched)

    exit_with(body)
