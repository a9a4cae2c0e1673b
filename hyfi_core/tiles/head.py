"""The aggregator of a step, with its graph, and the loss over all slides of all replicas.

Every rank of a replica aggregates the replica's slides; logits and labels of all replicas are gathered, and the loss is
computed once on each rank, so that it may be any function of the whole batch, such as Cox's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hyfi_core.errors import RequestError
from hyfi_core.runtime.groups import Groups
from hyfi_core.runtime.losses.gathered import gather_tensors
from hyfi_core.runtime.losses.loss_function import LossFunction
from hyfi_core.tiles.aggregator_call import AggregatorCall
from hyfi_core.tiles.keyed_draws import DrawKey
from hyfi_core.tiles.source import TileSource


@dataclass(frozen=True)
class HeadGradients:
    """Results of the aggregator and the loss.

    Attributes:
        loss: loss of the whole batch, float64 without dims, the same on all ranks.
        features: cotangents of the features of this replica's slides, None where there are none.
        trained: names of the parameters that got gradients, the same on all ranks.
        counted: gradients that this rank adds to the sum over all ranks; other ranks leave out what this one counts.
        attention: attention of each slide of this replica, as the aggregator returns it; empty if it returns none.
        attended_tiles: the number of tiles of each slide of ``attention``.
    """

    loss: torch.Tensor
    features: list[torch.Tensor | None]
    trained: tuple[str, ...]
    counted: Mapping[nn.Parameter, torch.Tensor]
    attention: list[torch.Tensor]
    attended_tiles: list[int]


@dataclass(frozen=True)
class BagHead:
    """The aggregator and the loss of a step.

    Attributes:
        call: calls the aggregator.
        model: encoder and aggregator.
        loss: function of (logits, labels) of the whole batch.
        groups: the plan's groups.
        batches: number of slides of each replica.
    """

    call: AggregatorCall
    model: nn.Module
    loss: LossFunction
    groups: Groups
    batches: Sequence[int]

    def __call__(
        self,
        features: Sequence[torch.Tensor],
        slides: Sequence[TileSource],
        labels: torch.Tensor,
        key: DrawKey,
        trains_encoder: bool,
    ) -> HeadGradients:
        """Return loss and gradients (collective over all ranks).

        Args:
            features: features of all slides of this replica.
            slides: the slides, for their coordinates.
            labels: labels of this replica's slides.
            key: key of random numbers of the replica's first slide.
            trains_encoder: whether gradients of the features are needed.

        Raises:
            RequestError: nothing is trained, or the loss is refused.
        """
        # The gathered features belong to this step: they become leaves themselves, without a copy.
        bags: list[torch.Tensor] = [bag.requires_grad_(trains_encoder and bag.is_floating_point()) for bag in features]
        keys = [DrawKey(key.seed, key.step, key.slide + number) for number in range(len(bags))]
        aggregated = [self.call(bag, slide.coords, k) for bag, slide, k in zip(bags, slides, keys, strict=True)]
        own = torch.stack([logits for logits, _ in aggregated])
        attention = [weights.detach() for _, weights in aggregated if weights is not None]
        attended = [len(bag) for bag, (_, weights) in zip(bags, aggregated, strict=True) if weights is not None]
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if not own.requires_grad:
            raise RequestError("neither encoder nor aggregator has a parameter to train; set requires_grad of some")
        # The loss of the gathered logits and the aggregator's graph are differentiated one after the other:
        # logits of other replicas have no graph here.
        value, cotangent, of_loss = self._loss_of_all(own.detach(), labels.to(own.device), [*named.values()])
        leaves: list[torch.Tensor] = [*bags, *named.values()] if trains_encoder else [*named.values()]
        of_leaves: tuple[torch.Tensor | None, ...] = torch.autograd.grad(own, leaves, cotangent, allow_unused=True)
        of_bags: list[torch.Tensor | None] = list(of_leaves[: len(bags)]) if trains_encoder else [None] * len(bags)
        # A parameter may have a gradient by the aggregator, and one by its use in the loss function itself.
        by_aggregator = dict(zip(named, of_leaves[len(leaves) - len(named) :], strict=True))
        by_loss = dict(zip(named, of_loss, strict=True))
        trained = tuple(name for name in named if by_aggregator[name] is not None or by_loss[name] is not None)
        counted: dict[nn.Parameter, torch.Tensor] = {}
        for name in trained:
            # Gradients are summed over all ranks, but several ranks have computed the same ones: the aggregator's count
            # on the first rank of each replica, those of the loss function on rank 0.
            counts = ((by_aggregator, self.groups.replica.rank == 0), (by_loss, self.groups.all.rank == 0))
            gradients = [gradient for by, counts_here in counts if counts_here and (gradient := by[name]) is not None]
            if gradients:
                counted[named[name]] = gradients[0] if len(gradients) == 1 else gradients[0] + gradients[1]
        return HeadGradients(value, of_bags, trained, counted, attention, attended)

    def _loss_of_all(
        self, own: torch.Tensor, own_labels: torch.Tensor, parameters: list[nn.Parameter]
    ) -> tuple[torch.Tensor, torch.Tensor, Sequence[torch.Tensor | None]]:
        """Return the loss of the slides of all replicas, and its gradients (collective over all ranks).

        Args:
            own: logits of this replica's slides, (B, …), without graph.
            own_labels: their labels, on the same device.
            parameters: parameters of the model; the loss function may use some itself, without the logits.

        Returns:
            The loss, float64 without dims; the cotangent of ``own``; for each parameter, the gradient of its use in the
            loss function, None if it is not used there.
        """
        logits, labels = (own, own_labels) if len(self.batches) == 1 else self._gathered(own, own_labels)
        leaf = logits.detach().requires_grad_()
        loss = self.loss(leaf, labels)
        cotangent, *of_parameters = torch.autograd.grad(loss, [leaf, *parameters], allow_unused=True)
        value, comm = loss.detach().double().reshape(()), self.groups.all.of("reduce")
        if comm.size > 1:
            # All ranks take rank 0's value: computed on different devices, the last bits may differ.
            comm.broadcast(value)
        first = sum(self.batches[: self.groups.replica_index])
        # The cotangent is None if the loss does not use the logits.
        of_all = torch.zeros_like(leaf) if cotangent is None else cotangent
        return value, of_all[first : first + len(own)], of_parameters

    def _gathered(self, own: torch.Tensor, own_labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits and labels of all replicas, in their order, on every rank."""
        tensors = {"logits": own, "labels": own_labels}
        like = {
            # On the meta device: a receiver needs to know shapes and dtypes only.
            (name, replica): tensor.new_empty((batch, *tensor.shape[1:]), device="meta")
            for name, tensor in tensors.items()
            for replica, batch in enumerate(self.batches)
        }
        # All ranks of a replica have the same logits: the first one sends them.
        sends = self.groups.replica.rank == 0
        owned = {(name, self.groups.replica_index): tensor for name, tensor in tensors.items()} if sends else {}
        by_replica = gather_tensors(self.groups.all.of("reduce"), like, owned, own.device)
        logits, labels = (torch.cat([by_replica[name, r] for r in range(len(self.batches))]) for name in tensors)
        return logits, labels
