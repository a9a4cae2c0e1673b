"""Settings of an engine of tiles, and the trials of its model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from hyfi_core.capture.verify import Output
from hyfi_core.tiles.aggregator_call import AggregatorCall
from hyfi_core.tiles.encoding.encoder_facts import EncoderFacts
from hyfi_core.tiles.reading import Like

BatchNormMode = Literal["frozen", "exact"]


@dataclass(frozen=True)
class TileSettings:
    """Settings of an engine that are the same on all ranks.

    Attributes:
        output: picks the features out of what the encoder returns.
        autocast: dtype of autocast.
        batch_norm: what batch norms of the encoder in training mode do.
        chunk: tiles for which the encoder is called at once; None: as many as fit.
    """

    output: Output | None
    autocast: torch.dtype | None
    batch_norm: BatchNormMode
    chunk: int | None


@dataclass(frozen=True)
class TriedModel:
    """Trials of encoder and aggregator, for certain flags and a certain shape of tiles.

    Attributes:
        facts: what was found of the encoder.
        call: calls the aggregator.
        like: shape and dtype of a tile.
        lasting: numbers of tiles of slides -> bytes of features and of the aggregator, which live through a step.
    """

    facts: EncoderFacts
    call: AggregatorCall
    like: Like
    lasting: Callable[[Sequence[int]], int]
