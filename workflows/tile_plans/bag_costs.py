"""The operations and bytes that a run with bags needs for a tile and for a slide, measured on a few tiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hyfi_core.process_memory import resident_bytes
from hyfi_core.runtime.executor import evaluating
from hyfi_core.tiles.aggregator_call import aggregator_call
from hyfi_core.tiles.encoding.encoder_call import EncoderCall
from hyfi_core.tiles.encoding.encoder_facts import EncoderFacts, tried
from hyfi_core.tiles.keyed_draws import DrawKey
from hyfi_core.tiles.model import TileModel
from hyfi_core.tiles.sharding.shard_encoder import gathered_bytes
from workflows.config.run import Config
from workflows.evaluation.models import DTYPES
from workflows.training.inputs.bags import BagInputs
from workflows.training.inputs.flops import bag_flops
from workflows.training.inputs.of_job import inputs_of
from workflows.training.job import prepare
from workflows.training.memory import PROCESS_BYTES

_CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class BagCosts:
    """The operations and bytes that a run with bags needs, independent of its plan.

    Attributes:
        tiles: Tiles of each training slide in an epoch.
        forward_flops: Operations of the encoder's forward for a tile, by kind of the machine model.
        backward_flops: Operations of its backward, by kind.
        bag_flops: Operations of the aggregator for a mean slide, forward and backward.
        facts: Bytes of the encoder for a chunk.
        tile_bytes: Bytes of a tile as it is read and as the encoder takes it.
        file_bytes: Bytes of a stored vector, which is not read ahead; 0 with pixels, which are.
        chunk: Tiles that are read at once; None: as many as fit.
        lasting_bytes: Tiles of each slide of a batch -> bytes of vectors, of the aggregator and of decoded chunks.
        process_bytes: Bytes of a process with the libraries of the run, measured on this process, without weights.
        weight_bytes: Bytes of all weights.
        trained_bytes: Bytes of the trained weights.
        tensors: Number of trained tensors.
        shard: Whether ranks that share tiles divide the encoder's weights; the aggregator's count as divided, too.
        gathered_bytes: With ``shard``, bytes of whole weights and their gradients that a call gathers at once.
        dtype: Dtype of the computation, as machine models name it.
    """

    tiles: tuple[int, ...]
    forward_flops: Mapping[str, float]
    backward_flops: Mapping[str, float]
    bag_flops: float
    facts: EncoderFacts
    tile_bytes: int
    file_bytes: int
    chunk: int | None
    lasting_bytes: Callable[[Sequence[int]], int]
    process_bytes: int
    weight_bytes: int
    trained_bytes: int
    tensors: int
    shard: bool
    gathered_bytes: int
    dtype: str

    @classmethod
    def of(cls, config: Config) -> BagCosts:
        """Build the model of a run and measure it; reads the store's tissue masks, no pixels.

        Raises:
            RequestError: The run's slides, features or model cannot be used.
        """
        inputs = inputs_of(prepare(config))
        assert isinstance(inputs, BagInputs)
        model, _ = inputs.make_model("cpu", loads=False, tell=lambda line: None)
        assert isinstance(model, TileModel)
        weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        # Measured, as transformers or timm take hundreds of megabytes; without the weights, which count by themselves.
        process_bytes = max(PROCESS_BYTES, resident_bytes() - weight_bytes)
        shape, stored_dtype = inputs.tile_shape()
        dtype = DTYPES[config.run.precision]
        autocast = torch.bfloat16 if config.run.precision == "bfloat16" else None
        call = EncoderCall(
            model.encoder, output=None, autocast=autocast, device=_CPU, dtype=dtype, exact=inputs.batch_norm == "exact"
        )
        # A trial of two passes shows the memory of a tile; its random numbers do not matter.
        facts = tried(call, shape, DrawKey(seed=0, step=0, slide=0), backward=True)
        head = aggregator_call(model.aggregator, autocast, _CPU, facts.features, facts.dtype)
        bag_bytes, vector_bytes = head.bytes_of(facts.features, facts.dtype), facts.features * facts.dtype.itemsize
        forward, both_passes = (_flops(model.encoder, shape, dtype, backward) for backward in (False, True))
        trained = [p for p in model.parameters() if p.requires_grad]
        mean_tiles = round(sum(inputs.counts) / len(inputs.counts))
        return cls(
            tiles=tuple(inputs.counts),
            forward_flops=forward,
            # The counter cannot count a backward alone.
            backward_flops={kind: both_passes[kind] - forward[kind] for kind in both_passes},
            bag_flops=bag_flops(model.aggregator, mean_tiles, facts.features),
            facts=facts,
            tile_bytes=torch.Size(shape).numel() * (stored_dtype.itemsize + dtype.itemsize),
            file_bytes=facts.features * stored_dtype.itemsize if config.data.kind == "features" else 0,
            chunk=None if inputs.chunk == "auto" else inputs.chunk,
            # Vectors twice, as `TilesEngine` counts them.
            lasting_bytes=lambda tiles: inputs.kept_bytes + sum(2 * n * vector_bytes + bag_bytes(n) for n in tiles),
            process_bytes=process_bytes,
            weight_bytes=weight_bytes,
            trained_bytes=sum(p.numel() * p.element_size() for p in trained),
            tensors=len(trained),
            shard=inputs.shard,
            gathered_bytes=gathered_bytes(model.encoder) if inputs.shard else 0,
            dtype=config.run.precision,
        )


def _flops(encoder: nn.Module, shape: tuple[int, ...], dtype: torch.dtype, backward: bool) -> dict[str, float]:
    """Return the encoder's operations for one tile, by kind: of the forward or, with ``backward``, of both passes."""
    trained = [p for p in encoder.parameters() if p.requires_grad]
    with evaluating(encoder, _CPU), torch.enable_grad(), FlopCounterMode(display=False) as counter:
        vectors = encoder(torch.zeros((1, *shape), dtype=dtype))
        if backward and vectors.requires_grad:
            torch.autograd.grad(vectors.sum(), trained, allow_unused=True)
    flops = {"convolution": 0.0, "product": 0.0}
    for operator, count in counter.get_flop_counts().get("Global", {}).items():
        # Kinds of the machine model, whose rates differ.
        flops["convolution" if "convolution" in str(operator) else "product"] += count
    return flops
