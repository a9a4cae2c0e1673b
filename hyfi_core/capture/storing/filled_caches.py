"""Programs that differ only in a cache: one computes a tensor that the other, after a forward of the user, reads there.

```
y = x * linspace(0, 1, 11)        before: each capture removes what a forward caches, and its program computes it
y = x * constant                  afterwards: a tensor with these values
```

Values that depend on neither the image nor a weight are compared as numbers, all others operator by operator.

So that ranks agree, whichever of them have run such a forward, a capture returns the program of empty caches: stored
tensors are removed for a second capture, and if that program computes the same, they were a cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Hashable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from hyfi_core.capture.outside_names import memories, outside_values
from hyfi_core.capture.program import Operator, Program, Ref, refs_in, substitute
from hyfi_core.capture.storing.later_forwards import MISSING, Stored, stored_values
from hyfi_core.capture.storing.stored_tensors import dicts_in
from hyfi_core.errors import RequestError


def of_empty_caches(model: nn.Module, program: Program, capture: Callable[[], Program]) -> Program:
    """Return the program that a model gives if its caches are empty, so that it computes what they hold.

    Args:
        model: the user's module; not changed, except that results of ``functools.lru_cache`` are forgotten.
        program: its capture, which may read tensors in caches.
        capture: captures the model again.

    Returns:
        ``program`` itself if the tensors that it reads are no cache: without them, the model fails or differs.
    """
    # A cached tensor is a constant of the graph; with none, no cache was read.
    if not program.constants:
        return program
    constants = {id(constant) for constant in program.constants.values()}
    roots = [value for module in model.modules() for value in vars(module).values()]
    dicts = dicts_in([*roots, *(value for _, value in outside_values(model))])
    # What to store so that the model finds no tensor there: items of dicts are removed, attributes become None.
    stored: list[Stored] = [
        (container, name, MISSING) for container in dicts for name, value in container.items() if _has(value, constants)
    ]
    for module in model.modules():
        tensors = [(name, value) for name, value in vars(module).items() if isinstance(value, torch.Tensor)]
        stored += [(module, name, None) for name, value in tensors if id(value) in constants]
    functions_with_cache, _ = memories(model)
    memoised = [function for function in functions_with_cache if function.cache_info().currsize]
    if not stored and not memoised:
        return program
    for function in memoised:  # so that its results are computed again
        function.cache_clear()
    try:
        with stored_values(stored):
            empty = capture()
    except RequestError:  # the forward needs these tensors
        return program
    return empty if compute_the_same(empty, program) else program


def _has(value: Any, tensors: Container[int]) -> bool:
    """Whether a value is, or contains, an object with one of these ids."""
    return any(id(leaf) in tensors for leaf in _pytree.tree_leaves(value))


def compute_the_same(program_a: Program, program_b: Program) -> bool:
    """Whether two programs of one model, for one shape, compute the same from image, weights and buffers."""
    # Operators that depend on inputs are compared one by one, in the order of execution; all others by their results.
    first, second = _Parts(program_a), _Parts(program_b)
    if len(first.dependent) != len(second.dependent) or program_a.mutations.keys() != program_b.mutations.keys():
        return False
    same = _Values(first, second)
    for a, b in zip(first.dependent, second.dependent, strict=True):
        if (a.text, a.module, a.kwargs.keys()) != (b.text, b.module, b.kwargs.keys()):
            return False
        if not same.arguments((a.args, [*a.kwargs.values()]), (b.args, [b.kwargs[name] for name in a.kwargs])):
            return False
        # From now on, the results of both count as the same values.
        if not same.pair(a.outputs, b.outputs):
            return False
    mutated = [(Ref(value), Ref(program_b.mutations[name])) for name, value in program_a.mutations.items()]
    return same.arguments(program_a.outputs, program_b.outputs) and all(same.arguments(a, b) for a, b in mutated)


class _Parts:
    """The operators of a program that depend on its inputs, and the values of all others.

    Attributes:
        inputs: value -> which input it is: ``"image"``, or (``"parameter"`` or ``"buffer"``, name in the model).
        dependent: operators that depend on an input, or draw random numbers, in the order of execution.
    """

    def __init__(self, program: Program) -> None:
        self.inputs: dict[str, Hashable] = {program.image: "image"}
        self.inputs |= {value: ("parameter", name) for value, name in program.parameters.items()}
        self.inputs |= {value: ("buffer", name) for value, name in program.buffers.items()}
        self._constants = dict(program.constants)
        self._makers: dict[str, Operator] = {}
        self._expressions = {value: f"constant {id(tensor)}" for value, tensor in program.constants.items()}
        self.dependent: list[Operator] = []
        alive = program.needed({*refs_in(program.outputs), *program.mutations.values()})
        for op in program.operators:
            if alive.isdisjoint(op.outputs):
                continue
            # Operators that depend on no input. Those that draw random numbers are counted as dependent, and so are
            # functions of the user's, which have no tags.
            tags = getattr(op.target, "tags", None)
            if (
                tags is not None
                and torch.Tag.nondeterministic_seeded not in tags
                and all(self.is_free(name) for name in op.inputs)
            ):
                for number, output in enumerate(op.outputs):
                    if output is not None:
                        self._makers[output] = op
                        self._expressions[output] = self._expression_of(op, number)
            else:
                self.dependent.append(op)

    def is_free(self, name: str) -> bool:
        """Whether a value depends on no input."""
        return name in self._constants or name in self._makers

    def expression(self, name: str) -> str:
        """Return how a value that depends on no input is computed: values with equal expressions are equal."""
        return self._expressions[name]

    def _expression_of(self, op: Operator, number: int) -> str:
        """Return the expression of one result of an operator: a digest."""
        # Each argument that is a value is replaced by its expression, which is short: with whole texts, the text of a
        # value that is used twice would double with each operator.
        args, kwargs = _pytree.tree_map_only(
            Ref, lambda ref: ("value", self._expressions[ref.name]), (op.args, op.kwargs)
        )
        text = repr((number, op.text, args, sorted(kwargs.items())))
        return hashlib.sha256(text.encode()).hexdigest()

    def value(self, name: str) -> torch.Tensor:
        """Return the tensor of a free value, computed once."""
        if name not in self._constants:
            op = self._makers[name]
            values = {name: self.value(name) for name in op.inputs}
            kwargs = {key: substitute(item, values) for key, item in op.kwargs.items()}
            results = op.target(*substitute(op.args, values), **kwargs)
            results = (results,) if isinstance(results, torch.Tensor) else results
            self._constants |= {o: tensor for o, tensor in zip(op.outputs, results, strict=False) if o is not None}
        return self._constants[name]


class _Values:
    """Which values of two programs are the same."""

    def __init__(self, a: _Parts, b: _Parts) -> None:
        self._first, self._second = a, b
        self._pairs: dict[str, str] = {}

    def pair(self, outputs_a: tuple[str | None, ...], outputs_b: tuple[str | None, ...]) -> bool:
        """Record that results of two equal operators are the same; return whether both use the same ones."""
        self._pairs |= {a: b for a, b in zip(outputs_a, outputs_b, strict=True) if a is not None and b is not None}
        return [a is None for a in outputs_a] == [b is None for b in outputs_b]

    def arguments(self, a: Any, b: Any) -> bool:
        """Whether arguments are the same, also within lists."""
        if isinstance(a, Ref) and isinstance(b, Ref):
            return self._are_same(a.name, b.name)
        if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
            return len(a) == len(b) and all(self.arguments(x, y) for x, y in zip(a, b, strict=True))
        return type(a) is type(b) and bool(a == b or (a != a and b != b))

    def _are_same(self, a: str, b: str) -> bool:
        """Whether a value of the first program equals a value of the second one."""
        # Without inputs, both values are known. Equal expressions have equal values: most pairs need not be computed.
        if self._first.is_free(a) and self._second.is_free(b):
            if self._first.expression(a) == self._second.expression(b):
                return True
            with torch.no_grad():
                return _equal(self._first.value(a), self._second.value(b))
        if a in self._first.inputs or b in self._second.inputs:
            return self._first.inputs.get(a) == self._second.inputs.get(b)
        return self._pairs.get(a) == b


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return False
    # Exactly equal numbers, and NaN equals NaN, which it does not in torch.equal.
    return torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)
