"""The loss over the logits of the whole batch, of all micro-batches and replicas.

    replica 0   F0 ── F1 ─┐  logits and labels  ┌─▶ loss(all logits, all labels) ─▶ cotangents of 0, 1 ─▶ B0 ── B1
    replica 1   F0 ── F1 ─┘   of all samples    └─▶ the same                     ─▶ cotangents of 2, 3 ─▶ B0 ── B1

Every rank of the last stage, in any direction and replica, has all logits bit for bit and computes the same loss. So
the loss may be any function of the batch: a weighted mean, a sum, a ranking of its samples.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Set
from typing import Any

import torch

from hyfi_core.errors import RequestError
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.runtime.groups import Groups
from hyfi_core.runtime.losses.gathered import gather_tensors
from hyfi_core.runtime.losses.loss_function import LossFunction
from hyfi_core.runtime.losses.step_loss import LeafCotangents, Leaves, StepLoss, is_float, zeros_of

_LABELS = -1
"""Index that stands for the labels in keys (replica, micro-batch, index of a leaf)."""


class BatchLoss(StepLoss):
    """One loss over the whole batch.

    Args:
        function: the loss.
        pick: turns the leaves of the output into the loss's argument.
        labels: labels of this replica's batch, on the device.
        plan: micro-batches, directions, replicas and their shares.
        groups: communication groups of this rank or cell.
        common_leaves: indices of the leaves of the output that are the same for all images; the loss takes them once.
    """

    def __init__(
        self,
        function: LossFunction,
        pick: Callable[[Leaves], Any],
        labels: torch.Tensor,
        plan: ParallelPlan,
        groups: Groups,
        common_leaves: Set[int] = frozenset(),
    ) -> None:
        super().__init__(labels.device)
        self._function, self._pick, self._labels = function, pick, labels
        self._plan, self._groups, self._common_leaves = plan, groups, common_leaves
        self._sample_order = _sample_order(plan)
        self._gradients: LeafCotangents | None = None
        self.needs_outputs = True

    def take(self, outputs: Mapping[int, Leaves]) -> None:
        """Compute the loss from the outputs of all ranks (collective over the ranks that have an output)."""
        # Set before, so that later backwards do not try again if the loss refuses.
        self.needs_outputs = False
        try:
            # Not inside of ``get``, which only one cell computes: ``_whole`` is collective.
            leaves, labels = self._whole(outputs)
            leaves, loss = self.computed.get(0, lambda: self._loss(leaves, labels))
        except RequestError as refusal:
            # Backward still runs, with zeros, because other ranks wait for its messages.
            self.refusal = refusal
            return
        self.value = loss.detach().double().reshape(())
        seed = torch.full_like(loss, self._plan.mean_over)  # reduced gradients are divided by it
        counts = self._leads(0) and self._groups.replica_index == 0
        if counts:
            self.counted = self.value
        self._gradients = self._differentiated(leaves, loss, seed, counts)

    def _loss(self, leaves: Leaves, labels: torch.Tensor) -> tuple[Leaves, torch.Tensor]:
        """Return (leaves that require gradients, the loss computed from them)."""
        with torch.enable_grad():
            leaves = [leaf.requires_grad_() if is_float(leaf) else leaf for leaf in leaves]
            return leaves, self._function(self._pick(leaves), labels)

    def cotangents(self, microbatch: int, leaves: Leaves, leads: bool) -> LeafCotangents:
        """Return a micro-batch's part of the gradients of all logits; see ``StepLoss``."""
        if self._gradients is None:
            return zeros_of(leaves)
        start, stop = self._rows(self._groups.replica_index, microbatch)
        parts = [
            gradient if gradient is None or at in self._common_leaves else gradient[start:stop]
            for at, gradient in enumerate(self._gradients)
        ]
        # A leaf that is the same for all images gets its whole gradient in the first micro-batch.
        is_first = (self._groups.replica_index, microbatch) == self._sample_order[0]
        counted = [leads and (is_first or at not in self._common_leaves) for at in range(len(parts))]
        # In new memory: it may be spilled.
        copies = [torch.clone if counts else torch.zeros_like for counts in counted]
        return [None if part is None else copy(part) for copy, part in zip(copies, parts, strict=True)]

    def _whole(self, outputs: Mapping[int, Leaves]) -> tuple[Leaves, torch.Tensor]:
        """Return the leaves of the output for the whole batch, in new memory, and its labels."""
        plan = self._plan
        any_output = next(iter(outputs.values()))
        # Leaves by their index ``at`` in the output; parts of them by (replica, micro-batch, ``at``).
        joined = {at: leaf.detach().clone() for at, leaf in enumerate(any_output) if at in self._common_leaves}
        tensors = [at for at, leaf in enumerate(any_output) if isinstance(leaf, torch.Tensor) and at not in joined]
        size = len(self._labels) // plan.microbatches
        for at in tensors:
            _refuse_without_batch(any_output[at], size)
        if plan.replicas * plan.directions == 1:
            parts = {(0, m, at): leaves[at] for m, leaves in outputs.items() for at in tensors}
            labels = self._labels
        else:
            parts, labels = self._gathered(outputs, tensors)
        joined |= {
            at: torch.cat([parts[replica, m, at].detach() for replica, m in self._sample_order]) for at in tensors
        }
        return [joined.get(at, leaf) for at, leaf in enumerate(any_output)], labels

    def _gathered(
        self, outputs: Mapping[int, Leaves], tensors: list[int]
    ) -> tuple[dict[tuple[int, int, int], torch.Tensor], torch.Tensor]:
        """Return (replica, micro-batch, leaf) -> tensor, and the labels of the whole batch.

        Args:
            outputs: micro-batch -> leaves, of this rank.
            tensors: indices of the leaves that are tensors.
        """
        comm, any_output = self._groups.outputs().of("reduce"), next(iter(outputs.values()))
        samples = {at: any_output[at] for at in tensors} | {_LABELS: self._labels}
        # Before the gathering: the length of its message depends on shapes.
        _compare_shapes(comm, list(samples.values()))
        like = {
            (replica, m, at): tensor.new_empty((self._size(replica), *tensor.shape[1:]), device="meta")
            for replica, m in self._sample_order
            for at, tensor in samples.items()
        }
        gathered = gather_tensors(comm, like, self._owned(outputs, tensors), self._labels.device)
        labels = [gathered.pop((replica, m, _LABELS)) for replica, m in self._sample_order]
        return gathered, torch.cat(labels)

    def _owned(self, outputs: Mapping[int, Leaves], leaves: list[int]) -> dict[tuple[int, int, int], torch.Tensor]:
        """Return (replica, micro-batch, leaf) -> tensor, for all that this rank sends.

        A direction's outputs are sent by one rank of its last stage, which leads it; labels by that of direction 0.
        """
        replica, microbatches = self._groups.replica_index, range(self._plan.microbatches)
        led = [m for m in microbatches if self._leads(self._direction(m))]
        owned = {(replica, m, leaf): outputs[m][leaf] for m in led for leaf in leaves}
        if self._leads(0):
            # Direction 0 sends all labels of a replica, although the last stages of both directions have them.
            labels = self._labels.split(self._size(replica))
            owned |= {(replica, m, _LABELS): labels[m] for m in microbatches}
        return owned

    def _size(self, replica: int) -> int:
        """Return the number of samples of a micro-batch of a replica."""
        shares = self._plan.shares
        return (shares[replica] if shares else len(self._labels)) // self._plan.microbatches

    def _rows(self, replica: int, microbatch: int) -> tuple[int, int]:
        """Return (start, stop): the samples of a micro-batch in the whole batch."""
        before = self._sample_order[: self._sample_order.index((replica, microbatch))]
        start = sum(self._size(earlier) for earlier, _ in before)
        return start, start + self._size(replica)

    def _direction(self, microbatch: int) -> int:
        return microbatch * self._plan.directions // self._plan.microbatches

    def _leads(self, direction: int) -> bool:
        """Whether this is the first rank of the replica's last stage in a direction."""
        group = self._groups.stages.get((self._plan.stages - 1, direction))
        return group is not None and group.rank == self._groups.between_planes.rank == 0


def _sample_order(plan: ParallelPlan) -> list[tuple[int, int]]:
    """Return (replica, micro-batch) in the order of samples: by replica; with shares, by micro-batch."""
    if plan.shares:
        return [(replica, m) for m in range(plan.microbatches) for replica in range(plan.replicas)]
    return [(replica, m) for replica in range(plan.replicas) for m in range(plan.microbatches)]


def _refuse_without_batch(leaf: torch.Tensor, samples: int) -> None:
    """Refuse a tensor of the model's output whose first dim is not the batch."""
    if leaf.shape[:1] != (samples,):
        raise RequestError(
            f"the model's output has a tensor of shape {tuple(leaf.shape)} for {samples} image(s): without a dim for "
            f"the batch it cannot be joined for a loss over the whole batch; select the logits with output=, or pass "
            f'loss_over="microbatch" if the loss is a mean over samples'
        )


def _compare_shapes(comm: Any, tensors: list[torch.Tensor]) -> None:
    """Refuse outputs whose shapes or dtypes differ between replicas, the same on all their ranks."""
    text = ", ".join(f"{tuple(tensor.shape[1:])} {tensor.dtype}" for tensor in tensors)
    number = zlib.crc32(text.encode())
    extremes = torch.tensor([number, -number])  # the largest negative is the smallest number: one all-reduce for both
    comm.all_reduce(extremes, "max")
    highest, lowest = extremes.tolist()
    if highest != -lowest:
        raise RequestError(
            "replicas have outputs or labels of different shapes for a sample, so that there is no loss over the whole "
            "batch; use images and labels of one size"
        )
