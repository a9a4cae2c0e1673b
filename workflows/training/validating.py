"""The trainers' side of validation: here, or handed over to validators; and what follows from its results."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch

from hyfi_core.comm.base import Communicator
from hyfi_core.runtime.checkpoint import load_checkpoint, step_folder
from hyfi_core.runtime.engine import Engine
from workflows.console import say
from workflows.evaluation.evaluate import Interrupted, gather_logits, predict_slides
from workflows.evaluation.snapshot import Snapshot, snapshot_bytes, unflatten
from workflows.evaluation.validation_client import ValidationClient
from workflows.training.ema import MovingAverage
from workflows.training.job import TrainingJob
from workflows.training.recorder import Recorder
from workflows.training.start import Roles, make_evaluation_set
from workflows.training.stop import StopFlag

Weights = Mapping[str, torch.Tensor]


class Validating:
    """One trainer's part; all trainers call its methods together, at the same steps.

    Args:
        job: the run.
        roles: of all ranks.
        engine: of the trainers.
        model: the module that the engine spreads.
        average: of the weights, which is evaluated in their place; None: they are themselves.
        recorder: on rank 0; None elsewhere.
        stop: the signal's flag.

    Attributes:
        last: the step with which the run ends before its time, None while it continues; the same on every trainer.
    """

    def __init__(
        self,
        job: TrainingJob,
        roles: Roles,
        engine: Engine,
        model: torch.nn.Module,
        average: MovingAverage | None,
        recorder: Recorder | None,
        stop: StopFlag,
    ) -> None:
        assert roles.trainers is not None
        self.last: int | None = None
        self._seconds = 0.0
        self._owed: list[int] = []
        self._job, self._world, self._trainers = job, roles.world, roles.trainers
        self._engine, self._model, self._average = engine, model, average
        self._recorder, self._stop = recorder, stop
        self._evaluation_set = make_evaluation_set(job)
        self._remote = bool(roles.validator_ranks)
        self._client: ValidationClient | None = None
        if self._remote and roles.world.rank == 0:
            self._client = ValidationClient(roles.world, roles.validator_ranks[0], job.config.validation.policy)

    def new_seconds(self) -> float:
        """Return the seconds spent on validation since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    @property
    def open_steps(self) -> tuple[int, ...]:
        """Steps whose checkpoints must stay, for their metrics are not known yet (on rank 0)."""
        sent = self._client.open_steps if self._client is not None else ()
        return (*sent, *self._owed)

    def validate(self, step: int, weights: Weights | None) -> None:
        """Have the weights of ``step`` evaluated: now, by the trainers; or later, by the validators.

        Args:
            step: of the weights.
            weights: on rank 0: the engine's, or their moving average if kept.
        """
        with self._timed():
            if not self._remote:
                with self._average.applied() if self._average is not None else nullcontext():
                    self._validate_here(step)
            elif self._client is not None and weights is not None:
                self._client.submit(step, weights, self._impatient)

    def agreed(self) -> bool:
        """Process results; return whether a stop was requested, the same on every trainer."""
        with self._timed():
            self._collect()
        vote = torch.tensor([int(self._stop.asked(self._world)), int(self._gave_up), self._recorded_last])
        self._trainers.all_reduce(vote, "max")
        stopped, gave_up, self.last = bool(vote[0]), bool(vote[1]), int(vote[2]) or None
        if gave_up and self._remote and self.last is None and not stopped:
            with self._timed():
                self._take_over()
            return self.agreed()
        return stopped

    def catch_up(self) -> bool:
        """Validate checkpoints that a stop left without results; return whether a stop was requested since."""
        missed = self._trainers.broadcast_object(self._recorder.unvalidated() if self._recorder else None)
        self._validate_saved(missed)
        return self.agreed()

    def drain(self, stopped: bool) -> bool:
        """Wait for the validators' last results, unless a stop is asked for; return whether it was."""
        if stopped or not self._remote or self.last is not None:
            return stopped
        with self._timed():
            if self._client is not None and not self._client.drain(self._impatient):
                self._stop.wanted = True
        return self.agreed()

    def close(self, stopped: bool) -> None:
        """Release the validators; if the run ends early, remove everything after its last step."""
        if self._client is not None:
            self._client.close(stopped, needless=self.last is not None)
            if not stopped:
                self._collect()
        if self._recorder is not None and self.last is not None and not stopped:
            self._recorder.take_back()

    @property
    def _gave_up(self) -> bool:
        return self._client is not None and self._client.gave_up

    @property
    def _recorded_last(self) -> int:
        return (self._recorder.last or 0) if self._recorder is not None else 0

    def _impatient(self) -> bool:
        """Whether rank 0, which alone waits for validators, has been asked to stop."""
        return self._stop.asked(self._world)

    def _interrupted(self) -> bool:
        return self._stop.agreed(self._world, self._trainers)

    def _collect(self) -> None:
        if self._client is not None and self._recorder is not None:
            results = self._client.collect()
            for place, (step, metrics) in enumerate(results, 1):
                later = [other for other, _ in results[place:]]
                self._recorder.validated(step, metrics, (*later, *self.open_steps))

    def _validate_here(self, step: int) -> None:
        replica, place = divmod(self._trainers.rank, self._job.plan.ranks_per_replica)
        plan, images, slides = self._job.plan, self._evaluation_set.images, len(self._job.val)
        share = (replica, plan.replicas)
        try:
            mine = predict_slides(self._engine, images, slides, share, self._interrupted, plan.shares)
        except Interrupted:
            return
        logits = gather_logits(self._trainers, mine if place == 0 else None)
        if self._recorder is not None and logits is not None:
            self._recorder.validated(step, self._evaluation_set.metrics_of(logits), self.open_steps)

    def _take_over(self) -> None:
        """Validate open checkpoints, and all later ones, in the trainers."""
        left = self._trainers.broadcast_object(list(self.open_steps))
        self._remote = False
        if self._client is not None:
            self._client.forget()
            say(f"the trainers validate from now on{f', beginning with step {left[0]}' if left else ''}")
        self._validate_saved(left)

    def _validate_saved(self, steps: list[int]) -> None:
        """Validate checkpoints; the engine's weights are restored bitwise."""
        if not steps:
            return
        held = shared_weights(self._trainers, self._engine.gather_state_dict(), self._model.state_dict())
        self._owed = list(steps)
        for step in steps:
            self._owed.remove(step)
            saved = load_checkpoint(step_folder(self._job.config.run.dir / "checkpoints", step)).judged
            if self._remote:
                self.validate(step, saved)
            else:
                self._engine.load_state_dict(saved)
                self._validate_here(step)
        self._engine.load_state_dict(held)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start_s, before_s = time.perf_counter(), self._seconds
        try:
            yield
        finally:
            self._seconds = before_s + time.perf_counter() - start_s  # includes times measured inside


def shared_weights(comm: Communicator, weights: Weights | None, like: Weights) -> dict[str, torch.Tensor]:
    """Return rank 0's ``weights`` on every rank, on the host (collective); ``like``: names, shapes and types."""
    flat = torch.empty(snapshot_bytes(like), dtype=torch.uint8)
    if weights is not None:
        Snapshot(0, weights, flat).wait()
    comm.broadcast(flat)
    return unflatten(flat, like)
