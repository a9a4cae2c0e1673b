"""Loggers of a run: each has everything, none delays or ends the run, and a resumed run goes on in theirs."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hyfi_core.errors import RequestError
from tests.workflows.archive import make_config
from tests.workflows.runs import run_here
from workflows.training.loggers import run_loggers
from workflows.training.loggers.record import LoggedRecord, MetricsLogger, RunOutcome
from workflows.training.loggers.run_loggers import RunLoggers, check_loggers
from workflows.training.metrics_log import read_metrics

OUTCOME = RunOutcome("done", 2, {"best_checkpoint": Path("/best")})


class Memory(MetricsLogger):
    """Keeps what it is given, per identity."""

    name = "mlflow"
    runs: dict[str, list[Any]] = {}  # noqa: RUF012

    def begin(self) -> str:
        self.identity = self.identity or f"run-{len(self.runs)}"
        self.runs.setdefault(self.identity, [self.settings])
        return self.identity

    def write(self, records: Sequence[LoggedRecord]) -> None:
        self.runs[self.identity or ""] += records

    def end(self, outcome: RunOutcome) -> None:
        self.runs[self.identity or ""].append(outcome)


class Broken(Memory):
    name = "wandb"

    def write(self, records: Sequence[LoggedRecord]) -> None:
        raise SystemExit("no space left\nand more")


class Hanging(Memory):
    released = threading.Event()

    def begin(self) -> str:
        self.released.wait()
        return "late"

    def write(self, records: Sequence[LoggedRecord]) -> None: ...

    def end(self, outcome: RunOutcome) -> None: ...


def use(monkeypatch: pytest.MonkeyPatch, **loggers: type[MetricsLogger]) -> None:
    monkeypatch.setattr(run_loggers, "_LOGGERS", {name: (kind, ()) for name, kind in loggers.items()})
    Memory.runs = {}


def test_a_broken_logger_is_said_once_and_the_others_have_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, mlflow=Memory, wandb=Broken)
    loggers = RunLoggers(("mlflow", "wandb"), tmp_path, {"optimizer.lr": 0.1}, resumed=False)
    for step in (1, 2):
        loggers.add("train", step, {"loss": 0.5, "epoch": 0, "slowest": {"rank": 3}, "lr": float("nan"), "who": "x"})
    loggers.add("validation", 2, {"auroc": 0.9, "intervals": {"auroc": [0.8, 1.0]}, "f1": None})
    loggers.end(OUTCOME)
    left = [thread.records.qsize() for thread in loggers._threads]
    loggers.add("train", 3, {"loss": 0.5})
    assert [thread.records.qsize() for thread in loggers._threads] == left  # nothing piles up that nobody takes
    settings, *records, outcome = Memory.runs[json.loads((tmp_path / "loggers.json").read_text())["mlflow"]]
    assert settings == {"optimizer.lr": 0.1} and outcome == OUTCOME
    assert [(r.step, r.values) for r in records] == [
        (1, {"train/loss": 0.5, "train/slowest/rank": 3.0}),
        (2, {"train/loss": 0.5, "train/slowest/rank": 3.0}),
        (2, {"validation/auroc": 0.9}),
    ]
    said = capfd.readouterr().err
    assert said.count("wandb failed (SystemExit: no space left); the run goes on without it") == 1


def test_an_end_does_not_wait_for_a_logger_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, mlflow=Hanging)
    monkeypatch.setattr(run_loggers, "_END_S", 0.0)
    loggers = RunLoggers(("mlflow",), tmp_path, {}, resumed=False)
    loggers.add("train", 1, {"loss": 0.5})
    loggers.end(OUTCOME)
    assert "mlflow has not taken everything" in capfd.readouterr().err
    Hanging.released.set()


def test_a_resumed_run_has_its_identity_and_a_new_one_in_the_folder_has_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, mlflow=Memory)
    for resumed in (False, True, False):
        RunLoggers(("mlflow",), tmp_path, {}, resumed).end(OUTCOME)
    assert [len(run) for run in Memory.runs.values()] == [3, 2]


def test_a_package_that_is_missing_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_loggers, "_LOGGERS", {"wandb": (Memory, ("os", "no_such_package"))})
    with pytest.raises(RequestError, match=r"wandb needs no_such_package: pip install 'hyfi\[wandb\]'"):
        check_loggers(("wandb",))


@pytest.mark.usefixtures("in_process")
def test_mlflow_has_every_step_of_a_run_and_of_its_continuation(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("alembic")
    from mlflow.tracking import MlflowClient

    monkeypatch.setattr(run_loggers, "_END_S", 250.0)
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    config = make_config(
        tmp_path,
        store,
        model={"name": "tests.workflows.faults:tiny"},
        lr_schedule={"name": "constant"},
        validation={"every_steps": 2},
        run={"loggers": ["mlflow"]},
    )
    assert run_here(config, "run.steps=2") == 0
    assert run_here(config, "run.steps=4", resume=True) == 0
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'run' / 'mlflow' / 'mlflow.db'}")
    [experiment] = client.search_experiments(filter_string="name = 'hyfi'")
    [run] = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.data.params["optimizer.lr"] == "0.01"
    assert run.data.tags["best_checkpoint"] == str((tmp_path / "run" / "checkpoints" / "best").resolve())
    for kind, name in (("train", "loss"), ("validation", "auroc")):
        history = {m.step: m.value for m in client.get_metric_history(run.info.run_id, f"{kind}/{name}")}
        records = read_metrics(tmp_path / "run" / "metrics.jsonl")
        assert history == {r["step"]: r[name] for r in records if r["kind"] == kind} and history


def test_wandb_writes_an_offline_run_with_late_validations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setattr(run_loggers, "_END_S", 250.0)
    for name in ("WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    for name in ("WANDB__SERVICE_WAIT", "WANDB_INIT_TIMEOUT"):  # its process starts slowly on a busy machine
        monkeypatch.setenv(name, "240")
    for resumed, step in ((False, 3), (True, 5)):
        loggers = RunLoggers(("wandb",), tmp_path, {"optimizer.lr": 0.1}, resumed)
        loggers.add("train", step, {"loss": 0.25})
        loggers.add("validation", step - 1, {"auroc": 0.75})
        loggers.end(OUTCOME)
    identity = json.loads((tmp_path / "loggers.json").read_text())["wandb"]
    files = sorted(tmp_path.glob(f"wandb/offline-run-*/run-{identity}.wandb"))  # wandb sync puts them together
    history = [row for file in files for row in history_of(file)]
    for step in (3, 5):
        assert any({"train/loss": 0.25, "train/step": step}.items() <= row.items() for row in history)
        assert any({"validation/auroc": 0.75, "validation/step": step - 1}.items() <= row.items() for row in history)


def history_of(file: Path) -> list[dict[str, Any]]:
    """Read the logged rows of a small .wandb file: a log of LevelDB with records of Protocol Buffers."""
    from wandb.proto import wandb_internal_pb2

    data, at, rows, message = file.read_bytes(), 7, [], b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:  # blocks end with zeros
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record.FromString(message)
            rows += [{i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}]
            message = b""
    return rows
