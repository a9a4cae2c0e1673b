"""The first difference between a module and its captured program, and the first submodule that differs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hyfi_core.capture.interpret import RepeatableDraws, interpret
from hyfi_core.capture.program import Operator, Program

_SMALL = 1e-3
"""Smallest norm by which an error is divided, as a fraction of the largest norm of the same kind of value."""


def equal(
    expected: Mapping[str, torch.Tensor | None], actual: Mapping[str, torch.Tensor | None], tolerance: float
) -> str | None:
    """Return a phrase about the first value that differs; None if all are equal up to a tolerance.

    Names begin with the kind of value: ``output 0 of step 1``, ``gradient of weight in step 1``, ``buffer bn.mean``.
    """
    sizes: dict[str, float] = {}
    for name, value in expected.items():
        # Kinds are measured apart: a small gradient is compared with the largest gradient, not with outputs.
        kind = name.split()[0]
        sizes[kind] = max(sizes.get(kind, 0.0), 0.0 if value is None else _norm(value))
    for name, value in expected.items():
        actual_value = actual.get(name)
        # If the loss does not depend on a parameter, autograd returns None or zeros: both are the same gradient.
        if value is None or actual_value is None:
            present = value if value is not None else actual_value
            if present is not None and present.any():  # infinite values and NaN, too
                return (
                    f"{name} is {'None' if value is None else 'a tensor'} in the module and "
                    f"{'None' if actual_value is None else 'a tensor'} in the program"
                )
            continue
        if value.shape != actual_value.shape or value.dtype != actual_value.dtype:
            return (
                f"{name} is {tuple(value.shape)} {value.dtype} in the module and "
                f"{tuple(actual_value.shape)} {actual_value.dtype} in the program"
            )
        wide, actual_wide = _wide(value), _wide(actual_value)
        # The norms below leave NaN and infinite values out, so these are compared first.
        if (word := _elsewhere(wide, actual_wide)) is not None:
            return f"{name} is {word} at other places in the module than in the program"
        error = _norm(wide - actual_wide)
        size = max(_norm(value), _SMALL * sizes[name.split()[0]])
        if not error <= tolerance * size:
            return f"{name} has a relative error of {error / size if size else error:.1e}"
    return None


def first_module(model: nn.Module, program: Program, image: torch.Tensor) -> str:
    """Return a phrase that names the first submodule whose output differs from its captured operators', or ""."""
    captured: dict[str, list[torch.Tensor]] = {}

    def keep(op: Operator, values: Mapping[str, Any]) -> None:
        for name in op.outputs:
            if name is not None and isinstance(values.get(name), torch.Tensor):
                captured.setdefault(op.module, []).append(values[name])

    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers(remove_duplicate=False)}
    with torch.no_grad(), RepeatableDraws():
        interpret(program, parameters, buffers, image, keep)
        outputs = _outputs(model, image)
    # Children finish before their parents, so the first module that differs is the innermost.
    for path, output in outputs:
        # It is not recorded which operator computed the module's output, so it may be any value of its operators.
        inside = [values for at, values in captured.items() if at == path or at.startswith(f"{path}.")]
        if path in captured and not any(_close(output, value) for values in inside for value in values):
            return f"; the first module that differs is {path} ({type(model.get_submodule(path)).__name__})"
    return ""


def _outputs(model: nn.Module, image: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return (path of a module, its output), in the order in which modules finish."""
    outputs: list[tuple[str, torch.Tensor]] = []

    def hook(path: str) -> Any:
        return lambda module, args, output: (
            outputs.append((path, output.detach().clone())) if isinstance(output, torch.Tensor) else None
        )

    handles = [module.register_forward_hook(hook(path)) for path, module in model.named_modules() if path]
    try:
        model(image)
    finally:
        for handle in handles:
            handle.remove()
    return outputs


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = _wide(a), _wide(b)
    if a.shape != b.shape or _elsewhere(a, b) is not None:
        return False
    return _norm(a - b) <= 1e-4 * max(_norm(a), 1e-30)


def _wide(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values in float64; complex numbers as pairs in a new last dim."""
    value = value.detach()
    return (torch.view_as_real(value.resolve_conj()) if value.is_complex() else value).double()


def _elsewhere(a: torch.Tensor, b: torch.Tensor) -> str | None:
    """Return "NaN" or "infinite" if one of two tensors is so where the other is not; else None."""
    if not torch.equal(a.isnan(), b.isnan()):
        return "NaN"
    return None if torch.equal(_infinite(a), _infinite(b)) else "infinite"


def _infinite(value: torch.Tensor) -> torch.Tensor:
    """Return the infinite values of a tensor, and 0 elsewhere."""
    return torch.where(value.isinf(), value, 0.0)


def _norm(value: torch.Tensor) -> float:
    """Return the norm of the finite values of a tensor."""
    return float(torch.nan_to_num(_wide(value), nan=0.0, posinf=0.0, neginf=0.0).norm())
