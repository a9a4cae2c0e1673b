"""The checkpoints of a run on disk: which exist, links to them, and the removal of old ones."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from hyfi_core.files import replaced_name, sync_file, temporary_name


def point_link(link: Path, target: str) -> None:
    """Point ``link`` to its sibling ``target``, atomically."""
    temporary = temporary_name(link)
    temporary.symlink_to(target)
    # A rename replaces the old link; removing it first would leave a moment without any.
    temporary.replace(link)
    sync_file(link.parent)


def step_folder(checkpoints: Path, step: int) -> Path:
    """Return the folder of one step's checkpoint."""
    return checkpoints / f"step-{step:08d}"


def saved_steps(checkpoints: Path) -> list[int]:
    """Return the steps that have a checkpoint under ``checkpoints``, ascending."""
    if not checkpoints.is_dir():
        return []
    return sorted(int(path.name[5:]) for path in checkpoints.glob("step-*") if path.name[5:].isdigit())


def remove_leftovers(checkpoints: Path) -> None:
    """Remove temporary folders and links of killed writers, and restore a checkpoint that was being replaced.

    Call it only while no process writes here.
    """
    # While a checkpoint ``step-N`` is replaced, the earlier one has the name ``.step-N.old``.
    for aside in checkpoints.glob(replaced_name(checkpoints / "step-*").name):
        folder = checkpoints / aside.name.removeprefix(".").removesuffix(".old")
        if folder.exists():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.rename(folder)
    for leftover in checkpoints.glob(".*.tmp-*"):
        # Links first: ``is_dir`` follows them, and ``rmtree`` refuses them.
        if leftover.is_symlink():
            leftover.unlink()
        elif leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)


def prune(checkpoints: Path, keep: int, spare: Iterable[int] = ()) -> list[int]:
    """Remove all but the ``keep`` newest checkpoints; never one with a link to it, nor a step of ``spare``.

    Returns:
        The removed steps.
    """
    linked = {path.resolve().name for path in checkpoints.iterdir() if path.is_symlink()}
    steps = saved_steps(checkpoints)
    removed = []
    for step in steps[: max(0, len(steps) - keep)]:
        folder = step_folder(checkpoints, step)
        if folder.name not in linked and step not in spare:
            remove(folder)
            removed.append(step)
    return removed


def remove(folder: Path) -> None:
    """Remove a checkpoint; a process that is killed meanwhile leaves no incomplete one under its name."""
    hidden = temporary_name(folder)
    # Removing takes many steps, a rename one. A process killed after it leaves a folder for ``remove_leftovers``.
    folder.rename(hidden)
    shutil.rmtree(hidden)
