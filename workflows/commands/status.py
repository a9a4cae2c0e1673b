"""``hyfi status``: the progress of a run."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hyfi_core.errors import RequestError
from workflows.config.tasks import TASKS
from workflows.console import counted, duration, emit_json, say
from workflows.exit_codes import DONE
from workflows.launch.log_summary import RankReport, first_failed, read_logs
from workflows.launch.owner import describe_owner, owner_of
from workflows.launch.rank_log import FOLDER
from workflows.paths import require_readable
from workflows.training.metrics_log import describe_nonfinite, read_metrics
from workflows.training.stragglers import describe_fullest, describe_stragglers
from workflows.training.throughput import describe_loading, describe_speed

_RATES = ("images_per_second", "gigapixels_per_second", "flops_per_second", "utilisation", "memory_bytes")
_LATEST_STEPS = 50
_BRIEF = ("loss", *(facts.selecting[0] for facts in TASKS.values()))
"""Metrics of the last validation that are shown: the loss, and the main one of the task."""
_LEAST_STALL_S = 60.0


def run(folder: Path, as_json: bool) -> int:
    """Print the progress of a run, from the files in its folder; changes nothing there.

    Raises:
        RequestError: There is no run in ``folder``, or it cannot be read.
    """
    require_readable(folder, "give the run.dir of a configuration")
    if not (folder / "config.yaml").is_file():
        raise RequestError(f"{folder}: not a run (it has no config.yaml); give the run.dir of a configuration")
    status = read_status(folder)
    say(f"{folder}: {status['state']}{', but stalled' if status['stalled'] else ''}{_owner_text(status)}")
    for text in filter(None, (status["reason"], status["nonfinite"])):
        say(text)
    if status["step"]:
        of = f" of {status['steps']}" if status["steps"] else ""
        left = f", about {duration(status['seconds_left'])} left" if status["seconds_left"] is not None else ""
        ago = f", {duration(status['last_step_s'])} ago" if status["state"] == "running" else ""
        say(f"step {status['step']}{of}, epoch {status['epoch']}, loss {_number(status['loss'])}{ago}{left}")
        if status["stalled"]:
            say("no step for ten times the longest one: a rank is frozen, or a validation or a file takes long")
        if status["throughput"]:
            say(status["throughput"])
    if status["loading"]:
        say(describe_loading(status["loading"], of_tiles=_unit(folder) != "images"))
    slow = describe_stragglers(status["stragglers"])
    if slow:
        say(f"{slow} (until step {status['stragglers_step']})")
    if status["fullest"]:
        say(f"{describe_fullest(status['fullest'])} (at step {status['stragglers_step']})")
    if status["validation"]:
        numbers = ", ".join(f"{k} {_number(v)}" for k, v in status["validation"].items() if _is_brief(k))
        say(f"last validation, step {status['validation']['step']}: {numbers}")
    say(f"latest checkpoint: {status['latest'] or 'none'}; best: {status['best'] or 'none'}")
    for line in _logs_text(folder, status["state"], status["logs"]):
        say(line)
    if as_json:
        emit_json({"run": folder, **status})
    return DONE


def _is_brief(metric: str) -> bool:
    """Whether a metric is shown; that of one of several targets has its name before it: ``grade.auroc``."""
    return metric in _BRIEF or metric.rpartition(".")[2] in _BRIEF[1:]


def read_status(folder: Path) -> dict[str, Any]:
    """Return the status of a run.

    ``state`` is ``running`` (a process has locked the folder), ``done``, ``stopped`` (on request), ``failed`` (numbers
    are not finite, see ``reason``) or ``interrupted`` (its processes were killed or failed: ``--resume`` continues from
    the latest checkpoint). ``last_step_s`` is the age of the last record, a step or a validation; ``stalled`` says that
    it is older than ``run.stall_s``, or ten times the longest step with its validation and checkpoint.
    """
    owner = owner_of(folder)
    saved = _json(folder / "status.json")
    records = read_metrics(folder / "metrics.jsonl")
    trained = _last([record for record in records if record["kind"] == "train"])
    validated = _last([record for record in records if record["kind"] == "validation"])
    # Only some steps compare ranks.
    compared = _last([record for record in records if "stragglers" in record])
    # The lock decides, not the file: a killed run leaves "running" in status.json.
    state = "running" if owner is not None else saved.get("state", "interrupted")
    if owner is None and state == "running":
        state = "interrupted"
    steps, step = saved.get("steps"), trained.get("step")
    age_s = _age_s(folder / "metrics.jsonl") if step else None
    seconds_left = None
    # Before the first step there is no age: capturing the model may take any time.
    stalled = state == "running" and age_s is not None and age_s > _stall_s(folder, records)
    if state == "running" and steps and step and not stalled:
        seconds_left = (steps - step) * _step_s(records)
    checkpoints = folder / "checkpoints"
    return {
        "state": state,
        "owner": owner,
        "reason": saved.get("reason") if state == "failed" else None,
        "nonfinite": describe_nonfinite(records),
        "step": step,
        "steps": steps,
        "epoch": trained.get("epoch"),
        "loss": trained.get("loss"),
        **{key: trained.get(key) for key in _RATES},
        "throughput": _throughput_text(folder, trained),
        "stragglers": compared.get("stragglers", []),
        "stragglers_step": compared.get("step"),
        "slowest": compared.get("slowest"),
        "fullest": compared.get("fullest"),
        "seconds_left": seconds_left,
        "last_step_s": age_s,
        "stalled": stalled,
        "loading": saved.get("loading"),
        "validation": {k: v for k, v in validated.items() if k != "kind"} or None,
        "latest": _link(checkpoints / "latest"),
        "best": _link(checkpoints / "best"),
        "logs": [asdict(report) for report in read_logs(folder)],
    }


def _owner_text(status: dict[str, Any]) -> str:
    """Return which process writes to the run, and since when, as text; empty without one."""
    owner = status["owner"]
    if not owner:
        return ""
    since = f" since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(owner['since']))}" if "since" in owner else ""
    return f", {describe_owner(owner)}{since}"


def _last(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return records[-1] if records else {}


def _age_s(metrics: Path) -> float | None:
    """Return how many seconds ago the last record was written; None if there is no record."""
    try:
        return max(0.0, time.time() - metrics.stat().st_mtime)
    except OSError:
        return None


def _stall_s(folder: Path, records: Sequence[Mapping[str, Any]]) -> float:
    """Return after how many seconds without a record a run counts as stalled; more before the first validation."""
    # `run.stall_s` in the text of config.yaml, because loading it needs torch; null, the default, does not match.
    match = re.search(r"^  stall_s: (\d[\d.]*)$", _config(folder), re.MULTILINE)
    if match is not None:
        # 0 means never.
        return float(match[1]) or float("inf")
    trained = [record for record in records if record["kind"] == "train"][1:]  # the first captures and compiles
    longest_s = max((_spent_s(record) for record in trained), default=0.0)
    least_s = _LEAST_STALL_S if any(record["kind"] == "validation" for record in records) else 5 * _LEAST_STALL_S
    return max(least_s, 10 * longest_s)


def _config(folder: Path) -> str:
    return (folder / "config.yaml").read_text(encoding="utf-8")


def _spent_s(record: Mapping[str, Any]) -> float:
    """Return the seconds of a step, with the validation and the checkpoint before it."""
    return sum(float(record.get(key) or 0.0) for key in ("seconds", "validation_seconds", "save_seconds"))


def _step_s(records: Sequence[Mapping[str, Any]]) -> float:
    """Return the mean time of the latest steps, with the validations and checkpoints between them."""
    latest = [record for record in records if record["kind"] == "train"][-_LATEST_STEPS:]
    return sum(map(_spent_s, latest)) / max(1, len(latest))


def _throughput_text(folder: Path, trained: Mapping[str, Any]) -> str:
    """Return the speed of the last step as text, from its record; empty without one."""
    if any(trained.get(key) is None for key in _RATES if key != "utilisation"):
        return ""  # written by an earlier version
    rates = {key: trained.get(key) for key in _RATES}
    return f"{describe_speed(trained['images_per_second'], rates, _unit(folder))} on rank 0"


def _unit(folder: Path) -> str:
    """Return what the run counts, see `unit_of`, from the text of its configuration: loading it needs torch."""
    config = _config(folder)
    # `null` up to the end of the line: the name of a folder may begin with it, too.
    if re.search(r"^  (tiles: \{|features: (?!null$))", config, re.MULTILINE) is None:
        return "images"
    return "cases" if re.search(r"^  bag: case$", config, re.MULTILINE) else "slides"


def _logs_text(folder: Path, state: str, logs: list[dict[str, Any]]) -> list[str]:
    """Return lines about the logs: ranks and hosts, warnings, and the first error."""
    reports = [RankReport(**log) for log in logs]
    if not reports:
        return []
    hosts, noisy = {report.host for report in reports}, [report for report in reports if report.warnings]
    warned = sum(report.warnings for report in noisy)
    warnings = f", {counted(warned, 'line')} of warnings on {counted(len(noisy), 'rank')}" if noisy else ""
    lines = [f"logs: {folder / FOLDER}, {counted(len(reports), 'rank')} on {counted(len(hosts), 'host')}{warnings}"]
    failed = first_failed(reports)
    if failed is not None:
        # Of an interrupted run, the error is what ended it. Others may go on after one, as if a library only logs it.
        kind = "failed" if state == "interrupted" else "first error"
        lines.append(f"{kind}: rank {failed.rank} on {failed.host} at {failed.error_time}: {failed.error}")
    return lines


def _json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _link(link: Path) -> str | None:
    return link.resolve().name if link.exists() else None


def _number(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.4f}"
