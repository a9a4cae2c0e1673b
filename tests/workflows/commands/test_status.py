"""``hyfi status``: running, done, stopped, interrupted."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from hyfi_core.errors import RequestError
from pathology.view import gallery, scene, server, web_files
from workflows.commands import status, view
from workflows.exit_codes import exit_code_of
from workflows.launch.owner import FolderOwner


def make_run(folder: Path, state: str) -> Path:
    run = folder / "run"
    (run / "checkpoints" / "step-00000004").mkdir(parents=True)
    (run / "checkpoints" / "latest").symlink_to("step-00000004")
    (run / "config.yaml").write_text("")
    (run / "status.json").write_text(json.dumps({"state": state, "steps": 10}))
    lines = [
        {"kind": "train", "step": 4, "epoch": 1, "loss": 0.5, "seconds": 2.0, "images_per_second": 3.0},
        {"kind": "validation", "step": 4, "loss": 0.6, "auroc": None},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "tr')
    return run


@pytest.mark.parametrize(("written", "seen"), [("running", "interrupted"), ("stopped", "stopped"), ("done", "done")])
def test_a_run_that_nobody_holds(tmp_path: Path, written: str, seen: str) -> None:
    found = status.read_status(make_run(tmp_path, written))
    assert (found["state"], found["step"], found["steps"], found["seconds_left"]) == (seen, 4, 10, None)
    assert (found["latest"], found["best"], found["validation"]["auroc"]) == ("step-00000004", None, None)


def test_a_run_under_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path, "running")
    owner = FolderOwner(run, "")
    assert status.run(run, as_json=True) == 0
    owner.release()
    said = capsys.readouterr().out
    assert "step 4 of 10, epoch 1, loss 0.5000, 0 s ago, about 12 s left" in said
    assert json.loads(said.splitlines()[-1])["state"] == "running"


@pytest.mark.parametrize(
    ("age_s", "config", "stalled"),
    [(50, "", False), (70, "", True), (70, "run:\n  stall_s: 100.0\n", False), (110, "run:\n  stall_s: 100.0\n", True)],
)
def test_a_run_without_steps_is_stalled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], age_s: float, config: str, stalled: bool
) -> None:
    """It showed the time left as if all were well."""
    run = make_run(tmp_path, "running")
    (run / "config.yaml").write_text(config)
    then = time.time() - age_s
    os.utime(run / "metrics.jsonl", (then, then))
    owner = FolderOwner(run, "")
    assert status.run(run, as_json=True) == 0
    owner.release()
    said = capsys.readouterr().out
    found = json.loads(said.splitlines()[-1])
    assert (found["stalled"], found["seconds_left"] is None) == (stalled, stalled)
    assert age_s <= found["last_step_s"] < age_s + 10
    assert ("running, but stalled" in said) is stalled


@pytest.mark.parametrize("mode", [0o000, 0o600], ids=["not listed", "not entered"])
@pytest.mark.parametrize("command", ["status", "view"])
def test_a_folder_that_may_not_be_read_is_a_wrong_request(tmp_path: Path, command: str, mode: int) -> None:
    """Both ended with a fault's exit code."""
    folder = tmp_path / "private"
    folder.mkdir()
    (folder / "config.yaml").write_text("")
    web_files.static_file, gallery.Gallery, scene.Scene, server.make_app  # imported while root can
    tried = {"status": lambda: status.run(folder, False), "view": lambda: view.run([folder], 0, False, None, None)}
    parents = {parent: parent.stat().st_mode for parent in (tmp_path, *tmp_path.parents[:-2])}
    for parent in parents:
        parent.chmod(0o711)
    folder.chmod(mode)
    before = os.geteuid()
    try:
        if before == 0:
            os.chown(folder, 65534, 65534)
            os.seteuid(65534)
        assert exit_code_of(tried[command]) == 2
        with pytest.raises(RequestError, match=rf"{folder}: cannot be read \(Permission denied\)"):
            tried[command]()
    finally:
        os.seteuid(before)
        folder.chmod(0o755)
        for parent, allowed in parents.items():
            parent.chmod(allowed)


def test_no_run_is_a_wrong_request(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"not a run"):
        status.run(tmp_path, as_json=False)


def test_an_ended_run_names_the_rank_that_failed_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path, "running")
    (run / "logs").mkdir()
    started = "2026-03-01 14:00:0{} node{} rank {} INFO starts: trainer {}, process 7\n"
    for rank, node, second, error in ((0, 1, 9, "a lost peer"), (1, 1, 0, ""), (2, 2, 8, "ValueError: no such label")):
        lines = ["2026-03-01 13:00:00 node1 rank 0 ERROR of an earlier start\n", started.format(1, node, rank, rank)]
        lines.append(f"2026-03-01 14:00:05 node{node} rank {rank} WARNING my.model: slow path\n")
        if error:
            lines += [
                f"2026-03-01 14:00:0{second} node{node} rank {rank} ERROR {text}\n" for text in ("Traceback", error)
            ]
        (run / "logs" / f"rank-{rank}.log").write_text("".join(lines))
    assert status.run(run, as_json=True) == 0
    *said, result = capsys.readouterr().out.splitlines()
    assert said[0].endswith(": interrupted")
    assert said[-2].endswith("logs, 3 ranks on 2 hosts, 3 lines of warnings on 3 ranks")
    assert said[-1] == "failed: rank 2 on node2 at 2026-03-01 14:00:08: ValueError: no such label"
    assert [report["error"] for report in json.loads(result)["logs"]] == [
        "a lost peer",
        None,
        "ValueError: no such label",
    ]


def test_logs_of_ranks_of_an_earlier_start_are_not_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path, "done")
    (run / "logs").mkdir()
    start = "2026-03-01 {}:00 node1 rank {} INFO starts: trainer {}, process 7\n"
    ranks = {
        0: start.format("15:00", 0, 0) + "2026-03-01 15:10:00 node1 rank 0 ERROR my.model: a value was replaced\n",
        1: start.format("15:00", 1, 1),
        2: start.format("14:00", 2, 2) + "2026-03-01 14:10:00 node1 rank 2 ERROR of an earlier start\n",
    }
    for rank, lines in ranks.items():
        (run / "logs" / f"rank-{rank}.log").write_text(lines)
    assert [report["rank"] for report in status.read_status(run)["logs"]] == [0, 1]
    assert status.run(run, as_json=False) == 0
    *_, logs, error = capsys.readouterr().out.splitlines()
    assert logs.endswith("logs, 2 ranks on 1 host")
    assert error == "first error: rank 0 on node1 at 2026-03-01 15:10:00: my.model: a value was replaced"


def test_the_time_left_counts_validations_and_checkpoints(tmp_path: Path) -> None:
    run = make_run(tmp_path, "running")
    steps = [{"kind": "train", "step": n, "seconds": 1.0, "validation_seconds": 4.0 * (n == 2)} for n in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    owner = FolderOwner(run, "")
    assert status.read_status(run)["seconds_left"] == 8 * 3.0
    owner.release()


@pytest.mark.parametrize(
    ("features", "unit"), [("null", "images"), ("nas/features", "cases"), ("null-model", "cases"), ("/data/f", "cases")]
)
def test_what_a_run_counts(tmp_path: Path, features: str, unit: str) -> None:
    """A folder of features whose name begins with n was taken for null."""
    (tmp_path / "config.yaml").write_text(f"data:\n  tiles: null\n  features: {features}\n  bag: case\n")
    assert status._unit(tmp_path) == unit
