"""The captured model: operators over named values, every shape known, nothing mutable."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

KEY = "~key"
"""Name of the key of random operators: int64 (seed, step, micro-batch), an input like the image."""


@dataclass(frozen=True, slots=True)
class Ref:
    """A value's name where an operator takes it as an argument."""

    name: str


@dataclass(frozen=True, slots=True)
class ValueInfo:
    """Global shape and type of a value, as one process would see it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Operator:
    """One call of an ATen operator.

    Attributes:
        name: unique in the program.
        target: the operator; its text form (``aten.conv2d.default``) is what rules and messages name.
        args: positional arguments, values as ``Ref``.
        kwargs: keyword arguments, likewise.
        outputs: names of what it returns, in order; None for a result that nothing uses.
        module: path of the module of the user's model that called it.
        text: the operator's name, ``aten.conv2d.default``; derived from the target.
        inputs: names of all input values, in order of appearance; derived from the arguments.
    """

    name: str
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[str | None, ...]
    module: str
    text: str = field(init=False, repr=False, compare=False)
    inputs: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Computed once: planning reads them often.
        object.__setattr__(self, "text", str(self.target))
        object.__setattr__(self, "inputs", tuple(refs_in((self.args, tuple(self.kwargs.values())))))

    @property
    def first_output(self) -> str:
        """Name of the first result that is used."""
        return next(output for output in self.outputs if output is not None)


@dataclass(frozen=True)
class Program:
    """A model for one image shape and one set of training flags.

    Attributes:
        operators: in the order of execution.
        values: every value's global shape and type.
        parameters: value name -> name in the user's module.
        buffers: the same for buffers.
        constants: value name -> tensor lifted out of the code.
        image: the value that is the input.
        outputs: the leaves of what the model returns, ``Ref`` or a plain constant.
        mutations: name of a buffer in the user's module -> the value that replaces it after the run.
        unflatten: puts leaves back into what the model returns (tuple, dict, dataclass).
        ordinals: index of each operator in the whole model, if this is a part of one; random numbers depend on it.
    """

    operators: tuple[Operator, ...]
    values: Mapping[str, ValueInfo]
    parameters: Mapping[str, str]
    buffers: Mapping[str, str]
    constants: Mapping[str, torch.Tensor]
    image: str
    outputs: tuple[Any, ...]
    mutations: Mapping[str, str]
    unflatten: Callable[[list[Any]], Any]
    ordinals: Mapping[str, int] = field(default_factory=dict)

    def ordinal(self, op: Operator) -> int:
        """Return the operator's index in the whole model."""
        if self.ordinals:
            return self.ordinals[op.name]
        return next(at for at, other in enumerate(self.operators) if other.name == op.name)

    def digest(self) -> str:
        """Return a digest that is equal on all ranks exactly when they captured the same program."""
        text = "\n".join(
            f"{op.outputs} = {op.text}{op.args}{sorted(op.kwargs.items(), key=lambda kv: kv[0])} @ {op.module}"
            for op in self.operators
        )
        shapes = sorted((name, info.shape, str(info.dtype)) for name, info in self.values.items())
        return hashlib.sha256(f"{text}\n{shapes}\n{self.outputs}".encode()).hexdigest()

    def needed(self, roots: set[str]) -> set[str]:
        """Return the names of all values on which the ``roots`` depend, themselves included."""
        wanted = set(roots)
        for op in reversed(self.operators):
            if any(output in wanted for output in op.outputs if output is not None):
                wanted.update(op.inputs)
        return wanted


def refs_in(argument: Any) -> Iterator[str]:
    """Yield the names of all values inside an argument, nested lists included."""
    if isinstance(argument, Ref):
        yield argument.name
    elif isinstance(argument, (list, tuple)):
        for item in argument:
            yield from refs_in(item)


def substitute(argument: Any, values: Mapping[str, Any]) -> Any:
    """Return the argument with every ``Ref`` replaced by its value."""
    if isinstance(argument, Ref):
        return values[argument.name]
    if isinstance(argument, (list, tuple)):
        return type(argument)(substitute(item, values) for item in argument)
    return argument
