"""Checkpoints of a run as its trainers see them: copied between two steps, written and published later."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from hyfi_core.comm.base import Communicator
from hyfi_core.runtime.saving.checkpoint_writer import CheckpointPart, CheckpointWriter
from hyfi_core.runtime.saving.kept_checkpoints import step_folder
from workflows.launch import at_failure
from workflows.training.averages.averaged_weights import AveragedWeights
from workflows.training.checks.finite import finite_everywhere
from workflows.training.inputs.run_inputs import RunInputs, TrainingEngine
from workflows.training.recorder import Recorder


class RunCheckpoints:
    """Writes a run's checkpoints on one trainer. All trainers create it together and call its methods alike.

    Args:
        inputs: The kind of the run.
        trainers: The group of trainers.
        engine: The trainers' engine.
        average: Average of the weights, saved with them; None if not kept.
        recorder: On rank 0; None elsewhere.
    """

    def __init__(
        self,
        inputs: RunInputs,
        trainers: Communicator,
        engine: TrainingEngine,
        average: AveragedWeights | None,
        recorder: Recorder | None,
    ) -> None:
        self._inputs, self._engine, self._average, self._recorder = inputs, engine, average, recorder
        self._trainers = trainers
        self._writer = CheckpointWriter(trainers, bool(engine.owned_state()))
        # A run that fails while it writes removes its part of the checkpoint, which may be gigabytes.
        at_failure.add(self._writer.discard)

    @property
    def open_step(self) -> int | None:
        """The step whose checkpoint is not published yet."""
        return self._writer.open_step

    def begin(self, step: int, state: Mapping[str, Any], spare: Iterable[int]) -> bool:
        """Copy the state after ``step`` and start writing it; waits for the previous checkpoint.

        Weights that are not finite are not saved, so that neither ``latest`` nor ``best`` can have them.

        Args:
            step: The step.
            state: For resuming, besides weights and optimizer.
            spare: Steps whose checkpoints must stay (on rank 0).

        Returns:
            Whether the weights are saved, the same on every trainer.
        """
        # Host memory has room for one copy of the state: the previous checkpoint must be written.
        self.finish(spare)
        owned = self._engine.owned_state()
        # Only the part of the average that this rank writes.
        averaged = self._average.of(owned) if self._average is not None else None
        tensors = [*owned.values(), *(averaged or {}).values()]
        if not bool(finite_everywhere(tensors, self._trainers, torch.empty(0, device=self._engine.device))):
            return False
        part = CheckpointPart(owned, self._engine.owned_optimizer(), averaged, self._engine.owned_buffers())
        folder = step_folder(self._inputs.job.config.run.dir / "checkpoints", step)
        # Only rank 0 writes `model.json`; the `model` of other ranks is not used.
        trained = {} if self._recorder is None else {"trained_on": self._recorder.trained_slides.to_json()}
        model = {**self._inputs.model_json(), **trained, "step": step}
        self._writer.begin(folder, part, step=step, model=model, state=state)
        return True

    def busy(self) -> bool:
        """Return whether this rank is still writing; does not block.

        Raises:
            OSError: It could not write, which ends the run.
        """
        return self._writer.busy()

    def advance(self, spare: Iterable[int]) -> None:
        """Publish a checkpoint that every trainer has written; call it when no trainer is busy (collective).

        Args:
            spare: Steps whose checkpoints must stay (on rank 0).
        """
        self._record(self._writer.advance(), spare)

    def finish(self, spare: Iterable[int]) -> None:
        """Wait until everything is published (collective); see ``advance``."""
        self._record(self._writer.finish(), spare)

    def _record(self, step: int | None, spare: Iterable[int]) -> None:
        # Links move only now: `latest` never names a checkpoint that is not complete.
        if step is not None and self._recorder is not None:
            self._recorder.saved(step, spare)
