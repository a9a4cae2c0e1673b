"""``hyfi sweep``: trains every setting and prints the one that validation prefers; the test split never chooses."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from data.csv_table import write_table
from data.files import write_atomically
from hyfi_core.errors import RequestError
from workflows.commands.train_folds import pool_folds, run_fold
from workflows.console import counted, emit_json, plain_json, say, warn
from workflows.cross_validation.fold_runs import FoldRuns
from workflows.exit_codes import DONE, SOME_FAILED
from workflows.launch.request import is_finished
from workflows.own_command import run_command
from workflows.sweep.optuna_search import SearchOptions
from workflows.sweep.search_command import SearchResult, check_search, run_search
from workflows.sweep.settings import SweptSetting, same_keys, text_of
from workflows.sweep.sweep_runs import TABLE_FILE, SettingScore, SweepRuns, chosen_of

SUMMARY_FILE = "sweep.json"
_Tried = tuple[int | None, Sequence[SweptSetting], Sequence[SettingScore]]
"""(Fold or None, settings, validation scores of the settings)."""


def run(sweep: SweepRuns, as_json: bool, search: SearchOptions | None = None) -> int:
    """Train every setting, and write ``sweep.csv`` and ``sweep.json``.

    Args:
        sweep: The runs; without settings if they are searched.
        as_json: Print the summary as one JSON object.
        search: Options of the search; None: the settings of ``sweep`` are trained.

    Returns:
        0; 1 if a setting has failed; or the exit code of the command that ended the sweep.

    Raises:
        RequestError: The request is not valid, and nothing was written; or no setting has a usable checkpoint.
    """
    if search is None:
        sweep.check()
    else:
        check_search(sweep, search)
    number = len(sweep.settings) if search is None else search.trials
    each = " for each fold" if search is not None and sweep.folds else ""
    say(
        f"{counted(number, 'setting')}{each}; validation's {sweep.metric} chooses (validation.metric), the test "
        f"{'fold' if sweep.folds else 'split'} never does"
    )
    if search is not None:
        code, summary = _searched_split(sweep, search) if sweep.folds is None else _searched_folds(sweep, search)
    else:
        code, summary = _one_split(sweep) if sweep.folds is None else _folds(sweep)
    if code in (DONE, SOME_FAILED) and as_json and summary:
        emit_json(summary)
    return code


def _one_split(sweep: SweepRuns) -> tuple[int, dict[str, Any]]:
    """Train and score all settings; return the exit code, and what ``--json`` prints."""
    scores: list[SettingScore] = []
    failed: list[int] = []
    for setting in sweep.settings:
        if not is_finished(sweep.config_of(setting)):
            say(f"setting {setting.number}: {setting.describe()}")
            code = run_command(sweep.train_words(setting))
            if code not in (DONE, SOME_FAILED):
                return _stopped(setting.number, code), {}
            if code == SOME_FAILED:
                failed.append(setting.number)
                _warn_of_failed(f"setting {setting.number}")
        scores.append(sweep.score(sweep.folder_of(setting)))
        # After each setting, so that a stopped sweep has a table.
        _write_table(sweep, [(None, sweep.settings, scores)])
    _require_usable_score(scores, str(sweep.folder))
    return SOME_FAILED if failed else DONE, _report_split(sweep, scores)


def _searched_split(sweep: SweepRuns, search: SearchOptions) -> tuple[int, dict[str, Any]]:
    """Search settings for one split; return the exit code, and what ``--json`` prints."""
    result = run_search(sweep, search, lambda so_far: _write_table(sweep, [(None, so_far.settings, so_far.scores)]))
    if result.code != DONE:
        return _stopped(len(result.settings), result.code), {}
    return DONE, _report_split(replace(sweep, settings=result.settings), result.scores)


def _report_split(sweep: SweepRuns, scores: Sequence[SettingScore]) -> dict[str, Any]:
    """Print which setting is chosen, and return the summary."""
    best = chosen_of(scores)
    setting = sweep.settings[best]
    say(f"chosen: setting {setting.number} ({setting.describe()}), {scores[best].describe(sweep.metric)}")
    say(f"all settings: {sweep.folder / TABLE_FILE}")
    say(
        f"this number was chosen as the best of {len(scores)}, so it is optimistic; the test split gives an unbiased "
        f"one: {_validate_words(sweep, scores[best])}"
    )
    chosen = {"setting": setting.values, "run": scores[best].run, "value": scores[best].value}
    return _summary(sweep, {"chosen": chosen, "metric": sweep.metric, "settings": len(scores)})


def _folds(sweep: SweepRuns) -> tuple[int, dict[str, Any]]:
    """Train and score all settings in each fold; return the exit code, and what ``--json`` prints."""
    runs = [sweep.fold_runs_of(setting) for setting in sweep.settings]
    folds = runs[0].chosen_folds
    failed: list[int] = []
    # Trained on all folds first, evaluated on none: the test fold is read only after the choice.
    for setting_runs, setting in zip(runs, sweep.settings, strict=True):
        setting_runs.write_splits()
        for fold in folds:
            if setting_runs.is_trained(fold):
                continue
            say(f"setting {setting.number}, fold {fold}: {setting.describe()}")
            code = run_command(setting_runs.train_words(fold))
            if code not in (DONE, SOME_FAILED):
                return _stopped(setting.number, code), {}
            if code == SOME_FAILED:
                failed.append(setting.number)
                _warn_of_failed(f"setting {setting.number}, fold {fold},")
    # Fold -> scores of the settings.
    scores_of = {fold: [sweep.score(setting_runs.run_of(fold)) for setting_runs in runs] for fold in folds}
    _write_table(sweep, [(fold, sweep.settings, scores) for fold, scores in scores_of.items()])
    for fold, scores in scores_of.items():
        _require_usable_score(scores, f"{sweep.folder}, fold {fold}")
    code, summary = _report_folds(sweep, {fold: (sweep.settings, scores) for fold, scores in scores_of.items()})
    return SOME_FAILED if failed and code == DONE else code, summary


def _searched_folds(sweep: SweepRuns, search: SearchOptions) -> tuple[int, dict[str, Any]]:
    """Search settings in each fold; return the exit code, and what ``--json`` prints."""
    results: dict[int, SearchResult] = {}
    # Any setting will do: settings may not change the slides, so all have the same folds.
    for fold in sweep.fold_runs_of(SweptSetting(0, {})).chosen_folds:
        finished: list[_Tried] = [(earlier, result.settings, result.scores) for earlier, result in results.items()]

        # Defaults, because a closure would see the fold of the last round.
        def tell(so_far: SearchResult, fold: int = fold, finished: Sequence[_Tried] = finished) -> None:
            _write_table(sweep, [*finished, (fold, so_far.settings, so_far.scores)])

        results[fold] = run_search(sweep, search, tell, fold)
        if results[fold].code != DONE:
            return _stopped(len(results[fold].settings), results[fold].code), {}
    return _report_folds(sweep, {fold: (result.settings, result.scores) for fold, result in results.items()})


def _report_folds(
    sweep: SweepRuns, tried: Mapping[int, tuple[Sequence[SweptSetting], Sequence[SettingScore]]]
) -> tuple[int, dict[str, Any]]:
    """Evaluate each fold with the setting that its validation fold has chosen, and pool all folds.

    Args:
        sweep: The runs.
        tried: Fold -> (settings, their validation scores).

    Returns:
        (exit code, what ``--json`` prints).
    """
    chosen: dict[int, SweptSetting] = {}
    runs: dict[int, FoldRuns] = {}
    for fold, (settings, scores) in tried.items():
        best = chosen_of(scores)
        setting = chosen[fold] = settings[best]
        runs[fold] = sweep.fold_runs_of(setting)
        say(
            f"fold {fold}: setting {setting.number} ({setting.describe()}), {scores[best].describe(sweep.metric)}, on "
            f"fold {runs[fold].table.validating(fold)}; evaluated on fold {fold}"
        )
        code = run_fold(runs[fold], fold)
        if code != DONE:
            return _stopped(setting.number, code), {}
    summary = pool_folds(sweep.folder, runs, len(next(iter(runs.values())).table.folds))
    say(f"all settings: {sweep.folder / TABLE_FILE}")
    values = {str(fold): setting.values for fold, setting in chosen.items()}
    return DONE, _summary(sweep, {"chosen": values, "metric": sweep.metric, **summary})


def _stopped(setting: int, code: int) -> int:
    """Say that a command of this setting did not return 0, and return its exit code."""
    warn(f"hyfi: setting {setting} ended with exit code {code}; the same command with --resume continues there")
    return code


def _warn_of_failed(run: str) -> None:
    """Say that numbers of a run were not finite: a sweep is there to find such settings, and goes on."""
    warn(f"hyfi: {run} has failed; the sweep goes on with what it has validated")


def _require_usable_score(scores: Sequence[SettingScore], where: str) -> None:
    """Check that a setting can be chosen.

    Raises:
        RequestError: None has a checkpoint with a finite loss.
    """
    if all(score.step is None for score in scores):
        raise RequestError(f"{where}: no setting has a checkpoint with a finite loss; choose other settings")


def _write_table(sweep: SweepRuns, tried: Sequence[_Tried]) -> None:
    """Write a row for each setting and fold that has a score; ``tried``: (fold, settings, scores) of each fold."""
    keys = same_keys(tried[0][1])
    rows = []
    for fold, settings, scores in tried:
        best = settings[chosen_of(scores)].number
        # Fewer scores than settings while a sweep goes on.
        for setting, score in zip(settings, scores, strict=False):
            row: dict[str, object] = {"setting": setting.number, "fold": fold, "run": score.run}
            row |= {key: text_of(setting.values[key]) for key in keys}
            row |= {sweep.metric: "" if score.value is None else f"{score.value:.6f}", "step": score.step}
            row |= {
                "chosen": "yes" if setting.number == best and score.step is not None else "",
                "given_up": "yes" if score.given_up else "",
            }
            rows.append(row)
    columns = ["setting", *(["fold"] if sweep.folds else []), *keys, sweep.metric, "step", "chosen", "given_up", "run"]
    try:
        sweep.folder.mkdir(parents=True, exist_ok=True)
        write_table(sweep.folder / TABLE_FILE, columns, rows)
    except OSError as error:
        raise RequestError(f"{sweep.folder / TABLE_FILE}: cannot be written ({error.strerror or error})") from error


def _validate_words(sweep: SweepRuns, score: SettingScore) -> str:
    """Return the command line that evaluates the best checkpoint of a setting on the test split."""
    data = sweep.config.data
    words = ["hyfi", "validate", str(score.run / "checkpoints" / "best"), "--store", str(data.store)]
    for option, path in (("--labels", data.labels), ("--splits", data.splits), ("--features", data.features)):
        words += [option, str(path)] if path else []
    return shlex.join(words)


def _summary(sweep: SweepRuns, summary: dict[str, Any]) -> dict[str, Any]:
    """Write ``sweep.json``, and return its content: the summary and the path of the table."""
    summary = {**summary, "table": sweep.folder / TABLE_FILE}
    write_atomically(sweep.folder / SUMMARY_FILE, (json.dumps(plain_json(summary), indent=1) + "\n").encode())
    return summary
