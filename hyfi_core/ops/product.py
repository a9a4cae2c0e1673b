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
    """Saved for backward.

    Attributes:
        edge: the result's place in autograd's graph; None if it has no gradient.
        graph_inputs: the tensors where this graph ends: leaves with the values of maps, and parameters.
    """

    edge: Any
    graph_inputs: Tensors


@dataclass(frozen=True, eq=False)
class LocalProduct(LocalSplitBackward):
    """A local call with weights.

    Attributes:
        function: takes the inputs, returns one tensor.
        are_parameters: for each input, whether it is a parameter; the others are maps.
        own_cotangents: see ``ops.base``.
        fresh: whether its result is new memory that its backward does not read.
    """

    function: Callable[..., torch.Tensor]
    are_parameters: tuple[bool, ...]
    own_cotangents: bool
    fresh: bool

    def forward(self, inputs: Tensors) -> tuple[Tensors, Any]:
        """Return (product,); saves its graph."""
        pairs = list(zip(inputs, self.are_parameters, strict=True))
        # Operators run without autograd; this one keeps a small graph of its own.
        with torch.enable_grad():
            # Maps are replaced by leaves, where the graph ends; parameters are leaves already.
            graph_inputs = tuple(tensor if is_parameter else _leaf(tensor) for tensor, is_parameter in pairs)
            result = self.function(*graph_inputs)
        # The edge, not the result: a result held here would keep its memory until backward.
        edge = torch.autograd.graph.get_gradient_edge(result) if result.requires_grad else None
        return (result.detach(),), _SavedProduct(edge, graph_inputs)

    def backward(self, saved: Any, cotangents: Cotangents, needs_grad: NeedsGrad = ()) -> Cotangents:
        """Return the cotangents of all inputs."""
        return _differentiated(saved, cotangents, needs_grad or (True,) * len(self.are_parameters), keep_graph=False)

    def backward_of_map(
        self, saved: Any, cotangents: Cotangents, needs_grad: NeedsGrad = ()
    ) -> tuple[Cotangents, Rest]:
        """Return the cotangents of maps, and a function that computes those of weights."""
        needs_grad = needs_grad or (True,) * len(self.are_parameters)
        pairs = list(zip(needs_grad, self.are_parameters, strict=True))
        needed_maps = tuple(needed and not is_parameter for needed, is_parameter in pairs)
        needed_weights = tuple(needed and is_parameter for needed, is_parameter in pairs)
        # The second part needs the graph again.
        d_maps = _differentiated(saved, cotangents, needed_maps, keep_graph=True)
        return d_maps, lambda: _differentiated(saved, cotangents, needed_weights, keep_graph=False)


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor


def _differentiated(
    saved: _SavedProduct, cotangents: Cotangents, needs_grad: Sequence[bool], keep_graph: bool
) -> Cotangents:
    """Return the cotangents of the inputs that need them; None for others, and for all if the result has none."""
    inputs = list(zip(saved.graph_inputs, needs_grad, strict=True))
    leaves = [leaf for leaf, needed in inputs if needed and leaf.requires_grad]
    if cotangents[0] is None or saved.edge is None or not leaves:
        return (None,) * len(saved.graph_inputs)
    gradients = torch.autograd.grad([saved.edge], leaves, [cotangents[0]], retain_graph=keep_graph, allow_unused=True)
    # By identity: tensors compare element by element.
    gradient_of = dict(zip(map(id, leaves), gradients, strict=True))
    return tuple(gradient_of.get(id(leaf)) if needed else None for leaf, needed in inputs)
