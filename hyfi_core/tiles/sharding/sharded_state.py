"""Updating, gathering and saving a model whose encoder is divided: whole tensors under the user's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from hyfi_core.comm.agreement.same_weights import HeldWeights
from hyfi_core.comm.base import Communicator
from hyfi_core.comm.counted import CountedCommunicator
from hyfi_core.runtime.calls.local_use import local_state
from hyfi_core.runtime.calls.parameter_hooks import ParameterHooks
from hyfi_core.runtime.groups import Groups
from hyfi_core.runtime.ownership import ParameterOwnership
from hyfi_core.runtime.saving.weight_shards import is_shard, own_part, shard_like, whole
from hyfi_core.tiles.gradients import TileGradients

WATCHED = "aggregator."
"""Prefix of the names of weights that all ranks hold whole, and compare."""


class ShardedOwnership(ParameterOwnership):
    """The owners of `ParameterOwnership`; shards are gathered to whole tensors before they are written."""

    def held(self) -> HeldWeights:
        """Return the names of the weights that all ranks hold whole, by which they can be compared."""
        held = super().held()
        names = {name for name in held.names if name.startswith(WATCHED)}
        # A group is None if this rank is not in it.
        groups = [None if group is None else [n for n in group if n.startswith(WATCHED)] for group in held.groups]
        return HeldWeights(names, groups)

    def here(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return a state of whole tensors with this rank's shards in place of those of divided weights."""
        own, own_state = local_state(self._model), super().here(state)
        for name, tensor in own_state.items():
            if name in own and is_shard(own[name]) and tensor.shape == own[name].shape:
                own_state[name] = shard_like(own[name], tensor)
        return own_state

    def gather_gradients(self) -> dict[str, torch.Tensor] | None:
        """Return copies of all gradients on rank 0, None elsewhere."""
        gradients = {n: p.grad for n, p in self._model.named_parameters() if p.requires_grad and p.grad is not None}
        return self._on_first(gradients)

    def gather_state_dict(self) -> dict[str, torch.Tensor] | None:
        """Return a copy of the model's own ``state_dict`` on rank 0, None elsewhere."""
        return self._on_first(local_state(self._model))

    def _on_first(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
        """Return whole copies of tensors on the first rank, None on others (collective)."""
        first = self._groups.all.rank == 0
        copies: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():  # one at a time: only the first rank needs memory for all
            gathered = whole(tensor)
            if first:
                copies[name] = gathered if is_shard(tensor) else gathered.clone()
        return copies if first else None


class ShardedTileGradients(TileGradients):
    """Gradients of a divided encoder: each rank has its part of them, already summed over the ranks of its replica.

    Args:
        model: encoder and aggregator.
        trained: names of the parameters that get gradients.
        groups: the plan's groups.
        dtype: dtype of gradients in messages between replicas; None: their own.
        copies: the ranks of all replicas that have the same parts.
    """

    def __init__(
        self,
        model: nn.Module,
        trained: Sequence[str],
        groups: Groups,
        dtype: torch.dtype | None,
        copies: CountedCommunicator,
    ) -> None:
        named = dict(model.named_parameters())
        super().__init__(model, [name for name in trained if not is_shard(named[name])], groups, dtype)
        # Shards are not reduced by the base class: FSDP sums them over a replica, ``finish`` sums them over replicas.
        self._divided, self._copies, self._dtype = [named[n] for n in trained if is_shard(named[n])], copies, dtype

    def finish(self, hooks: ParameterHooks) -> None:
        """Sum this rank's parts over replicas; then finish undivided gradients, as `TileGradients.finish` does."""
        for parameter in self._divided if self._copies.size > 1 else ():
            if parameter.grad is not None:
                part = own_part(parameter.grad)
                sent = part if self._dtype is None else part.to(self._dtype)
                self._copies.of("reduce").all_reduce(sent)
                if sent is not part:
                    part.copy_(sent)
        super().finish(hooks)


def whole_of(tensors: Mapping[str, torch.Tensor], accepts: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    """Return the tensors whose names ``accepts`` accepts, whole (collective: all ranks gather all shards)."""
    result: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        # Gathered on all ranks even if the name is not accepted here: gathering needs all of them.
        gathered = whole(tensor) if is_shard(tensor) else tensor
        if accepts(name):
            result[name] = gathered
    return result


def clip_shards(
    parameters: Sequence[nn.Parameter], max_norm: float, everyone: Communicator, replicas: int
) -> torch.Tensor:
    """Scale gradients so that their norm over the whole model is at most ``max_norm`` (collective).

    Args:
        parameters: parameters of this rank; squares of shards are summed over ranks, whole gradients count once.
        max_norm: largest norm.
        everyone: all ranks.
        replicas: number of replicas, which hold the same gradients.

    Returns:
        The norm before, float64 without dims.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    parts = [own_part(gradient) for gradient in gradients]
    squares = [(is_shard(g), part.double().square().sum()) for g, part in zip(gradients, parts, strict=True)]
    zero = torch.zeros((), dtype=torch.float64, device=parameters[0].device)
    divided = sum((square for shard, square in squares if shard), zero.clone())
    everyone.all_reduce(divided)
    once = sum((square for shard, square in squares if not shard), zero)
    # The sum over all ranks has each shard once for each replica.
    norm = (divided / replicas + once).sqrt()
    scale = max_norm / (norm + 1e-6)
    # On a GPU, scale without looking at the number, for which the host would have to wait.
    if parts and (scale.device.type != "cpu" or scale < 1.0):
        torch._foreach_mul_(parts, scale.clamp(max=1.0))
    return norm
