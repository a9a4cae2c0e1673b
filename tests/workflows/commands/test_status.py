"""``hyfi status``: running, done, stopped, interrupted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hyfi_core.errors import RequestError
from workflows.commands import status
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
    assert "step 4 of 10, epoch 1, loss 0.5000, about 12 s left" in said
    assert json.loads(said.splitlines()[-1])["state"] == "running"


def test_no_run_is_a_wrong_request(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"not a run"):
        status.run(tmp_path, as_json=False)
