"""Vectors of a frozen encoder that stay in memory: each chunk of a slide is encoded once.

A chunk has the same tiles in the same call each time, so its kept vectors are bitwise those of computing it again.
"""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from hyfi_core.comm.agreement.weight_watch import change_mark
from hyfi_core.process_memory import resident_bytes
from hyfi_core.tiles.chunks import TileChunk
from hyfi_core.tiles.source import TileSource


class KeptVectors:
    """The vectors that one rank keeps. Chunks that do not fit are computed again each time.

    Attributes:
        step_bytes: memory that a step needs beside the kept vectors.
        used_bytes: bytes of the vectors that are kept.
        encoded: tiles that this rank has encoded so far, because they were not kept.

    Args:
        limit_bytes: most bytes of vectors.
        memory_bytes: limit of this process; None: no limit.
    """

    def __init__(self, limit_bytes: int, memory_bytes: int | None = None) -> None:
        self._limit_bytes, self._memory_bytes = limit_bytes, memory_bytes
        self._vectors: dict[tuple[str, int, int, bytes], torch.Tensor] = {}
        self._modes = b""  # whether each module of the encoder is in training mode
        self._marks: list[tuple[int, int]] | None = None
        self._digest = ""
        self.step_bytes = self.used_bytes = self.encoded = 0

    def begin(self, encoder: nn.Module) -> None:
        """Forget all vectors if the encoder's weights have changed since the last call, and note its training flags.

        Vectors are kept under these flags, because modules may return other values in training mode.
        """
        self._modes = bytes(module.training for module in encoder.modules())
        tensors = [*encoder.parameters(), *encoder.buffers()]
        marks = [change_mark(tensor) for tensor in tensors]
        if marks == self._marks:
            return
        digest = _digest_of(tensors)  # a mark also changes if the same values are written, e.g. from a checkpoint
        if digest != self._digest:
            self._vectors.clear()
            self.used_bytes = 0
        self._marks, self._digest = marks, digest

    def get(self, slide: TileSource, chunk: TileChunk) -> torch.Tensor | None:
        """Return the vectors of a chunk ``(n, D)``, which the caller does not change; None if they are not kept."""
        return self._vectors.get(self._key(slide, chunk))

    def put(self, slide: TileSource, chunk: TileChunk, vectors: torch.Tensor) -> None:
        """Keep the vectors of a chunk, if the slide's tiles are the same in each epoch and there is room."""
        self.encoded += len(chunk)
        size, key = vectors.numel() * vectors.element_size(), self._key(slide, chunk)
        identity = key[0]  # "" if the slide's tiles may change
        if not identity or key in self._vectors or self.used_bytes + size > self._limit_bytes:
            return
        if self._memory_bytes is not None and resident_bytes() + self.step_bytes + size > self._memory_bytes:
            return
        # In host memory, because a GPU's memory is for activations.
        self._vectors[key] = vectors.detach().cpu()
        self.used_bytes += size

    def _key(self, slide: TileSource, chunk: TileChunk) -> tuple[str, int, int, bytes]:
        """Return (identity of a slide or "", first tile of a chunk, tile after its last, modes of the encoder)."""
        return str(getattr(slide, "identity", "")), chunk.start, chunk.stop, self._modes


def _digest_of(tensors: list[torch.Tensor]) -> str:
    """Return a digest of dtypes, shapes and all values."""
    summed = hashlib.sha256()
    for tensor in tensors:
        plain = tensor.detach().cpu().contiguous().reshape(-1)
        summed.update(f"{plain.dtype} {tuple(tensor.shape)}\n".encode())
        summed.update(plain.view(torch.uint8).numpy().data)
    return summed.hexdigest()
