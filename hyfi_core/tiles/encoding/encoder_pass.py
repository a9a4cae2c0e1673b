"""The two passes of a step over the encoder.

::

    pass 1     chunk 0   chunk 1   chunk 2   chunk 3        features only; the last ones keep their activations
                                   ▓▓▓▓▓▓▓   ▓▓▓▓▓▓▓
    pass 2     chunk 3 ◂ chunk 2 ◂ chunk 1 ◂ chunk 0        backward; the first ones are computed again
               ▓▓▓▓▓▓▓   ▓▓▓▓▓▓▓   forward   forward        gradients are reduced during the last backward

The order of backwards does not depend on which chunks keep activations, so the sums are bitwise the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from hyfi_core.comm.base import Communicator
from hyfi_core.tiles.chunks import SlideParts, TileChunk
from hyfi_core.tiles.encoding.encoder_call import EncoderCall, keeping_nothing
from hyfi_core.tiles.encoding.encoder_facts import EncoderFacts
from hyfi_core.tiles.encoding.kept_vectors import KeptVectors
from hyfi_core.tiles.features import SlideFeatures
from hyfi_core.tiles.gradients import TileGradients
from hyfi_core.tiles.keyed_draws import DrawKey, NoDrawsInBackward
from hyfi_core.tiles.memory_budget import KeepingRoom
from hyfi_core.tiles.reading import ChunkReader, Like
from hyfi_core.tiles.source import TileSource, as_input


@dataclass
class EncoderPass:
    """The encoder's part of one step, or of a prediction.

    Attributes:
        call: calls the encoder.
        facts: what trials of the encoder have shown.
        slides: the slides of this replica.
        parts: how ranks share tiles.
        chunks: the chunks of this rank.
        comm: the ranks of this replica.
        seed: part of the key of random numbers.
        step: number of the training step, also part of the key.
        like: (shape, dtype) of a tile.
        trains: whether a backward follows.
        reader: reads the tiles.
        vectors: features of a frozen encoder that are kept between steps; None: none are.
        waited_s: seconds spent waiting for tiles that were not read yet.
    """

    call: EncoderCall
    facts: EncoderFacts
    slides: Sequence[TileSource]
    parts: SlideParts
    chunks: Sequence[TileChunk]
    comm: Communicator
    seed: int
    step: int
    like: Like
    trains: bool
    reader: ChunkReader
    vectors: KeptVectors | None = None
    waited_s: float = 0.0

    def forward(
        self, kept: int, room: KeepingRoom | None = None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """Encode all chunks; return the features of all slides, and the features of each chunk that is kept.

        Args:
            kept: number of chunks to keep, the last ones.
            room: prepared for each chunk, and asked before one is kept whether it still fits; None: all fit.

        Returns:
            Features ``(N, D)`` of each slide, from all ranks; for each chunk of this rank, its features with their
            graph, None if it is not kept.
        """
        width, dtype, device = self.facts.features, self.facts.dtype, self.call.device
        slides = range(len(self.slides))
        features = [SlideFeatures(self.parts, slide, self.comm, width, dtype, device) for slide in slides]
        graphs: list[torch.Tensor | None] = []
        kept_vectors = self._kept_vectors()
        stored: list[torch.Tensor | None] = [None] * len(self.chunks)  # vectors of earlier steps
        if kept_vectors is not None:
            stored = [kept_vectors.get(self.slides[chunk.slide], chunk) for chunk in self.chunks]
        missing = [chunk for chunk, vectors in zip(self.chunks, stored, strict=True) if vectors is None]
        reads_again = self.trains and bool(self.facts.trained)  # in backward, for chunks that are not kept
        read = self.reader.read(self.slides, missing, self.like, self._waited, last=not reads_again)
        for chunk, vectors in zip(self.chunks, stored, strict=True):
            # The last chunks are kept: backward begins with them, so that their memory is free soonest.
            keeps = len(graphs) >= len(self.chunks) - kept and (room is None or room.fits_another())
            if vectors is None:
                if room is not None:
                    room.prepare(backward=False)
                encoded = self._encoded(*next(read), keeps)
                if kept_vectors is not None:
                    kept_vectors.put(self.slides[chunk.slide], chunk, encoded)
            else:
                encoded = vectors.to(device)
            features[chunk.slide].put(chunk.start, encoded)
            graphs.append(encoded if keeps and encoded.requires_grad else None)
            del encoded
            for of_slide in features[: chunk.slide + 1]:  # in order: those after it wait for their chunks
                of_slide.start()
        for of_slide in features:
            of_slide.start()
        return [of_slide.gathered() for of_slide in features], graphs

    def backward(
        self,
        graphs: list[torch.Tensor | None],
        cotangents: Sequence[torch.Tensor | None],
        gradients: TileGradients,
        room: KeepingRoom | None = None,
    ) -> None:
        """Drive all chunks backward, the last first.

        Args:
            graphs: kept features with their graphs, from ``forward``; set to None one by one.
            cotangents: cotangents of the features of all slides.
            gradients: reduces the encoder's gradients over ranks while the last chunk is driven backward.
            room: prepared for each chunk that is computed again; None: all fit.
        """
        again = [chunk for chunk, graph in zip(self.chunks, graphs, strict=True) if graph is None]
        read = self.reader.read(self.slides, again[::-1], self.like, self._waited, last=True)
        trained = [p for name, p in self.call.encoder.named_parameters() if name in self.facts.trained]
        for number in reversed(range(len(self.chunks))):
            # The list gives the graph up: after its backward, nothing else holds it.
            chunk, encoded, graphs[number] = self.chunks[number], graphs[number], None
            if encoded is None:
                if room is not None:
                    room.prepare(backward=True)
                encoded = self._encoded(*next(read), keeps=True)
            cotangent = cotangents[chunk.slide]
            if cotangent is not None:
                # Only the last backward completes gradients; before it, every parameter still gets more.
                hooks = _Completing(trained, gradients) if number == 0 else nullcontext()
                with hooks, self._guard():
                    torch.autograd.backward(encoded, cotangent[chunk.start : chunk.stop])
            del encoded
            gradients.poll()
        gradients.complete(trained)

    def _kept_vectors(self) -> KeptVectors | None:
        """Return the store of kept vectors; None if vectors depend on more than tiles and frozen weights."""
        if self.vectors is None or self.facts.trained or self.facts.drawn_shapes or self.call.live_norms:
            return None
        self.vectors.begin(self.call.encoder)
        return self.vectors

    def _waited(self, seconds: float) -> None:
        self.waited_s += seconds

    def _encoded(self, chunk: TileChunk, tiles: torch.Tensor, keeps: bool) -> torch.Tensor:
        """Return the features (n, D) of a chunk; ``keeps``: with a graph that a backward can use."""
        inputs = as_input(tiles, self.call.device, self.call.dtype)
        key = DrawKey(self.seed, self.step, self.parts.first_slide + chunk.slide)
        # Used by exact norms only: the ranks that share the slide, and its number of tiles.
        sharing = (self.comm, self.parts.tiles[chunk.slide]) if self.trains else None
        # In training, gradients are enabled even if the graph is not kept: without them, PyTorch may choose other
        # kernels, so that both passes over a chunk would differ in the last bits.
        saving: AbstractContextManager[Any] = nullcontext() if keeps else keeping_nothing()
        with torch.set_grad_enabled(self.trains), saving:
            return self.call(inputs, key, chunk.tiles, self.facts.drawn_shapes, sharing)

    def _guard(self) -> AbstractContextManager[Any]:
        """Return the context of a backward, which must not draw random numbers."""
        return NoDrawsInBackward() if self.facts.drawn_shapes else nullcontext()


class _Completing:
    """Context of the last backward, which reports each parameter whose gradient is complete."""

    def __init__(self, parameters: Sequence[nn.Parameter], gradients: TileGradients) -> None:
        self._parameters, self._gradients = parameters, gradients
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        complete = partial(_complete, self._gradients)
        self._handles = [p.register_post_accumulate_grad_hook(complete) for p in self._parameters]

    def __exit__(self, *raised: object) -> None:
        for handle in self._handles:
            handle.remove()


def _complete(gradients: TileGradients, parameter: torch.Tensor) -> None:
    assert isinstance(parameter, nn.Parameter)
    gradients.complete([parameter])
