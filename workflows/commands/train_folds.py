"""``hyfi train --folds``: trains and evaluates a model for each fold, and reports all slides together."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.files import write_atomically
from hyfi_core.errors import RequestError
from workflows.console import emit_json, plain_json, say, warn
from workflows.cross_validation.fold_runs import FoldRuns
from workflows.exit_codes import DONE, SOME_FAILED
from workflows.own_command import run_command

if TYPE_CHECKING:
    from workflows.cross_validation.pooled import PooledFolds

SUMMARY_FILE = "folds.json"


def run(runs: FoldRuns, as_json: bool) -> int:
    """Train and evaluate the chosen folds, one after the other, and pool all folds that are finished.

    Args:
        runs: The request.
        as_json: Print the summary as one JSON object.

    Returns:
        0, or the exit code of the first command that did not return 0.

    Raises:
        RequestError: The request is not valid; nothing was written.
    """
    # All folds before the first is trained: otherwise a fault of the last one would show after days.
    runs.check()
    runs.write_splits()
    for fold in runs.chosen_folds:
        say(f"fold {fold}: reported on fold {fold}, best checkpoint chosen on fold {runs.table.validating(fold)}")
        code = run_fold(runs, fold)
        if code != DONE:
            # A run whose loss is not finite ends with this code: it would meet the same numbers again.
            mended = " once the cause is mended (optimizer.lr, run.on_nonfinite)," if code == SOME_FAILED else ""
            warn(
                f"hyfi: fold {fold} ended with exit code {code};{mended} the same command with --resume continues "
                "there, and keeps the folds that are finished"
            )
            return code
    summary = _pool(runs)
    if as_json:
        emit_json(summary)
    return DONE


def run_fold(runs: FoldRuns, fold: int) -> int:
    """Train and evaluate a fold, as far as it is not done; return the exit code."""
    if not runs.is_trained(fold):
        code = run_command(runs.train_words(fold))
        if code != DONE:
            return code
    # A fold that is trained and not evaluated was interrupted between the two.
    is_current = runs.is_evaluated(fold) and not runs.was_relabelled(fold)
    return DONE if is_current else run_command(runs.validate_words(fold))


def _pool(runs: FoldRuns) -> Mapping[str, Any]:
    """Write and print the pooled results of all finished folds; those evaluated with other labels are left out."""
    finished: list[int] = []
    summary: Mapping[str, Any] = {}

    def evaluated() -> list[int]:
        return [fold for fold in runs.table.folds if runs.is_trained(fold) and runs.is_evaluated(fold)]

    def finished_now() -> list[int]:
        return [fold for fold in evaluated() if not runs.was_relabelled(fold)]

    # If another job of an array finishes a fold meanwhile, this job may overwrite its summary: repeat with that fold.
    while (latest := finished_now()) != finished:
        finished = latest
        # Here all folds are of the same runs; in a sweep, each may be of other ones.
        runs_of = dict.fromkeys(finished, runs)
        summary = pool_folds(runs.folder, runs_of, folds=len(runs.table.folds))
    if outdated := [str(fold) for fold in evaluated() if fold not in finished]:
        warn(
            f"note: left out, as they were evaluated with other labels: folds {', '.join(outdated)}; --folds "
            f"{','.join(outdated)} with --resume and --accept-data-changes evaluates them again"
        )
    return summary


def pool_folds(folder: Path, runs_of: Mapping[int, FoldRuns], folds: int) -> Mapping[str, Any]:
    """Write and print the pooled results of some folds.

    Args:
        folder: Folder for the results.
        runs_of: Fold -> the runs that include its run.
        folds: Number of all folds.

    Raises:
        RequestError: A file cannot be written.
    """
    from workflows.cross_validation.pooled import FoldResult, PooledFolds

    results = [FoldResult.read(fold, runs.checkpoint_of(fold), runs.test_of(fold)) for fold, runs in runs_of.items()]
    pooled = PooledFolds(results)
    # All folds have the same store.
    store = Path(next(iter(runs_of.values())).config.data.store)
    try:
        summary = pooled.write(folder, store, folds)
        write_atomically(folder / SUMMARY_FILE, (json.dumps(plain_json(summary), indent=1) + "\n").encode())
    except OSError as error:
        raise RequestError(f"{folder}: cannot be written ({error.strerror or error})") from error
    _print(pooled, summary)
    return summary


def _print(pooled: PooledFolds, summary: Mapping[str, Any]) -> None:
    """Print the metrics over all folds, and the command that predicts with all models."""
    count, total = len(pooled.results), summary["of"]
    say(
        f"{count} of {total} folds, {summary['slides']} slides of {summary['cases']} cases, each predicted by the "
        "model of its fold (in brackets: 95 % interval, cases resampled; ±: standard deviation over folds):"
    )
    names = dict.fromkeys((*summary["pooled"], *summary["spread"]))
    width = max(18, *map(len, names))
    for name in names:
        all_slides, folds = summary["pooled"].get(name), summary["spread"].get(name)
        parts = [] if all_slides is None else [f"all slides {_pooled(all_slides)}"]
        parts += [] if folds is None else [_spread(folds, count)]
        say(f"  {name:<{width}} {', '.join(parts)}")
    say(f"all slides: {summary['page']}, {summary['predictions']}")
    if summary["ensemble"] and count > 1:
        first, *more = summary["ensemble"]
        words = ["hyfi", "predict", first, *(word for checkpoint in more for word in ("--checkpoint", checkpoint))]
        say(f"the models of the folds as an ensemble: {shlex.join(words)} SLIDES --out results")
    elif count > 1:
        say(
            "the models of the folds do not form an ensemble: they predict different numbers, such as survival at "
            "other times"
        )


def _spread(folds: Mapping[str, Any], count: int) -> str:
    """Return mean and standard deviation over folds as text, and how many define the metric if not all do."""
    if not folds["folds"]:
        return "undefined in every fold"
    of_some = "" if folds["folds"] == count else f" ({folds['folds']} of {count} define it)"
    spread = "" if folds["sd"] is None else f" ± {folds['sd']:.4f}"
    return f"folds {_number(folds['mean'])}{spread}{of_some}"


def _number(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.4f}"


def _pooled(number: Mapping[str, Any]) -> str:
    if number["value"] is None:
        return "undefined"
    bounds = number["interval"]
    interval = "interval undefined" if bounds is None else f"{bounds[0]:.4f} to {bounds[1]:.4f}"
    return f"{_number(number['value'])} ({interval})"
