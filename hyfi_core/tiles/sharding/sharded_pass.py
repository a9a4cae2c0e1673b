"""The two passes of a step over an encoder of shards: every rank calls it equally often, because calls gather weights.

::

    rank 0, 3 chunks     chunk 0   chunk 1   chunk 2
    rank 1, 2 chunks     a dummy   chunk 0   chunk 1        the dummy: one random tile, whose features are dropped
    kept                           ▓▓▓▓▓▓▓   ▓▓▓▓▓▓▓        as many as all ranks have room for
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from hyfi_core.comm.base import ReduceOp
from hyfi_core.tiles.chunks import TileChunk
from hyfi_core.tiles.encoding.encoder_pass import EncoderPass
from hyfi_core.tiles.features import SlideFeatures
from hyfi_core.tiles.gradients import TileGradients
from hyfi_core.tiles.memory_budget import KeepingRoom


@dataclass
class ShardedPass(EncoderPass):
    """The encoder's part of one step, or of a prediction; creation is collective over the ranks of the replica."""

    def __post_init__(self) -> None:
        """Put dummies before this rank's chunks, so that all ranks have the same number."""
        # Before them, because the last chunks may be kept.
        self.chunks = [*[_DUMMY] * (self._by_all(len(self.chunks), "max") - len(self.chunks)), *self.chunks]

    def forward(
        self, kept: int, room: KeepingRoom | None = None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """Encode all chunks and return as `EncoderPass.forward`; a chunk is kept if all ranks have room for theirs."""
        width, dtype, device = self.facts.features, self.facts.dtype, self.call.device
        features = [SlideFeatures(self.parts, n, self.comm, width, dtype, device) for n in range(len(self.slides))]
        graphs: list[torch.Tensor | None] = []
        kept = self._by_all(kept, "min")  # as many as every rank can keep
        read = self._read(self.chunks, last=not self.trains or not self.facts.trained)
        for number, chunk in enumerate(self.chunks):
            keeps = number >= len(self.chunks) - kept
            if keeps and room is not None and room.memory_bytes is not None:
                # All ranks decide alike, because computing a chunk again gathers weights from all of them.
                keeps = bool(self._by_all(int(room.fits_another()), "min"))
            if room is not None:
                room.prepare(backward=False)
            encoded = self._encoded(chunk, next(read), keeps)
            features[chunk.slide].put(chunk.start, encoded)
            graphs.append(encoded if keeps and encoded.requires_grad else None)
            del encoded
        for of_slide in features:  # not while weights are gathered: on a GPU, two groups could wait for each other
            of_slide.start()
        return [of_slide.gathered() for of_slide in features], graphs

    def backward(
        self,
        graphs: list[torch.Tensor | None],
        cotangents: Sequence[torch.Tensor | None],
        gradients: TileGradients,
        room: KeepingRoom | None = None,
    ) -> None:
        """Drive all chunks backward, the last first; each adds gradients, summed over ranks, to this rank's shards."""
        again = [chunk for chunk, graph in zip(self.chunks, graphs, strict=True) if graph is None]
        read = self._read(again[::-1], last=True)
        for number in reversed(range(len(self.chunks))):
            # Taken out of the list, so that each chunk's graph is freed after its backward.
            chunk, encoded, graphs[number] = self.chunks[number], graphs[number], None
            if encoded is None:
                if room is not None:
                    room.prepare(backward=True)
                encoded = self._encoded(chunk, next(read), keeps=True)
            cotangent = cotangents[chunk.slide]
            # Also with a cotangent of 0, if the loss does not depend on this slide: the backward of other ranks needs
            # this rank's shards, perhaps for another slide.
            own = torch.zeros_like(encoded) if cotangent is None else cotangent[chunk.start : chunk.stop]
            with self._guard():
                torch.autograd.backward(encoded, own)
            del encoded
            gradients.poll()

    def _read(self, chunks: Sequence[TileChunk], last: bool) -> Iterator[torch.Tensor]:
        """Yield the tiles of chunks; for a dummy a random tile, as some functions have no derivative at 0."""
        real = [chunk for chunk in chunks if len(chunk)]
        read = self.reader.read(self.slides, real, self.like, self._waited, last)
        dummy = torch.rand((1, *self.like[0]), generator=torch.Generator().manual_seed(0))
        for chunk in chunks:
            yield next(read)[1] if len(chunk) else dummy

    def _encoded(self, chunk: TileChunk, tiles: torch.Tensor, keeps: bool) -> torch.Tensor:
        """Return the features of a chunk; those of a dummy are empty, but have a graph."""
        real = chunk if len(chunk) else TileChunk(chunk.slide, 0, 1)
        # The slice drops the features of a dummy and keeps its graph, whose backward gathers weights like others.
        return super()._encoded(real, tiles, keeps)[: len(chunk)]

    def _by_all(self, value: int, op: ReduceOp) -> int:
        """Return the value reduced over the ranks of the replica (collective)."""
        values = torch.tensor([value])
        self.comm.all_reduce(values, op)
        return int(values)


_DUMMY = TileChunk(0, 0, 0)
