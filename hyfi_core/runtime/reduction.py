"""Gradient reduction: buckets that are summed over ranks while backward still runs.

    backward of the last micro-batch   ── layer 9 ── layer 8 ── layer 7 ── layer 6 ── … ──▶
    all-reduce of bucket 0                        [9 8]══════════════
    all-reduce of bucket 1                                            [7 6]══════════════

Every rank has a share of each gradient: its part of the image, its micro-batches, its replica. The gradient is the sum
over all ranks that hold the parameter, divided by the replicas where these weigh the same. A parameter's ``grad`` is a
view of its bucket, so that backward adds in place and nothing is copied (the idea of overlapping is S-Caffe's,
PPoPP'17; buckets are DDP's).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from hyfi_core.comm.base import Pending
from hyfi_core.comm.counted import CountedCommunicator

BUCKET_BYTES = 4 << 20


@dataclass
class _Bucket:
    parameters: list[nn.Parameter]
    flat: torch.Tensor
    open: set[int] = field(default_factory=set)
    wire: torch.Tensor | None = None
    pending: Pending | None = None


class ReductionGroup:
    """The parameters that the same ranks hold, in the order in which their gradients are complete.

    Args:
        parameters: the same on all ranks of the group, those used last first.
        comm: the ranks that hold them, in all replicas.
        mean_over: the sum is divided by this.
        dtype: of gradients on the wire, None for their own.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], comm: CountedCommunicator, mean_over: int, dtype: torch.dtype | None
    ) -> None:
        self._comm = comm.of("reduce")
        self._mean_over = mean_over
        self._dtype = dtype
        self._buckets = [_Bucket(chunk, _flat(chunk)) for chunk in _chunks(parameters)]
        self._bucket_of = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        self._next = 0

    def begin(self) -> None:
        """Let every ``grad`` be a view of its bucket, zero, and wait for all of them."""
        self._next = 0
        for bucket in self._buckets:
            bucket.flat.zero_()
            bucket.open = {id(parameter) for parameter in bucket.parameters}
            offset = 0
            for parameter in bucket.parameters:
                parameter.grad = bucket.flat.as_strided(parameter.shape, _strides(parameter), offset)
                offset += parameter.numel()

    def complete(self, parameters: Sequence[nn.Parameter]) -> None:
        """Take note that no more of these gradients comes on this rank; start what is complete, in order."""
        for parameter in parameters:
            self._bucket_of[id(parameter)].open.discard(id(parameter))
        while self._next < len(self._buckets) and not self._buckets[self._next].open:
            self._start(self._buckets[self._next])
            self._next += 1

    def poll(self) -> None:
        """Let what is under way make progress: MPI makes none outside of calls."""
        for bucket in self._buckets[: self._next]:
            if bucket.pending is not None and bucket.pending.test():
                self._land(bucket)

    def finish(self) -> None:
        """Start what is left and return when every gradient is the sum over ranks."""
        for bucket in self._buckets[self._next :]:
            self._start(bucket)
        self._next = len(self._buckets)
        for bucket in self._buckets:
            if bucket.pending is not None:
                bucket.pending.wait()
                self._land(bucket)

    def _start(self, bucket: _Bucket) -> None:
        bucket.wire = bucket.flat if self._dtype is None else bucket.flat.to(self._dtype)
        bucket.pending = self._comm.start_all_reduce(bucket.wire)

    def _land(self, bucket: _Bucket) -> None:
        bucket.pending = None
        if bucket.wire is not None and bucket.wire is not bucket.flat:
            bucket.flat.copy_(bucket.wire)
        bucket.wire = None
        if self._mean_over > 1:
            bucket.flat.div_(self._mean_over)


def _chunks(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Cut a list of parameters into runs of one type and of the size of a bucket."""
    chunks: list[list[nn.Parameter]] = []
    size = 0
    for parameter in parameters:
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
    """Return the parameter's own strides, by which optimisers are fast, or plain ones where it has holes."""
    dense = torch.ops.aten.is_non_overlapping_and_dense(parameter)
    return parameter.stride() if dense else torch.empty(parameter.shape, device="meta").stride()
