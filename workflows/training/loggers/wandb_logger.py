"""Weights & Biases: offline in the run's folder, unless WANDB_MODE says something else."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from typing import Any

from workflows.training.loggers.record import LoggedRecord, MetricsLogger, RunOutcome


class WandbLogger(MetricsLogger):
    """The run as a run of Weights & Biases."""

    name = "wandb"

    def begin(self) -> str:
        """Open the run in the project WANDB_PROJECT, by default ``hyfi``; return its id."""
        import wandb

        mode: Any = os.environ.get("WANDB_MODE") or "offline"
        # An identity of our own: offline, no server gives one, and the resumed run needs the same.
        self.identity = self.identity or uuid.uuid4().hex[:12]
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "hyfi",
            name=self.folder.name,
            id=self.identity,
            resume="allow",
            dir=str(self.folder),
            config=dict(self.settings),
            mode=mode,
            # wandb would redirect the output of the process, and copy code and the state of git.
            settings=wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True),
        )
        # Each kind has a step metric of its own: wandb's common counter only rises, and would drop a validation that
        # arrives after later steps.
        for kind in ("train", "validation"):
            self._run.define_metric(f"{kind}/step")
            self._run.define_metric(f"{kind}/*", step_metric=f"{kind}/step")
        return self.identity

    def write(self, records: Sequence[LoggedRecord]) -> None:
        """Record numbers."""
        for record in records:
            self._run.log({**record.values, f"{record.kind}/step": record.step})

    def end(self, outcome: RunOutcome) -> None:
        """Record paths in the summary, and end the run."""
        self._run.summary.update({name: str(path) for name, path in outcome.files.items()})
        self._run.summary.update({"state": outcome.state, "best_step": outcome.best_step})
        self._run.finish(exit_code=int(outcome.state == "failed"))
