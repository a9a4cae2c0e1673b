"""``hyfi sweep --search optuna``: trains proposed settings one after the other, separately for each fold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from hyfi_core.errors import RequestError
from workflows.console import say, warn
from workflows.exit_codes import DONE, SOME_FAILED, STOPPED
from workflows.launch.request import is_finished
from workflows.own_command import run_command
from workflows.sweep.optuna_search import JOURNAL_FILE, OptunaSearch, SearchOptions, require_optuna
from workflows.sweep.settings import SweptSetting, corners
from workflows.sweep.sweep_runs import SettingScore, SweepRuns
from workflows.training.best import merit
from workflows.training.metrics_log import read_metrics


@dataclass(frozen=True)
class SearchResult:
    """The result of a search so far.

    Attributes:
        settings: The settings, in the order of their trials.
        scores: The validation score of each setting.
        code: 0, or the exit code of the run that ended the search.
    """

    settings: tuple[SweptSetting, ...]
    scores: tuple[SettingScore, ...]
    code: int


def check_search(sweep: SweepRuns, options: SearchOptions) -> None:
    """Check, before the first run, configurations with every value of the lists and both ends of the ranges.

    Raises:
        RequestError: A configuration or a run is not valid, or Optuna is not installed; nothing was written.
    """
    require_optuna()
    exists = (sweep.folder / JOURNAL_FILE).exists()
    if exists and not sweep.resumption.allowed:
        raise RequestError(f"run.dir {sweep.folder}: has a search; continue it with --resume, or use another run.dir")
    # Number −1 gives a folder that no setting has, so that settings that are trained already do not matter.
    fold = None if sweep.folds is None else -1
    settings = tuple(replace(setting, number=-1, fold=fold) for setting in corners(options.space))
    replace(sweep, settings=settings).check()
    # A journal of another search is refused now.
    if exists:
        _search(
            sweep, options, None if sweep.folds is None else sweep.fold_runs_of(SweptSetting(0, {})).chosen_folds[0]
        )


def run_search(
    sweep: SweepRuns, options: SearchOptions, tell: Callable[[SearchResult], None], fold: int | None = None
) -> SearchResult:
    """Train as many proposed settings as ``options.trials``.

    Args:
        sweep: The runs.
        options: Options of the search.
        tell: Called with the result so far, after each setting.
        fold: The fold to search for; its validation fold judges the settings, the fold itself is not read.
    """
    sweep.folder.mkdir(parents=True, exist_ok=True)
    search = _search(sweep, options, fold)
    settings: list[SweptSetting] = []
    scores: list[SettingScore] = []
    for number in range(options.trials):
        setting = search.setting(number)
        # A search may propose the same values again. Their run would be the same, so the first one's result counts.
        twin = next((earlier for earlier in settings if earlier.values == setting.values), setting)
        # Trials that are over already belong to a search that continues.
        code = DONE if search.is_over(number) else _trial(sweep, search, number, twin)
        if code not in (DONE, SOME_FAILED):
            return SearchResult(tuple(settings), tuple(scores), code)
        if twin is setting:
            settings.append(setting)
            scores.append(replace(sweep.score(_run_of(sweep, setting)), given_up=search.was_given_up(number)))
            tell(SearchResult(tuple(settings), tuple(scores), DONE))
    if all(score.step is None or score.given_up for score in scores):
        raise RequestError(f"{sweep.folder}: no setting has a checkpoint with a finite loss; choose other ranges")
    return SearchResult(tuple(settings), tuple(scores), DONE)


def _search(sweep: SweepRuns, options: SearchOptions, fold: int | None) -> OptunaSearch:
    run = sweep.config.run
    identity = {"validation.metric": sweep.metric, "run.steps": run.steps, "run.epochs": run.epochs}
    return OptunaSearch(sweep.folder, options, identity, fold)


def _trial(sweep: SweepRuns, search: OptunaSearch, number: int, setting: SweptSetting) -> int:
    """Train a setting unless it is trained already, watch its validations, and report the result to the search.

    Args:
        sweep: The runs.
        search: The search.
        number: Number of the trial.
        setting: The setting of the trial, or an equal one of an earlier trial, whose run counts for this one, too.

    Returns:
        0 if the trial has a result; otherwise the exit code of the run that ends the search.
    """
    of_fold = "" if setting.fold is None else f" for fold {setting.fold}"
    run = _run_of(sweep, setting)

    def gives_up() -> bool:
        records = [record for record in read_metrics(run / "metrics.jsonl") if record["kind"] == "validation"]
        values = [(int(record["step"]), merit(record, sweep.metric)[0]) for record in records]
        # An undefined metric has the merit −inf.
        return search.gives_up(number, [(step, value) for step, value in values if value > float("-inf")])

    if setting.number == number and not _is_finished(sweep, setting):
        say(f"setting {setting.number}{of_fold}: {setting.describe()}")
        code = run_command(_words(sweep, setting), watch=gives_up)
        # Asked again: a run may have ended by itself before the watch looked, and its records decide.
        given_up = gives_up()
        # Stopped by the user, not by `gives_up`.
        if code == STOPPED and not given_up:
            return code
        if code not in (DONE, SOME_FAILED, STOPPED):
            return code
        if given_up:
            say(f"setting {setting.number}{of_fold}: given up, worse than the median of those before at the same step")
        elif code == SOME_FAILED:
            warn(f"hyfi: setting {setting.number}{of_fold} has failed; the search goes on with what it has validated")
    else:
        if setting.number == number:
            _check_finished(sweep, setting)
        given_up = gives_up()
    score = sweep.score(run)
    search.tell(number, None if score.value is None else score.merit[0], given_up)
    return DONE


def _run_of(sweep: SweepRuns, setting: SweptSetting) -> Path:
    """Return the folder of a setting's run; with folds, of its run on the fold for which it was proposed."""
    return sweep.folder_of(setting) if setting.fold is None else sweep.fold_runs_of(setting).run_of(setting.fold)


def _is_finished(sweep: SweepRuns, setting: SweptSetting) -> bool:
    if setting.fold is None:
        return is_finished(sweep.config_of(setting))
    return sweep.fold_runs_of(setting).is_trained(setting.fold)


def _check_finished(sweep: SweepRuns, setting: SweptSetting) -> None:
    """Check that a finished setting, with which those trained now are compared, was trained on the present data."""
    from workflows.training.checks.data_record import check_finished
    from workflows.training.job import prepare

    config = (
        sweep.fold_runs_of(setting).config_of(setting.fold) if setting.fold is not None else sweep.config_of(setting)
    )
    note = check_finished(prepare(config), sweep.resumption.accepts_changes)
    if note is not None:
        say(note)


def _words(sweep: SweepRuns, setting: SweptSetting) -> list[str]:
    """Return the command that trains a setting; with folds, write the splits that it reads."""
    if setting.fold is None:
        return sweep.train_words(setting)
    runs = sweep.fold_runs_of(setting)
    runs.write_splits()
    return runs.train_words(setting.fold)
