"""The lines that rank 0 prints at the start and at the end of a run."""

from __future__ import annotations

from pathlib import Path

from hyfi_core.runtime.engine import Engine
from workflows.console import counted, emit_json, say, warn
from workflows.run_machine import machine_of
from workflows.training.inputs.run_inputs import TrainingEngine
from workflows.training.job import TrainingJob
from workflows.training.optimisation import describe_updates
from workflows.training.pace import describe_pace
from workflows.training.recorder import Recorder


def describe_start(job: TrainingJob, engine: TrainingEngine, start: int) -> str:
    """Return what rank 0 prints when training starts, or continues after step ``start``."""
    # Only the time to spill is forecast, by the machine of the configuration or the nearest one that is described here.
    chosen = job.config.run.machine or ("h100" if engine.device.type == "cuda" else "cpu")
    machine = machine_of(job.config, chosen) if engine.plan.spill is not None else None
    plan = engine.describe(machine) if isinstance(engine, Engine) else engine.describe()
    action = f"continues after step {start}" if start else "starts"
    compiling = ""
    if engine.segments is not None and job.config.run.deterministic:
        compiling = "\nthe first step compiles segments of the model; run.compile=off omits it"
    return (
        f"run {job.config.run.dir} {action}: {_samples(job)}, {job.task.describe()}, {counted(job.steps, 'step')} of "
        f"{counted(job.step_samples, job.config.data.bag)}{_selecting(job)}\n"
        f"{describe_updates(job.config.optimizer, job.step_samples)}\n"
        f"{describe_pace(job)}{plan}{compiling}"
    )


def _samples(job: TrainingJob) -> str:
    """Return the numbers of training and validation samples in words: slides, or cases and their slides."""
    if job.config.data.bag == "slide":
        return f"{counted(len(job.train), 'slide')} to train on, {len(job.val):,} to validate on"
    train, val = job.train_samples, job.val_samples
    return (
        f"{counted(len(train), 'case')} of {counted(train.slides, 'slide')} to train on, {len(val):,} of "
        f"{counted(val.slides, 'slide')} to validate on"
    )


def _selecting(job: TrainingJob) -> str:
    """Return which metric selects the best checkpoint if there are several targets, each with its metrics."""
    if job.config.data.targets is None or not len(job.val):
        return ""
    return f"; best is the checkpoint with the best {job.config.validation.metric} (validation.metric)"


def report(job: TrainingJob, recorder: Recorder, stopped: bool, failure: str | None, as_json: bool) -> None:
    """Print how a run has ended, and write it to its folder; on rank 0 only.

    Args:
        job: The run.
        recorder: Its recorder, closed.
        stopped: Whether it was stopped on request.
        failure: Why it ended early; None if it did not.
        as_json: Whether to print the result as one JSON object, too.
    """
    folder = job.config.run.dir
    state = "stopped" if stopped else "done"
    if failure is not None:  # a failed run counts as stopped, too
        state = "failed"
    outcome = "stopped on request; --resume continues it" if state == "stopped" else state
    recorder.folder.write_state(state, job.steps, recorder.loading, failure)
    recorder.end_loggers(state)
    if recorder.early_stop_step is not None and not stopped:
        metric, patience = job.config.validation.metric, job.config.run.early_stop
        outcome = f"ended after step {recorder.early_stop_step}: {patience} validations without a better {metric}"
    best = f", best checkpoint of step {recorder.best}" if recorder.best is not None else ""
    say(f"run {folder}: {outcome}{best}")
    nonfinite = recorder.describe_nonfinite()
    if nonfinite is not None:
        say(f"run {folder}: {nonfinite}")
    if failure is not None:
        warn(f"hyfi: run {folder} {_advice_on_failure(folder, failure)}", "ERROR")
    if as_json:
        emit_json(
            {
                "run": folder,
                "status": state,
                "reason": failure,
                "steps": job.steps,
                "best_step": recorder.best,
                "early_stop_step": recorder.early_stop_step,
                "latest": folder / "checkpoints" / "latest",
                "metrics": recorder.metrics_of_best(),
                "best": folder / "checkpoints" / "best" if (folder / "checkpoints" / "best").exists() else None,
            }
        )


def _advice_on_failure(folder: Path, failure: str) -> str:
    """Return why a run has failed, with its last checkpoint and what may help."""
    latest = folder / "checkpoints" / "latest"
    saved = f"the last finite checkpoint is {latest.resolve()}" if latest.exists() else "there is no checkpoint yet"
    return (
        f"failed: {failure}; {saved}. Lower optimizer.lr, give optimizer.max_norm or lr_schedule.warmup_steps, or "
        f"look at these slides; with run.on_nonfinite=skip such steps are left out"
    )
