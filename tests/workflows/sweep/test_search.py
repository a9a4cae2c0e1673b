"""Searches for settings by Optuna: reproducible, resumable, and judged by validation only."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hyfi_core.errors import RequestError
from tests.workflows.archive import SPLITS, make_config
from workflows.config.load import dump_resolved, load_config
from workflows.cross_validation.fold_runs import FoldRuns
from workflows.launch.resumption import Resumption
from workflows.sweep import command, search_command
from workflows.sweep.optuna_search import OptunaSearch, SearchOptions, requested_settings
from workflows.sweep.sweep_runs import SweepRuns

pytest.importorskip("optuna")
SPACE: dict[str, Any] = {
    "optimizer.lr": {"low": "1e-5", "high": 1e-1, "log": True},
    "optimizer.momentum": [0.0, 0.9],
}


def auroc_of(values: dict[str, str]) -> float:
    """Best near a rate of 3e-3, with momentum; a little worse on other validation folds."""
    rate, momentum = float(values["optimizer.lr"]), float(values["optimizer.momentum"])
    fold = int(json.loads(values.get("data.split_column", '"0"'))[-1]) if "data.split_column" in values else 0
    return 0.95 - 0.1 * abs(math.log10(rate / 3e-3)) - 0.05 * (momentum == 0) - 0.001 * fold


def sweep_of(folder: Path, store: Path, resume: bool = False, **keys: Any) -> SweepRuns:
    with (folder / "labels.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("slide_id", "label", "split", "fold"))
        rows.writerows((f"slide-{k:02d}", "ab"[k // 3 % 2], split, k % 3) for k, split in enumerate(SPLITS))
    path = make_config(folder, store, data={"labels": str(folder / "labels.csv"), "class_weights": "none"})
    return SweepRuns(path, (), None, Resumption.of(resume, None, False), (), **keys)


Commands = list[Sequence[str]]


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    """Commands of training, which write the validations of their setting until they are stopped."""
    started: Commands = []

    def run_command(words: Sequence[str], watch: Callable[[], bool] | None = None) -> int:
        started.append(words)
        given = dict(word.split("=", 1) for word in words[2:] if "=" in word)
        run = Path(json.loads(given["run.dir"]))
        (run / "checkpoints").mkdir(parents=True, exist_ok=True)
        config = load_config(Path(words[1]), [word for word in words[2:] if "=" in word], ignore_plan=True)
        (run / "config.yaml").write_text(dump_resolved(config))
        lines = ""
        for step in (1, 2, 3):
            record = {"kind": "validation", "step": step, "loss": 1.0, "auroc": auroc_of(given) - 0.1 / step}
            lines += json.dumps(record) + "\n"
            (run / "metrics.jsonl").write_text(lines)
            if watch is not None and watch():
                (run / "status.json").write_text('{"state": "stopped"}')
                return 3
        (run / "status.json").write_text('{"state": "done"}')
        return 0

    monkeypatch.setattr(search_command, "run_command", run_command)
    return started


def rows_of(run: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((run / "sweep.csv").open()))


def test_proposals_learn_from_validation_and_a_stopped_search_goes_on_as_if_it_had_not_been(
    tmp_path: Path, store: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("whole", "halves"):
        (tmp_path / name).mkdir()
    whole, halves = (sweep_of(tmp_path / name, store) for name in ("whole", "halves"))
    assert command.run(whole, False, SearchOptions(SPACE, 25, 1)) == 0
    rows = rows_of(tmp_path / "whole/run")
    rates = [float(row["optimizer.lr"]) for row in rows]
    distances = [abs(math.log10(rate / 3e-3)) for rate in rates]
    assert sum(distances[15:]) / len(distances[15:]) < 0.7  # of uniform draws 1.06
    [chosen] = [row for row in rows if row["chosen"]]
    assert float(chosen["auroc"]) == max(float(row["auroc"]) for row in rows) and float(chosen["auroc"]) > 0.85
    with monkeypatch.context() as patch:  # the fourteenth is stopped by the user
        run_command, calls = search_command.run_command, []

        def stopping(words: Sequence[str], watch: Callable[[], bool] | None = None) -> int:
            calls.append(words)
            return 3 if len(calls) == 14 else run_command(words, watch=watch)

        patch.setattr(search_command, "run_command", stopping)
        assert command.run(halves, False, SearchOptions(SPACE, 25, 1)) == 3
    with pytest.raises(RequestError, match="continue it with --resume"):
        command.run(halves, False, SearchOptions(SPACE, 25, 1))
    again = replace(halves, resumption=Resumption.of(True, None, False))
    with pytest.raises(RequestError, match=r"optuna.journal: the search has another --seed"):
        command.run(again, False, SearchOptions(SPACE, 25, 2))
    assert command.run(again, False, SearchOptions(SPACE, 25, 1)) == 0
    other = rows_of(tmp_path / "halves/run")
    assert [{**row, "run": ""} for row in other] == [{**row, "run": ""} for row in rows]


def test_settings_that_are_worse_than_the_median_are_stopped_and_not_chosen(
    tmp_path: Path, store: Path, commands: Commands
) -> None:
    assert command.run(sweep_of(tmp_path, store), False, SearchOptions(SPACE, 12, 1, prune=True)) == 0
    rows = rows_of(tmp_path / "run")
    given_up = [row for row in rows if row["given_up"]]
    assert 0 < len(given_up) < len(rows) and not any(row["chosen"] for row in given_up)
    assert all(json.loads((Path(row["run"]) / "status.json").read_text())["state"] == "stopped" for row in given_up)


def test_each_fold_has_a_search_of_its_own_judged_by_its_validation_fold_only(
    tmp_path: Path, store: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated: list[tuple[Path, int]] = []

    def run_fold(runs: FoldRuns, fold: int) -> int:
        evaluated.append((runs.run_of(fold), fold))
        return 0

    monkeypatch.setattr(command, "run_fold", run_fold)
    monkeypatch.setattr(command, "pool_folds", lambda folder, runs, folds: {"of": folds})
    space = {"optimizer.lr": SPACE["optimizer.lr"], "optimizer.momentum": [0.9]}
    assert command.run(sweep_of(tmp_path, store, folds="all"), False, SearchOptions(space, 4, 0)) == 0
    assert len(commands) == 12 and all(words[0] == "train" for words in commands)
    for words in commands:  # a setting is trained on the fold for which it was proposed only
        given = dict(word.split("=", 1) for word in words[2:] if "=" in word)
        run, fold = Path(json.loads(given["run.dir"])), json.loads(given["data.split_column"])[-1]
        assert run.parts[-3] == f"for-fold-{fold}" and run.name == f"fold-{fold}"
    rows = rows_of(tmp_path / "run")
    for fold, (run, of) in enumerate(evaluated):
        [chosen] = [row for row in rows if row["fold"] == str(fold) and row["chosen"]]
        assert of == fold and Path(chosen["run"]) == run
        assert float(chosen["auroc"]) == max(float(row["auroc"]) for row in rows if row["fold"] == str(fold))


def test_a_wrong_end_of_a_range_is_refused_before_anything_runs(
    tmp_path: Path, store: Path, commands: Commands
) -> None:
    space = {"optimizer.momentum": {"low": 0.5, "high": 1.5}}
    with pytest.raises(RequestError, match=r"setting optimizer.momentum=1.5"):
        command.run(sweep_of(tmp_path, store), False, SearchOptions(space, 4, 0))
    assert not commands and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("search", "trials", "prune", "words"),
    [
        ("tpe", 3, False, "--search tpe: expected grid, random or optuna"),
        ("optuna", None, False, "--search optuna needs --trials N"),
        ("grid", 3, False, "leave out --trials"),
        ("random", 3, True, "--prune is for --search optuna"),
    ],
)
def test_options_that_do_not_fit_are_refused(search: str, trials: int | None, prune: bool, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        requested_settings(Path("settings.yaml"), search, trials, 0, prune)


def test_a_trial_that_was_given_up_stays_given_up(tmp_path: Path) -> None:
    """Its run may validate once more before it has stopped; the search then ended as if the user had stopped it."""
    search = OptunaSearch(tmp_path, SearchOptions(SPACE, 8, 0, prune=True), {})
    for number in range(4):
        search.setting(number)
        assert not search.gives_up(number, [(1, 0.8)])
        search.tell(number, 0.8)
    search.setting(4)
    assert search.gives_up(4, [(1, 0.1)])
    again = OptunaSearch(tmp_path, SearchOptions(SPACE, 8, 0, prune=True), {})  # as after a stop
    for one in (search, again):
        assert one.gives_up(4, [(1, 0.1), (2, 0.9)])
