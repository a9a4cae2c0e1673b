"""An ``autograd.Function`` that computes pixel by pixel becomes one operator, called with its own backward.

```
class Swish(torch.autograd.Function)      forward saves x alone, backward computes the sigmoid again
class Reversed(torch.autograd.Function)   forward returns x, backward -dy
```

A trace sees only what ``forward`` computes. Here it records one operator instead, whose calls are ``Function.apply``.
Each rank may call it on its part of a map if every value depends only on the values at its own place. This is tried on
random numbers, forward and backward: permuted inputs must give equally permuted results, and where inputs stay the same
while others change, so must the results.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from hyfi_core.capture.places import calling_line
from hyfi_core.capture.storing.later_forwards import is_constant
from hyfi_core.errors import RequestError

# Sides of the random tensors. All differ, so that a function that swaps two dims changes the shape.
_SIDES = (2, 3, 4, 5)
_ADVICE = (
    "write it with PyTorch operators that have the gradient you need (x + (f(x) - x).detach() passes gradients past f)"
)


@dataclass(frozen=True)
class PointwiseFunction:
    """A user's function and its arguments that are not tensors: the target of an operator.

    Attributes:
        function: the class.
        constants: arguments, None in place of tensors.
        places: indices of the arguments that are tensors.
    """

    function: type[torch.autograd.Function]
    constants: tuple[Any, ...]
    places: tuple[int, ...]

    # The text of an operator, by which its rule is looked up.
    def __str__(self) -> str:
        return str(torch.ops.hyfi.pointwise_function.default)

    @property
    def name(self) -> str:
        """Class and constants, equal on all ranks."""
        constants = ", ".join(repr(constant) for at, constant in enumerate(self.constants) if at not in self.places)
        return f"{self.function.__module__}.{self.function.__qualname__}({constants})"

    def __call__(self, tensors: Sequence[torch.Tensor], name: str = "", number: int = 0) -> torch.Tensor:
        """Call the function with these tensors at their places among its constants.

        It takes the arguments of the operator ``hyfi::pointwise_function``, whose calls in a program it replaces: for
        this operator, ``name`` and ``number`` say which function it is.
        """
        arguments = list(self.constants)
        for position, tensor in zip(self.places, tensors, strict=True):
            arguments[position] = tensor
        apply: Callable[..., torch.Tensor] = self.function.apply
        return apply(*arguments)


_KNOWN: list[PointwiseFunction] = []
"""Recorded functions; a trace records the index as ``number``."""


@torch.library.custom_op("hyfi::pointwise_function", mutates_args=())
def _recorded(tensors: list[torch.Tensor], name: str, number: int) -> torch.Tensor:
    raise RuntimeError(f"{name} is recorded by traces and called by programs")


@_recorded.register_fake
def _(tensors: list[torch.Tensor], name: str, number: int) -> torch.Tensor:
    # ``_unsupported`` and ``_not_pointwise`` have shown before that the result is like the first tensor.
    return torch.empty_like(tensors[0])


def _no_backward(context: Any, *cotangents: Any) -> Any:
    raise RuntimeError("a trace has no backward")


# Registered so that results require gradients in the trace, as those of ``Function.apply`` do.
_recorded.register_autograd(_no_backward)


def recorded(
    function: type[torch.autograd.Function],
    arguments: tuple[Any, ...],
    untraced: Callable[[], contextlib.AbstractContextManager[None]],
) -> torch.Tensor:
    """Record a call of a user's function in the current trace as one operator; return the operator's result.

    Args:
        function: the class.
        arguments: its arguments.
        untraced: returns a context in which functions are called and not recorded.

    Raises:
        RequestError: it is not pointwise; the message says why.
    """
    places = tuple(at for at, item in enumerate(arguments) if isinstance(item, torch.Tensor))
    constants = tuple(None if at in places else item for at, item in enumerate(arguments))
    called = PointwiseFunction(function, constants, places)
    tensors = [arguments[position] for position in places]
    reason = _unsupported(tensors, constants)
    if reason is None:
        with untraced():
            reason = _not_pointwise(called, tensors)
    if reason is not None:
        raise RequestError(
            f"the model calls {function.__module__}.{function.__qualname__}, an autograd.Function that {reason}, at "
            f"{calling_line()}: only those that compute pixel by pixel can be divided; {_ADVICE}"
        )
    result: torch.Tensor = _recorded(tensors, called.name, _number_of(called))
    return result


def _number_of(called: PointwiseFunction) -> int:
    """Return the index of a call in ``_KNOWN``; in a repeated capture, equal calls get the index of the first."""
    for number, known in enumerate(_KNOWN):
        # ``name`` compares constants as text: True differs from 1 and 1.0, and NaN equals NaN.
        if known.function is called.function and known.places == called.places and known.name == called.name:
            return number
    _KNOWN.append(called)
    return len(_KNOWN) - 1


def function_of(target: Any, args: Sequence[Any]) -> PointwiseFunction | None:
    """Return the user's function of a recorded operator; None for other operators."""
    return _KNOWN[args[2]] if target is torch.ops.hyfi.pointwise_function.default else None


def _unsupported(tensors: Sequence[torch.Tensor], constants: tuple[Any, ...]) -> str | None:
    """Return why these arguments are not supported; None if they are."""
    if not all(is_constant(item) for item in constants):
        return "takes an argument that is neither a tensor nor a constant"
    if not tensors or len({tuple(tensor.shape) for tensor in tensors}) != 1:
        return "takes tensors of different shapes"
    return None


def _not_pointwise(called: PointwiseFunction, tensors: Sequence[torch.Tensor]) -> str | None:
    """Return why the function is not pointwise, by trial; None if it is."""
    # The trial computes real numbers: outside of the trace's modes and with its own generator.
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.random.fork_rng([]), torch.enable_grad():
        drawn = torch.Generator().manual_seed(0)
        shape = _SIDES[: tensors[0].dim()] if tensors[0].dim() <= len(_SIDES) else (2,) * tensors[0].dim()
        # float64, so that rounding stays far below the tolerance.
        kind = torch.float64 if tensors[0].is_floating_point() else tensors[0].dtype
        # Also outside of [-1, 1], so that clamps and saturations occur; the last sample is the result's cotangent.
        samples = [3.0 * torch.randn(shape, dtype=torch.float64, generator=drawn) for _ in (*tensors, None)]
        samples = [sample.to(kind) for sample in samples]
        try:
            return _differs(called, samples)
        except _UnsuitableError as error:
            return str(error)
        except Exception as error:
            return f"fails on small tensors of random numbers ({type(error).__name__}: {str(error)[:80]})"


def _differs(called: PointwiseFunction, samples: list[torch.Tensor]) -> str | None:
    """Return how the function differs from a pointwise one, or None; the last sample is the result's cotangent."""
    results = _results(called, samples)
    # A function that draws, or counts its calls, would differ between ranks and recomputations.
    if not _equal(results, _results(called, samples)):
        return "returns something else when it is called again"
    drawn = torch.Generator().manual_seed(1)
    order = torch.randperm(samples[0].numel(), generator=drawn)

    def turned(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.flatten()[order].view(tensor.shape)

    moved = [tensor.flatten()[order].view(tensor.shape) for tensor in samples]
    if not _equal([turned(result) for result in results], _results(called, moved)):
        return "depends on where values are"
    # Half of the values stay and the others change: results of the former must not change.
    unchanged = torch.rand(samples[0].shape, generator=drawn) < 0.5
    elsewhere = [
        # In the samples' dtype: integers stay integers.
        torch.where(unchanged, sample, (sample.flip(tuple(range(sample.dim()))) * 0.5 + 1.0).to(sample.dtype))
        for sample in samples
    ]
    inside = [None if result is None else result[unchanged] for result in results]
    if not _equal(inside, [None if result is None else result[unchanged] for result in _results(called, elsewhere)]):
        return "mixes values of different places"
    return None


def _results(called: PointwiseFunction, samples: list[torch.Tensor]) -> list[Any]:
    """Return [result of a call, gradient of each tensor]; None for a missing gradient.

    Args:
        called: the function.
        samples: its tensors, and the result's cotangent last; all of one dtype, so all leaves are trained or none.

    Raises:
        _UnsuitableError: the result is not one tensor like the first, or an argument was changed in place.
    """
    leaves = [sample.clone().requires_grad_(sample.is_floating_point()) for sample in samples[:-1]]
    # Products, not leaves: changing a leaf in place raises, changing a product is detected below.
    inputs = [leaf * 1 for leaf in leaves]
    before = [leaf.detach().clone() for leaf in inputs]
    result = called(inputs)
    if not isinstance(result, torch.Tensor):
        raise _UnsuitableError("returns something other than one tensor")
    if not all(torch.equal(leaf, copy) for leaf, copy in zip(inputs, before, strict=True)):
        raise _UnsuitableError("changes its argument in place")
    if result.shape != inputs[0].shape or result.dtype != inputs[0].dtype:
        raise _UnsuitableError("returns another shape or dtype than it is given")
    if not result.requires_grad:
        return [result.detach(), *[None] * len(leaves)]
    trained = [leaf for leaf in leaves if leaf.requires_grad]
    return [result.detach(), *torch.autograd.grad(result, trained, samples[-1].to(result.dtype), allow_unused=True)]


class _UnsuitableError(Exception):
    """Why a function is not pointwise."""


def _equal(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Whether tensors are equal except for rounding; None equals None."""
    pairs = list(zip(first, second, strict=True))
    if any((a is None) != (b is None) for a, b in pairs):
        return False
    return all(
        a is None or torch.allclose(a.double(), b.double(), rtol=1e-10, atol=1e-12, equal_nan=True) for a, b in pairs
    )
