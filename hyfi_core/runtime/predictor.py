"""Answers: one forward through all stages, and the result on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hyfi_core.plan.placement import Placement
from hyfi_core.runtime.backward import Values
from hyfi_core.runtime.compiled import Compiled, HostedStage
from hyfi_core.runtime.executor import Executor
from hyfi_core.runtime.groups import Groups
from hyfi_core.runtime.stage_exchange import StageExchange

Key = tuple[int, int]


class Predictor:
    """Runs micro-batches forward through the stages of direction 0, one after the other.

    Args:
        compiled: the stages that this rank holds.
        groups: the plan's groups.
        placement: which ranks hold which stage.
        exchange: what travels between stages.
        begin: (stage, its part of the image, micro-batch) -> the values that are there before the first instruction.
    """

    def __init__(
        self,
        compiled: Compiled,
        groups: Groups,
        placement: Placement,
        exchange: StageExchange,
        begin: Callable[[HostedStage, torch.Tensor | None, int], Values],
    ) -> None:
        self._compiled = compiled
        self._groups = groups
        self._placement = placement
        self._exchange = exchange
        self._begin = begin

    def run(self, local: Mapping[Key, torch.Tensor], batch: int, size: int) -> Any:
        """Return the answer for the whole batch, the same on every rank of the replica.

        Args:
            local: (stage, direction) -> this rank's box of the batch.
            batch: images.
            size: images of a micro-batch.
        """
        leaves = [self._forward(local, micro, size) for micro in range(batch // size)]
        self._exchange.finish()
        return _joined([self._compiled.pick(self._shared(item)) for item in leaves])

    def _forward(self, local: Mapping[Key, torch.Tensor], microbatch: int, size: int) -> list[Any] | None:
        """Run one micro-batch through this rank's stages; return the leaves of the answer where it is made."""
        leaves, exchange, boundaries = None, self._exchange, self._compiled.boundaries
        for key in sorted(key for key in self._compiled.hosted if key[1] == 0):
            stage = self._compiled.hosted[key]
            for edge in (edge for edge in boundaries if edge[1] == key[0]):
                exchange.expect(edge, 0, microbatch, back=False)
            part = local[key][microbatch * size : (microbatch + 1) * size] if key in local else None
            values = self._begin(stage, part, microbatch)
            values.update(exchange.values(*key, microbatch))
            Executor(stage.tape, self._groups.stages[key]).forward(values, record=False)
            for edge in (edge for edge in boundaries if edge[0] == key[0]):
                exchange.send(edge, 0, microbatch, values, back=False)
            if key[0] == self._placement.stages - 1:
                leaves = self._compiled.leaves(stage, values)
        return leaves

    def _shared(self, leaves: list[Any] | None) -> list[Any]:
        """Return the leaves on every rank of the replica."""
        if self._placement.stages == 1:
            assert leaves is not None
            return leaves
        root, comm = self._placement.group(self._placement.stages - 1)[0], self._groups.replica
        known = comm.broadcast_object(_described(leaves) if leaves is not None else None, root)
        tensors = _undescribed(known, leaves if comm.rank == root else None, self._exchange.device)
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                comm.broadcast(tensor, root)
        return tensors


def _described(leaves: list[Any]) -> list[Any]:
    """Return what another rank needs to make room for the leaves of an answer."""
    return [
        [list(leaf.shape), str(leaf.dtype).removeprefix("torch.")] if isinstance(leaf, torch.Tensor) else leaf
        for leaf in leaves
    ]


def _undescribed(known: list[Any], leaves: list[Any] | None, device: torch.device) -> list[Any]:
    """Return the leaves, or room for them."""
    if leaves is not None:
        return [leaf.contiguous() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return [
        torch.empty(item[0], dtype=getattr(torch, item[1]), device=device) if isinstance(item, list) else item
        for item in known
    ]


def _joined(answers: list[Any]) -> Any:
    """Put the micro-batches' answers together again, whatever structure they have."""
    if len(answers) == 1:
        return answers[0]
    leaves = [torch.utils._pytree.tree_flatten(answer) for answer in answers]
    joined = [
        torch.cat(parts) if isinstance(parts[0], torch.Tensor) and parts[0].dim() else parts[0]
        for parts in zip(*(flat for flat, _ in leaves), strict=True)
    ]
    return torch.utils._pytree.tree_unflatten(joined, leaves[0][1])
