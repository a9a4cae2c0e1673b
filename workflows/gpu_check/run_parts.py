"""Runs the parts of a check one after the other, each in its own session of processes with a time limit."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from data.children import child_environment, die_with_parent
from hyfi_core.errors import RequestError
from workflows.gpu_check.parts import CheckPart
from workflows.gpu_check.results import Outcome, PartResult
from workflows.launch.launch import RANK_SETTINGS
from workflows.launch.processes import kill_session

_LAST_LINES = 3
SECONDS_TO_END = 10.0


def run_parts(
    parts: Sequence[CheckPart],
    gpus: int,
    seconds: float,
    options: list[str],
    report: Callable[[PartResult], None],
) -> list[PartResult]:
    """Run all parts; each may take its share of the remaining time, so time that a part leaves serves later ones.

    Args:
        parts: in order.
        gpus: number of GPUs here; a part that needs more is not run. 0: the check runs on the processor.
        seconds: for all parts.
        options: of the child program.
        report: called with each result.
    """
    results: list[PartResult] = []
    deadline_s = time.monotonic() + seconds
    for number, part in enumerate(parts):
        left = sum(later.weight for later in parts[number:] if later is part or _lacking(later, gpus) is None)
        limit_s = max(1.0, (deadline_s - time.monotonic()) * part.weight / left)
        results.append(_run(part, gpus, limit_s, options))
        report(results[-1])
    return results


def _run(part: CheckPart, gpus: int, limit_s: float, options: list[str]) -> PartResult:
    lacking = _lacking(part, gpus)
    if lacking is not None:
        return PartResult(part.name, "not run", lacking)
    try:
        command = part.command(options)
    except RequestError as error:
        return PartResult(part.name, "not run", str(error))
    begin_s = time.monotonic()
    code, output, errors = _output(command, limit_s, _environment(part, gpus))
    rows = list(_rows(output))
    outcome, reason = _verdict(code, rows, errors, limit_s)
    return PartResult(part.name, outcome, reason, round(time.monotonic() - begin_s, 1), rows)


def _lacking(part: CheckPart, gpus: int) -> str | None:
    """Return what a part lacks here, if anything."""
    return f"needs {part.gpus} GPUs, found {gpus}" if gpus and part.gpus > gpus else None


def _environment(part: CheckPart, gpus: int) -> Mapping[str, str]:
    """Return a part's environment: ranks of mpiexec share the first GPU."""
    environment = RANK_SETTINGS | child_environment()
    if part.launcher == "mpiexec" and gpus:
        environment["CUDA_VISIBLE_DEVICES"] = environment.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return environment


def _output(command: Sequence[str], limit_s: float, environment: Mapping[str, str]) -> tuple[int | None, str, str]:
    """Return (exit code, or None at the time limit; standard output; standard error); no process is left."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env=dict(environment),
            start_new_session=True,
            preexec_fn=functools.partial(die_with_parent, signal.SIGTERM),
        )
        code: int | None = None
        try:
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            # torchrun's ranks have sessions of their own: it ends them, if it is asked to.
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(SECONDS_TO_END)
        finally:
            kill_session(child.pid)
            child.wait()
        output.seek(0, os.SEEK_SET)
        errors.seek(0, os.SEEK_SET)
        return code, output.read(), errors.read()


def _rows(output: str) -> list[dict[str, Any]]:
    """Return the rows among the lines of standard output."""
    rows = []
    for line in output.splitlines():
        try:
            row = json.loads(line)
        except ValueError:  # libraries and launchers print, too
            continue
        if isinstance(row, dict) and "what" in row:
            rows.append(row)
    return rows


def _verdict(code: int | None, rows: Sequence[Mapping[str, Any]], errors: str, limit_s: float) -> tuple[Outcome, str]:
    if code is None:
        return "stopped", f"its share of the time, {limit_s:.0f} s, was up"
    if code != 0:
        lines = [line.strip() for line in errors.splitlines() if line.strip()]
        return "failed", " | ".join(lines[-_LAST_LINES:]) or f"exit code {code}"
    wrong = [row["what"] for row in rows if row.get("passed") is False or "failed" in row]
    if wrong:
        return "failed", ", ".join(wrong)
    if not rows:
        return "failed", "it ended without a result"
    reasons = [row["not run"] for row in rows if "not run" in row]
    return ("not run", reasons[0]) if reasons else ("passed", "")
