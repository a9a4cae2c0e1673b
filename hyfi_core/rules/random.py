"""Rules for operators that draw random numbers: the same numbers with any plan.

Each number is a function of (seed, step, sample, operator, position in the whole value), so each rank can draw those of
its part. Seed, step and sample are in the value ``KEY``.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch

from hyfi_core.capture.program import KEY, Operator, substitute
from hyfi_core.ops import draws
from hyfi_core.rules.builder import Builder
from hyfi_core.rules.calls import renamed
from hyfi_core.rules.instructions import Split
from hyfi_core.rules.operator_facts import OperatorFacts
from hyfi_core.rules.pointwise import operands

_Sampler = Callable[..., torch.Tensor]
"""A function of ``ops.draws``: (key, positions, dtype, parameters of the distribution) -> numbers."""


class _Numbers:
    """The numbers that one operator draws on this rank."""

    def __init__(self, builder: Builder, op: Operator, shape: tuple[int, ...], split: Split | None) -> None:
        # Its index in the whole model, so that numbers do not depend on where the model is cut.
        self._operator = builder.program.ordinal(op)
        self._images = builder.shape(builder.program.image)[0]
        self._shape = shape
        self._dims: tuple[int, int] | None = None
        self._box = (0, 0, 0, 0)  # (y0, y1, x0, x1) of this rank's numbers; not read for a replicated value
        self._local: tuple[int, ...] | None = None  # shape of this rank's tensor
        if split is not None:
            self._shape, self._dims = split.opened(shape)
            box = split.held[builder.rank]
            self._box = (box.y0, box.y1, box.x0, box.x1)
            self._local = split.local_shape(shape, builder.rank)

    def __call__(
        self, draw: _Sampler, key: torch.Tensor, device: torch.device, dtype: torch.dtype, *parameters: Any
    ) -> torch.Tensor:
        """Return this rank's numbers; ``key`` holds seed, step and the micro-batch's first sample."""
        seed, step, sample = (int(word) for word in key)
        # Samples are consecutive, so that numbers do not depend on the division into micro-batches.
        first = sample * prod(self._shape) // self._images
        where = draws.positions(self._shape, self._dims, self._box, device, first)
        numbers = draw(draws.mixed(seed, step, self._operator), where, dtype, *parameters)
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
    # With probability 1 all are dropped, so any scale will do; 1 / 0 would raise.
    scale = 0.0 if probability == 1.0 else 1.0 / (1.0 - probability)

    def call(tensor: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        # float64, so that the same elements survive in every dtype of the map.
        survives = numbers(draws.uniform, key, tensor.device, torch.float64) >= probability
        result: torch.Tensor = tensor * (survives.to(tensor.dtype) * scale)
        return result

    builder.compute(call, (name, KEY), op.outputs[:1], split)


def of_pixels(draw: _Sampler) -> Callable[[Builder, Operator], None]:
    """Return the rule of an operator whose last argument has the distribution's parameter for each number."""

    def rule(builder: Builder, op: Operator) -> None:
        """Random numbers with a parameter for each pixel; no gradient passes through, as in PyTorch."""
        output = op.first_output
        sizes, dtype = builder.shape(output), builder.values[output].dtype
        names, split = _operands(builder, op, sizes)
        numbers, parameter = _Numbers(builder, op, sizes, split), op.args[-1].name

        def call(key: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
            return numbers(draw, key, tensor.device, dtype, tensor.detach())

        builder.compute(call, (KEY, names.get(parameter, parameter)), op.outputs, split)

    return rule


def drawn_like(draw: _Sampler) -> Callable[[Builder, Operator], None]:
    """Return the rule of an operator that draws numbers of its first argument's shape; others are parameters."""

    def rule(builder: Builder, op: Operator) -> None:
        """Random numbers with the shape of a map, the same on any grid."""
        output = op.first_output
        name, split = _laid_out(builder, op)
        numbers, dtype = _Numbers(builder, op, builder.shape(output), split), builder.values[output].dtype
        parameters = op.args[1:]

        def call(tensor: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return numbers(draw, key, tensor.device, dtype, *parameters)

        builder.compute(call, (name, KEY), op.outputs, split)

    return rule


def drawn(draw: _Sampler) -> Callable[[Builder, Operator], None]:
    """Return the rule of an operator that draws numbers of a shape, its last argument; others are parameters."""

    def rule(builder: Builder, op: Operator) -> None:
        """Random numbers of a given shape, the same on every rank."""
        output = op.first_output
        numbers, dtype = _Numbers(builder, op, builder.shape(output), None), builder.values[output].dtype
        device, parameters = _device(op), op.args[:-1]
        builder.compute(lambda key: numbers(draw, key, device, dtype, *parameters), (KEY,), op.outputs)

    return rule


def normal_of_pixels(builder: Builder, op: Operator) -> None:
    """Normal numbers with a mean or a deviation for each pixel; no gradient passes through, as in PyTorch."""
    output = op.first_output
    sizes, dtype = builder.shape(output), builder.values[output].dtype
    names, split = _operands(builder, op, sizes)
    numbers, moments = _Numbers(builder, op, sizes, split), renamed(op, names)
    inputs = tuple(dict.fromkeys(moments.inputs))

    def call(key: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        values = {name: tensor.detach() for name, tensor in zip(inputs, tensors, strict=True)}
        # Without a deviation among the arguments, it is 1.
        mean, std = (*substitute(moments.args, values), 1.0)[:2]
        result: torch.Tensor = numbers(draws.normal, key, tensors[0].device, dtype) * std + mean
        return result

    builder.compute(call, (KEY, *inputs), op.outputs, split)


def permutation(builder: Builder, op: Operator) -> None:
    """Numbers in a random order, the same on every rank and for all micro-batches and replicas of a step."""
    output, operator, device = op.first_output, builder.program.ordinal(op), _device(op)
    shape, dtype = builder.shape(output), builder.values[output].dtype

    def call(key: torch.Tensor) -> torch.Tensor:
        # Without the sample: a permutation, such as one of channels, is shared by all images of a step.
        seed, step, _ = (int(word) for word in key)
        every_position = draws.positions(shape, dims=None, box=(0, 0, 0, 0), device=device, first=0)
        return draws.permutation(draws.mixed(seed, step, operator), every_position, dtype)

    builder.compute(call, (KEY,), op.outputs)


def _operands(builder: Builder, op: Operator, sizes: tuple[int, ...]) -> tuple[dict[str, str], Split | None]:
    """Return (value -> name of its part, split of the result), as ``operands``; ({}, None) if nothing is split."""
    if any(name in builder.splits for name in op.inputs):
        return operands(builder, op, sizes)
    return {}, None


def _device(op: Operator) -> torch.device:
    return torch.device(op.kwargs.get("device") or "cpu")


def _laid_out(builder: Builder, op: Operator) -> tuple[str, Split | None]:
    """Return (name of the first argument in the layout of the result, this layout); None: it is replicated."""
    name = op.args[0].name
    if name not in builder.splits:
        return name, None
    split = builder.same_pixels(op, name)
    return builder.part(name, split), split


FACTS = {
    name: OperatorFacts(rule)
    for name, rule in {
        "native_dropout": dropout,
        "bernoulli.p": drawn_like(draws.bernoulli),
        "bernoulli": of_pixels(draws.bernoulli),
        "bernoulli.Tensor": of_pixels(draws.bernoulli),
        "poisson": of_pixels(draws.poisson),
        "rand_like": drawn_like(draws.uniform),
        "randn_like": drawn_like(draws.normal),
        "randint_like": drawn_like(draws.integers),
        "randint_like.low_dtype": drawn_like(draws.integers),
        "random": drawn_like(draws.any_integers),
        "random.to": drawn_like(draws.integers),
        "uniform": drawn_like(draws.uniform),
        "normal_functional": drawn_like(draws.normal),
        "log_normal": drawn_like(draws.log_normal),
        "exponential": drawn_like(draws.exponential),
        "cauchy": drawn_like(draws.cauchy),
        "geometric": drawn_like(draws.geometric),
        "rand": drawn(draws.uniform),
        "randn": drawn(draws.normal),
        "randint": drawn(draws.integers),
        "randint.low": drawn(draws.integers),
        "normal.float_float": drawn(draws.normal),
        "normal.Tensor_float": normal_of_pixels,
        "normal.float_Tensor": normal_of_pixels,
        "normal.Tensor_Tensor": normal_of_pixels,
        "randperm": permutation,
    }.items()
}
