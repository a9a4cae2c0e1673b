"""Whether a loss is computed for each micro-batch or over the whole batch, and its value on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from hyfi_core.capture.program import Ref
from hyfi_core.capture.stages import active_values
from hyfi_core.comm.agreement.agree import agree
from hyfi_core.comm.agreement.described import describe_function
from hyfi_core.errors import RequestError
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.runtime.groups import Groups
from hyfi_core.runtime.losses.additivity import why_not_mean
from hyfi_core.runtime.losses.gathered import gather_tensors
from hyfi_core.runtime.losses.known_means import KnownMean, known_mean
from hyfi_core.runtime.losses.step_loss import StepLoss
from hyfi_core.runtime.lowered_model import LoweredModel
from hyfi_core.runtime.subject import CAPTURES_KEPT, Subject

FLOAT16 = (
    "autocast is torch.float16, in which small gradients become zero and large ones infinite; training "
    "needs autocast=torch.bfloat16, which has the range of float32, or None; float16 is for prediction, without an "
    "optimizer"
)
_MOST_CHECKED = 4096
"""Number of checks of labels that are remembered."""
_TRIAL_SAMPLES = 4
"""Number of samples on which a loss that should be a mean is tried."""


class TrainingLoss:
    """Chooses how the loss of each step is computed. All methods are collective.

    Args:
        subject: the model, its loss, what that is computed over, and autocast.
        plan: plan of the run.
        groups: communicators of this rank.
    """

    def __init__(self, subject: Subject, plan: ParallelPlan, groups: Groups) -> None:
        self._subject, self._settings, self._plan, self._groups = subject, subject.settings, plan, groups
        self._shapes: list[tuple[LoweredModel, tuple[int, ...] | None]] = []
        self._computed = False
        # Digests of labels and loss that were found to fit: labels of an epoch come again in the next one.
        self._checked: set[bytes] = set()
        self._is_confirmed: dict[KnownMean, bool] = {}

    def describe(self, forwards_first: bool) -> list[str]:
        """Return lines of text on forwards that the loss makes run twice; none if they run once."""
        pieces = self._plan.microbatches * self._plan.replicas
        if (
            pieces == 1
            or forwards_first
            or self._settings.loss_over == "microbatch"
            or self._confirmed_mean() is not None
        ):
            return []
        return [
            f"every forward runs twice: the loss is computed over the whole batch, but schedule {self._plan.schedule} "
            f'begins backwards before all outputs exist; schedule "gpipe" runs them once and keeps the activations of '
            f'all micro-batches; for a mean of terms of single samples, loss_over="microbatch" does, too'
        ]

    def over_batch(self, lowered: LoweredModel, labels: torch.Tensor, forwards_first: bool) -> bool:
        """Return whether this step's loss is computed over the whole batch; the same on every rank.

        Args:
            lowered: the model for this step's micro-batches.
            labels: labels of the replica's batch.
            forwards_first: whether all forwards come before all backwards: a loss over the batch then needs no second
                forward.

        Raises:
            RequestError: on every rank: ``loss_over`` is "microbatch", but the loss is not a mean over samples.
        """
        if self._settings.autocast == torch.float16:
            raise RequestError(FLOAT16)
        if self._plan.microbatches * self._plan.replicas == 1:
            return False  # one micro-batch is the whole batch
        if self._settings.loss_over == "microbatch":
            self._check(lowered, labels)
            return False
        mean, output = self._confirmed_mean(), self._output_shape(lowered)
        if mean is None or output is None or not mean.fits(output, labels):
            return True
        if not mean.by_index(output, labels):
            return False  # only indices of classes can be ignored: otherwise every sample counts
        if forwards_first and labels.device.type != "cpu":
            return True  # reading labels would make every step wait for the device
        ignored = torch.tensor([int(mean.ignores(output, labels))])
        if self._plan.replicas > 1:
            # Replicas have other labels, but must choose alike: with a loss over the batch they exchange outputs.
            self._groups.all.of("reduce").all_reduce(ignored, "max")
        return bool(ignored.item())

    def total(self, losses: Sequence[StepLoss], over_batch: bool) -> torch.Tensor:
        """Return the loss of the step on every rank, from those of this rank's cells.

        Raises:
            RequestError: the loss could not be computed; in the first step on every rank, later where it is computed.
        """
        refusal = next((loss.refusal for loss in losses if loss.refusal is not None), None)
        if not self._computed:
            agree(self._groups.all, lambda: _raise(refusal))  # once only: agreeing takes a message
            self._computed = True
        _raise(refusal)
        if self._plan.stages * self._plan.directions * self._plan.replicas == 1:
            return losses[0].value
        # Each part of the loss is in ``counted`` of one rank, or cell, which is zero on all others.
        total = torch.stack([loss.counted for loss in losses]).sum()
        self._groups.all.of("reduce").all_reduce(total)
        return total if over_batch else total / self._plan.mean_over

    def unreached(self, lowered: LoweredModel, losses: Sequence[StepLoss]) -> frozenset[str]:
        """Return the user's names of trained parameters on which no output used by the loss depends (collective).

        In one process such a parameter has no gradient and stays as it is; with a gradient of zeros, weight decay would
        change it.
        """
        outputs, program = lowered.outputs, lowered.program
        floats = [
            at for at, leaf in enumerate(outputs) if isinstance(leaf, Ref) and program.values[leaf.name].differentiable
        ]
        if len(floats) < 2:
            return frozenset()
        used = torch.zeros(len(outputs), dtype=torch.int64)
        for loss in losses:
            used[sorted(loss.reached)] = 1
        if self._plan.stages * self._plan.directions * self._plan.replicas > 1:
            self._groups.all.of("reduce").all_reduce(used, "max")
        if used[floats].all():
            return frozenset()
        trained = {value for value, name in program.parameters.items() if name in lowered.trained}
        active = active_values(program, tuple(outputs[at] for at in floats if used[at]), trained)
        return lowered.trained - {program.parameters[value] for value in trained & active}

    def _confirmed_mean(self) -> KnownMean | None:
        """Return the known mean that the user's loss is, if a trial confirms this; else None.

        Asked in every step, as the settings of a loss may change between steps.
        """
        mean = known_mean(self._settings.loss) if self._settings.loss_over == "auto" else None
        if mean is not None and mean not in self._is_confirmed:
            labels, like = mean.trial_labels(_TRIAL_SAMPLES), torch.empty((1, mean.classes), device="meta")
            loss, divisions = self._settings.loss, (2, _TRIAL_SAMPLES)  # into halves, and into single samples
            reason = why_not_mean(loss, lambda leaves: leaves[0], [like], labels, 1, self._subject.device, divisions)
            self._is_confirmed[mean] = reason is None
        return mean if mean is not None and self._is_confirmed[mean] else None

    def _output_shape(self, lowered: LoweredModel) -> tuple[int, ...] | None:
        """Return the shape of the loss's first argument for a micro-batch; None if it is not a tensor."""
        known_shape = next((shape for model, shape in self._shapes if model is lowered), ())  # (): not known yet
        if known_shape != ():
            return known_shape
        try:
            # ``pick``: the user's function that selects the loss's argument from the output.
            picked = lowered.pick(output_leaves(lowered))
        except Exception:  # it cannot compute without values
            picked = None
        shape = tuple(picked.shape) if isinstance(picked, torch.Tensor) else None
        self._shapes = [*self._shapes[1 - CAPTURES_KEPT :], (lowered, shape)]
        return shape

    def _check(self, lowered: LoweredModel, labels: torch.Tensor) -> None:
        """Refuse a loss that is not a mean over samples, for the labels of all replicas."""
        subject = self._subject
        all_labels, samples = labels.detach().cpu(), len(labels) // self._plan.microbatches
        if self._plan.replicas > 1:
            all_labels = self._all_labels(all_labels)
        digest = hashlib.sha256(all_labels.contiguous().view(torch.uint8).numpy().tobytes())
        digest.update(describe_function(self._settings.loss, frozenset(subject.model.modules())).encode())
        if digest.digest() in self._checked:
            return
        leaves, plan, is_first_check = output_leaves(lowered), self._plan, not self._checked
        # Micro-batches of replicas with shares differ in size; if single samples add up, so do they.
        divisions = [
            len(all_labels) if plan.shares else plan.microbatches * plan.replicas,
            *((2, len(all_labels)) if is_first_check else ()),
        ]
        device = subject.device
        reason = why_not_mean(
            self._settings.loss, lowered.pick, leaves, all_labels, samples, device, divisions, quick=not is_first_check
        )
        if reason is not None:
            raise RequestError(
                f'loss_over is "microbatch", but the loss is not a mean of terms of single samples: {reason}; pass '
                f'loss_over="batch", or "auto"'
            )
        # A forgotten digest only costs another check.
        if len(self._checked) == _MOST_CHECKED:
            self._checked.clear()
        self._checked.add(digest.digest())

    def _all_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """Return the labels of all replicas, in their order, on the host (collective)."""
        shares = self._plan.shares or (len(labels),) * self._plan.replicas
        like = {
            replica: labels.new_empty((share, *labels.shape[1:]), device="meta") for replica, share in enumerate(shares)
        }
        own = {self._groups.replica_index: labels} if self._groups.replica.rank == 0 else {}
        gathered = gather_tensors(self._groups.all.of("reduce"), like, own, torch.device("cpu"))
        return torch.cat(list(gathered.values()))


def output_leaves(lowered: LoweredModel) -> list[Any]:
    """Return the leaves of the output for a micro-batch, tensors without values."""
    values = lowered.program.values
    return [
        torch.empty(values[leaf.name].shape, dtype=values[leaf.name].dtype, device="meta")
        if isinstance(leaf, Ref)
        else leaf
        for leaf in lowered.outputs
    ]


def _raise(refusal: RequestError | None) -> None:
    if refusal is not None:
        raise refusal
