"""Gradients of encoder and aggregator, summed over all ranks in buckets while the last chunk is driven backward.

Ranks have different tiles and replicas different slides, so the encoder's gradients are sums. The aggregator's are the
same on all ranks of a replica, and counted on its first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from hyfi_core.runtime.calls.parameter_hooks import ParameterHooks
from hyfi_core.runtime.gradients import EarlierGradients, ReductionGroup
from hyfi_core.runtime.groups import Groups


class TileGradients:
    """The gradients of a set of trained parameters. Creation is collective over all ranks.

    Args:
        model: encoder and aggregator.
        trained: names of the parameters that get gradients, the same on all ranks.
        groups: the plan's groups.
        dtype: dtype of gradients in messages; None: their own.
    """

    def __init__(self, model: nn.Module, trained: Sequence[str], groups: Groups, dtype: torch.dtype | None) -> None:
        named = dict(model.named_parameters())
        self._earlier = EarlierGradients(named.values())  # of earlier calls, which must not be reduced again
        # The aggregator's gradients are complete before any chunk is driven backward.
        self._of_aggregator = [named[name] for name in trained if not name.startswith("encoder.")]
        comm = groups.reduction(frozenset(range(groups.plane.size)))
        assert comm is not None, "all ranks hold the model"
        # Backward completes an encoder's last parameters first: their buckets can leave first.
        of_encoder = [named[name] for name in reversed(trained) if name.startswith("encoder.")]
        parameters = [*self._of_aggregator, *of_encoder]
        self._group = (
            ReductionGroup(parameters, comm, mean_over=1, dtype=dtype) if comm.size > 1 and parameters else None
        )

    def begin(self, counted: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Set earlier gradients aside; start to sum those of aggregator and loss, with ``counted`` of this rank."""
        self._earlier.set_aside()
        if self._group is not None:
            self._group.begin()
        for parameter, gradient in counted.items():
            if parameter.grad is None:
                # A copy: autograd may return an expanded tensor, or one that several parameters share.
                parameter.grad = torch.empty_like(parameter).copy_(gradient)
            else:
                parameter.grad.add_(gradient)
        self.complete(self._of_aggregator)

    def complete(self, parameters: Sequence[nn.Parameter]) -> None:
        """Record gradients that are complete on this rank; start reductions of complete buckets."""
        if self._group is not None:
            self._group.complete(parameters)
            self._group.poll()

    def poll(self) -> None:
        """Make progress on pending reductions."""
        if self._group is not None:
            self._group.poll()

    def finish(self, hooks: ParameterHooks) -> None:
        """Wait for all reductions, run hooks, and add earlier gradients."""
        if self._group is not None:
            self._group.finish()
        # Hooks see the sum over all ranks, as in one process, and only this call's gradients.
        hooks.run_on_new_gradients()
        self._earlier.add()
        hooks.run_after_accumulation()
