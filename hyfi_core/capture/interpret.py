"""Reference execution of a captured program: in one process, operator by operator, with autograd and equal draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hyfi_core.capture.program import Operator, Program, Ref, refs_in, substitute

Watch = Callable[[Operator, Mapping[str, Any]], None]
_WITHOUT_DERIVATIVE = frozenset(
    {"aten.normal_functional.default", "aten.randint_like.default", "aten.randint_like.low_dtype"}
)
"""Draws whose numbers require no gradient in a forward, but would when called by these names; backward would fail."""


def interpret(
    program: Program,
    parameters: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    image: torch.Tensor,
    watch: Watch | None = None,
) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Run a program.

    Args:
        program: a program captured for images of this shape.
        parameters: parameters by their names in the user's module.
        buffers: buffers by their names in the user's module; not changed.
        image: ``(B, C, H, W)``.
        watch: called after each operator with all values so far.

    Returns:
        The leaves of the output, and the updated buffers.
    """
    values: dict[str, Any] = {**program.constants, program.image: image}
    values.update((value, parameters[name]) for value, name in program.parameters.items())
    values.update((value, buffers[name]) for value, name in program.buffers.items())
    # As ranks do, leave out operators that no result needs, such as a check of a dtype.
    alive = program.needed({*refs_in(program.outputs), *program.mutations.values()})
    for op in program.operators:
        if not any(output in alive for output in op.outputs):
            continue
        # In the model's forward, results of these operators require no gradient; called as here, they would.
        with torch.set_grad_enabled(torch.is_grad_enabled() and op.text not in _WITHOUT_DERIVATIVE):
            results = op.target(
                *substitute(op.args, values), **{k: substitute(v, values) for k, v in op.kwargs.items()}
            )
        if isinstance(results, torch.Tensor):
            results = (results,)
        values.update((n, r) for n, r in zip(op.outputs, results, strict=False) if n is not None)
        if watch is not None:
            watch(op, values)
    leaves = [values[item.name] if isinstance(item, Ref) else item for item in program.outputs]
    return leaves, {**buffers, **{name: values[value].detach() for name, value in program.mutations.items()}}


# The fractions of its multiples are spread evenly in [0, 1), so about the right part of any shape is dropped.
_GOLDEN = 0.6180339887498949


class RepeatableDraws(TorchDispatchMode):
    """Makes dropout and bernoulli depend only on the shape: order and type of these operators do not matter.

    Other random operators start from a fixed seed, so the caller must restore torch's generators.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operator, or return repeatable numbers instead."""
        aten = torch.ops.aten
        # The third argument is ``train``: without it, dropout draws nothing.
        if function is aten.native_dropout.default and args[2]:
            survivors = _pattern(args[0]) < 1.0 - args[1]
            # As in PyTorch, the result is zero for p=1, for which 1 / (1 - p) would raise.
            scale = 0.0 if args[1] == 1.0 else 1.0 / (1.0 - args[1])
            return args[0] * survivors * scale, survivors
        if function is aten.bernoulli_.float:
            return args[0].copy_(_pattern(args[0]) < (args[1] if len(args) > 1 else 0.5))
        if function is aten.bernoulli.p:
            return (_pattern(args[0]) < args[1]).to(args[0].dtype)
        if function is aten.bernoulli.default:
            return (_pattern(args[0]) < args[0]).to(args[0].dtype)
        if torch.Tag.nondeterministic_seeded in function.tags:
            # Seeded at each draw, so that module and program may draw in different orders.
            torch.manual_seed(0)
        return function(*args, **(kwargs or {}))


def _pattern(like: torch.Tensor) -> torch.Tensor:
    """Return evenly distributed numbers in [0, 1) of the same shape."""
    # float64: in float32, the fraction of large multiples would have few digits.
    steps = torch.arange(like.numel(), dtype=torch.float64, device=like.device)
    return (steps * _GOLDEN + 0.3).frac().reshape(like.shape)


def arguments_of(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return name -> argument of the call of an ATen operator, with the defaults of its schema."""
    # A call may leave defaults out, and pass arguments by place or name.
    defaults = {argument.name: argument.default_value for argument in function._schema.arguments}
    return defaults | dict(zip(defaults, args, strict=False)) | dict(kwargs)


def may_draw(function: Any, arguments: Mapping[str, Any]) -> bool:
    """Whether the call of an ATen operator, with arguments by name, may draw random numbers."""
    # Attention without dropout has the tag, too, but does not draw; an operator without this argument does.
    return torch.Tag.nondeterministic_seeded in function.tags and arguments.get("dropout_p", 1.0) != 0.0
