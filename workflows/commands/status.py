"""``hyfi status``: the progress of a run."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from hyfi_core.errors import RequestError
from workflows.console import emit_json, say
from workflows.exit_codes import DONE
from workflows.launch.owner import describe_owner, owner_of


def run(folder: Path, as_json: bool) -> int:
    """Print the progress of a run, from the files in its folder; changes nothing there.

    Raises:
        RequestError: There is no run in ``folder``.
    """
    if not (folder / "config.yaml").is_file():
        raise RequestError(f"{folder}: not a run (it has no config.yaml); give the run.dir of a configuration")
    found = read_status(folder)
    say(f"{folder}: {found['state']}{_owner_text(found)}")
    if found["step"]:
        of = f" of {found['steps']}" if found["steps"] else ""
        left = f", about {found['seconds_left']:.0f} s left" if found["seconds_left"] is not None else ""
        say(f"step {found['step']}{of}, epoch {found['epoch']}, loss {_number(found['loss'])}{left}")
    if found["validation"]:
        numbers = ", ".join(f"{k} {_number(v)}" for k, v in found["validation"].items() if k in ("loss", "auroc"))
        say(f"last validation, step {found['validation']['step']}: {numbers}")
    say(f"latest checkpoint: {found['latest'] or 'none'}; best: {found['best'] or 'none'}")
    if as_json:
        emit_json({"run": folder, **found})
    return DONE


def read_status(folder: Path) -> dict[str, Any]:
    """Return the status of a run.

    ``state`` is ``running`` (a process has locked the folder), ``done``, ``stopped`` (on request) or ``interrupted``
    (its processes were killed or failed: ``--resume`` continues from the latest checkpoint).
    """
    owner = owner_of(folder)
    saved = _json(folder / "status.json")
    trained, validated = _last_lines(folder / "metrics.jsonl")
    state = "running" if owner is not None else saved.get("state", "interrupted")
    if owner is None and state == "running":
        state = "interrupted"
    steps, step = saved.get("steps"), trained.get("step")
    left = None
    if state == "running" and steps and step:
        left = (steps - step) * float(trained.get("seconds") or 0.0)
    checkpoints = folder / "checkpoints"
    return {
        "state": state,
        "owner": owner,
        "step": step,
        "steps": steps,
        "epoch": trained.get("epoch"),
        "loss": trained.get("loss"),
        "images_per_second": trained.get("images_per_second"),
        "seconds_left": left,
        "validation": {k: v for k, v in validated.items() if k != "kind"} or None,
        "latest": _link(checkpoints / "latest"),
        "best": _link(checkpoints / "best"),
    }


def _owner_text(found: dict[str, Any]) -> str:
    owner = found["owner"]
    if not owner:
        return ""
    since = f" since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(owner['since']))}" if "since" in owner else ""
    return f", {describe_owner(owner)}{since}"


def _last_lines(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the last training record and the last validation record; empty if there is none."""
    from workflows.training.metrics_log import read_metrics

    last: dict[str, dict[str, Any]] = {"train": {}, "validation": {}}
    for record in read_metrics(path):
        last[record["kind"]] = record
    return last["train"], last["validation"]


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return {}
    return found if isinstance(found, dict) else {}


def _link(link: Path) -> str | None:
    return link.resolve().name if link.exists() else None


def _number(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.4f}"
