"""Calls of the model's operators: on other values than at capture, with constants bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hyfi_core.capture.program import Operator, Ref, refs_in, substitute
from hyfi_core.ops.avg_pool import avg_pool2d
from hyfi_core.ops.norms.strides import batch_norm_for_all_strides, instance_norm
from hyfi_core.rules.builder import Builder, Splits
from hyfi_core.rules.instructions import Split

_ATEN = torch.ops.aten
_BATCH_NORMS = _ATEN.batch_norm.default, _ATEN._native_batch_norm_legit_no_training.default
_CORRECTED: Mapping[Any, Callable[..., Any]] = {
    _ATEN.avg_pool2d.default: avg_pool2d,
    _ATEN.instance_norm.default: instance_norm,
    **{norm: batch_norm_for_all_strides(norm) for norm in _BATCH_NORMS},
}
"""Native operator with wrong gradients on some device -> our function, with the same arguments and results."""


def emit(
    builder: Builder, op: Operator, names: dict[str, str], split: Splits = None, source: Operator | None = None
) -> None:
    """Emit an operator of the model, called on this rank's tensors.

    Args:
        builder: builder of the rank's program.
        op: the operator.
        names: values of the operator -> values to call it on, such as redistributed ones; others are used as they are.
        split: how the outputs are split.
        source: see ``Builder.compute``.
    """
    function, inputs = bound(renamed(op, names))
    builder.compute(function, inputs, op.outputs, split, source)


def emit_on_part(
    builder: Builder, op: Operator, part_split: Split, split: Splits, source: Operator | None = None
) -> None:
    """Emit an operator of the model, called on this rank's part of its first argument, which is its only map.

    Args:
        builder: builder of the rank's program.
        op: the operator.
        part_split: how the map is split when the operator is called; it is redistributed if necessary.
        split: how the outputs are split.
        source: see ``Builder.compute``.
    """
    name = op.args[0].name
    emit(builder, op, {name: builder.part(name, part_split)}, split, source)


def bound(op: Operator) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """Return (function, names of its arguments): the operator's call as a function of its values, constants bound."""
    names, target = tuple(dict.fromkeys(op.inputs)), _CORRECTED.get(op.target, op.target)

    def call(*tensors: Any) -> Any:
        values = dict(zip(names, tensors, strict=True))
        return target(*substitute(op.args, values), **{k: substitute(v, values) for k, v in op.kwargs.items()})

    if any(True for _ in refs_in(tuple(op.kwargs.values()))):
        return call, names
    # Most operators take values first, then constants: a shorter call, which runs in every step.
    first = next((at for at, item in enumerate(op.args) if not isinstance(item, Ref)), len(op.args))
    constants = op.args[first:]
    if tuple(item.name for item in op.args[:first]) != names or any(True for _ in refs_in(constants)):
        return call, names
    # Here each value comes once, in the order of ``names``, before all constants.
    kwargs = dict(op.kwargs)
    return lambda *tensors: target(*tensors, *constants, **kwargs), names


def renamed(op: Operator, names: dict[str, str]) -> Operator:
    """Return the operator with some of its values replaced by others."""
    if all(before == after for before, after in names.items()):
        return op

    def swap(argument: Any) -> Any:
        if isinstance(argument, Ref):
            return Ref(names.get(argument.name, argument.name))
        if isinstance(argument, (list, tuple)):
            return type(argument)(swap(item) for item in argument)
        return argument

    return replace(op, args=swap(op.args), kwargs={key: swap(item) for key, item in op.kwargs.items()})


def pair(value: Any) -> tuple[int, int]:
    """Return a setting for (y, x), which may be given as one number for both."""
    if isinstance(value, int):
        return value, value
    # A list of one number is for both, too.
    return (value[0], value[0]) if len(value) == 1 else (value[0], value[1])


def arguments(args: tuple[Any, ...], defaults: Sequence[Any], required: int) -> tuple[Any, ...]:
    """Return positional arguments, with ``defaults`` for missing ones after the first ``required``."""
    return (*args, *defaults[len(args) - required :])
