"""Validation as the trainers see it: done by themselves or by validators; and early stopping."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from hyfi_core.runtime.calls.local_use import local_state
from hyfi_core.runtime.checkpoint import load_checkpoint
from hyfi_core.runtime.saving.kept_checkpoints import step_folder
from hyfi_core.runtime.saving.snapshot import State
from workflows.console import say
from workflows.evaluation.evaluate import EvaluatedMetrics, Interrupted, gather_logits, predict_slides
from workflows.evaluation.validation_client import ValidationClient
from workflows.launch.stop import StopFlag
from workflows.training.averages.averaged_weights import AveragedWeights
from workflows.training.inputs.run_inputs import RunInputs, TrainingEngine
from workflows.training.recorder import Recorder
from workflows.training.saving.run_checkpoints import RunCheckpoints
from workflows.training.start import Roles


class Validating:
    """Validation of a run on one trainer; all trainers call its methods together, at the same steps.

    Args:
        inputs: The kind of the run.
        roles: Roles of all ranks.
        engine: The trainers' engine.
        model: The module that the engine trains.
        average: Average of the weights, to be evaluated in their place; None: the weights are evaluated.
        recorder: On rank 0; None elsewhere.
        stop: Requests to stop.
        checkpoints: Written while training continues; metrics are recorded when theirs is published.

    Attributes:
        last: The step with which early stopping ends the run, or None; the same on every trainer.
        voted_s: Seconds for which the last ``sync`` waited for the other trainers' votes.
    """

    def __init__(
        self,
        inputs: RunInputs,
        roles: Roles,
        engine: TrainingEngine,
        model: torch.nn.Module,
        average: AveragedWeights | None,
        recorder: Recorder | None,
        stop: StopFlag,
        checkpoints: RunCheckpoints,
    ) -> None:
        assert roles.trainers is not None
        self.early_stop_step: int | None = None
        self.voted_s = self._seconds = 0.0
        self._unvalidated: list[int] = []
        self._job, self._world, self._trainers = inputs.job, roles.world, roles.trainers
        self._engine, self._model, self._average = engine, model, average
        self._recorder, self._stop, self._checkpoints = recorder, stop, checkpoints
        self._results: list[tuple[int, EvaluatedMetrics]] = []
        self._evaluation_set, self._inference = inputs.evaluation_set(), inputs.inference(engine)
        self._remote = bool(roles.validator_ranks)
        self._client: ValidationClient | None = None
        if self._remote and roles.world.rank == 0:
            policy = inputs.job.config.validation.policy
            self._client = ValidationClient(roles.world, roles.validator_ranks[0], policy)

    def new_seconds(self) -> float:
        """Return the seconds spent on validation since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    @property
    def open_steps(self) -> tuple[int, ...]:
        """Steps whose checkpoints must stay because their metrics are not known yet (on rank 0)."""
        # Results that wait for their checkpoint, weights at the validators, and steps of a resumed run that come later.
        sent = self._client.open_steps if self._client is not None else ()
        return (*(step for step, _ in self._results), *sent, *self._unvalidated)

    @property
    def remote(self) -> bool:
        """Whether validators validate, to which rank 0 sends the weights."""
        return self._remote

    def validate(self, step: int, weights: State | None) -> None:
        """Validate the weights of ``step``: now, by the trainers; or send them to the validators.

        Args:
            step: Step of the weights.
            weights: With validators, on rank 0: the engine's weights, or their average if one is kept; None
                elsewhere.
        """
        with self._timed():
            if not self._remote:
                with self._average.applied() if self._average is not None else nullcontext():
                    self._validate_in_trainers(step)
            # No weights: they were not finite, so there is no checkpoint to judge either.
            elif self._client is not None and weights is not None:
                self._client.submit(step, weights, self._stop_requested)

    def sync(self) -> bool:
        """Record results that arrived, and publish a checkpoint that all ranks have written (collective).

        All learn the step of an early stop. If the validators are gone, the trainers validate from now on.

        Returns:
            Whether a stop was requested, the same on every trainer.
        """
        with self._timed():
            self._collect()
        # One message for four questions: with four, every step would wait for three more rounds of all ranks.
        writing = int(self._checkpoints.busy())
        vote = torch.tensor([int(self._stop.poll(self._world)), int(self._gave_up), self._recorded_early_stop, writing])
        start_s = time.perf_counter()
        self._trainers.all_reduce(vote, "max")
        self.voted_s = time.perf_counter() - start_s
        stopped, gave_up, self.early_stop_step = bool(vote[0]), bool(vote[1]), int(vote[2]) or None
        # No rank is writing any more, and all know it: the moment to publish together.
        if not vote[3]:
            self._checkpoints.advance(self.open_steps)
        # All trainers have the same votes, so all take this branch, or none.
        if gave_up and self._remote and self.early_stop_step is None and not stopped:
            with self._timed():
                self._take_over()
            return self.sync()
        return stopped

    def catch_up(self) -> bool:
        """Validate checkpoints of a resumed run that are not validated yet; return whether a stop was requested."""
        # Only rank 0 has the records.
        missed = self._trainers.broadcast_object(self._recorder.unvalidated() if self._recorder else None)
        self._validate_saved(missed)
        return self.sync()

    def drain(self, stopped: bool) -> bool:
        """Wait for the validators' last results, or until a stop is requested; return whether one was requested."""
        if stopped or not self._remote or self.early_stop_step is not None:
            return stopped
        with self._timed():
            if self._client is not None and not self._client.drain(self._stop_requested):
                # Only rank 0 knows of it: the vote in `sync` tells the others.
                self._stop.wanted = True
        return self.sync()

    def close(self, stopped: bool) -> None:
        """Release the validators; after early stopping, remove everything after the last step."""
        if self._client is not None:
            # Waits until the validators have ended: only then is it known that no result follows.
            self._client.close(stopped, discard=self.early_stop_step is not None)
            if not stopped:
                self._collect()
        if self._recorder is not None and self.early_stop_step is not None and not stopped:
            self._recorder.rewind()

    @property
    def _gave_up(self) -> bool:
        return self._client is not None and self._client.gave_up

    @property
    def _recorded_early_stop(self) -> int:
        return (self._recorder.early_stop_step or 0) if self._recorder is not None else 0

    def _stop_requested(self) -> bool:
        """Whether rank 0 knows of a request to stop; only rank 0 waits for validators."""
        return self._stop.poll(self._world)

    def _interrupted(self) -> bool:
        return self._stop.poll_all(self._world, self._trainers)

    def _collect(self) -> None:
        """Record the validators' results for steps whose checkpoints are published."""
        if self._client is not None and self._recorder is not None:
            self._results += self._client.collect()
            # In the order of steps, and only once published: recording writes the calibration into the checkpoint, and
            # may link to it as the best.
            while self._results:
                step, metrics = self._results[0]
                if step == self._checkpoints.open_step:
                    break
                # Removed first: the step is open no longer, so its checkpoint need not stay unless it is the best.
                self._results.pop(0)
                self._recorder.validated(step, metrics, self.open_steps)

    def _validate_in_trainers(self, step: int) -> None:
        """Validate the weights of a step on the trainers themselves, and record the metrics (collective)."""
        replica, position = divmod(self._trainers.rank, self._job.plan.ranks_per_replica)
        plan, images, samples = self._job.plan, self._evaluation_set.images, len(self._job.val_samples)
        share = (replica, plan.replicas)  # each replica predicts a part of the samples
        try:
            own_logits = predict_slides(self._inference, images, samples, share, self._interrupted, plan.shares)
        # `_interrupted` is the same on all trainers, so all return here, and none waits in `gather_logits`.
        except Interrupted:
            return
        # All ranks of a replica have the same logits: one of them reports.
        logits = gather_logits(self._trainers, own_logits if position == 0 else None)
        # Publish before recording, as in `_collect`; `step` must not be pruned before its metrics may make it the best.
        self._checkpoints.finish((*self.open_steps, step))
        if self._recorder is not None and logits is not None:
            self._recorder.validated(step, self._evaluation_set.metrics_of(logits), self.open_steps)

    def _take_over(self) -> None:
        """Validate the open checkpoints and all later ones in the trainers, because the validators gave up."""
        self._checkpoints.finish(self.open_steps)
        self._collect()
        steps = self._trainers.broadcast_object(list(self.open_steps))
        # From now on `validate` runs in the trainers.
        self._remote = False
        if self._client is not None:
            self._client.forget()
            say(f"the trainers validate from now on{f', starting with step {steps[0]}' if steps else ''}")
        self._validate_saved(steps)

    def _validate_saved(self, steps: list[int]) -> None:
        """Validate saved checkpoints; afterwards the engine has its current weights again, bitwise."""
        if not steps:
            return
        # Weights on their way would otherwise be copied as they were, and overwrite the old ones later.
        self._engine.settle()
        # Buffers that are not in the `state_dict` change as well when a checkpoint is loaded.
        all_tensors = {**local_state(self._model), **dict(self._model.named_buffers())}
        own = {name: tensor for name, tensor in all_tensors.items() if torch.is_tensor(tensor) and not tensor.is_meta}
        current = {name: tensor.clone() for name, tensor in own.items()}
        self._unvalidated = list(steps)
        for step in steps:
            # Off the list: from here on, the validation itself keeps this checkpoint from being removed.
            self._unvalidated.remove(step)
            saved = load_checkpoint(step_folder(self._job.config.run.dir / "checkpoints", step))
            if self._remote:
                self.validate(step, saved.inference_weights)
            else:
                self._engine.load_state_dict(saved.inference_weights)
                self._engine.load_buffers(saved.buffers or {})
                self._validate_in_trainers(step)
        # Copied back bit by bit: reading them from the latest checkpoint would lose steps after it.
        for name, tensor in own.items():
            tensor.copy_(current[name])

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Context whose time is added to the seconds of validation."""
        start_s, before_s = time.perf_counter(), self._seconds
        try:
            yield
        finally:
            self._seconds = before_s + time.perf_counter() - start_s  # nested contexts are counted once
