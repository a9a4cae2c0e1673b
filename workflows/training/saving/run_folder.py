"""The folder of a run: configuration, plan, state, and links to checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.files import write_atomically
from hyfi_core.runtime import checkpoint
from hyfi_core.runtime.saving import kept_checkpoints as checkpoints
from workflows.config.load import Config, dump_resolved
from workflows.training.best import Records, best_step


class RunFolder:
    """Writes the files and links of a run's folder, except the metrics; on rank 0 only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoints = folder / "checkpoints"

    def begin(self, config: Config, plan: Mapping[str, Any]) -> None:
        """Write ``config.yaml`` and ``plan.json`` (with roles in addition to the plan's fields), atomically."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / "config.yaml", dump_resolved(config).encode())
        write_atomically(self.folder / "plan.json", (json.dumps(plan, indent=2) + "\n").encode())

    def write_state(
        self, state: str, steps: int, loading: Mapping[str, Any] | None = None, reason: str | None = None
    ) -> None:
        """Write ``status.json``.

        Args:
            state: ``running``, ``stopped``, ``failed`` or ``done``.
            steps: Number of steps of the run.
            loading: The loaders' report.
            reason: Why it failed.
        """
        more = {"loading": loading, "reason": reason}
        status = {"state": state, "steps": steps, **{key: value for key, value in more.items() if value is not None}}
        write_atomically(self.folder / "status.json", (json.dumps(status) + "\n").encode())

    def saved(self, step: int) -> None:
        """Point ``latest`` at the checkpoint of a step."""
        checkpoints.point_link(self.checkpoints / "latest", checkpoints.step_folder(self.checkpoints, step).name)

    def calibrate(self, step: int, calibration: Mapping[str, Any]) -> None:
        """Store the calibration in the checkpoint of a step, if it exists."""
        folder = checkpoints.step_folder(self.checkpoints, step)
        # The split alone is no calibration. The folder may be gone: `run.keep` removes old checkpoints.
        if len(calibration) > 1 and folder.is_dir():
            checkpoint.amend_model_json(folder, {"calibration": dict(calibration)})

    def rewind(self, step: int) -> None:
        """Point ``latest`` at the checkpoint of ``step``, or the last one before it, and remove those after it."""
        steps = checkpoints.saved_steps(self.checkpoints)  # ascending
        kept = [saved_step for saved_step in steps if saved_step <= step]
        if kept:  # perhaps without `step`, whose weights may not have been finite
            self.saved(kept[-1])
        # Removed after `latest` was moved, so that the link never names a checkpoint that is being removed.
        for later_step in steps[len(kept) :]:
            checkpoints.remove(checkpoints.step_folder(self.checkpoints, later_step))
        best = self.checkpoints / "best"
        # A link to a removed checkpoint: the next `choose_best` makes a new one.
        if best.is_symlink() and not best.exists():
            best.unlink()

    def choose_best(self, validations: Records, metric: str) -> int | None:
        """Point ``best`` to the best validated step and return it; None if none has a checkpoint.

        The result does not depend on the order of records.
        """
        best = best_step(validations, metric, checkpoints.saved_steps(self.checkpoints))
        if best is not None:
            self.point_best(best)
        return best

    def point_best(self, step: int) -> None:
        """Point ``best`` at the checkpoint of ``step``."""
        name = checkpoints.step_folder(self.checkpoints, step).name
        link = self.checkpoints / "best"
        # Most validations are not better: they leave the link alone.
        if not link.is_symlink() or str(link.readlink()) != name:
            checkpoints.point_link(link, name)
