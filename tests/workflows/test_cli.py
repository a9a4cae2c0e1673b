from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hyfi_core.errors import RequestError
from tests.conftest import ROOT, Hyfi
from tests.patience import PATIENCE_S
from workflows.cli import app
from workflows.console import emit_json, progress, say
from workflows.exit_codes import exit_code_of

COMMANDS = [
    "doctor",
    "demo",
    "synth",
    "ingest",
    "verify",
    "export",
    "inspect",
    "split",
    "train",
    "sweep",
    "validate",
    "predict",
    "export_model",
    "status",
    "view",
    "plan",
    "simulate",
    "features",
]


def test_every_command_is_there() -> None:
    shown = [command for command in app.registered_commands if command.callback and not command.hidden]
    assert [command.callback.__name__ for command in shown if command.callback] == COMMANDS


@pytest.mark.parametrize("words", [[], *[[name.replace("_", "-")] for name in COMMANDS]])
def test_help_at_every_level(hyfi_here: Hyfi, words: list[str]) -> None:
    done = hyfi_here(*words, "--help")
    assert done.returncode == 0
    assert "Usage: " in done.stdout
    assert all(name.replace("_", "-") in done.stdout for name in (words or COMMANDS))


def test_help_is_quick() -> None:
    """The best of some tries, of the processor: other work on the machine must not decide."""
    seconds = []
    for _ in range(3):
        before = os.times()
        subprocess.run([sys.executable, "-m", "workflows.cli", "--help"], cwd=ROOT, check=True, capture_output=True)
        after = os.times()
        seconds.append(sum(after[2:4]) - sum(before[2:4]))  # of children
    assert min(seconds) < 0.5


@pytest.mark.parametrize("words", [["trian"], ["train"], ["synth", "here", "--slide", "3"], ["ingest", "x", "--out"]])
def test_wrong_words_are_a_wrong_request(hyfi_here: Hyfi, tmp_path: Path, words: list[str]) -> None:
    done = hyfi_here(*words)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_each_end_has_its_code(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> int:
        raise RequestError("x.csv: no column label")

    def stop() -> int:
        raise KeyboardInterrupt

    def break_down() -> int:
        return 1 // 0

    assert [exit_code_of(lambda: 0), exit_code_of(lambda: 1)] == [0, 1]
    assert exit_code_of(refuse) == 2
    assert capsys.readouterr().err == "hyfi: x.csv: no column label\n"
    assert exit_code_of(stop) == 3
    capsys.readouterr()
    assert exit_code_of(break_down) == 70
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_a_removed_working_folder_is_a_wrong_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    assert exit_code_of(lambda: 0) == 2
    assert capsys.readouterr().err == (
        'hyfi: the working folder was removed; change to another one, or to the new one of its name: cd "$PWD"\n'
    )


@pytest.mark.parametrize("name", ["TERM", "USR1", "INT"])
def test_signals_stop_a_command(name: str) -> None:
    code = f"""
import os, signal, sys, time
from workflows import signals
from workflows.exit_codes import exit_code_of
signals.interrupt_on_request()
def body():
    os.kill(os.getpid(), signal.SIG{name})
    time.sleep(20)
    return 0
sys.exit(exit_code_of(body))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (3, "hyfi: stopped on request\n")


def test_the_version_is_that_of_the_package(hyfi: Hyfi) -> None:
    from importlib.metadata import version

    assert hyfi("--version").stdout == f"hyfi {version('hyfi')}\n"


@pytest.mark.parametrize("name", ["TERM", "USR1", "INT"])
@pytest.mark.parametrize("module", ["workflows", "workflows.cli"])
@pytest.mark.parametrize("imported", ["typer", "ctypes"])
def test_a_signal_in_the_first_lines_is_a_stop(tmp_path: Path, imported: str, module: str, name: str) -> None:
    """It ended the process as the system does, with its number and not with 3, until these had been imported."""
    (tmp_path / f"{imported}.py").write_text(f"import os, signal\nos.kill(os.getpid(), signal.SIG{name})\n")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    words = [sys.executable, "-m", module, "train", "run.yaml"]
    done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (3, "hyfi: stopped on request\n")


@pytest.mark.parametrize("module", ["workflows", "workflows.cli"])
def test_no_garbage_is_collected_while_torch_is_imported(tmp_path: Path, module: str) -> None:
    """It took a third of the import's time."""
    (tmp_path / "typer.py").write_text("import torch, os\nos._exit(0)\n")
    (tmp_path / "torch.py").write_text("import gc\nprint(gc.isenabled(), flush=True)\n")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-m", module], env=environment, stdout=subprocess.PIPE, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout) == (0, b"False\n")


def test_json_is_the_last_line_and_strict(capsys: pytest.CaptureFixture[str]) -> None:
    import numpy as np

    say("working")
    emit_json({"path": Path("a/b"), "auroc": float("nan"), "n": np.int64(3), "x": (np.float32(0.5), None), "ö": True})
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1]) == {"path": "a/b", "auroc": None, "n": 3, "x": [0.5, None], "ö": True}


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_what_no_encoding_knows_is_shown_escaped(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slide whose name is not UTF-8 ended the command that wanted to name it."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    say("done: a\udcff, 1 µm")
    emit_json({"slide_id": "a\udcff", "unit": "µm"})
    first, last = written.getvalue().decode(encoding).splitlines()
    assert first.startswith("done: a\\udcff, 1 ")
    assert json.loads(last) == {"slide_id": "a\udcff", "unit": "µm"}


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", ">&-"])
def test_a_command_runs_with_closed_streams(closed: str, tmp_path: Path) -> None:
    """As a daemon's may be: the first line ended it, and the number of standard output went to the next file opened."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    (tmp_path / "labels.csv").write_text("slide_id,label\n" + "".join(f"s{n},{n % 2}\n" for n in range(20)))
    words = shlex.join([sys.executable, "-m", "workflows", "split", "labels.csv", "--out", "splits.csv"])
    done = subprocess.run(["bash", "-c", f"exec {words} {closed}"], env=environment, cwd=tmp_path, timeout=PATIENCE_S)
    assert done.returncode == 0
    assert (tmp_path / "splits.csv").read_text().startswith("slide_id")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_help_that_cannot_be_written_is_one_line() -> None:
    words = [sys.executable, "-m", "workflows", "train", "--help"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(words, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S)
    assert done.returncode == 70
    assert done.stderr == "hyfi: standard output cannot be written (No space left on device)\n"


def test_progress_in_a_log_is_plain_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock_s = iter(range(0, 10_000, 3))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock_s)))
    with progress(40, "slides") as shown:
        for _ in range(40):
            shown.advance()
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert 5 <= len(lines) <= 11
    assert lines[-1].startswith("slides: 40/40 after")
    assert "\x1b" not in err


def test_nothing_is_left_where_writing_was_tried(tmp_path: Path) -> None:
    from workflows.paths import require_writable

    require_writable(tmp_path / "new" / "deep")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_is_a_wrong_request(hyfi_here: Hyfi, tmp_path: Path) -> None:
    for words in (["synth", "a" * 300, "--slides", "1", "--size", "256"], ["ingest", ".", "--out", "b" * 300]):
        done = hyfi_here(*words)
        assert done.returncode == 2 and "File name too long" in done.stderr
        assert "Traceback" not in done.stderr
