"""Runs the parts of a check, each in its own session of processes with a time limit.

::

    equal │ equal │ equal     parts that measure no time run at the same time, about one process for each core
    ──────┴───────┴──────
    speed, cells, …           then the others one after the other, each with its share of the time that is left
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from data.children import child_environment, die_with_parent
from hyfi_core.errors import RequestError
from workflows.gpu_check.parts import CheckPart
from workflows.gpu_check.results import Outcome, PartResult
from workflows.launch.launch import RANK_SETTINGS
from workflows.launch.mpiexec import ON_THIS_NODE
from workflows.launch.processes import kill_session

_LAST_LINES = 3
SECONDS_TO_END = 10.0


def run_parts(
    parts: Sequence[CheckPart],
    gpus: int,
    seconds: float,
    options: list[str],
    logs: Path,
    report: Callable[[PartResult], None],
) -> list[PartResult]:
    """Run all parts; each has its share of the time that is left, so that later parts get what earlier ones spare.

    Args:
        parts: The parts in order; those that may run together come first.
        gpus: Number of GPUs here; a part that needs more is not run. 0: the check runs on the processor.
        seconds: Time for all parts.
        options: Options of the child program; ``--seconds`` with its time is added.
        logs: Folder for everything that the parts print; made if it does not exist.
        report: Called with each result.
    """
    logs.mkdir(parents=True, exist_ok=True)
    deadline_s = time.monotonic() + seconds
    together = [part for part in parts if part.together]
    alone = [part for part in parts if not part.together]
    # Parts that run together share their time: their weights are smaller than their seconds.
    share = _weight(together, gpus) / max(_weight(parts, gpus), 1e-9)
    results = _run_together(together, gpus, seconds * share, options, logs, report)
    for number, part in enumerate(alone):
        # Time that earlier parts have spared is shared by all parts that follow.
        remaining_weight = max(_weight(alone[number:], gpus), part.weight)
        limit_s = max(1.0, (deadline_s - time.monotonic()) * part.weight / remaining_weight)
        results.append(_run(part, gpus, limit_s, options, logs))
        report(results[-1])
    return results


def _weight(parts: Sequence[CheckPart], gpus: int) -> float:
    """Return the sum of the weights of the parts that can run here."""
    return sum(part.weight for part in parts if _lacking(part, gpus) is None)


def _run_together(
    parts: Sequence[CheckPart],
    gpus: int,
    seconds: float,
    options: list[str],
    logs: Path,
    report: Callable[[PartResult], None],
) -> list[PartResult]:
    """Run parts at the same time, with about one process for each core, and start none after ``seconds``."""
    deadline_s, cores = time.monotonic() + seconds, max(os.cpu_count() or 1, 4)
    waiting, running, results = list(parts), dict[Future[PartResult], CheckPart](), list[PartResult]()
    # A thread for each part, all alive until the end: `die_with_parent` ends a child when the thread that started it
    # ends.
    with ThreadPoolExecutor(max(len(parts), 1)) as threads:
        while waiting or running:
            busy = sum(part.ranks for part in running.values())
            # If nothing is running, the next part starts even if it has more ranks than there are cores.
            while waiting and (not running or busy + waiting[0].ranks <= cores):
                part = waiting.pop(0)
                limit_s = deadline_s - time.monotonic()
                # A part that this machine cannot run takes no time: `_run` only says what it lacks.
                if limit_s <= 0 and _lacking(part, gpus) is None:
                    results.append(PartResult(part.name, "stopped", "no time was left to start it; use more --minutes"))
                    report(results[-1])
                    continue
                running[threads.submit(_run, part, gpus, limit_s, options, logs)] = part
                busy += part.ranks
            for ended in wait(running, return_when=FIRST_COMPLETED).done:
                del running[ended]
                results.append(ended.result())
                report(results[-1])
    return results


def _run(part: CheckPart, gpus: int, limit_s: float, options: list[str], logs: Path) -> PartResult:
    """Run one part as a process of its own for at most ``limit_s``; return its result, "not run" if it cannot run."""
    lacking = _lacking(part, gpus)
    if lacking is not None:
        return PartResult(part.name, "not run", lacking)
    try:
        command = part.command([*options, "--seconds", f"{limit_s:.1f}"])
    except RequestError as error:
        return PartResult(part.name, "not run", str(error))
    begin_s = time.monotonic()
    log = logs / f"{part.file_name}.txt"
    code, output = _output(command, limit_s, _environment(part, gpus), log)
    rows = list(_rows(output))
    outcome, reason = _verdict(code, rows, log, limit_s)
    return PartResult(part.name, outcome, reason, round(time.monotonic() - begin_s, 1), rows)


def _lacking(part: CheckPart, gpus: int) -> str | None:
    """Return what this machine lacks for a part, such as ``needs a GPU``; None if it lacks nothing."""
    if not gpus:
        return "needs a GPU" if part.gpu_only else None
    return f"needs {part.gpus} GPUs, found {gpus}" if part.gpus > gpus else None


def _environment(part: CheckPart, gpus: int) -> Mapping[str, str]:
    """Return a part's environment: ranks of mpiexec share the first GPU."""
    environment = RANK_SETTINGS | ON_THIS_NODE | child_environment()
    if part.launcher == "mpiexec" and gpus:
        # The first GPU that this process may use, which need not be number 0.
        environment["CUDA_VISIBLE_DEVICES"] = environment.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return environment


def _output(
    command: Sequence[str], limit_s: float, environment: Mapping[str, str], log: Path
) -> tuple[int | None, str]:
    """Run a command; return (exit code, standard output), with None as code at the time limit. No process is left.

    Args:
        command: Program and arguments.
        limit_s: Time limit.
        environment: Environment variables of the program.
        log: File for standard error; standard output is added at the end.
    """
    output_log = log.with_suffix(".out")
    with output_log.open("w+") as output, log.open("w") as errors:
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
            # torchrun's ranks have sessions of their own, which `kill_session` does not reach: torchrun ends them.
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(SECONDS_TO_END)
        finally:
            kill_session(child.pid)
            child.wait()
    text = output_log.read_text(errors="replace")
    with log.open("a") as file:
        file.write(f"\nstandard output:\n{text}")
    output_log.unlink()
    return code, text


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


def _verdict(code: int | None, rows: Sequence[Mapping[str, Any]], log: Path, limit_s: float) -> tuple[Outcome, str]:
    """Return the outcome of a part, and the reason if it has not passed."""
    if code is None:
        return "stopped", f"its share of the time, {limit_s:.0f} s, was up; see {log.parent.name}/{log.name}"
    if code != 0:
        reason = _first_error(log.read_text(errors="replace")) or f"exit code {code}"
        return "failed", f"{reason}; see {log.parent.name}/{log.name}"
    wrong = [row["what"] for row in rows if row.get("passed") is False or "failed" in row]
    if wrong:
        return "failed", ", ".join(wrong)
    if not rows:
        return "failed", f"it ended without a result; see {log.parent.name}/{log.name}"
    reasons = [row["not run"] for row in rows if "not run" in row]
    return ("not run", reasons[0]) if len(reasons) == len(rows) else ("passed", "")


_ERROR = re.compile(r"^(?:\[[^\]]*\]:?\s*)?[\w.]*(?:Error|Exception|Interrupt)\b(?::.*)?$")


def _first_error(errors: str) -> str:
    """Return the line that names the first error of any rank; the last lines if there is none."""
    lines = [line.strip() for line in errors.split("\nstandard output:\n")[0].splitlines() if line.strip()]
    return next((line for line in lines if _ERROR.match(line)), " | ".join(lines[-_LAST_LINES:]))
