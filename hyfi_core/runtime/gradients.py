"""Gradients of one rank: when they are complete, and their reduction over all ranks that contribute.

    backward of the last micro-batch   ── layer 9 ── layer 8 ── layer 7 ── layer 6 ── … ──▶
    all-reduce of bucket 0                        [9 8]══════════════
    all-reduce of bucket 1                                            [7 6]══════════════

Every rank has a partial sum of each gradient: over its part of the image, its micro-batches, its replica. The gradient
is the sum over all ranks that hold the parameter, divided by the number of replicas if these have equal weights. A
parameter's ``grad`` is a view of its bucket, so that backward adds in place and nothing is copied (overlapping as in
S-Caffe, PPoPP'17; buckets as in DDP).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hyfi_core.comm.base import Pending
from hyfi_core.comm.counted import CountedCommunicator
from hyfi_core.plan.parallel_plan import BUCKET_BYTES, ParallelPlan
from hyfi_core.runtime.calls.parameter_hooks import ParameterHooks
from hyfi_core.runtime.groups import Groups
from hyfi_core.runtime.lowered_model import HostedStage, Key, LoweredModel
from hyfi_core.runtime.mirror import Mirror


class StepGradients:
    """The gradients of one lowered model. Creation is collective over all trainers.

    Args:
        model: the user's module.
        lowered: its stages.
        groups: the plan's groups.
        plan: replicas and their shares, mirror, dtype of messages.
        mirror: transfers gradients of direction 1; None if they are reduced with the others.
    """

    def __init__(
        self,
        model: nn.Module,
        lowered: LoweredModel,
        groups: Groups,
        plan: ParallelPlan,
        mirror: Mirror | None,
    ) -> None:
        self._named = dict(model.named_parameters(remove_duplicate=False))
        self._lowered = lowered
        self._mirror = mirror
        self._earlier = EarlierGradients(self._named.values())
        dtype = torch.bfloat16 if plan.reduce_dtype == "bfloat16" else None
        self._group_of: dict[int, ReductionGroup] = {}
        self._groups: list[ReductionGroup] = []
        # Sorted, because creating a group is collective: all ranks must create them in one order, also those outside.
        for holders, members in sorted(_by_holders(self._named, lowered, groups).items(), key=lambda kv: sorted(kv[0])):
            comm = groups.reduction(holders)
            if comm is not None and comm.size > 1:
                group = ReductionGroup(members, comm, plan.mean_over, dtype)
                self._groups.append(group)
                self._group_of.update({id(parameter): group for parameter in members})
        # id of a parameter -> contributions that are still missing before its gradient can be reduced.
        self._missing: dict[int, int] = {}

    @property
    def reduces(self) -> bool:
        """Whether any gradient is reduced over several ranks."""
        return bool(self._groups)

    def begin(self) -> None:
        """Set earlier gradients aside, so that only new ones are reduced, and count the contributions to expect."""
        # First: the groups below replace every ``grad`` by a zero view of their buckets.
        self._earlier.set_aside()
        for group in self._groups:
            group.begin()
        self._missing = {}
        for stage in self._lowered.hosted.values():
            for name in _used(stage):
                self._wait_for(self._named[name])
        if self._mirror is not None:
            for parameter in self._mirror.expected():
                self._wait_for(parameter)
        for group in self._groups:
            # Last: only now is it known which parameters this plane computes with.
            group.wait_for(self._missing)

    def complete(self, key: Key, names: Sequence[str]) -> None:
        """Record that a stage's contribution to these gradients is complete; start complete reductions."""
        program = self._lowered.hosted[key].ranked.program
        for name in names:
            self._contributed(self._named[program.parameters[name]])
        for group in self._groups:
            group.poll()

    def stage_done(self) -> None:
        """Called after all backwards of a stage on this rank: make progress on reductions."""
        self._add_arrived(wait=False)
        for group in self._groups:
            group.poll()

    def send(self, stage: int) -> None:
        """Start sending a stage's gradients to the direction that owns them."""
        assert self._mirror is not None
        self._mirror.send_gradients(stage)

    def expect(self, stage: int) -> None:
        """Post the receives of a stage's gradients from the other direction."""
        assert self._mirror is not None
        self._mirror.expect_gradients(stage)

    def finish(self, hooks: ParameterHooks, unreached: Iterable[str] = ()) -> None:
        """Wait for all reductions, run hooks, and add the gradients that ``begin`` has set aside.

        Args:
            hooks: hooks of parameters.
            unreached: names of parameters on which no used output depends. If the loss does not read them either, their
                gradient is None.
        """
        self._add_arrived(wait=True)
        for group in self._groups:
            group.finish()
        for parameter in map(self._named.__getitem__, unreached):
            if parameter.grad is not None and not parameter.grad.any():
                parameter.grad = None
        # Hooks change the new gradients alone: earlier ones have been through the hooks in their own call.
        hooks.run_on_new_gradients()
        self._earlier.add()
        hooks.run_after_accumulation()

    def _add_arrived(self, wait: bool) -> None:
        """Add the gradients that have arrived from direction 1; ``wait``: first wait until all have arrived."""
        if self._mirror is not None:
            for parameter in self._mirror.add_arrived_gradients(wait):
                self._contributed(parameter)

    def _wait_for(self, parameter: nn.Parameter) -> None:
        """Wait for one more contribution to a parameter's gradient before it is reduced."""
        # Counted, because a parameter that is tied, or in two directions, is complete only with its last contribution.
        self._missing[id(parameter)] = self._missing.get(id(parameter), 0) + 1

    def _contributed(self, parameter: nn.Parameter) -> None:
        """Record one contribution to a gradient; after the last one, its bucket may be reduced."""
        self._missing[id(parameter)] -= 1
        # A parameter that one rank holds has no group: its gradient is complete as it is.
        if not self._missing[id(parameter)] and id(parameter) in self._group_of:
            self._group_of[id(parameter)].complete([parameter])


class EarlierGradients:
    """Gradients that earlier calls have accumulated, so that only those of this call are reduced.

    Args:
        parameters: parameters of the model; tied ones may come twice.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list({id(p): p for p in parameters if p.requires_grad}.values())
        self._kept: list[torch.Tensor | None] = []

    def set_aside(self) -> None:
        """Keep copies, and clear the parameters' gradients."""
        # Copied: a gradient may be a view of a bucket, which the next call sets to zero.
        self._kept = [None if p.grad is None else p.grad.clone() for p in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None

    def add(self) -> None:
        """Add the copies to the parameters' gradients."""
        for parameter, earlier in zip(self._parameters, self._kept, strict=True):
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)
        self._kept = []


class GradientsOfCells:
    """``StepGradients`` for the cells of a rank, which add to the same gradients: complete after the last cell.

    Args:
        gradients: gradients of the rank.
        cells: number of cells.
    """

    def __init__(self, gradients: StepGradients, cells: int) -> None:
        self._gradients, self._cells = gradients, cells
        self._cells_done: dict[Any, int] = {}

    @property
    def reduces(self) -> bool:
        """Whether any gradient is reduced over several ranks."""
        return self._gradients.reduces

    def complete(self, key: Key, names: Sequence[str]) -> None:
        """Record that a cell's contribution to these gradients is complete."""
        # All cells add to one ``grad``, which is this rank's whole sum only after the last cell.
        self._gradients.complete(key, [name for name in names if self._is_last_cell((key, name))])

    def stage_done(self) -> None:
        """Called after all backwards of a stage in a cell."""
        self._gradients.stage_done()

    def send(self, stage: int) -> None:
        """Start sending a stage's gradients to the direction that owns them, when all cells are done."""
        if self._is_last_cell(("send", stage)):
            self._gradients.send(stage)

    def expect(self, stage: int) -> None:
        """Post the receives of a stage's gradients from the other direction, once."""
        if self._is_last_cell(("expect", stage)):
            self._gradients.expect(stage)

    def _is_last_cell(self, event: Any) -> bool:
        """Count one more cell that has reached ``event``; return whether all cells have."""
        self._cells_done[event] = self._cells_done.get(event, 0) + 1
        return self._cells_done[event] == self._cells


def _used(stage: HostedStage) -> list[str]:
    """Return the user's names of a stage's parameters; with branches, of those that this plane computes with."""
    ranked = stage.ranked
    if not ranked.of_all_planes:
        return list(ranked.program.parameters.values())
    inputs = {name for instruction in ranked.instructions for name in instruction.inputs}
    return [named for value, named in ranked.program.parameters.items() if value in inputs]


def _by_holders(
    named: Mapping[str, nn.Parameter], lowered: LoweredModel, groups: Groups
) -> dict[frozenset[int], list[nn.Parameter]]:
    """Return ranks of a plane -> trained parameters that they hold, in the order in which backward completes them."""
    stages: dict[int, set[int]] = {}
    order: dict[int, nn.Parameter] = {}
    for stage, names in enumerate(lowered.parameters):
        for name in names:
            if name in lowered.trained:
                # A tied weight keeps the place of its first use: backward completes it there.
                order.setdefault(id(named[name]), named[name])
                stages.setdefault(id(named[name]), set()).add(stage)
    parameters: dict[frozenset[int], list[nn.Parameter]] = {}
    # Backward begins with the last layer, so its gradients must fill the first bucket.
    for key in reversed(order):
        parameters.setdefault(groups.holders(stages[key]), []).append(order[key])
    return parameters


def clip(
    owned: Sequence[nn.Parameter], counted: Sequence[nn.Parameter], max_norm: float, comm: CountedCommunicator | None
) -> torch.Tensor:
    """Scale gradients down to a norm over the whole model, as ``torch.nn.utils.clip_grad_norm_`` does.

    Args:
        owned: parameters of this rank.
        counted: parameters that this rank counts in the norm; each is counted by one rank of ``comm``.
        max_norm: largest norm.
        comm: the ranks that hold the model together; None if this rank counts all of it.

    Returns:
        The norm before, float64 without dims, on the device.
    """
    device = owned[0].device
    # Summed in float64: in float32 the norm would depend on how stages divide the model.
    norms = [p.grad.norm().double() for p in counted if p.grad is not None]
    total = torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64, device=device)
    if comm is not None:
        comm.of("reduce").all_reduce(total)
    norm = total.sqrt()
    # 1e-6 as in ``clip_grad_norm_``, so that clipped gradients are those of one process.
    scale = max_norm / (norm + 1e-6)
    gradients = [p.grad for p in owned if p.grad is not None]
    # On a GPU always, so that the host does not wait for the scale. Not ``<``: a NaN must be passed on.
    if gradients and (scale.device.type != "cpu" or not scale >= 1.0):
        torch._foreach_mul_(gradients, scale.clamp(max=1.0))
    return norm


@dataclass
class _Bucket:
    """Parameters whose gradients are views of ``flat``, which is reduced in one message."""

    parameters: list[nn.Parameter]
    flat: torch.Tensor
    # Ids of parameters whose gradients this rank has not completed yet.
    incomplete: set[int] = field(default_factory=set)
    # The message of a pending reduction: ``flat`` itself, or a copy in fewer bits.
    message: torch.Tensor | None = None
    pending: Pending | None = None


class ReductionGroup:
    """Parameters held by the same ranks, in the order in which their gradients are completed.

    Args:
        parameters: the same on all ranks of the group, those used last first.
        comm: the ranks that hold them, in all replicas.
        mean_over: divisor of sums.
        dtype: dtype of gradients in messages; None: their own.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], comm: CountedCommunicator, mean_over: int, dtype: torch.dtype | None
    ) -> None:
        self._comm = comm.of("reduce")
        self._mean_over = mean_over
        self._dtype = dtype
        self._buckets = [_Bucket(chunk, _flat(chunk)) for chunk in _chunks(parameters)]
        self._bucket_of = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        self._next_bucket = 0

    def begin(self) -> None:
        """Set every ``grad`` to a zero view of its bucket."""
        self._next_bucket = 0
        for bucket in self._buckets:
            bucket.flat.zero_()
            bucket.incomplete = {id(parameter) for parameter in bucket.parameters}
            offset = 0
            for parameter in bucket.parameters:
                # A view, so that autograd's addition fills the bucket, and the reduced sums are the gradients without a
                # copy.
                parameter.grad = bucket.flat.as_strided(parameter.shape, _strides(parameter), offset)
                offset += parameter.numel()

    def wait_for(self, parameters: Collection[int]) -> None:
        """Wait for the gradients of these parameters (by ``id``) only: other planes compute the rest alone."""
        for bucket in self._buckets:
            bucket.incomplete.intersection_update(parameters)

    def complete(self, parameters: Sequence[nn.Parameter]) -> None:
        """Record gradients that are complete on this rank; start reductions of complete buckets, in order."""
        for parameter in parameters:
            self._bucket_of[id(parameter)].incomplete.discard(id(parameter))
        # In order, although a later bucket may be full: all ranks must start the same reduction.
        while self._next_bucket < len(self._buckets) and not self._buckets[self._next_bucket].incomplete:
            self._start(self._buckets[self._next_bucket])
            self._next_bucket += 1

    def poll(self) -> None:
        """Make progress on pending reductions: MPI makes none outside of calls."""
        for bucket in self._buckets[: self._next_bucket]:
            if bucket.pending is not None and bucket.pending.test():
                self._store_sum(bucket)

    def finish(self) -> None:
        """Start the remaining reductions and wait for all."""
        for bucket in self._buckets[self._next_bucket :]:
            self._start(bucket)
        self._next_bucket = len(self._buckets)
        for bucket in self._buckets:
            if bucket.pending is not None:
                bucket.pending.wait()
                self._store_sum(bucket)

    def _start(self, bucket: _Bucket) -> None:
        bucket.message = bucket.flat if self._dtype is None else bucket.flat.to(self._dtype)
        # Reduced in place: without ``_dtype`` the parameters' own gradients are the message.
        bucket.pending = self._comm.start_all_reduce(bucket.message)

    def _store_sum(self, bucket: _Bucket) -> None:
        """Copy a bucket's received sum to its gradients, and divide it."""
        bucket.pending = None
        if bucket.message is not None and bucket.message is not bucket.flat:
            bucket.flat.copy_(bucket.message)
        bucket.message = None
        # After the sum, once: dividing each rank's part first would round as often as there are ranks.
        if self._mean_over > 1:
            bucket.flat.div_(self._mean_over)


def _chunks(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Divide parameters, in order, into lists of one dtype and about ``BUCKET_BYTES`` each."""
    chunks: list[list[nn.Parameter]] = []
    size = 0
    for parameter in parameters:
        # One flat tensor has one dtype. The last parameter may exceed the size: none is cut.
        if not chunks or chunks[-1][-1].dtype != parameter.dtype or size >= BUCKET_BYTES:
            chunks.append([])
            size = 0
        chunks[-1].append(parameter)
        size += parameter.numel() * parameter.element_size()
    return chunks


def _flat(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    first = parameters[0]
    return torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)


def _strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the parameter's strides, with which optimizers are fast, or contiguous ones if it is not dense."""
    dense = torch.ops.aten.is_non_overlapping_and_dense(parameter)
    return parameter.stride() if dense else torch.empty(parameter.shape, device="meta").stride()
