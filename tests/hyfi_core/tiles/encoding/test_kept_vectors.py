"""Vectors that stay in memory: forgotten with other weights, and within their limits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hyfi_core.tiles.chunks import TileChunk
from hyfi_core.tiles.encoding.kept_vectors import KeptVectors
from hyfi_core.tiles.source import TensorTiles

CHUNK, VECTORS = TileChunk(0, 2, 5), torch.arange(12.0).view(3, 4)


class Named(TensorTiles):
    """Tiles that are the same in each epoch."""

    identity = "a"


SLIDE = Named(torch.zeros(5, 3, 2, 2))


def kept(limit_bytes: int = 1000, memory_bytes: int | None = None) -> tuple[KeptVectors, nn.Module]:
    vectors, encoder = KeptVectors(limit_bytes, memory_bytes), nn.Linear(3, 4)
    vectors.begin(encoder)
    vectors.put(SLIDE, CHUNK, VECTORS)
    return vectors, encoder


def test_other_weights_forget_vectors_and_the_same_written_again_do_not() -> None:
    vectors, encoder = kept()
    with torch.no_grad():
        encoder.bias.copy_(encoder.bias.clone())
        vectors.begin(encoder)
        assert vectors.get(SLIDE, CHUNK) is not None
        encoder.bias[0] += 1
    vectors.begin(encoder)
    assert vectors.get(SLIDE, CHUNK) is None and vectors.used_bytes == 0


def test_vectors_are_those_of_the_encoders_mode() -> None:
    vectors, encoder = kept()
    vectors.begin(encoder.eval())
    assert vectors.get(SLIDE, CHUNK) is None
    vectors.put(SLIDE, CHUNK, VECTORS + 1)
    vectors.begin(encoder.train())
    assert torch.equal(vectors.get(SLIDE, CHUNK), VECTORS) and vectors.used_bytes == 2 * VECTORS.nbytes


@pytest.mark.parametrize("inference", [False, True])
def test_weights_in_other_memory_are_compared(inference: bool) -> None:
    """Neither a replaced parameter nor a tensor of inference mode counts its changes."""
    vectors, encoder = kept()
    with torch.inference_mode(inference):
        encoder.weight = nn.Linear(3, 4).weight
    vectors.begin(encoder)
    assert vectors.get(SLIDE, CHUNK) is None


def test_limits_and_other_chunks() -> None:
    assert torch.equal(kept()[0].get(SLIDE, CHUNK), VECTORS)
    assert kept()[0].get(SLIDE, TileChunk(0, 0, 2)) is None
    assert kept(limit_bytes=47)[0].get(SLIDE, CHUNK) is None
    assert kept(memory_bytes=1)[0].get(SLIDE, CHUNK) is None
    twice, _ = kept(limit_bytes=2 * 48)
    twice.put(SLIDE, CHUNK, VECTORS)
    assert twice.used_bytes == 48
    plain = TensorTiles(torch.zeros(5, 3, 2, 2))
    vectors, _ = kept()
    vectors.put(plain, CHUNK, VECTORS)
    assert vectors.get(plain, CHUNK) is None and vectors.encoded == 6
