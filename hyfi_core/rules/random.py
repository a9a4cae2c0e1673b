"""Rules for operators that draw random numbers: the same numbers with any plan.

Each number is a function of (seed, step, sample, operator, position in the whole value), so each rank can draw those of
its part. Seed, step and sample are in the value ``KEY``.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch

from hyfi_core.capture.program import KEY, Operator
from hyfi_core.ops import draws
from hyfi_core.rules.builder import Builder
from hyfi_core.rules.instructions import Split

_Draw = Callable[[int, torch.Tensor, torch.dtype], torch.Tensor]


class _Numbers:
    """The numbers that one operator draws on this rank."""

    def __init__(self, builder: Builder, op: Operator, shape: tuple[int, ...], split: Split | None) -> None:
        self._operator = builder.program.ordinal(op)
        self._shape = shape
        self._dims: tuple[int, int] | None = None
        if split is not None:
            self._shape, self._dims = split.opened(shape)
        self._local = None if split is None else split.local_shape(shape, builder.rank)
        self._images = builder.shape(builder.program.image)[0]
        box = split.held[builder.rank] if split is not None else None
        self._box = (box.y0, box.y1, box.x0, box.x1) if box is not None else (0, 0, 0, 0)

    def __call__(self, draw: _Draw, key: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """Return this rank's numbers; ``key`` holds seed, step and the micro-batch's first sample."""
        seed, step, sample = (int(word) for word in key)
        # Samples are consecutive, so that numbers do not depend on the division into micro-batches.
        first = sample * prod(self._shape) // self._images
        where = draws.positions(self._shape, self._dims, self._box, device, first)
        numbers = draw(draws.mixed(seed, step, self._operator), where, dtype)
        return numbers if self._local is None else numbers.reshape(self._local)


def dropout(builder: Builder, op: Operator) -> None:
    """Dropout of single elements."""
    x, probability, train = op.args[:3]
    if op.outputs[1:] and op.outputs[1] is not None:
        builder.refuse(op, "returns its mask", "dropout whose mask is used by nothing else")
    name, split = _laid_out(builder, op)
    if not train or probability == 0.0:
        builder.compute(lambda tensor: tensor, (name,), op.outputs[:1], split)
        return
    numbers = _Numbers(builder, op, builder.shape(x.name), split)
    scale = 0.0 if probability == 1.0 else 1.0 / (1.0 - probability)

    def call(tensor: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        kept = numbers(draws.uniform, key, tensor.device, torch.float64) >= probability
        result: torch.Tensor = tensor * (kept.to(tensor.dtype) * scale)
        return result

    builder.compute(call, (name, KEY), op.outputs[:1], split)


def bernoulli(builder: Builder, op: Operator) -> None:
    """Zeros and ones, with a given probability, or that of each value of the first argument."""
    x = op.args[0]
    probability = op.args[1] if op.text == "aten.bernoulli.p" else None
    name, split = _laid_out(builder, op)
    numbers = _Numbers(builder, op, builder.shape(x.name), split)

    def call(tensor: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        number = numbers(draws.uniform, key, tensor.device, torch.float64)
        return (number < (tensor if probability is None else probability)).to(tensor.dtype)

    builder.compute(call, (name, KEY), op.outputs, split)


def drawn_like(draw: _Draw) -> Callable[[Builder, Operator], None]:
    """Return the rule of ``rand_like`` or ``randn_like``."""

    def rule(builder: Builder, op: Operator) -> None:
        """Random numbers with the shape of a map, the same on any grid."""
        output = op.first_output
        name, split = _laid_out(builder, op)
        numbers, dtype = _Numbers(builder, op, builder.shape(output), split), builder.values[output].dtype
        builder.compute(lambda tensor, key: numbers(draw, key, tensor.device, dtype), (name, KEY), op.outputs, split)

    return rule


def drawn(draw: _Draw) -> Callable[[Builder, Operator], None]:
    """Return the rule of ``rand`` or ``randn``, whose result is replicated."""

    def rule(builder: Builder, op: Operator) -> None:
        """Random numbers of a given shape, the same on every rank."""
        output = op.first_output
        numbers, dtype = _Numbers(builder, op, builder.shape(output), None), builder.values[output].dtype
        device = torch.device(op.kwargs.get("device") or "cpu")
        builder.compute(lambda key: numbers(draw, key, device, dtype), (KEY,), op.outputs)

    return rule


def _laid_out(builder: Builder, op: Operator) -> tuple[str, Split | None]:
    name = op.args[0].name
    if name not in builder.splits:
        return name, None
    split = builder.same_pixels(op, name)
    return builder.part(name, split), split


RANDOM: dict[str, Callable[[Builder, Operator], None]] = {
    "aten.native_dropout.default": dropout,
    "aten.bernoulli.p": bernoulli,
    "aten.bernoulli.default": bernoulli,
    "aten.rand_like.default": drawn_like(draws.uniform),
    "aten.randn_like.default": drawn_like(draws.normal),
    "aten.rand.default": drawn(draws.uniform),
    "aten.randn.default": drawn(draws.normal),
}
