"""Parts run in processes of their own: one that fails, hangs or lacks a GPU does not affect the others."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests.patience import SOON_S
from workflows.gpu_check.parts import CheckPart, all_parts
from workflows.gpu_check.results import PartResult, as_text
from workflows.gpu_check.run_parts import run_parts
from workflows.gpu_check.setting import FULL, SMALL, CheckSizes
from workflows.launch.processes import session_members

ROW = 'print(\'{"what": "a step", "step_s": 0.25}\', flush=True)'


class Program(CheckPart):
    """A part whose argument is Python code."""

    def command(self, options: list[str]) -> list[str]:
        return [sys.executable, "-c", self.argument, *options]


def run(folder: Path, *parts: CheckPart, gpus: int = 1, seconds: float = 60.0) -> dict[str, PartResult]:
    found = run_parts(parts, gpus, seconds, ["--option"], folder / "logs", lambda result: None)
    return {result.part: result for result in found}


def test_each_part_has_its_own_end(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        Program("good", "", f"print('noise'); print('{{}}'); {ROW}"),
        Program("broken", "", "raise ValueError('no such kernel')"),
        Program("wrong", "", """print('{"what": "resnet", "passed": false, "gradients": 0.5}')"""),
        Program("silent", "", "pass"),
        Program("absent", "", """print('{"what": "resnet", "not run": "not installed"}')"""),
        Program("two", "", "pass", gpus=2),
    )
    assert found["good"].outcome == "passed" and list(found["good"].rows) == [{"what": "a step", "step_s": 0.25}]
    assert found["broken"].outcome == "failed" and "ValueError: no such kernel" in found["broken"].reason
    assert (found["wrong"].outcome, found["wrong"].reason) == ("failed", "resnet")
    assert found["silent"].outcome == "failed"
    assert (found["absent"].outcome, found["absent"].reason) == ("not run", "not installed")
    assert (found["two"].outcome, found["two"].reason) == ("not run", "needs 2 GPUs, found 1")
    text = as_text({"device": "a GPU"}, list(found.values()))
    assert "a step: step_s 0.250 s" in text and "NOT as expected: gradients 0.5" in text
    assert "1 passed, 3 failed, 0 stopped" in text


def test_a_part_that_hangs_ends_in_time_with_its_children_and_its_rows_are_kept(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    child = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    hangs = f"{child}; import os, pathlib, time; pathlib.Path({str(pid)!r}).write_text(str(os.getpid())); {ROW}"
    begin_s = time.monotonic()
    found = run(tmp_path, Program("hangs", "", f"{hangs}; time.sleep(60)"), Program("good", "", ROW), seconds=6.0)
    assert time.monotonic() - begin_s < SOON_S
    assert found["hangs"].outcome == "stopped" and len(found["hangs"].rows) == 1
    assert session_members(int(pid.read_text())) == []
    assert found["good"].outcome == "passed"


LAUNCHER = """
import pathlib, signal, subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
def end(number, frame):
    rank.kill()
    sys.exit(rank.wait())
signal.signal(signal.SIGTERM, end)
pathlib.Path({pid!r}).write_text(str(rank.pid))
rank.wait()
"""


def test_a_launcher_is_asked_to_end_its_ranks_which_have_sessions_of_their_own(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    found = run(tmp_path, Program("hangs", "", LAUNCHER.format(pid=str(pid))), seconds=3.0)
    assert found["hangs"].outcome == "stopped"
    assert session_members(int(pid.read_text())) == []


def test_ranks_of_mpi_share_a_gpu_and_time_goes_only_to_what_can_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import workflows.gpu_check.run_parts as module

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    seen: dict[str, tuple[float, str | None]] = {}

    def output(command: list[str], limit_s: float, environment: dict[str, str], log: Path) -> tuple[int, str]:
        log.write_text("")
        seen[command[2]] = round(limit_s), environment.get("CUDA_VISIBLE_DEVICES")
        return 0, ""

    monkeypatch.setattr(module, "_output", output)
    run(
        tmp_path,
        Program("one", "", "one", weight=2.0),
        Program("two GPUs", "", "two GPUs", gpus=2, weight=50.0),
        Program("ranks", "", "ranks", launcher="mpiexec", weight=1.0),
        seconds=90.0,
    )
    assert seen == {"one": (60, "3,5"), "ranks": (90, "3")}


def test_parts_that_measure_no_time_run_beside_each_other(tmp_path: Path) -> None:
    """Each waits until the other has begun."""
    parts = []
    for own, other in (("a", "b"), ("b", "a")):
        own_path, other_path = str(tmp_path / own), str(tmp_path / other)
        code = f"import os, time; open({own_path!r}, 'w')\nwhile not os.path.exists({other_path!r}): time.sleep(0.01)\n"
        parts.append(Program(own, "", code + ROW, together=True))
    found = run(tmp_path, *parts, seconds=60.0)
    assert {result.outcome for result in found.values()} == {"passed"}


def test_the_first_error_is_named_and_all_that_was_printed_is_kept(tmp_path: Path) -> None:
    """A launcher says most, and last; the reason is the error of the rank."""
    code = """
import sys, traceback
print("noise")
try:
    raise RuntimeError("CUDA error: no such kernel")
except RuntimeError:
    traceback.print_exc()
sys.exit("\\n".join(["launcher: a rank has ended", "launcher: bye", "launcher: really", "launcher: 4th line"]))
"""
    found = run(tmp_path, Program("equal: a, 2 ranks", "", code))["equal: a, 2 ranks"]
    assert found.outcome == "failed"
    assert found.reason == "RuntimeError: CUDA error: no such kernel; see logs/equal-a-2-ranks.txt"
    log = (tmp_path / "logs" / "equal-a-2-ranks.txt").read_text()
    assert "Traceback" in log and "launcher: bye" in log and "standard output:\nnoise" in log


@pytest.mark.parametrize("sizes", [FULL, SMALL], ids=["full", "small"])
def test_parts_have_different_names(sizes: CheckSizes) -> None:
    names = [part.name for part in all_parts(sizes)]
    assert len(set(names)) == len(names)
    files = [part.file_name for part in all_parts(sizes)]
    assert len(set(files)) == len(files)
