"""What rank 0 writes while a run goes on: metrics, TensorBoard events, checkpoints, the link to the best."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from data.coverage import write_coverage
from hyfi_core.runtime.checkpoint import prune, saved_steps
from workflows.console import say
from workflows.training.job import Job
from workflows.training.metrics_log import MetricsLog
from workflows.training.run_folder import RunFolder

Metrics = Mapping[str, float | None]


class Recorder:
    """The run's folder, open for writing; on rank 0 only.

    Args:
        job: the run.
        start: the step that the run goes on after; later lines of the log are dropped.
        coverage: rows of ``coverage.csv``.
    """

    def __init__(self, job: Job, start: int, coverage: Iterable[Mapping[str, Any]]) -> None:
        self._job, config = job, job.config
        self._start = start
        self.folder = RunFolder(config.run.dir)
        self.folder.begin(config, {**job.plan.to_json(), **config.roles.model_dump()})
        write_coverage(config.run.dir / "coverage.csv", coverage)
        self._log = MetricsLog(config.run.dir / "metrics.jsonl", start)
        self._board = _Board(config.run.dir / "tensorboard", start) if config.run.tensorboard else None
        self.best: int | None = None

    def trained(self, step: int, loss: float, lr: float, seconds: float, wait_seconds: float) -> None:
        """Record one step; ``lr`` is the rate that it used."""
        values = {
            "epoch": self._job.epoch_of(step),
            "loss": loss,
            "lr": lr,
            "seconds": seconds,
            "images_per_second": self._job.step_samples / seconds,
            "wait_seconds": wait_seconds,
        }
        self._log.write("train", step=step, **values)
        self._show("train", step, values)

    def validated(self, step: int, metrics: Metrics, spare: Iterable[int] = ()) -> None:
        """Record what the weights of ``step`` are worth, point ``best`` anew, and remove what is not needed now."""
        self._log.write("validation", step=step, **metrics)
        self._show("validation", step, metrics)
        named = ", ".join(f"{key} {'undefined' if value is None else f'{value:.4f}'}" for key, value in metrics.items())
        self.choose_best()
        prune(self.folder.checkpoints, self._job.config.run.keep, spare)
        say(f"step {step}: validation {named}{' (best)' if self.best == step else ''}")

    def choose_best(self) -> None:
        """Point ``best`` at the best of what has been validated and saved; without validation, at the latest."""
        metric = self._job.config.validation.metric
        self.best = self.folder.choose_best(self._log.validations(), metric)

    def save(
        self,
        step: int,
        weights: Mapping[str, torch.Tensor],
        optimizer: Mapping[str, Any],
        state: Mapping[str, Any],
        spare: Iterable[int],
    ) -> None:
        """Save a checkpoint and remove old ones; never the latest, the best, or the steps of ``spare``."""
        self.folder.save(step, weights, self._job.model_json(), optimizer, state)
        if not len(self._job.val):
            self.folder.point_best(step)
        prune(self.folder.checkpoints, self._job.config.run.keep, spare)

    def unvalidated(self) -> list[int]:
        """Return saved steps that should have been validated and were not: the run was stopped before."""
        done = self._log.validations()
        saved = [step for step in saved_steps(self.folder.checkpoints) if step <= self._start]
        return [step for step in saved if self._job.validates_after(step) and step not in done]

    def close(self) -> None:
        """Bring everything to the disk."""
        self._log.close()
        if self._board is not None:
            self._board.close()

    def _show(self, kind: str, step: int, values: Metrics) -> None:
        if self._board is not None:
            self._board.show(kind, step, values)


class _Board:
    """TensorBoard events."""

    def __init__(self, folder: Any, start: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder), purge_step=start + 1 if start else None)

    def show(self, kind: str, step: int, values: Metrics) -> None:
        for name, value in values.items():
            if value is not None and name != "epoch":
                self._writer.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        self._writer.close()
