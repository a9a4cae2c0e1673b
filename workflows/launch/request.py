"""Checks whether a run may be started or continued, before large imports and before anything is written."""

from __future__ import annotations

import json
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
"""Keys with which a finished run may go on."""


def check_run(config: Config, resumption: Resumption) -> int:
    """Return the step after which the run continues, 0 for a new run; writes nothing.

    Raises:
        RequestError: The run exists and may not be continued, its settings were different, it has no such checkpoint,
            or the folder is not a run or cannot be written.
    """
    folder = config.run.dir
    require_writable(folder / "config.yaml")
    if not folder.exists() or not any(entry.name not in (OWNER, LOGS) for entry in folder.iterdir()):
        if resumption.source is not None:
            raise RequestError(f"--resume-from {resumption.source}: run.dir {folder} has no run")
        return 0
    if not (folder / "config.yaml").is_file():
        raise RequestError(f"run.dir {folder}: exists and is not a run (it has no config.yaml); use another run.dir")
    if not resumption.allowed:
        raise RequestError(f"run.dir {folder}: this run exists; continue it with --resume, or use another run.dir")
    refuse_changes(load_config(folder / "config.yaml"), config)
    return resumption.step(folder / "checkpoints")


def is_finished(config: Config) -> bool:
    """Whether a run is done, and not to be made longer by its configuration."""
    folder = config.run.dir
    try:
        state = json.loads((folder / "status.json").read_text(encoding="utf-8"))["state"]
    except (OSError, ValueError, KeyError):
        return False
    return state == "done" and not _LONGER & changed_keys(load_config(folder / "config.yaml"), config).keys()


def check_unused(config: Config) -> None:
    """Check that no other process writes to the run, before its files are read: they change and are removed.

    Raises:
        RequestError: One does, or the folder cannot be written.
    """
    require_writable(config.run.dir / "config.yaml")
    check_free(config.run.dir, _OTHER)


def describe_missing_run(config: Config) -> tuple[str, bool] | None:
    """Return (what a request to resume finds where there is no run, whether it is a warning); None if there is a run.

    Scripts resume at their first start, too, as they should; but beside a run of a similar name, the folder may have
    been mistyped.
    """
    folder = config.run.dir
    if (folder / "config.yaml").exists():
        return None
    parent = folder.absolute().parent
    siblings = [path.parent.name for path in parent.glob("*/config.yaml")] if parent.is_dir() else []
    like = get_close_matches(folder.name, siblings, n=1)
    if not like:
        return f"run.dir {folder}: first start of this run", False
    return (
        f"run.dir {folder}: there is no run to resume, a new one starts; did you mean {folder.parent / like[0]}?",
        True,
    )


def check_checkpoint(config: Config, start: int) -> None:
    """Check that the checkpoint after which rank 0 continues is here; ``start``: its step, 0 for a new run.

    Raises:
        RequestError: It is not.
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
    if size != config.ranks:
        right = config.ranks
        how = f"--ranks {right}" if inside_launcher() is None else f"`srun -n {right} …` or `mpiexec -n {right} …`"
        raise RequestError(
            f"{size} ranks were started, but the run needs {config.ranks}: {config.trainers} trainers (plan), "
            f"{roles.loaders} loaders and {roles.validators} validators (roles); "
            f"use {how}, or change these"
        )
