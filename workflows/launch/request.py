"""Checks whether a run may be started or continued, before large imports and before anything is written."""

from __future__ import annotations

import json
import os
from difflib import get_close_matches

from hyfi_core.errors import RequestError
from hyfi_core.runtime.launch import inside_launcher
from workflows.config.load import Config, changed_keys, load_config, refuse_changes
from workflows.launch.owner import NAME as OWNER
from workflows.launch.owner import FolderOwner, check_free
from workflows.launch.rank_log import FOLDER as LOGS
from workflows.launch.resumption import Resumption
from workflows.paths import require_writable

_OTHER = "use another run.dir"
_LONGER = {"run.steps", "run.epochs", "run.early_stop"}
"""Keys that may make a finished run longer."""


def check_run(config: Config, resumption: Resumption) -> int:
    """Return the step after which the run continues, 0 for a new run; writes nothing.

    Raises:
        RequestError: The run exists and ``--resume`` is missing, its settings differ, it has no such checkpoint, or the
            folder is not a run or cannot be written.
    """
    folder = config.run.dir
    require_writable(folder / "config.yaml")
    # A folder with only these two is no run: it was left by a start that was refused.
    if not folder.exists() or not any(entry.name not in (OWNER, LOGS) for entry in folder.iterdir()):
        if resumption.source is not None:
            raise RequestError(f"--resume-from {resumption.source}: run.dir {folder} has no run")
        return 0
    if not (folder / "config.yaml").is_file():
        raise RequestError(f"run.dir {folder}: exists and is not a run (it has no config.yaml); use another run.dir")
    # The command that starts a run never continues an existing one by accident, perhaps with other data.
    if not resumption.allowed:
        raise RequestError(f"run.dir {folder}: this run exists; continue it with --resume, or use another run.dir")
    refuse_changes(load_config(folder / "config.yaml"), config)
    return resumption.step(folder / "checkpoints")


def is_finished(config: Config) -> bool:
    """Whether a run is done, and its configuration does not make it longer."""
    folder = config.run.dir
    try:
        state = json.loads((folder / "status.json").read_text(encoding="utf-8"))["state"]
    except (OSError, ValueError, KeyError):
        return False
    return state == "done" and not _LONGER & changed_keys(load_config(folder / "config.yaml"), config).keys()


def check_unused(config: Config) -> None:
    """Check that no other process writes to the run; call it before reading its files, which the other may remove.

    Raises:
        RequestError: One does, or the folder cannot be written.
    """
    require_writable(config.run.dir / "config.yaml")
    check_free(config.run.dir, _OTHER)


def describe_missing_run(config: Config) -> tuple[str, bool] | None:
    """Return (text, whether it is a warning) about ``--resume`` without a run; None if there is a run.

    Scripts pass ``--resume`` at their first start, too. But if there is a run with a similar name beside it, the name
    of the folder may be mistyped.
    """
    folder = config.run.dir
    if (folder / "config.yaml").exists():
        return None
    parent = folder.absolute().parent
    # Only folders of runs: others of a similar name would be no advice.
    siblings = [path.parent.name for path in parent.glob("*/config.yaml")] if parent.is_dir() else []
    like = get_close_matches(folder.name, siblings, n=1)
    if not like:
        return f"run.dir {folder}: first start of this run", False
    return (
        f"run.dir {folder}: there is no run to resume, a new one starts; did you mean {folder.parent / like[0]}?",
        True,
    )


def check_checkpoint(config: Config, start: int) -> None:
    """Check that this rank, too, sees the checkpoint from which rank 0 continues.

    Args:
        config: The configuration of the run.
        start: The step of the checkpoint; 0 for a new run.

    Raises:
        RequestError: It does not.
    """
    from hyfi_core.runtime.saving.kept_checkpoints import step_folder

    folder = step_folder(config.run.dir / "checkpoints", start)
    if start and not folder.is_dir():
        raise RequestError(f"{folder}: not found, but the run continues after this step")


def own_run(config: Config, resumption: Resumption, start: int) -> FolderOwner:
    """Acquire exclusive ownership of the run's folder.

    Raises:
        RequestError: Another process owns it, or has continued the run since ``start`` was read.
    """
    folder = config.run.dir
    owner = FolderOwner(folder, _OTHER)
    try:
        # Checked again under the lock: between the first check and now, another process may have trained here.
        if check_run(config, resumption) != start:
            raise RequestError(
                f"run.dir {folder}: another process has written to this run in the meantime; start again"
            )
    except RequestError:
        owner.release()
        raise
    return owner


def check_ranks(config: Config, size: int) -> None:
    """Check the number of ranks against the configuration.

    Raises:
        RequestError: The number is not what the configuration needs, or roles by host name have no launcher.
    """
    roles = config.roles
    if roles.by_host:
        if inside_launcher() is None:
            raise RequestError(
                f"roles.loaders: {roles.loaders}, roles.validators: {roles.validators}, roles.spare: {roles.spare}: "
                "roles by host need a launcher that starts ranks on several hosts (srun hyfi train …, mpiexec -hosts … "
                "hyfi train …)"
            )
        return
    # Roles by host are counted later, when all hosts are known.
    if size != config.ranks:
        ranks = config.ranks
        advice = f"--ranks {ranks}" if inside_launcher() is None else f"`srun -n {ranks} …` or `mpiexec -n {ranks} …`"
        raise RequestError(
            f"{size} ranks were started, but the run needs {ranks}: {config.trainers} trainers (plan), "
            f"{roles.loaders} loaders and {roles.validators} validators (roles); "
            f"use {advice}, or change these{left_over_advice(size)}"
        )


def left_over_advice(size: int) -> str:
    """Return what to do if variables of an earlier launcher are why this process is the only rank; empty if not."""
    launcher = inside_launcher()
    if launcher is None or size > 1:
        return ""
    from hyfi_core.comm.supervision.rendezvous import Expected

    return f". {Expected(launcher, os.environ).if_left_over()}"
