"""Checks for losses, gradients and weights that are not finite, in the step where they appear, on all trainers alike.

::

    accumulate … accumulate │ sums of gradients, losses │ one number over all trainers  │ update
                                                                    │
                            stop, skip: not applied ◄── not finite ─┘

One sum is taken over each gradient, which costs a small part of an update, and one number is reduced. On a GPU the
host would have to wait for it before each update, so with ``stop`` it reads the number after the update, together with
the loss that it reads anyway: nothing of that update is saved or validated, as the run ends. With ``skip`` it waits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import torch

from hyfi_core.comm.base import Communicator
from hyfi_core.runtime.saving.weight_shards import own_part
from workflows.config.run import OnNonfinite
from workflows.console import listed
from workflows.training.inputs.run_inputs import TrainingEngine
from workflows.training.job import TrainingJob

NotFinite = Literal["loss", "gradient"]


class StepNumbers:
    """The losses of a step, and whether they and the gradients are finite; the host reads them on first use.

    Args:
        losses: The loss of each turn, on the device.
        finite: One number on the same device: 1 if everything is finite on every trainer, else 0.
    """

    def __init__(self, losses: Sequence[torch.Tensor], finite: torch.Tensor) -> None:
        # One tensor, so that the host copies once: each copy from a GPU waits for it.
        self._device = torch.stack([*losses, finite.to(losses[0].dtype)])
        self._host: list[float] | None = None

    @property
    def losses(self) -> list[float]:
        """The loss of each turn; on a GPU the host waits for the device."""
        return self._read()[:-1]

    @property
    def wrong(self) -> NotFinite | None:
        """What is not finite; None if everything is."""
        *losses, finite = self._read()
        if finite:
            return None
        # A loss that is not finite has such gradients, too: name the cause.
        return "gradient" if all(map(math.isfinite, losses)) else "loss"

    def _read(self) -> list[float]:
        if self._host is None:
            self._host = self._device.tolist()
        return self._host


class FiniteSteps:
    """The check of each step. All trainers create it together and call its methods alike.

    Args:
        policy: ``run.on_nonfinite``.
        trainers: The group of trainers.
        engine: The trainers' engine.
        model: The module that the engine trains.
    """

    def __init__(
        self, policy: OnNonfinite, trainers: Communicator, engine: TrainingEngine, model: torch.nn.Module
    ) -> None:
        self._trainers, self._engine, self._model, self._policy = trainers, engine, model, policy
        # On a CPU the number is known at once, so `stop` checks it before the update. On a GPU, that would wait for the
        # device before each update.
        self._reads_first = policy == "skip" or (policy == "stop" and engine.device.type == "cpu")
        self._buffers: list[torch.Tensor] = []

    def begin(self) -> None:
        """Copy the buffers before a step that may be skipped, because its forward changes running statistics."""
        if self._policy == "skip":
            self._buffers = [buffer.clone() for buffer in self._own_buffers()]

    def check(self, losses: Sequence[torch.Tensor]) -> StepNumbers:
        """Compute whether the losses of a step and the accumulated gradients are finite (collective)."""
        parameters = [p for group in self._engine.optimizer.param_groups for p in group["params"]]
        gradients = [own_part(p.grad) for p in parameters if p.grad is not None]
        # Over all trainers: if only some of them skipped an update, their weights would differ from then on.
        finite = finite_everywhere([*losses, *gradients], self._trainers, losses[0])
        return StepNumbers(losses, finite)

    def forbids_update(self, numbers: StepNumbers) -> bool:
        """Return whether the update of a step must not be applied; undo the step if it is to be skipped."""
        if not self._reads_first or numbers.wrong is None:
            return False
        if self._policy == "skip":
            self._undo_step()
        return True

    def describe(self, job: TrainingJob, step: int, numbers: StepNumbers, lr: float) -> str:
        """Return what is not finite in a step, and its slides, as text (collective)."""
        losses, parameters = numbers.losses, self._parameters_with_nonfinite_gradients()
        # A finite loss does not tell which turn's gradient is wrong: all turns are named.
        turns = [turn for turn, loss in enumerate(losses) if not math.isfinite(loss)] or [*range(len(losses))]
        finding = (
            f"the loss is {sum(losses)}" if numbers.wrong == "loss" else "the loss is finite, but not its gradient"
        )
        text = (
            f"step {step} (epoch {job.epoch_of(step)}): {finding}, for slides {listed(job.step_slides(step, turns), 8)}"
            f", with learning rate {lr:.3g}"
        )
        return f"{text}; gradients that are not finite: {listed(parameters, 3)}" if parameters else text

    def _parameters_with_nonfinite_gradients(self) -> list[str]:
        """Return the names of parameters with a gradient that is not finite on any trainer (collective)."""
        mine = [
            name
            for name, p in self._model.named_parameters()
            if p.grad is not None and not bool(own_part(p.grad).isfinite().all())
        ]
        # Sent to all trainers: the text may end the run, and every trainer must end it alike.
        gathered = self._trainers.broadcast_object(self._trainers.gather_objects(mine))
        return list(dict.fromkeys(name for names in gathered for name in names))

    def _undo_step(self) -> None:
        """Drop the gradients, and give the buffers the values that they had at `begin`."""
        # Buffers, too: a single forward with NaN would leave running means NaN for good.
        self._engine.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, before in zip(self._own_buffers(), self._buffers, strict=False):
                buffer.copy_(before)

    def _own_buffers(self) -> list[torch.Tensor]:
        """Return the model's buffers without those of other ranks' stages, which are on the meta device."""
        return [buffer for buffer in self._model.buffers() if not buffer.is_meta]


def finite_everywhere(tensors: Iterable[torch.Tensor], trainers: Communicator, like: torch.Tensor) -> torch.Tensor:
    """Return 1 if all values are finite on every trainer, else 0: a number on the device of ``like`` (collective).

    The host does not wait for a GPU.
    """
    floats = [t.detach() for t in tensors if t.is_floating_point() and t.numel() and not t.is_meta]
    on_host = [t for t in floats if t.device.type == "cpu"]
    on_gpu = [t for t in floats if t.device.type != "cpu"]
    finite = torch.tensor([float(_finite_on_host(on_host))], dtype=torch.float64)
    finite = finite.to(like.device, non_blocking=True)
    for dtype in sorted({tensor.dtype for tensor in on_gpu}, key=str):  # one kernel for many tensors
        # The largest absolute value of each; NaN and infinity propagate, and, unlike a sum, it cannot overflow.
        norms = torch._foreach_norm([tensor for tensor in on_gpu if tensor.dtype == dtype], float("inf"))
        finite *= torch.stack([*norms]).isfinite().all()
    if trainers.size > 1:
        # 0 on any trainer becomes 0 on all.
        trainers.all_reduce(finite, "min")
    return finite[0]


def _finite_on_host(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all values are finite."""
    # If the sum of a tensor is finite, so are its values, and a sum takes a tenth of the time of `isfinite`. Only a sum
    # that is not finite needs a closer look: sums of large finite values overflow.
    return all(bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all()) for tensor in tensors)
