"""Whether and where a run continues: ``--resume``, ``--resume-from``, ``--accept-data-changes``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hyfi_core.errors import RequestError
from hyfi_core.runtime.saving.kept_checkpoints import saved_steps, step_folder

PREVIOUS = "previous"


@dataclass(frozen=True)
class Resumption:
    """How an existing run is continued.

    Attributes:
        allowed: Whether it may be continued.
        source: ``previous`` or ``step-N``: the checkpoint from which it continues; None: the latest.
        accepts_changes: Whether it may be continued although labels, splits or slides have changed.
    """

    allowed: bool = False
    source: str | None = None
    accepts_changes: bool = False

    @classmethod
    def of(cls, resume: bool, source: str | None, accepts_changes: bool) -> Resumption:
        """Return the request of a command line, on which ``--resume-from`` includes ``--resume``.

        Raises:
            RequestError: ``source`` is not the name of a checkpoint.
        """
        if source is not None and source != PREVIOUS and _step_of(source) is None:
            raise RequestError(f"--resume-from {source}: give previous, or a checkpoint of the run such as step-1200")
        return cls(resume or source is not None, source, accepts_changes)

    def words(self) -> list[str]:
        """Return the flags of a command line that give this request."""
        flags = {"--resume": self.allowed, "--accept-data-changes": self.accepts_changes}
        source = ["--resume-from", self.source] if self.source is not None else []
        return [*(flag for flag, is_set in flags.items() if is_set), *source]

    def describe(self, folder: Path, start: int) -> str | None:
        """Return what a run loses by continuing from the chosen checkpoint; None without ``--resume-from``."""
        if self.source is None:
            return None
        later = [step for step in saved_steps(folder / "checkpoints") if step > start]
        lost = f"the checkpoint{'s' if len(later) > 1 else ''} of {_named(later)}, and " if later else ""
        return (
            f"run {folder}: continues after step {start} (--resume-from {self.source}); removed: {lost}what was "
            f"recorded after that step"
        )

    def step(self, checkpoints: Path) -> int:
        """Return the step after which a run continues, 0 if it has no checkpoint; the checkpoint is not read.

        Args:
            checkpoints: The folder of the run's checkpoints.

        Raises:
            RequestError: There is no such checkpoint.
        """
        saved, link = saved_steps(checkpoints), checkpoints / "latest"
        if link.is_dir() and not link.is_symlink():
            raise RequestError(
                f"{link}: is a folder, not a link, as in a copy that followed links; remove it, and --resume continues "
                f"after the last of the steps that are saved ({', '.join(map(str, saved)) or 'none'})"
            )
        # The link is missing if the run ended just after writing its first checkpoint, or was copied without links.
        last = _step_of(link.readlink().name) if link.is_symlink() else (saved or [0])[-1]
        if last is None:
            raise RequestError(f"{link}: points to {link.readlink()}, which is no checkpoint of the run")
        if self.source is None:
            # The link outlived its checkpoint, as after an incomplete copy.
            if last and last not in saved:
                raise RequestError(f"{link}: step {last} is not there; {_offer(saved)}")
            return last
        # `previous` counts from the link, not from the newest folder.
        target = max((step for step in saved if step < last), default=None)
        if self.source != PREVIOUS:
            target = _step_of(self.source)
        if target is None or target not in saved:
            raise RequestError(f"--resume-from {self.source}: {checkpoints} has no such checkpoint; {_offer(saved)}")
        return target


def describe_way_out(checkpoints: Path, damaged: int) -> str:
    """Return how a run can be continued although a checkpoint is damaged; reads all others to check them.

    Args:
        checkpoints: The folder of the run's checkpoints.
        damaged: The step that cannot be used.
    """
    steps = [step for step in saved_steps(checkpoints) if step != damaged and _is_whole(checkpoints, step)]
    return _offer(steps, "whole")


def _is_whole(checkpoints: Path, step: int) -> bool:
    """Whether all files of a step's checkpoint are as they were saved."""
    from hyfi_core.runtime.checkpoint import load_checkpoint, load_training_state

    folder = step_folder(checkpoints, step)
    try:
        load_checkpoint(folder)
        load_training_state(folder)
    except RequestError:
        return False
    return True


def _offer(steps: Sequence[int], kind: str = "saved") -> str:
    if not steps:
        return f"no other checkpoint is {kind}; begin again in another run.dir"
    return f"{kind}: {_named(steps)}; continue from the last of them with --resume-from step-{steps[-1]}"


def _named(steps: Sequence[int]) -> str:
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"


def _step_of(text: str) -> int | None:
    match = re.fullmatch(r"(?:step-)?(\d+)", text)
    return int(match[1]) if match is not None else None
