"""The trainers' loop: feed, step, record, save, validate, stop."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch

from data.cores import usable_cores
from hyfi_core.comm.activity import ACTIVITY
from workflows.console import say, warn
from workflows.finetuning.freezing import Freezing
from workflows.launch.stop import StopFlag
from workflows.training.averages.of_run import make_average
from workflows.training.bound_by import RunSetup, StepTime, bound_by
from workflows.training.checks.data_record import DATA_KEY
from workflows.training.checks.finite import FiniteSteps, StepNumbers
from workflows.training.feeding import cores_of_trainer, loading_report
from workflows.training.inputs.run_inputs import RunInputs, TrainingEngine
from workflows.training.optimisation import LearningRate
from workflows.training.recorder import Recorder
from workflows.training.saving.run_checkpoints import RunCheckpoints
from workflows.training.start import Roles, SavedRun
from workflows.training.step_trace import StepTrace, traced_steps
from workflows.training.stragglers import (
    INTERVAL_STEPS,
    describe_fullest,
    describe_stragglers,
    gather_places,
    slowest,
    stragglers,
)
from workflows.training.throughput import describe_loading, memory_bytes
from workflows.training.validating import Validating

MaybeState = Mapping[str, torch.Tensor] | None
_WARNINGS = 5
"""A run warns of this many steps that are not finite, and then stops warning."""


class TrainingLoop:
    """The training loop of one trainer; all trainers call ``run`` together.

    Args:
        inputs: The kind of the run.
        roles: Roles of all ranks.
        engine: The trainers' engine.
        model: The module that the engine trains.
        freezing: What is frozen in it.
        recorder: On rank 0; None elsewhere.
        saved: The state of a resumed run; None for a new run.
        stop: Requests to stop.

    Attributes:
        failure: Why the run ended early, or its weights are not saved, because numbers are not finite; None if all are.
    """

    def __init__(
        self,
        inputs: RunInputs,
        roles: Roles,
        engine: TrainingEngine,
        model: torch.nn.Module,
        freezing: Freezing | None,
        recorder: Recorder | None,
        saved: SavedRun | None,
        stop: StopFlag,
    ) -> None:
        assert roles.trainers is not None
        job = self._job = inputs.job
        self._inputs, self._world, self._trainers = inputs, roles.world, roles.trainers
        self._engine, self._model, self._recorder, self._stop = engine, model, recorder, stop
        self._replica = roles.trainers.rank // job.plan.ranks_per_replica
        # Rates follow the slides of a whole step, however the plan divides them.
        lr = job.config.optimizer.scaled_lr(job.step_samples)
        self._rate = LearningRate(engine.optimizer, job.config.lr_schedule, job.steps, lr)
        self._freezing = freezing
        self._resumed, self._start = saved is not None, 0
        if saved is not None:
            self._start = int(saved.training.state["step"])
            # Before `make_average`, which starts from the model's weights.
            saved.restore(engine, model)
            change = self._rate.describe_change(saved.training.state)
            if change is not None and recorder is not None:
                say(change)
        self._average = make_average(job.config.run.ema, engine, model, saved)
        if saved is not None:
            # Closed here, because `make_average` reads from the checkpoint's files, too.
            saved.close()
        self.failure: str | None = None
        self._finite = FiniteSteps(job.config.run.on_nonfinite, roles.trainers, engine, model)
        self._checkpoints = RunCheckpoints(inputs, roles.trainers, engine, self._average, recorder)
        self._validating = Validating(inputs, roles, engine, model, self._average, recorder, stop, self._checkpoints)
        self._batches = inputs.batches(roles, engine, self._start)
        # `_late_s`: after a step's time was taken, trainers wait for each other to compare times and to vote; these
        # seconds count in the next step. `_compared_s`: the part of comparing.
        self._time, self._late_s, self._compared_s, self._compile_s = StepTime(), 0.0, 0.0, 0.0
        # Rank, host and memory of the trainer that uses most memory, when they were compared last.
        self._fullest: dict[str, Any] | None = None
        self._places = gather_places(roles.trainers, roles.launcher_rank)
        steps = traced_steps(self._start, job.steps, job.config.run.trace)
        self._trace = StepTrace(job.config.run.dir / "trace.json", engine, roles.trainers, steps)
        host, device = socket.gethostname(), str(engine.device)
        trainers_here = sum(place.host == host for place in self._places)
        self._setup = RunSetup(
            ranks=job.plan.ranks,
            loaders=len(roles.loader_ranks),
            validators=len(roles.validator_ranks),
            policy=job.config.validation.policy,
            spare_train=job.config.roles.design == "offload_naive",
            planes=job.plan.branches,
            tiles=job.plan.tiles is not None,
            free_cores=usable_cores() > trainers_here * cores_of_trainer(device),
        )

    def run(self, progress: Callable[[], None]) -> bool:
        """Train to the end or until a stop is requested.

        Args:
            progress: Called after every step.

        Returns:
            Whether the run was stopped.
        """
        stopped = self._validating.catch_up() if self._resumed else False
        step = self._start
        while step < self._job.steps and not stopped and self._validating.early_stop_step is None:
            step += 1
            # Before the forward, so that released parameters get gradients in this step.
            self._release(step)
            self._trace.begin(step)
            self._step(step)
            self._trace.end(step)
            progress()
            if self._failed():
                break
            with self._time.measure("save"):
                # Saved before it is validated: results count only for a published checkpoint, and a kill while
                # validating loses no step.
                state = self._save(step) if self._job.saves_after(step) else None
            if self._failed():
                break
            if self._job.validates_after(step):
                self._validating.validate(step, state)
            # The one vote of a step: all trainers leave the loop after the same step, or some would wait for messages
            # forever.
            stopped = self._validating.sync()
            # In the vote of `sync`, rank 0 waits for updates of slower ranks; that counts as reducing. After a
            # checkpoint or a validation, it waits for these, which is not counted.
            self._late_s = self._compared_s + (0.0 if self._job.saves_after(step) else self._validating.voted_s)
            self._report_epoch(step)
            # A stop on request loses no step, wherever between two checkpoints it comes.
            if stopped and not self._job.saves_after(step):
                self._save(step)
        # The last checkpoint is published first, because its results are recorded only then (`Validating._collect`).
        self._checkpoints.finish(self._validating.open_steps)
        self._trace.close()
        stopped = self._validating.drain(stopped or self._failed())
        self._close_feed(stopped)
        self._validating.close(stopped)
        return stopped

    def _release(self, step: int) -> None:
        """Train frozen parameters from ``step`` on, if their frozen epochs (``model.freeze_epochs``) are over."""
        if self._freezing is None or not self._freezing.is_over(self._job.epoch_of(step)):
            return
        self._freezing.release(self._model)
        if self._recorder is not None:
            say(f"from step {step} on, {len(self._freezing.parameters)} frozen parameters are trained, too")
        self._freezing = None

    def _step(self, step: int) -> None:
        """Train one step, counted from 1, and record it."""
        start_s, waited_s = time.perf_counter(), self._batches.wait_s
        accumulate = self._job.config.optimizer.accumulate
        losses, first = [], (step - 1) * accumulate
        # Before the first forward, which already changes running statistics.
        self._finite.begin()
        for turn in range(first, first + accumulate):
            if turn > first:
                self._time.add(self._engine.seconds())  # each call resets the counts
            with self._trace.span("data", "images"):
                # Its pixels may be read later, by the engine, part by part.
                batch = self._batches.batch(turn)
            labels = self._job.batch_labels(turn, self._replica)
            ACTIVITY.step = step - 1  # the engine adds 1 in each call; with accumulated batches, calls are not steps
            losses.append(self._engine.accumulate_unread(batch, labels))
            self._trace.accumulated()
        lr = self._rate.set(step)
        numbers = self._finite.check(losses)
        skipped = self._finite.forbids_update(numbers)
        if not skipped:
            self._update(step)
        loss = sum(numbers.losses)  # only now: on a GPU this waits for all of the step
        waited_s = self._batches.wait_s - waited_s
        self._time.add({**self._engine.seconds(), "wait": waited_s, "validation": self._validating.new_seconds()})
        self._time.add({"reduce": self._late_s, "compile": self._compiled_s()})
        seconds = time.perf_counter() - start_s + self._late_s
        spent = self._time.end_step(seconds)
        # The first step captures the model and fills caches: its times would hide what bounds later steps.
        if step == self._start + 1:
            self._time.discard()
        segments = self._engine.segments
        news = None if segments is None else segments.news()
        if self._recorder is not None and news is not None:
            say(f"step {step}: {news}")
        # After the step's time is taken: the time of comparing counts in the next step, as `_late_s`.
        comparison = self._compare(step)
        if self._recorder is not None:
            times = {f"{kind}_seconds": spent[kind] for kind in spent if kind != "wait"}
            wrong = {} if numbers.wrong is None else {"nonfinite": numbers.wrong, "skipped": skipped}
            of_inputs = self._inputs.step_record(self._engine)
            self._recorder.trained(step, loss, lr, seconds, waited_s, {**times, **of_inputs, **comparison, **wrong})
        if numbers.wrong is not None:
            self._report_nonfinite(step, numbers, lr)

    def _compiled_s(self) -> float:
        """Return the seconds of compiling since the last call."""
        before, segments = self._compile_s, self._engine.segments
        self._compile_s = 0.0 if segments is None else segments.seconds
        return self._compile_s - before

    def _update(self, step: int) -> None:
        """Update the weights, and their average if there is one."""
        with self._trace.span("update", "update"):
            self._engine.update_unread(self._job.config.optimizer.max_norm)
        if self._average is not None:
            # Weights may still be on their way to this rank.
            self._engine.settle()
            self._average.update(step)

    def _failed(self) -> bool:
        """Whether the run ends because numbers are not finite."""
        return self.failure is not None and self._job.config.run.on_nonfinite == "stop"

    def _report_nonfinite(self, step: int, numbers: StepNumbers, lr: float) -> None:
        """End the run after a step that is not finite, or warn of it (collective)."""
        policy, text = self._job.config.run.on_nonfinite, self._finite.describe(self._job, step, numbers, lr)
        if policy == "stop":
            self.failure = text
        elif self._recorder is not None and self._recorder.nonfinite_steps <= _WARNINGS:
            outcome = "left out" if policy == "skip" else "kept"
            warn(f"hyfi: {text}; the step is {outcome} (run.on_nonfinite={policy})")

    def _compare(self, step: int) -> dict[str, Any]:
        """Compare trainers, after some steps (collective); return keys for the record of this step on trainer 0."""
        self._compared_s = 0.0
        # Trainers agree on this without a message: it depends on the step alone.
        if not self._ends_epoch(step) and (step - self._start) % INTERVAL_STEPS:
            return {}
        start_s = time.perf_counter()
        gathered = self._trainers.gather_objects((self._time.end_interval(), memory_bytes(self._engine.device)))
        self._compared_s = time.perf_counter() - start_s
        if gathered is None or len(gathered) == 1:
            return {}
        spent, used_bytes = [times for times, _ in gathered], [size for _, size in gathered]
        # Rank 0 need not be the fullest: in a pipeline, it may use a quarter of the memory of others.
        fullest = self._places[used_bytes.index(max(used_bytes))]
        self._fullest = {"rank": fullest.rank, "host": fullest.host, "memory_bytes": max(used_bytes)}
        return {
            "slowest": slowest(spent, self._places),
            "stragglers": stragglers(spent, self._places),
            "fullest": self._fullest,
        }

    def _ends_epoch(self, step: int) -> bool:
        return self._job.epoch_of(step + 1) != self._job.epoch_of(step) or step >= self._job.steps

    def _report_epoch(self, step: int) -> None:
        """Print at the end of an epoch what bounded it, which ranks are slow, and which is fullest (collective)."""
        if not self._ends_epoch(step):
            return
        # What was validated after the epoch's last step still belongs to this epoch.
        self._time.add({"validation": self._validating.new_seconds()})
        spent = self._time.end_epoch(self._trainers)
        # An epoch of the first step alone has no computing: it is not counted, because it captures the model.
        if spent is not None and any(times["compute"] for times in spent):
            slow = describe_stragglers(stragglers(spent, self._places))
            full = describe_fullest(self._fullest)
            text = "; ".join(filter(None, (bound_by(spent, self._setup), slow, full)))
            say(f"epoch {self._job.epoch_of(step)}: {text}")

    def _close_feed(self, stopped: bool) -> None:
        """End the loading of images, and report how it went."""
        self._batches.close(stopped)
        report = loading_report(self._trainers, self._batches.reports)
        if report is not None:
            say(describe_loading(report, self._job.config.data.kind != "images"))
        if self._recorder is not None:
            self._recorder.loading = report

    def _save(self, step: int) -> MaybeState:
        """Start to save a checkpoint (collective).

        Returns:
            The weights to send to validators, on rank 0; None elsewhere, or if they do not validate ``step``.
        """
        if not self._checkpoints.begin(step, self._resume_state(step), self._validating.open_steps):
            self.failure = f"the weights after step {step} are not finite, and are not saved"
            if self._recorder is not None and not self._failed():
                warn(f"hyfi: {self.failure}")
            return None
        self.failure = None
        if self._engine.plan.spill is not None:  # steps are long, and it would be published only after the next one
            self._checkpoints.finish(self._validating.open_steps)
        if not (self._job.validates_after(step) and self._validating.remote):
            return None
        with self._average.applied() if self._average is not None else nullcontext():
            return self._engine.gather_state_dict()

    def _resume_state(self, step: int) -> dict[str, Any]:
        """Return the state for resuming after ``step``, besides weights and optimizer."""
        return {
            "step": step,
            "epoch": step * self._job.step_samples // len(self._job.train_samples),
            "sample": step * self._job.step_samples,
            "seed": self._job.config.run.seed,
            "steps": self._job.steps,
            "next_lr": self._rate.of(step + 1),
            DATA_KEY: None if self._recorder is None else self._recorder.data,  # rank 0 writes it
            "rng": bytes(torch.get_rng_state().tolist()).hex(),
            "random": [self._engine.random.seed, self._engine.random.step],
        }
