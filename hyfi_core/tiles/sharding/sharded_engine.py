"""The engine of tiles whose encoder's weights are divided among the ranks of a replica."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hyfi_core.capture.released import device_of
from hyfi_core.comm.agreement.agree import agree, compare
from hyfi_core.comm.base import Communicator
from hyfi_core.comm.counted import CountedCommunicator
from hyfi_core.errors import RequestError
from hyfi_core.runtime.calls.local_use import local_state
from hyfi_core.runtime.saving.optimizer_state import optimizer_state, restricted
from hyfi_core.tiles.encoding.encoder_pass import EncoderPass
from hyfi_core.tiles.engine import TilesEngine
from hyfi_core.tiles.gradients import TileGradients
from hyfi_core.tiles.memory_budget import KeepingRoom, MemoryNeeds
from hyfi_core.tiles.reading import Like
from hyfi_core.tiles.settings import TriedModel
from hyfi_core.tiles.sharding.process_group import process_group
from hyfi_core.tiles.sharding.shard_encoder import check_shardable, shard_encoder
from hyfi_core.tiles.sharding.sharded_pass import ShardedPass
from hyfi_core.tiles.sharding.sharded_state import (
    WATCHED,
    ShardedOwnership,
    ShardedTileGradients,
    clip_shards,
    whole_of,
)
from hyfi_core.tiles.source import TileSource, tile_like


class ShardedTilesEngine(TilesEngine):
    """A `TilesEngine` in which each rank holds 1 / ``plan.tiles`` of the encoder's weights, gradients and moments.

    A call of the encoder gathers the weights of one module after another. Results are those of `TilesEngine` except for
    rounding: gradients are summed over ranks after each chunk.
    """

    _passes = ShardedPass

    def _distribute(self, comm: Communicator) -> None:
        """Send the weights of rank 0 to all ranks, and keep this rank's part of the encoder's."""
        # Before anything is sent: a refusal leaves the model as it is.
        agree(comm, lambda: check_shardable(self._model.encoder))
        super()._distribute(comm)
        ranks = self.plan.ranks // self.plan.replicas
        # The ranks of all replicas that hold the same shards.
        copies = comm.subgroup(range(comm.rank % ranks, comm.size, ranks))
        assert copies is not None
        self._copies = CountedCommunicator(copies)
        group = agree(comm, lambda: process_group(self._groups.replica, device_of(self._model)))
        # The most bytes of whole weights that a forward or backward gathers at a time.
        self._gathered_bytes = shard_encoder(self._model.encoder, group, device_of(self._model))
        # A later change of ``requires_grad`` would not reach the shards: it is refused.
        self._trained_flags = [parameter.requires_grad for parameter in self._model.encoder.parameters()]

    def _make_ownership(self) -> ShardedOwnership:
        return ShardedOwnership(self._model, self._stage_names, self._groups, self.device)

    def _watched(self) -> nn.Module:
        """Return a module with the aggregator alone, under its names in the model."""
        # The encoder's shards differ between ranks by design: a comparison would report them.
        watched = nn.Module()
        watched.add_module(WATCHED.rstrip("."), self._model.aggregator)
        return watched

    def _make_gradients(self, trained: tuple[str, ...], dtype: torch.dtype | None) -> TileGradients:
        return ShardedTileGradients(self._model, trained, self._groups, dtype, self._copies)

    def _tried(self, slides: list[TileSource], train: bool) -> TriedModel:
        """Return the trials for such slides; ranks first agree on the tiles, because trials gather weights."""
        replica = self._groups.replica
        like = agree(replica, lambda: self._checked_like(slides))
        compare(replica, {"the shape and dtype of tiles": f"{like[0]} {like[1]}"})
        return self._tried_for(like, train)

    def _checked_like(self, slides: list[TileSource]) -> Like:
        """Return shape and dtype of tiles; refuse a change of ``requires_grad``, which FSDP does not notice."""
        if self._trained_flags != [parameter.requires_grad for parameter in self._model.encoder.parameters()]:
            raise RequestError(
                "shard=True: requires_grad of an encoder weight has changed since the engine was made; make a new one"
            )
        return tile_like(slides[0])

    def _room(self, trials: TriedModel, encoding: EncoderPass) -> KeepingRoom:
        room = super()._room(trials, encoding)
        needs = MemoryNeeds(room.needs.lasting + self._gathered_bytes, room.needs.working, room.needs.kept)
        return KeepingRoom(needs, room.memory_bytes, room.device)

    def update_unread(self, max_norm: float | None = None) -> torch.Tensor | None:
        """Clip by the norm over the shards of all ranks, and update; return the norm, which stays on the device."""
        norm = None
        if max_norm is not None:
            owned = self._ownership.optimized()
            norm = clip_shards(owned, max_norm, self._groups.all.of("reduce"), self.plan.replicas)
        # None: clipping is done. The inherited method would take the norm of this rank's shards only.
        super().update_unread(None)
        return norm

    def owned_state(self) -> dict[str, torch.Tensor]:
        """Return the entries of the ``state_dict`` that this rank writes, whole (collective)."""
        owned = set(self._ownership.owned_names())
        return whole_of(local_state(self._model), owned.__contains__)

    def owned_optimizer(self, gradients: bool = False) -> dict[str, Any]:
        """Return the optimizer state of the parameters that this rank writes, whole (collective)."""
        owned = set(self._ownership.owned_names())
        state = optimizer_state(self.optimizer, self._model.named_parameters(), gradients)
        tensors = whole_of(state["tensors"], lambda key: key.rpartition("/")[0] in owned)
        return restricted({**state, "tensors": tensors}, owned)
