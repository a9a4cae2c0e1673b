"""Reference execution of a captured program: in one process, operator by operator, with autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hyfi_core.capture.program import Operator, Program, Ref, refs_in, substitute

Watch = Callable[[Operator, Mapping[str, Any]], None]


def interpret(
    program: Program,
    parameters: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    image: torch.Tensor,
    watch: Watch | None = None,
) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Run a program.

    Args:
        program: for images of this shape.
        parameters: by the names of the user's module.
        buffers: likewise; not changed.
        image: ``(B, C, H, W)``.
        watch: called after each operator with all values so far.

    Returns:
        The leaves of the output, and the updated buffers.
    """
    values: dict[str, Any] = {**program.constants, program.image: image}
    values.update((value, parameters[name]) for value, name in program.parameters.items())
    values.update((value, buffers[name]) for value, name in program.buffers.items())
    alive = program.needed({*refs_in(program.outputs), *program.mutations.values()})
    for op in program.operators:
        if not any(output in alive for output in op.outputs):
            continue
        results = op.target(*substitute(op.args, values), **{k: substitute(v, values) for k, v in op.kwargs.items()})
        if isinstance(results, torch.Tensor):
            results = (results,)
        values.update((n, r) for n, r in zip(op.outputs, results, strict=False) if n is not None)
        if watch is not None:
            watch(op, values)
    leaves = [values[item.name] if isinstance(item, Ref) else item for item in program.outputs]
    return leaves, {**buffers, **{name: values[value].detach() for name, value in program.mutations.items()}}
