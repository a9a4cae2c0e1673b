"""The program for two images, derived from that for one by running each operator on tensors without data.

    captured, 1 image     conv2d(x, weight)     x: 1 x 3 x 512 x 512     view(y, [1, 2048])     y: 1 x 2048 x 1 x 1
    derived, 2 images     conv2d(x, weight)     x: 2 x 3 x 512 x 512     view(y, [2, 2048])     y: 2 x 2048 x 1 x 1

A capture of a large network takes ten seconds, this a tenth of one. Nothing is derived where a 1 may or may not be the
batch, and where two images need another operator, as a copy instead of a view.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from hyfi_core.capture.program import Operator, Program, ValueInfo, substitute

_RESHAPES = frozenset(("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default", "aten.expand.default"))
"""Operators with the sizes of their result as an argument; the batch size is one of these."""

_CHOOSING = frozenset(
    f"aten.{name}"
    for name in (
        "slice.Tensor",
        "narrow.default",
        "select.int",
        "unbind.int",
        "index_select.default",
        "gather.default",
        "split.Tensor",
        "split_with_sizes.default",
        "chunk.default",
        "cat.default",
        "stack.default",
    )
)
"""Operators that take samples of a batch, or join batches, if their argument `dim` is 0."""

_SIZES = frozenset(("size", "shape", "N", "repeats"))
"""Names of arguments that may contain the batch size, for all other operators."""

_TO_THE_END = 2**62


class _UnclearError(Exception):
    """What an operator does with two images is not known from what it does with one."""


def doubled(single: Program) -> Program | None:
    """Return the program for two images as a capture would give it; None if that is not clear.

    Args:
        single: the program for one image.
    """
    image, computed = single.values[single.image], {name for op in single.operators for name in op.outputs}
    if image.shape[0] != 1:
        return None
    shapes = {name: info.shape for name, info in single.values.items() if name not in computed}
    shapes[single.image] = (2, *image.shape[1:])
    # On the meta device, tensors have strides: a view fails here where a capture would have made a copy.
    values = {name: _empty(shape, single.values[name].dtype) for name, shape in shapes.items()}
    operators = []
    try:
        with torch.no_grad():
            for op in single.operators:
                operators.append(_for_two(op, values, single.values))
                _run(operators[-1], values, single.values)
    except Exception:  # each kernel refuses shapes in its own way
        return None
    infos = {name: ValueInfo(tuple(values[name].shape), info.dtype) for name, info in single.values.items()}
    return replace(single, operators=tuple(operators), values=infos)


def _for_two(op: Operator, values: Mapping[str, torch.Tensor], single: Mapping[str, ValueInfo]) -> Operator:
    """Return the operator that computes for two images what ``op`` computes for one.

    Args:
        op: an operator of the program for one image.
        values: the values computed so far, for two images.
        single: the same values, for one image.

    Raises:
        _UnclearError: the operator depends on the batch in a way that the program for one image does not show.
    """
    # Values that do not depend on the image, such as weights, have the same shape for two images.
    batched = [name for name in op.inputs if values[name].shape != single[name].shape]
    arguments = _arguments(op)
    if op.text in _RESHAPES:
        return _reshape(op, batched, values, single)
    # An argument such as `size` may contain the number of images.
    if _SIZES & arguments.keys():
        raise _UnclearError
    # A 1 may be the number of images, as in arange(batch).
    if not op.inputs and any(item == 1 for item in arguments.values() if type(item) is int):
        raise _UnclearError
    # Along dim 0, it chooses samples or joins batches: one image does not show which.
    if op.text in _CHOOSING and batched and not _chooses_all(arguments):
        # A negative dim counts from the end: for `stack`, from the end of the result, which has one dim more.
        dims = len(single[batched[0]].shape) + (op.text == "aten.stack.default")
        if arguments.get("dim", 0) % dims == 0:
            raise _UnclearError
    return op


def _chooses_all(arguments: Mapping[str, Any]) -> bool:
    """Whether the arguments are those of a slice from the first to the last position."""
    # Operators without a start are no slices: 1 stands for "not from the first".
    return not arguments.get("start", 1) and (arguments.get("end") or _TO_THE_END) >= _TO_THE_END


def _arguments(op: Operator) -> dict[str, Any]:
    """Return name -> argument of an operator's call."""
    schema = getattr(op.target, "_schema", None)
    if schema is None:
        raise _UnclearError
    return {**{declared.name: item for declared, item in zip(schema.arguments, op.args, strict=False)}, **op.kwargs}


def _reshape(
    op: Operator, batched: list[str], values: Mapping[str, torch.Tensor], single: Mapping[str, ValueInfo]
) -> Operator:
    """Return a reshape for two images: the first of its sizes doubles.

    In row-major order, the batch stays the first dim of the result if it is the first dim of the input.

    Args:
        op: one of ``_RESHAPES``, for one image.
        batched: its inputs that depend on the batch.
        values: the values computed so far, for two images.
        single: the same values, for one image.
    """
    sizes = op.args[1]
    if not batched:
        if 1 in sizes[:1]:  # this 1 may be the batch size
            raise _UnclearError
        return op
    before, after = single[batched[0]].shape, tuple(values[batched[0]].shape)
    if after[0] != 2 * before[0] or after[1:] != before[1:] or not isinstance(sizes[0], int):
        raise _UnclearError
    # -1 is computed from the other sizes.
    first = sizes[0] if sizes[0] == -1 else 2 * sizes[0]
    return replace(op, args=(op.args[0], [first, *sizes[1:]], *op.args[2:]))


def _run(op: Operator, values: dict[str, torch.Tensor], single: Mapping[str, ValueInfo]) -> None:
    """Run an operator on tensors without data and add its results to ``values``.

    Raises:
        _UnclearError: a result's shape is neither that for one image, nor twice as long in one dim.
    """
    kwargs = {key: substitute(item, values) for key, item in op.kwargs.items()}
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("meta")
    results = op.target(*substitute(op.args, values), **kwargs)
    for name, result in zip(op.outputs, (results,) if isinstance(results, torch.Tensor) else results, strict=False):
        if name is None:
            continue
        # Only one dim may double, the batch.
        longer = [(a, b) for a, b in zip(single[name].shape, result.shape, strict=True) if a != b]
        if longer and (len(longer) > 1 or longer[0][1] != 2 * longer[0][0]):
            raise _UnclearError
        # float32 stands for all floating-point dtypes, see ``_empty``.
        values[name] = result.float() if result.is_floating_point() else result


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor without data; float32 for all floating-point dtypes, because programs of autocast mix them."""
    return torch.empty(shape, dtype=torch.float32 if dtype.is_floating_point else dtype, device="meta")
