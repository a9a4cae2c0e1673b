"""The trainers' loop: feed, step, record, save, validate, stop."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial

import torch

from data.normalise import Normalisation
from hyfi_core.runtime.checkpoint import load_checkpoint, step_folder
from hyfi_core.runtime.engine import Engine
from hyfi_core.runtime.optimizer_state import optimizer_state
from workflows.console import Progress, say
from workflows.evaluation import Interrupted, gather_logits, predict_slides
from workflows.models import DTYPES, FORMATS
from workflows.training.feeding import Images, loading_report, loading_text, make_feed
from workflows.training.job import Job
from workflows.training.optimisation import lr_factor
from workflows.training.recorder import Recorder
from workflows.training.start import Roles, Saved, make_exam
from workflows.training.stop import StopFlag
from workflows.validator import ValidationClient

State = Mapping[str, torch.Tensor] | None


class Trainer:
    """One trainer of a run; all of them call ``run`` together.

    Args:
        job: the run.
        roles: who is who.
        engine: of the trainers.
        model: the module that the engine spreads.
        recorder: on rank 0; None elsewhere.
        saved: where the run stood, None at its beginning.
        stop: the signal's flag.
    """

    def __init__(
        self,
        job: Job,
        roles: Roles,
        engine: Engine,
        model: torch.nn.Module,
        recorder: Recorder | None,
        saved: Saved | None,
        stop: StopFlag,
    ) -> None:
        assert roles.trainers is not None
        self._job, self._world, self._trainers = job, roles.world, roles.trainers
        self._engine, self._model, self._recorder, self._stop = engine, model, recorder, stop
        self._replica = roles.trainers.rank // job.plan.ranks_per_replica
        factor = lr_factor(job.config.lr_schedule, job.steps)
        self._scheduler = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, factor)
        self._saved, self._start = saved, 0
        if saved is not None:
            self._start = int(saved.training.state["step"])
            saved.restore(engine, model, self._scheduler)
        self._remote = bool(roles.validator_ranks)
        self._client = None
        if self._remote and roles.world.rank == 0:
            self._client = ValidationClient(roles.world, roles.validator_ranks[0])
        device = next(model.parameters()).device
        self._feed = make_feed(job, roles, engine, self._start, device)
        run = job.config.run
        self._prepare = partial(Normalisation(), dtype=DTYPES[run.precision], memory_format=FORMATS[run.memory_format])
        self._exam = make_exam(job)

    def run(self, progress: Progress) -> bool:
        """Train to the end, or until a stop is asked for; return whether it was."""
        stopped = self._catch_up()
        step = self._start
        while step < self._job.steps and not stopped:
            step += 1
            self._step(step)
            progress.advance()
            state = self._save(step) if self._job.saves_after(step) else None
            if self._job.validates_after(step):
                self._validate(step, state)
            self._collect()
            stopped = self._agreed()
            if stopped and not self._job.saves_after(step):
                self._save(step)
        stopped = self._drain(stopped)
        self._close_feed(stopped)
        if self._client is not None:
            self._client.close(stopped)
        self._collect()
        return stopped

    def _step(self, step: int) -> None:
        start_s, waited_s = time.perf_counter(), self._feed.wait_s
        accumulate = self._job.config.optimizer.accumulate
        loss = 0.0
        for turn in range((step - 1) * accumulate, step * accumulate):
            pixels = self._feed.batch(turn)
            labels = torch.tensor(self._job.batch_labels(turn, self._replica))
            loss += self._engine.accumulate(Images(pixels, self._prepare), labels)
        lr = float(self._engine.optimizer.param_groups[0]["lr"])
        self._engine.update(self._job.config.optimizer.max_norm)
        self._scheduler.step()
        if self._recorder is not None:
            seconds = time.perf_counter() - start_s
            self._recorder.trained(step, loss, lr, seconds, self._feed.wait_s - waited_s)

    def _close_feed(self, stopped: bool) -> None:
        self._feed.close(stopped)
        report = loading_report(self._trainers, self._feed)
        if report is not None:
            say(loading_text(report))

    def _agreed(self) -> bool:
        return self._stop.agreed(self._world, self._trainers)

    def _impatient(self) -> bool:
        """Whether rank 0, which alone waits for validators, has been asked to stop."""
        return self._stop.asked(self._world)

    def _save(self, step: int) -> State:
        """Save a checkpoint; return the weights on rank 0."""
        state = self._engine.gather_state_dict()
        if self._recorder is None or state is None:
            return None
        optimizer = optimizer_state(self._engine.optimizer, self._model.named_parameters())
        where = {
            "step": step,
            "epoch": step * self._job.step_samples // len(self._job.train),
            "sample": step * self._job.step_samples,
            "seed": self._job.config.run.seed,
            "lr_schedule": {k: v for k, v in self._scheduler.state_dict().items() if k != "lr_lambdas"},
            "rng": bytes(torch.get_rng_state().tolist()).hex(),
            "random": [self._engine.random.seed, self._engine.random.step],
        }
        due = (step,) if self._job.validates_after(step) else ()
        self._recorder.save(step, state, optimizer, where, (*self._open_steps, *due))
        return state

    def _validate(self, step: int, state: State) -> None:
        """Validate the weights of ``step``: here, where there are no validators; else hand them over and go on."""
        if not self._remote:
            self._validate_here(step)
        elif self._client is not None and state is not None:
            self._client.submit(step, state, self._impatient)

    def _validate_here(self, step: int) -> None:
        replicas, first = self._job.plan.replicas, self._trainers.rank % self._job.plan.ranks_per_replica == 0
        share = (self._replica, replicas)
        try:
            mine = predict_slides(self._engine, self._exam.images, len(self._job.val), share, self._agreed)
        except Interrupted:
            return
        logits = gather_logits(self._trainers, mine if first else None)
        if self._recorder is not None and logits is not None:
            self._recorder.validated(step, self._exam.judge(logits))

    def _collect(self) -> None:
        if self._client is not None and self._recorder is not None:
            for step, metrics in self._client.collect():
                self._recorder.validated(step, metrics, self._open_steps)

    def _catch_up(self) -> bool:
        """Validate checkpoints that a stop left without numbers; return whether a stop was asked for meanwhile."""
        if self._saved is None:
            return False
        missed = self._trainers.broadcast_object(self._recorder.unvalidated() if self._recorder else None)
        for step in missed:
            weights = load_checkpoint(step_folder(self._job.config.run.dir / "checkpoints", step)).weights
            self._engine.load_state_dict(weights)
            self._validate(step, weights)
            self._collect()
        if missed:
            self._engine.load_state_dict(self._saved.checkpoint.weights)
        return self._agreed()

    @property
    def _open_steps(self) -> tuple[int, ...]:
        """Steps whose checkpoints must stay, for it is not known yet what they are worth."""
        return self._client.open_steps if self._client is not None else ()

    def _drain(self, stopped: bool) -> bool:
        """Wait for the validators' last results, unless a stop is asked for; return whether it was."""
        if self._client is not None and not stopped and not self._client.drain(self._impatient):
            self._stop.wanted = True
        self._collect()
        return self._agreed() if not stopped and self._remote else stopped
