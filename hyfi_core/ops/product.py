"""A product of maps and weights on one rank, whose gradients are computed apart: of the map, and later of the weights.

Autograd computes one gradient at a time: given ``inputs`` of ``torch.autograd.grad``, the kernels of convolutions and
matrix products leave out the other gradient. So both together are as many operations as one backward.
The graph of the product, with its input, lives until the second; graphs of neighbouring operators do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hyfi_core.comm.base import Tensors
from hyfi_core.ops.base import Cotangents, LocalSplitBackward, NeedsGrad, Rest


@dataclass(frozen=True)
class _SavedProduct:
    """Saved for backward: the result's edge in autograd's graph (None without gradient), and the graph's inputs."""

    result: Any
    taken: Tensors


@dataclass(frozen=True, eq=False)
class LocalProduct(LocalSplitBackward):
    """A local call with weights.

    Attributes:
        function: takes the inputs, returns one tensor.
        weights: for each input, whether it is a parameter.
        own_cotangents: see ``ops.base``.
        fresh: whether its result is new memory that its backward does not read.
    """

    function: Callable[..., torch.Tensor]
    weights: tuple[bool, ...]
    own_cotangents: bool
    fresh: bool

    def forward(self, inputs: Tensors) -> tuple[Tensors, Any]:
        """Return (product,); saves its graph."""
        pairs = list(zip(inputs, self.weights, strict=True))
        # Operators run without autograd; this one keeps a small graph of its own.
        with torch.enable_grad():
            # Maps are replaced by leaves, where the graph ends; parameters are leaves already.
            taken = tuple(tensor if of_user else _leaf(tensor) for tensor, of_user in pairs)
            result = self.function(*taken)
        # The edge, not the result: a result held here would keep its memory until backward.
        edge = torch.autograd.graph.get_gradient_edge(result) if result.requires_grad else None
        return (result.detach(),), _SavedProduct(edge, taken)

    def backward(self, saved: Any, cotangents: Cotangents, needs_grad: NeedsGrad = ()) -> Cotangents:
        """Return the cotangents of all inputs."""
        return _differentiated(saved, cotangents, needs_grad or (True,) * len(self.weights), keep=False)

    def backward_of_map(
        self, saved: Any, cotangents: Cotangents, needs_grad: NeedsGrad = ()
    ) -> tuple[Cotangents, Rest]:
        """Return the cotangents of maps, and a function that computes those of weights."""
        needs_grad = needs_grad or (True,) * len(self.weights)
        of_maps = tuple(needed and not weight for needed, weight in zip(needs_grad, self.weights, strict=True))
        of_weights = tuple(needed and weight for needed, weight in zip(needs_grad, self.weights, strict=True))
        # The second part needs the graph again.
        first = _differentiated(saved, cotangents, of_maps, keep=True)
        return first, lambda: _differentiated(saved, cotangents, of_weights, keep=False)


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor


def _differentiated(saved: _SavedProduct, cotangents: Cotangents, needs_grad: Sequence[bool], keep: bool) -> Cotangents:
    """Return the cotangents of the inputs that need them; None for others, and for all if the result has none."""
    inputs = list(zip(saved.taken, needs_grad, strict=True))
    leaves = [leaf for leaf, needed in inputs if needed and leaf.requires_grad]
    if cotangents[0] is None or saved.result is None or not leaves:
        return (None,) * len(saved.taken)
    gradients = torch.autograd.grad([saved.result], leaves, [cotangents[0]], retain_graph=keep, allow_unused=True)
    # By identity: tensors compare element by element.
    gradient_of = dict(zip(map(id, leaves), gradients, strict=True))
    return tuple(gradient_of.get(id(leaf)) if needed else None for leaf, needed in inputs)
