"""Output of a run, written by rank 0: metrics, TensorBoard events, links to the latest and best checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from data.samples.coverage import write_coverage
from data.samples.exclusion import write_excluded
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.runtime.saving.kept_checkpoints import prune, remove_leftovers, saved_steps
from workflows.config.load import settings_of
from workflows.console import say
from workflows.evaluation.evaluate import EvaluatedMetrics
from workflows.training.best import early_stop_step_of
from workflows.training.checks.data_record import SlideTables
from workflows.training.curves import write_curves
from workflows.training.job import TrainingJob
from workflows.training.loggers.event_file import EventFile
from workflows.training.loggers.record import RunOutcome, scalars
from workflows.training.loggers.run_loggers import RunLoggers
from workflows.training.metrics_log import MetricsLog, describe_nonfinite, nonfinite_steps
from workflows.training.saving.run_folder import RunFolder
from workflows.training.throughput import Throughput, describe_speed, unit_of


def format_metrics(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Return loss and metrics as text: ``0.8123 (0.7001 to 0.9012)``, ``0.8123`` or ``undefined``.

    A metric whose interval is undefined says so: too few cases define it, or all draws are alike.
    """
    intervals = metrics.get("intervals", {})
    # None: an undefined metric; under these two names, that there are no metrics of cases or no calibration.
    numbers = {
        k: v for k, v in metrics.items() if isinstance(v, float) or (v is None and k not in ("case", "calibration"))
    }
    # (): the metric has no interval; None: its interval is undefined.
    return {name: _format_number(value, intervals.get(name, ())) for name, value in numbers.items()}


def _format_number(value: float | None, interval: Sequence[float] | None) -> str:
    if value is None:
        return "undefined"
    if interval is None:
        return f"{value:.4f} (interval undefined)"
    return f"{value:.4f}" + (f" ({interval[0]:.4f} to {interval[1]:.4f})" if interval else "")


class Recorder:
    """Writes the run's folder; on rank 0 only.

    Args:
        job: The run.
        plan: The plan with resolved cuts.
        start: The step after which the run continues (0: a new run); later lines of the log are dropped.
        slides: Tables of its slides.
        throughput: Converts images per second.

    Attributes:
        folder: The run's folder.
        best: The step to which ``best`` points.
        last: The step with which early stopping ends the run (see :mod:`workflows.training.best`), or None.
        data: Record of the run's slides, for its checkpoints.
        trained_slides: The training slides, by which predictions recognise them.
        loading: Report of all loaders, set at the end; None before, and without loaders.
    """

    def __init__(
        self,
        job: TrainingJob,
        plan: ParallelPlan,
        start: int,
        slides: SlideTables,
        throughput: Throughput,
    ) -> None:
        self._job, config = job, job.config
        self._throughput = throughput
        self._start = start
        self.folder = RunFolder(config.run.dir)
        roles = {**config.roles.model_dump(exclude={"shares"}), "pace_s": job.pace_s}
        self.folder.begin(config, {**plan.to_json(), **roles})
        # Temporary folders of an earlier process that was killed while it wrote.
        remove_leftovers(self.folder.checkpoints)
        write_coverage(config.run.dir / "coverage.csv", slides.coverage or ())
        if job.excluded:
            write_excluded(config.run.dir / "excluded.csv", job.excluded)
        self.data, self.trained_slides = slides.data, slides.trained
        if start:
            # Checkpoints after `start` belong to a future that this run computes again, perhaps otherwise.
            self.folder.rewind(start)
        self._log = MetricsLog(config.run.dir / "metrics.jsonl", start)
        self._board = _TensorBoard(config.run.dir / "tensorboard", start) if config.run.tensorboard else None
        self._loggers = RunLoggers(config.run.loggers, config.run.dir, settings_of(config), resumed=start > 0)
        self.best: int | None = None
        self.early_stop_step: int | None = None
        self.loading: dict[str, Any] | None = None
        self._step_text = self._validation_text = ""
        # A resumed run may have ended already: its records say so.
        self._update_early_stop()

    def trained(
        self,
        step: int,
        loss: float,
        lr: float,
        seconds: float,
        wait_seconds: float,
        further: Mapping[str, Any] | None = None,
    ) -> None:
        """Record one step; ``lr``: its learning rate; ``further``: more keys, such as the times by kind."""
        images_per_s = self._job.step_samples / seconds
        throughput = self._throughput.of(images_per_s)
        values = {
            "epoch": self._job.epoch_of(step),
            "loss": loss,
            "lr": lr,
            "seconds": seconds,
            "images_per_second": images_per_s,
            "wait_seconds": wait_seconds,
            **(further or {}),
            **throughput,
        }
        self._log.write("train", step=step, **values)
        on_rank_0 = " on rank 0" if self._job.plan.ranks > 1 else ""
        speed = describe_speed(images_per_s, throughput, unit_of(self._job.config.data)) + on_rank_0
        self._step_text = f"loss {loss:.4g}, lr {lr:.3g}, {speed}"
        self._show("train", step, values)

    def metrics_of_best(self) -> Mapping[str, Any] | None:
        """Return the metrics of the best checkpoint, as ``metrics.jsonl`` has them; None: nothing was validated."""
        # Records from the log, not from memory: a resumed run has those of earlier processes, too.
        return None if self.best is None else self._log.validations().get(self.best)

    def validated(self, step: int, metrics: EvaluatedMetrics, spare: Iterable[int] = ()) -> None:
        """Record the metrics of the weights of ``step``, update best and early stop, and remove old checkpoints.

        Steps ascend; those after an early stop are ignored. ``spare``: steps whose checkpoints must stay.
        """
        if self.early_stop_step is not None:
            return
        self._log.write("validation", step=step, **metrics)
        self._show("validation", step, metrics)
        # Before `prune`, which may remove this checkpoint.
        self.folder.calibrate(step, {**(metrics.get("calibration") or {}), "split": self._job.config.validation.split})
        self.choose_best()
        self._update_early_stop()
        # After `best` points at its new target, because checkpoints with a link stay.
        prune(
            self.folder.checkpoints,
            self._job.config.run.keep,
            (*spare, step) if self.early_stop_step == step else spare,
        )
        chosen = self._job.config.validation.metric
        value = metrics.get(chosen)
        self._validation_text = "" if value is None else f", {chosen} {value:.4f} at step {step}"
        brief = {**metrics, "intervals": {chosen: metrics.get("intervals", {}).get(chosen)}}
        self._write_curves()
        text = ", ".join(f"{name} {value}" for name, value in format_metrics(brief).items())
        say(f"step {step}: validation {text}{' (best)' if self.best == step else ''}")

    @property
    def nonfinite_steps(self) -> int:
        """Number of steps so far whose loss or gradient was not finite."""
        return len(nonfinite_steps(self._log.records))

    def describe_nonfinite(self) -> str | None:
        """Return how many steps were not finite as text; None if all were."""
        return describe_nonfinite(self._log.records)

    def line(self) -> str:
        """Return the text of the progress line: loss, learning rate, speed, memory, latest validation."""
        return self._step_text + self._validation_text

    def rewind(self) -> None:
        """Remove checkpoints, records and events after step ``early_stop_step``."""
        assert self.early_stop_step is not None
        self.folder.rewind(self.early_stop_step)
        self._log.cut(self.early_stop_step)
        if self._board is not None:
            self._board.close()
            self._board = _TensorBoard(self.folder.folder / "tensorboard", self.early_stop_step)

    def _update_early_stop(self) -> None:
        """Set ``early_stop_step`` from the validations that are recorded so far."""
        self.early_stop_step = early_stop_step_of(
            self._log.validations(), self._job.config.validation.metric, self._job.config.run.early_stop
        )

    def choose_best(self) -> None:
        """Point ``best`` to the best validated checkpoint; without validation, to the latest."""
        metric = self._job.config.validation.metric
        self.best = self.folder.choose_best(self._log.validations(), metric)

    def saved(self, step: int, spare: Iterable[int]) -> None:
        """Update the links for a new checkpoint; remove old ones, except latest, best and those of ``spare``."""
        self.folder.saved(step)
        # Without validation, the latest is the best.
        if not len(self._job.val):
            self.folder.point_best(step)
        # A checkpoint may be published after the results by which the run ends with an earlier one.
        prune(
            self.folder.checkpoints,
            self._job.config.run.keep,
            (*spare, *([] if self.early_stop_step is None else [self.early_stop_step])),
        )

    def unvalidated(self) -> list[int]:
        """Return saved steps whose validation is missing because the run was stopped before it."""
        validated = self._log.validations()
        saved = [step for step in saved_steps(self.folder.checkpoints) if step <= self._start]
        # A stop on request saves after any step: such a checkpoint must not hide one that is to be validated.
        to_validate = [step for step in saved if self._job.validates_after(step) and step not in validated]
        if self._job.config.validation.policy == "latest":  # earlier ones were skipped on purpose
            return [step for step in to_validate if step > max(validated, default=0)][-1:]
        return to_validate

    def close(self) -> None:
        """Write the curves, sync everything to disk and close."""
        self._write_curves()
        self._log.close()
        if self._board is not None:
            self._board.close()

    def end_loggers(self, state: str) -> None:
        """Let the loggers of ``run.loggers`` record how the run has ended: ``done``, ``stopped`` or ``failed``."""
        folder = self.folder.folder
        names = {"metrics": "metrics.jsonl", "config": "config.yaml", "curves": "curves.html"}
        names |= {"best_checkpoint": "checkpoints/best", "latest_checkpoint": "checkpoints/latest"}
        # Resolved: `best` names another checkpoint if the run is continued.
        paths = {name: (folder / path).resolve() for name, path in names.items() if (folder / path).exists()}
        self._loggers.end(RunOutcome(state, self.best, paths))

    def _write_curves(self) -> None:
        """Replace ``curves.html``; errors are ignored."""
        folder, unit = self._job.config.run.dir, unit_of(self._job.config.data)
        # A page for people: no reason to end a run.
        with contextlib.suppress(OSError):
            write_curves(folder / "curves.html", str(folder), self._log.records, unit)

    def _show(self, kind: str, step: int, values: EvaluatedMetrics) -> None:
        if self._board is not None:
            self._board.show(kind, step, values)
        self._loggers.add(kind, step, values)


class _TensorBoard:
    """TensorBoard events."""

    def __init__(self, folder: Path, start: int) -> None:
        self._file = EventFile(folder, start)

    def show(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        for name, value in scalars(kind, values):
            self._file.add(name, value, step)

    def close(self) -> None:
        self._file.close()
