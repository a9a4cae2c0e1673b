"""A sweep: its settings, the choice by validation, and test folds that choose nothing."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hyfi_core.errors import RequestError
from tests.workflows.archive import SPLITS, make_config
from workflows.config.load import dump_resolved, load_config
from workflows.cross_validation.fold_runs import FoldRuns
from workflows.launch.resumption import Resumption
from workflows.sweep import command
from workflows.sweep.search_command import _check_finished
from workflows.sweep.settings import SweptSetting, read_settings
from workflows.sweep.sweep_runs import SettingScore, SweepRuns, chosen_of
from workflows.training.best import merit
from workflows.training.checks.data_record import data_record
from workflows.training.job import prepare

VALUES = {0.1: 0.6, 0.01: 0.9, 0.001: 0.7}
"""The auroc of each rate."""


def settings_of(folder: Path, text: str, trials: int | None = None) -> list[SweptSetting]:
    path = folder / "settings.yaml"
    path.write_text(text)
    return read_settings(path, trials, 0)


def test_settings_are_all_combinations_and_texts_of_numbers_are_numbers(tmp_path: Path) -> None:
    found = settings_of(tmp_path, "optimizer.lr: [1e-3, 0.1]\nmodel: {pool: [avg, max]}\n")
    assert [one.values for one in found][1:3] == [
        {"optimizer.lr": 0.001, "model.pool": "max"},
        {"optimizer.lr": 0.1, "model.pool": "avg"},
    ]
    assert found[0].overrides == ["optimizer.lr=0.001", 'model.pool="avg"']
    # Without a point, YAML would read text, which `options` hand to the user's class.
    assert SweptSetting(0, {"optimizer.options.eps": 1e-8}).overrides == ["optimizer.options.eps=1.0e-08"]


def test_random_settings_are_different_and_in_their_range(tmp_path: Path) -> None:
    text = "optimizer.lr: {low: 1e-5, high: 1e-2, log: true}\nmodel.pool: [avg, max]\n"
    found = settings_of(tmp_path, text, 12)
    rates = [one.values["optimizer.lr"] for one in found]
    assert len({json.dumps(one.values) for one in found}) == 12 and all(1e-5 <= rate <= 1e-2 for rate in rates)
    assert sum(rate < 3e-4 for rate in rates) > 2 and found == settings_of(tmp_path, text, 12)
    assert len(settings_of(tmp_path, "model.pool: [avg, max]\n", 12)) == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no settings"),
        ("optimizer.lr: 0.1", "optimizer.lr: given 0.1"),
        ("optimizer.lr: {low: 1}", "optimizer.lr: given"),
        ("optimizer.lr: {low: 1e-5, high: 1e-2}", "give --trials N"),
        ("data.splits: [a.csv, b.csv]", "the same slides"),
        ("data.target: [a, b]", "the same labels"),
        ("data: {missing: [[NA], [NA, none]]}", "the same labels"),
        ("run.seed: [" + ",".join(map(str, range(1001))) + "]", "1001 combinations"),
        ("{", "not YAML"),
    ],
)
def test_wrong_settings_are_answered(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        settings_of(tmp_path, text)


def sweep_of(folder: Path, store: Path, **keys: Any) -> SweepRuns:
    with (folder / "labels.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("slide_id", "label", "split", "fold"))
        rows.writerows((f"slide-{k:02d}", "ab"[k // 3 % 2], split, k % 3) for k, split in enumerate(SPLITS))
    path = make_config(folder, store, data={"labels": str(folder / "labels.csv"), "class_weights": "none"})
    settings = tuple(settings_of(folder, f"optimizer.lr: {list(VALUES)}\n"))
    return SweepRuns(path, (), None, Resumption.of(False, None, False), settings, **keys)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """Commands of training, which write a validation of their rate and end."""
    started: list[Sequence[str]] = []

    def run_command(words: Sequence[str]) -> int:
        started.append(words)
        given = dict(word.split("=", 1) for word in words[2:] if "=" in word)
        run, auroc = Path(json.loads(given["run.dir"])), VALUES[json.loads(given["optimizer.lr"])]
        (run / "checkpoints").mkdir(parents=True, exist_ok=True)
        config = load_config(Path(words[1]), [word for word in words[2:] if "=" in word], ignore_plan=True)
        (run / "config.yaml").write_text(dump_resolved(config))
        record = {"kind": "validation", "step": 3, "loss": 1.0, "auroc": auroc}
        (run / "metrics.jsonl").write_text(json.dumps(record) + "\n")
        (run / "status.json").write_text('{"state": "done"}')
        return 0

    monkeypatch.setattr(command, "run_command", run_command)
    return started


def test_the_loss_decides_where_the_metric_is_undefined_and_is_named(tmp_path: Path) -> None:
    """Validation slides of one class have no AUROC: the choice was shown as ``auroc undefined``."""
    losses = (0.9, 0.4, 0.6)
    scores = [SettingScore(tmp_path, 2, None, merit({"loss": loss}, "auroc")) for loss in losses]
    best = chosen_of(scores)
    assert best == 1 and scores[best].describe("auroc") == "auroc undefined, so by its loss, 0.4000"
    assert SettingScore(tmp_path, 2, 0.75, (0.75, -0.5)).describe("auroc") == "auroc 0.7500"


def test_validation_chooses_and_all_settings_are_in_the_table(
    tmp_path: Path, store: Path, commands: list[Sequence[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = sweep_of(tmp_path, store)
    assert command.run(sweep, as_json=True) == 0
    said = capsys.readouterr()
    summary = json.loads(said.out.splitlines()[-1])
    assert summary["chosen"]["setting"] == {"optimizer.lr": 0.01} and len(commands) == 3
    assert "optimistic" in said.out + said.err
    rows = list(csv.DictReader((tmp_path / "run/sweep.csv").open()))
    assert [row["chosen"] for row in rows] == ["", "yes", ""] and rows[2]["auroc"] == "0.700000"


def failing(monkeypatch: pytest.MonkeyPatch, *rates: str) -> None:
    """Runs of these rates fail before they have validated."""
    run_command = command.run_command

    def some_fail(words: Sequence[str]) -> int:
        code = run_command(words)
        given = dict(word.split("=", 1) for word in words[2:] if "=" in word)
        if given["optimizer.lr"] not in rates:
            return code
        Path(json.loads(given["run.dir"]), "metrics.jsonl").unlink(missing_ok=True)
        Path(json.loads(given["run.dir"]), "status.json").write_text('{"state": "failed"}')
        return 1

    monkeypatch.setattr(command, "run_command", some_fail)


@pytest.mark.parametrize("folds", [None, "all"])
def test_a_setting_that_fails_does_not_end_the_sweep(
    tmp_path: Path,
    store: Path,
    commands: list[Sequence[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    folds: str | None,
) -> None:
    """The first rate that was too high ended it, and ``--resume`` did so again."""
    monkeypatch.setattr(command, "run_fold", lambda runs, fold: 0)
    monkeypatch.setattr(command, "pool_folds", lambda folder, chosen, folds: {"of": folds})
    rates = [json.dumps(rate) for rate in VALUES]
    failing(monkeypatch, rates[0])
    assert command.run(sweep_of(tmp_path, store, folds=folds), as_json=True) == 1
    said = capsys.readouterr()
    assert "setting 0" in said.err and "has failed; the sweep goes on" in said.err
    assert json.loads(said.out.splitlines()[-1])["chosen"]
    rows = list(csv.DictReader((tmp_path / "run/sweep.csv").open()))
    assert {row["setting"] for row in rows if row["chosen"]} == {"1"} and {row["setting"] for row in rows} == set("012")
    (tmp_path / "again").mkdir()
    failing(monkeypatch, *rates)
    with pytest.raises(RequestError, match="no setting has a checkpoint with a finite loss"):
        command.run(sweep_of(tmp_path / "again", store, folds=folds), as_json=True)
    rows = list(csv.DictReader((tmp_path / "again/run/sweep.csv").open()))
    assert rows and not any(row["chosen"] for row in rows)


def test_finished_settings_are_kept_and_trained_on_if_more_steps_are_wanted(
    tmp_path: Path, store: Path, commands: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SweepRuns, "check", lambda self: None)  # the commands write no checkpoints
    sweep = replace(sweep_of(tmp_path, store), resumption=Resumption.of(True, None, False))
    for overrides, trained in (((), 3), ((), 3), (("run.steps=9",), 6)):
        assert command.run(replace(sweep, overrides=overrides), as_json=False) == 0
        assert len(commands) == trained
    assert commands[-1][-1] == "--resume"


def test_finished_settings_of_other_labels_are_not_compared_with_new_ones(
    tmp_path: Path, store: Path, commands: list[Sequence[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = replace(sweep_of(tmp_path, store), resumption=Resumption(True))
    assert command.run(sweep, as_json=False) == 0
    checkpoints = sweep.folder_of(sweep.settings[1]) / "checkpoints"
    (checkpoints / "step-00000003").mkdir()
    (checkpoints / "latest").symlink_to("step-00000003")
    record = data_record(prepare(sweep.config_of(sweep.settings[1])))
    relabelled = {slide: line.replace("\ta", "\tb") if slide == "slide-00" else line for slide, line in record.items()}
    for saved, is_refused in ((record, False), (relabelled, True)):
        state = {"step": 3, "data": saved}
        (checkpoints / "step-00000003/state.json").write_text(json.dumps(state))
        for check in (sweep.check, lambda: _check_finished(sweep, sweep.settings[1])):
            with pytest.raises(RequestError, match=r"slide-00 \(from b to a\)") if is_refused else nullcontext():
                check()
    replace(sweep, resumption=Resumption(True, accepts_changes=True)).check()
    assert "slide-00 (from b to a)\nIts model is kept" in capsys.readouterr().out


def test_a_fold_is_evaluated_by_the_setting_that_its_validation_fold_chose_only(
    tmp_path: Path, store: Path, commands: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated: list[tuple[Path, int]] = []

    def run_fold(runs: FoldRuns, fold: int) -> int:
        evaluated.append((runs.run_of(fold), fold))
        return 0

    monkeypatch.setattr(command, "run_fold", run_fold)
    monkeypatch.setattr(command, "pool_folds", lambda folder, chosen, folds: {"of": folds})
    assert command.run(sweep_of(tmp_path, store, folds="all"), as_json=False) == 0
    assert len(commands) == 9 and all(words[0] == "train" for words in commands)
    assert evaluated == [(tmp_path / f"run/setting-001/fold-{fold}", fold) for fold in range(3)]


def test_a_wrong_setting_is_refused_before_anything_runs(
    tmp_path: Path, store: Path, commands: list[Sequence[str]]
) -> None:
    sweep = sweep_of(tmp_path, store)
    wrong = SweepRuns(sweep.path, (), None, sweep.resumption, (SweptSetting(0, {"optimizer.lr": -1.0}),))
    with pytest.raises(RequestError, match=r"setting optimizer.lr=-1.0"):
        command.run(wrong, as_json=False)
    assert not commands and not (tmp_path / "run").exists()
