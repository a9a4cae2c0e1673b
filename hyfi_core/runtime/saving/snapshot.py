"""Snapshots: asynchronous copies of weights as flat bytes, for validation and for checkpoints.

::

    state_dict      bn.count     conv.bias    conv.weight      in the order of names
    bytes           |█···········|██··········|████████████████|      each tensor starts at a multiple of 64

Both sides know names, shapes and dtypes from the model, so only the bytes are sent, whatever order their states have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

# A multiple of the size of every dtype: ``Tensor.view(dtype)`` refuses other offsets.
ALIGN_BYTES = 64

State = Mapping[str, torch.Tensor]


def snapshot_bytes(state: State) -> int:
    """Return the size in bytes of a snapshot of tensors with the shapes and dtypes of ``state``."""
    return sum(_padded_bytes(value) for value in state.values())


def unflatten(flat: torch.Tensor, like: State) -> dict[str, torch.Tensor]:
    """Return the tensors of a snapshot under the names of ``like``, as views of ``flat``.

    Raises:
        ValueError: ``flat`` has another size than a snapshot of ``like``.
    """
    if flat.numel() != snapshot_bytes(like):
        raise ValueError(f"a snapshot of {flat.numel()} bytes does not fit a model of {snapshot_bytes(like)} bytes")
    result, start = {}, 0
    # By name: sender and receiver may have built their states in different orders.
    for name, value in sorted(like.items(), key=lambda item: item[0]):
        piece = flat[start : start + value.numel() * value.element_size()]
        result[name] = piece.view(value.dtype).view(value.shape)
        start += _padded_bytes(value)
    return result


class Snapshot:
    """A copy of weights in host memory, complete or in progress.

    Weights on a GPU are copied on a separate stream into pinned memory while training continues, until ``ready``.
    Weights in host memory are copied at once. Memory: one copy of the weights, released by ``SnapshotPool.release``.

    Args:
        step: Step of the weights.
        state: The weights. In host memory they may be changed when this returns; on a GPU not until ``ready`` (a
            gathered ``state_dict`` is never changed).
        flat: ``snapshot_bytes(state)`` bytes of host memory, pinned if the weights are on a GPU.
        changing: Whether the weights are those being trained: on a GPU they are copied on the current stream, before
            all that is started later, so that they may be changed at once.
    """

    def __init__(self, step: int, state: State, flat: torch.Tensor, changing: bool = False) -> None:
        self.step, self.flat = step, flat
        self._state: State | None = state
        self._done: torch.cuda.Event | None = None
        # At most one GPU: a rank has one. Counters of optimizers may be on the host even then.
        devices = {value.device for value in state.values() if value.is_cuda}
        views = unflatten(flat, state)
        if not devices:
            self._copy(views)
            return
        device = devices.pop()
        # ``changing``: on the current stream, so that the next update, on the same stream, runs after the copy.
        stream = torch.cuda.current_stream(device)
        if not changing:
            stream = torch.cuda.Stream(device)
            # Kernels that were started before may still compute the weights.
            stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self._copy(views)
        self._done = torch.cuda.Event()
        self._done.record(stream)

    def ready(self) -> bool:
        """Return whether the copy is complete; does not block."""
        if self._done is not None and not self._done.query():
            return False
        # Only now: until the copy is complete, the allocator must not give the weights' memory to other tensors.
        self._done = self._state = None
        return True

    def wait(self) -> None:
        """Wait until the copy is complete."""
        if self._done is not None:
            self._done.synchronize()
        self.ready()

    def _copy(self, views: State) -> None:
        assert self._state is not None
        for name, value in self._state.items():
            views[name].copy_(value.detach(), non_blocking=True)


class SnapshotPool:
    """Reuses the memory of snapshots: page faults of new memory would take as long as the copy."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def acquire(self, step: int, state: State, changing: bool = False) -> Snapshot:
        """Start a snapshot of ``state``; see :class:`Snapshot`."""
        size, pinned = snapshot_bytes(state), any(value.is_cuda for value in state.values())
        fitting = [flat for flat in self._free if flat.numel() == size and flat.is_pinned() == pinned]
        # Zeros: the padding between tensors is sent, too.
        flat = fitting[0] if fitting else torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
        self._free = [buffer for buffer in self._free if buffer is not flat]
        return Snapshot(step, state, flat, changing)

    def release(self, snapshot: Snapshot) -> None:
        """Return the memory of a snapshot that is no longer used to the pool."""
        self._free.append(snapshot.flat)


def _padded_bytes(value: torch.Tensor) -> int:
    return math.ceil(value.numel() * value.element_size() / ALIGN_BYTES) * ALIGN_BYTES
