"""Weights as flat bytes: an asynchronous copy for validation, and its inverse.

::

    state_dict      conv.weight      conv.bias   bn.count …
    bytes           |████████████████|██··········|█···········|      each tensor begins at a multiple of 64

Both sides know names, shapes and types from the model, so nothing but the bytes travels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

ALIGN_BYTES = 64

State = Mapping[str, torch.Tensor]


def snapshot_bytes(state: State) -> int:
    """Return the size of a snapshot of tensors like these."""
    return sum(_room(value) for value in state.values())


def unflatten(flat: torch.Tensor, like: State) -> dict[str, torch.Tensor]:
    """Return the tensors of a snapshot under the names of ``like``: views, valid as long as ``flat`` is.

    Raises:
        ValueError: ``flat`` is a snapshot of something else.
    """
    if flat.numel() != snapshot_bytes(like):
        raise ValueError(f"a snapshot of {flat.numel()} bytes does not fit a model of {snapshot_bytes(like)} bytes")
    result, start = {}, 0
    for name, value in like.items():
        piece = flat[start : start + value.numel() * value.element_size()]
        result[name] = piece.view(value.dtype).view(value.shape)
        start += _room(value)
    return result


class Snapshot:
    """A private copy of weights on the host, complete or in progress.

    From a GPU it is copied on a separate stream into pinned memory while training continues, until ``ready``. On the
    host it is complete at once. Memory: one copy of the weights, released by ``Pool.give``.

    Args:
        step: whose weights they are.
        state: the weights; on the host they may be overwritten when this returns, on a GPU they must not change until
            ``ready`` (a gathered ``state_dict`` is such a private copy).
        flat: ``snapshot_bytes(state)`` bytes on the host, pinned for a GPU.
    """

    def __init__(self, step: int, state: State, flat: torch.Tensor) -> None:
        self.step, self.flat = step, flat
        self._state: State | None = state
        self._done: torch.cuda.Event | None = None
        devices = {value.device for value in state.values() if value.is_cuda}
        places = unflatten(flat, state)
        if not devices:
            self._copy(places)
            return
        device = devices.pop()
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self._copy(places)
        self._done = torch.cuda.Event()
        self._done.record(stream)

    def ready(self) -> bool:
        """Return whether the copy is complete; does not block."""
        if self._done is not None and not self._done.query():
            return False
        self._done = self._state = None
        return True

    def wait(self) -> None:
        """Wait until the copy is complete."""
        if self._done is not None:
            self._done.synchronize()
        self.ready()

    def _copy(self, places: State) -> None:
        assert self._state is not None
        for name, value in self._state.items():
            places[name].copy_(value.detach(), non_blocking=True)


class Pool:
    """Buffers for snapshots, used again: fresh memory costs as much as the copy, page by page."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def take(self, step: int, state: State) -> Snapshot:
        """Begin a snapshot of ``state``."""
        size, pinned = snapshot_bytes(state), any(value.is_cuda for value in state.values())
        fitting = [flat for flat in self._free if flat.numel() == size and flat.is_pinned() == pinned]
        # Zeros, because padding between tensors is sent, too.
        flat = fitting[0] if fitting else torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
        self._free = [other for other in self._free if other is not flat]
        return Snapshot(step, state, flat)

    def give(self, snapshot: Snapshot) -> None:
        """Release the memory of a snapshot that is no longer used."""
        self._free.append(snapshot.flat)


def _room(value: torch.Tensor) -> int:
    return math.ceil(value.numel() * value.element_size() / ALIGN_BYTES) * ALIGN_BYTES
