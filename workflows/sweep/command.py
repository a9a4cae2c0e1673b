"""``hyfi sweep``: trains every setting and says which one validation prefers; test never chooses."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from typing import Any

from data.csv_table import write_table
from data.files import write_atomically
from hyfi_core.errors import RequestError
from workflows.commands.train_folds import pool_folds, run_fold
from workflows.console import counted, emit_json, plain_json, say, warn
from workflows.exit_codes import DONE
from workflows.launch.request import is_finished
from workflows.own_command import run_command
from workflows.sweep.settings import same_keys, text_of
from workflows.sweep.sweep_runs import TABLE_FILE, SettingScore, SweepRuns, chosen_of

SUMMARY_FILE = "sweep.json"


def run(sweep: SweepRuns, as_json: bool) -> int:
    """Train every setting, and write ``sweep.csv`` and ``sweep.json``.

    Returns:
        0, or the exit code of the first command that did not return 0.

    Raises:
        RequestError: The request is not valid; nothing was written.
    """
    sweep.check()
    say(
        f"{counted(len(sweep.settings), 'setting')}; validation's {sweep.metric} chooses (validation.metric), the test "
        f"{'fold' if sweep.folds else 'split'} never does"
    )
    code, summary = _one_split(sweep) if sweep.folds is None else _folds(sweep)
    if code == DONE and as_json:
        emit_json(summary)
    return code


def _one_split(sweep: SweepRuns) -> tuple[int, dict[str, Any]]:
    scores: list[SettingScore] = []
    for setting in sweep.settings:
        if not is_finished(sweep.config_of(setting)):
            say(f"setting {setting.number}: {setting.describe()}")
            code = run_command(sweep.train_words(setting))
            if code != DONE:
                return _stopped(setting.number, code), {}
        scores.append(sweep.score(sweep.folder_of(setting)))
        _write_table(sweep, [(None, scores)])
    best = chosen_of(scores)
    setting = sweep.settings[best]
    say(f"chosen: setting {setting.number} ({setting.describe()}), {scores[best].describe(sweep.metric)}")
    say(f"all settings: {sweep.folder / TABLE_FILE}")
    say(
        f"this number was chosen as the best of {len(scores)}, so it is too good; an honest one is that of the test "
        f"split: {_validate_words(sweep, scores[best])}"
    )
    chosen = {"setting": setting.values, "run": scores[best].run, "value": scores[best].value}
    return DONE, _summary(sweep, {"chosen": chosen, "metric": sweep.metric, "settings": len(scores)})


def _folds(sweep: SweepRuns) -> tuple[int, dict[str, Any]]:
    runs = [sweep.fold_runs_of(setting) for setting in sweep.settings]
    folds = runs[0].chosen
    for one, setting in zip(runs, sweep.settings, strict=True):
        one.write_splits()
        for fold in folds:
            if one.is_trained(fold):
                continue
            say(f"setting {setting.number}, fold {fold}: {setting.describe()}")
            code = run_command(one.train_words(fold))
            if code != DONE:
                return _stopped(setting.number, code), {}
    scores = {fold: [sweep.score(one.run_of(fold)) for one in runs] for fold in folds}
    _write_table(sweep, scores.items())
    chosen = {fold: chosen_of(of_fold) for fold, of_fold in scores.items()}
    for fold, number in chosen.items():
        setting, best = sweep.settings[number], scores[fold][number]
        validating = runs[0].table.validating(fold)
        say(
            f"fold {fold}: setting {setting.number} ({setting.describe()}), {best.describe(sweep.metric)}, on "
            f"fold {validating}; evaluated on fold {fold}"
        )
        code = run_fold(runs[number], fold)
        if code != DONE:
            return _stopped(setting.number, code), {}
    summary = pool_folds(
        sweep.folder, {fold: runs[number] for fold, number in chosen.items()}, len(runs[0].table.folds)
    )
    say(f"all settings: {sweep.folder / TABLE_FILE}")
    settings = {str(fold): sweep.settings[number].values for fold, number in chosen.items()}
    return DONE, _summary(sweep, {"chosen": settings, "metric": sweep.metric, **summary})


def _stopped(setting: int, code: int) -> int:
    warn(f"hyfi: setting {setting} ended with exit code {code}; the same command with --resume continues there")
    return code


def _write_table(sweep: SweepRuns, scores: Iterable[tuple[int | None, list[SettingScore]]]) -> None:
    """Write a row for each setting and fold, as far as they are known; ``scores``: of each fold, None without."""
    keys = same_keys(sweep.settings)
    rows = []
    for fold, of_fold in scores:
        best = chosen_of(of_fold)
        for setting, score in zip(sweep.settings, of_fold, strict=False):
            values = {key: text_of(setting.values[key]) for key in keys}
            value = "" if score.value is None else f"{score.value:.6f}"
            own = {"step": "" if score.step is None else score.step, "chosen": "yes" if setting.number == best else ""}
            rows.append(
                {"setting": setting.number, "fold": fold, **values, sweep.metric: value, **own, "run": score.run}
            )
    columns = ["setting", *(["fold"] if sweep.folds else []), *keys, sweep.metric, "step", "chosen", "run"]
    try:
        sweep.folder.mkdir(parents=True, exist_ok=True)
        write_table(sweep.folder / TABLE_FILE, columns, rows)
    except OSError as error:
        raise RequestError(f"{sweep.folder / TABLE_FILE}: cannot be written ({error.strerror or error})") from error


def _validate_words(sweep: SweepRuns, score: SettingScore) -> str:
    data = sweep.config.data
    words = ["hyfi", "validate", str(score.run / "checkpoints" / "best"), "--store", str(data.store)]
    for option, path in (("--labels", data.labels), ("--splits", data.splits), ("--features", data.features)):
        words += [option, str(path)] if path else []
    return shlex.join(words)


def _summary(sweep: SweepRuns, summary: dict[str, Any]) -> dict[str, Any]:
    summary = {**summary, "table": sweep.folder / TABLE_FILE}
    write_atomically(sweep.folder / SUMMARY_FILE, (json.dumps(plain_json(summary), indent=1) + "\n").encode())
    return summary
