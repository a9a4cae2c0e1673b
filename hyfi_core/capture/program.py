"""The captured model: operators on named values with known shapes; immutable."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import nn

# No Python identifier, so that no value of a graph has this name.
KEY = "~key"
"""Name of the key of random operators: int64 (seed, step, first sample of the micro-batch), an input like the image."""


@dataclass(frozen=True, slots=True)
class Ref:
    """A value as an argument of an operator, by name."""

    name: str


@dataclass(frozen=True, slots=True)
class ValueInfo:
    """Shape and dtype of a value, as in one process."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def differentiable(self) -> bool:
        """Whether a value of this dtype can carry a gradient."""
        return self.dtype.is_floating_point or self.dtype.is_complex


@cache  # there are few operators, and PyTorch composes the name anew each time
def _text_of(target: Callable[..., Any]) -> str:
    return str(target)


@dataclass(frozen=True, slots=True)
class Operator:
    """One call of an ATen operator.

    Attributes:
        name: unique in the program.
        target: the operator.
        args: positional arguments, values as ``Ref``.
        kwargs: keyword arguments, values as ``Ref``.
        outputs: names of its results, in order; None for an unused one.
        module: path of the module of the user's model that called it.
        text: name of the operator in rules and messages, such as ``aten.conv2d.default``; derived from the target.
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
        # The class is frozen: its own ``__setattr__`` raises.
        object.__setattr__(self, "text", _text_of(self.target))
        object.__setattr__(self, "inputs", tuple(refs_in((self.args, tuple(self.kwargs.values())))))

    @property
    def first_output(self) -> str:
        """Name of the first result that is used."""
        return next(output for output in self.outputs if output is not None)


@dataclass(frozen=True)
class Program:
    """A model for one image shape and one set of training flags.

    Attributes:
        operators: operators in the order of execution.
        values: shape and dtype of every value.
        parameters: value name -> name in the user's module.
        buffers: value name -> name of the buffer in the user's module.
        constants: value name -> tensor lifted out of the code.
        image: the input value.
        outputs: the leaves of the model's output, each a ``Ref`` or a constant.
        mutations: name of a buffer in the user's module -> the value that replaces it after the run.
        unflatten: returns the model's output (tuple, dict, dataclass) from its leaves.
        ordinals: index of each operator in the whole model, if this is a part; random numbers depend on the index.
        ends: the modules after which automatic cuts are allowed; None: all.
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
    ends: frozenset[str] | None = None

    def ordinal(self, op: Operator) -> int:
        """Return the operator's index in the whole model."""
        if self.ordinals:
            return self.ordinals[op.name]
        return next(at for at, operator in enumerate(self.operators) if operator.name == op.name)

    def digest(self) -> str:
        """Return a hash that is equal on two ranks if they have captured the same program."""
        # Without constants, which are whole tensors: ``equals`` compares them.
        text = "\n".join(
            f"{op.outputs} = {op.text}{op.args}{sorted(op.kwargs.items(), key=lambda kv: kv[0])} @ {op.module}"
            for op in self.operators
        )
        shapes = sorted((name, info.shape, str(info.dtype)) for name, info in self.values.items())
        mutations = sorted(self.mutations.items())
        return hashlib.sha256(f"{text}\n{shapes}\n{self.outputs}\n{mutations}".encode()).hexdigest()

    def equals(self, other: Program) -> bool:
        """Whether another program computes the same, with constants of the same values."""
        if self.digest() != other.digest() or self.constants.keys() != other.constants.keys():
            return False
        return all(torch.equal(constant, other.constants[name]) for name, constant in self.constants.items())

    def needed(self, roots: set[str]) -> set[str]:
        """Return the names of all values on which the ``roots`` depend, themselves included."""
        names = set(roots)
        # Operators come after those that compute their inputs, so one pass in reverse order is enough.
        for op in reversed(self.operators):
            if any(output in names for output in op.outputs if output is not None):
                names.update(op.inputs)
        return names


def copying_returned_inputs(program: Program) -> Program:
    """Return the program with copies of the parameters, buffers and image that the model returns as they are.

    So each tensor of the output is computed by an operator, whose stage returns it and receives its gradient.
    """
    computed = {name for op in program.operators for name in op.outputs}
    operators, values, outputs = [*program.operators], dict(program.values), list(program.outputs)
    for at, leaf in enumerate(outputs):
        if isinstance(leaf, Ref) and leaf.name not in computed:
            name = f"returned_{at}_{leaf.name}"
            operators.append(
                Operator(name, torch.ops.aten.clone.default, args=(leaf,), kwargs={}, outputs=(name,), module="")
            )
            values[name], outputs[at] = values[leaf.name], Ref(name)
    return replace(program, operators=tuple(operators), values=values, outputs=tuple(outputs))


def with_first_names(program: Program, model: nn.Module) -> Program:
    """Return the program with each buffer once, under the first of its names, which ``named_buffers`` lists.

    If a module of the model has two names, so has each of its buffers, and a capture has a value for each name.
    """
    first_of_buffer = {id(buffer): name for name, buffer in model.named_buffers()}
    first_of_name = {name: first_of_buffer[id(buffer)] for name, buffer in model.named_buffers(remove_duplicate=False)}
    if len(first_of_name) == len(first_of_buffer):
        return program
    read = {*refs_in(program.outputs), *(name for op in program.operators for name in op.inputs)}
    # Sorted, so that a value that is read comes last and replaces the others of the same buffer.
    by_read = sorted(program.buffers.items(), key=lambda item: item[0] in read)
    value_of = {first_of_name[name]: value for value, name in by_read}
    return replace(
        program,
        buffers={value: name for name, value in value_of.items()},
        mutations={first_of_name[name]: value for name, value in program.mutations.items()},
    )


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
