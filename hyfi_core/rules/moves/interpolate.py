"""Rules for resizing by weighted sums of a few neighbours: bicubic, and bilinear and bicubic with antialiasing.

Along each axis, an output is a weighted sum of neighbouring inputs; the weights depend only on its position, as in
ATen/native/UpSample.h and native/cpu/UpSampleKernel.cpp, and have the precision of the map.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from hyfi_core.capture.program import Operator
from hyfi_core.ops.constants import Constant
from hyfi_core.rules.accepted_maps import on_maps
from hyfi_core.rules.builder import Builder, Rule
from hyfi_core.rules.moves.axis import Axis, Selection, reach
from hyfi_core.rules.operator_facts import OperatorFacts


@dataclass(frozen=True)
class _Neighbours:
    """The inputs of each output along one axis.

    Attributes:
        places: indices of inputs, of shape (outputs, taps), ascending along both dims.
        weights: weights of these inputs, in the same shape.
    """

    places: torch.Tensor
    weights: torch.Tensor

    def axis(self) -> Axis:
        """Return the intervals of inputs that outputs read."""
        first, last = self.places.amin(1).tolist(), self.places.amax(1).tolist()
        return Axis(len(first), lambda start, stop: (first[start], last[stop - 1] + 1))


_Find = Callable[[int, int, bool, torch.Tensor], _Neighbours]


def interpolated(find: _Find) -> Rule:
    """Return the rule of a resizing; ``find(inputs, outputs, align_corners, scale)``: its taps along one axis."""

    def rule(builder: Builder, op: Operator) -> None:
        """Bicubic and antialiased resizing to any size."""
        refuse_bytes(builder, op)
        name, align = op.args[0].name, bool(op.args[2])
        factors = op.args[3] if len(op.args) > 3 and op.args[3] is not None else (None, None)
        dims = builder.splits[name].dims
        # Positions and weights in the arithmetic of PyTorch's kernels: float32 for 16-bit maps.
        dtype = torch.promote_types(builder.values[name].dtype, torch.float32)
        result_dtype = builder.values[op.first_output].dtype
        taps = []
        for dim, factor in zip(dims, factors, strict=True):
            size, outputs = builder.shape(name)[dim], builder.shape(op.first_output)[dim]
            taps.append(find(size, outputs, align, _scale(size, outputs, align, factor).to(dtype)))
        reached = reach(builder, name, (taps[0].axis(), taps[1].axis()))
        part, need = reached.part, reached.need
        # Of this rank's outputs alone, with places that count from the first received input.
        own_taps = [
            _WeightedTaps(along.places[start:stop] - origin, along.weights[start:stop])
            for along, start, stop, origin in zip(
                taps, (part.y0, part.x0), (part.y1, part.x1), (need.y0, need.x0), strict=True
            )
        ]

        def call(tensor: torch.Tensor) -> torch.Tensor:
            result = tensor.to(dtype)
            for dim, taps_of_part in zip(dims, own_taps, strict=True):
                result = taps_of_part.summed(result, dim)
            return result.to(result_dtype)  # autocast returns float32 on GPUs

        builder.compute(call, (reached.canvas,), op.outputs, reached.split)

    return rule


class _WeightedTaps:
    """The inputs of a part's outputs along one axis, and their weights, both of shape (outputs, taps)."""

    def __init__(self, places: torch.Tensor, weights: torch.Tensor) -> None:
        self._taps = [(Selection(places[:, tap]), Constant(weights[:, tap])) for tap in range(places.shape[1])]

    def summed(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the weighted sums of a map along ``dim``."""
        sides = [1] * tensor.dim()
        sides[dim] = -1
        products = (places.of(tensor, dim) * weights.like(tensor).view(sides) for places, weights in self._taps)
        result = next(products)
        for product in products:
            result = result + product
        return result


def refuse_bytes(builder: Builder, op: Operator) -> None:
    """Refuse to resize integers by weighted sums: PyTorch's kernels of bytes have weights and rounding of their own.

    Raises:
        RequestError: the operator's map is not floating point.
    """
    dtype = builder.values[op.args[0].name].dtype
    if not dtype.is_floating_point:
        builder.refuse(op, f"resizes a map of {dtype}", "a map of floats, such as y.float(), or mode='nearest'")


def _scale(size: int, outputs: int, align: bool, factor: float | None) -> torch.Tensor:
    """Return the distance between neighbouring outputs, in inputs."""
    if align:
        return torch.tensor((size - 1) / (outputs - 1) if outputs > 1 else 0.0, dtype=torch.float64)
    return torch.tensor(1.0 / factor if factor else size / outputs, dtype=torch.float64)


def bicubic(size: int, outputs: int, align: bool, scale: torch.Tensor) -> _Neighbours:
    """Return the four taps of bicubic resizing; taps beyond the border read the border."""
    out = torch.arange(outputs, dtype=scale.dtype)
    position = out * scale if align else scale * (out + 0.5) - 0.5
    first = position.floor()
    offset = position - first
    distances = torch.stack([offset + 1, offset, 1 - offset, 2 - offset], 1)
    # Clamped places with unclamped weights: several taps then read the border pixel.
    places = (first.long()[:, None] + torch.arange(-1, 3)).clamp(0, size - 1)
    # PyTorch's coefficient. With antialiasing, PyTorch uses that of Pillow, -0.5.
    return _Neighbours(places, _cubic(distances, -0.75))


def antialiased(support: float, weigh: Callable[[torch.Tensor], torch.Tensor]) -> _Find:
    """Return a function that computes the taps of antialiased resizing.

    Args:
        support: half the width of the filter, in inputs, at scale 1.
        weigh: distance -> weight of the filter.
    """

    def find(size: int, outputs: int, align: bool, scale: torch.Tensor) -> _Neighbours:
        """Return the taps of all outputs; the filter is stretched if the map gets smaller."""
        stretch = scale.clamp(min=1.0)
        reach_px = support * stretch
        # PyTorch ignores ``align_corners`` here.
        center = scale * (torch.arange(outputs, dtype=scale.dtype) + 0.5)
        low = (center - reach_px + 0.5).long().clamp(min=0)
        high = (center + reach_px + 0.5).long().clamp(max=size)
        places = low[:, None] + torch.arange(int((high - low).max()))
        weights = weigh((places - center[:, None] + 0.5) / stretch).masked_fill(places >= high[:, None], 0.0)
        # Divided by their sum, so that filters cut off at the border also have weights with the sum 1.
        return _Neighbours(torch.minimum(places, high[:, None] - 1), weights / weights.sum(1, keepdim=True))

    return find


def _cubic(distance: torch.Tensor, slope: float) -> torch.Tensor:
    """Return the cubic convolution kernel (Keys, 1981)."""
    x = distance.abs()
    near = ((slope + 2) * x - (slope + 3)) * x * x + 1
    far = ((x - 5) * x + 8) * x * slope - 4 * slope
    return torch.where(x <= 1, near, torch.where(x < 2, far, 0.0))


def _triangle(distance: torch.Tensor) -> torch.Tensor:
    return (1 - distance.abs()).clamp(min=0.0)


upsample_bicubic = interpolated(bicubic)
upsample_bilinear_antialiased = interpolated(antialiased(1.0, _triangle))
upsample_bicubic_antialiased = interpolated(antialiased(2.0, lambda distance: _cubic(distance, -0.5)))


_RESIZE = OperatorFacts(None, keeps="nothing")

FACTS = {
    "upsample_bicubic2d.vec": replace(_RESIZE, rule=on_maps(upsample_bicubic)),
    "_upsample_bilinear2d_aa.vec": replace(_RESIZE, rule=on_maps(upsample_bilinear_antialiased)),
    "_upsample_bicubic2d_aa.vec": replace(_RESIZE, rule=on_maps(upsample_bicubic_antialiased)),
    "grid_sampler": OperatorFacts(
        None, instead="F.interpolate with mode='bilinear' and antialias=False, or mode='nearest'"
    ),
}
