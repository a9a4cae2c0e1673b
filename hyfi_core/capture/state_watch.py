"""The Python state of a model at every step: a fast path of ``module_state``.

::

    constants: bool, float, str, (3, 3) …      compared by identity
    empty containers: registries of hooks …    compared by identity, and must still be empty
    all others: lists, tensors, settings …     compared in full

For a ResNet-50 this takes 2 ms instead of 7 ms. If anything differs, the state is computed again.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import nn

from hyfi_core.capture.module_state import (
    REGISTRIES,
    ModuleState,
    comparable,
    is_constant,
    is_empty,
    module_state,
    outside_attributes,
    own_tensors,
)

_MISSING = object()


class _WatchedModule:
    """The attributes of a module when the state was computed."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._held = module, vars(module)
        self._count = len(self._held)
        attributes = [(name, value) for name, value in self._held.items() if name not in REGISTRIES]
        self._constants = [(name, value) for name, value in attributes if is_constant(value)]
        self._empty = [(name, value) for name, value in attributes if is_empty(value) and not is_constant(value)]
        self._others = [name for name, value in attributes if not is_empty(value) and not is_constant(value)]
        self._submodules, self._buffers = dict(module._modules), dict(module._buffers)
        self._parameters = dict(module._parameters)
        self._trained = [(p, p.requires_grad) for p in self._parameters.values() if p is not None]

    def is_same(self) -> bool:
        """Whether nothing was added, removed or replaced; values of ``others`` are compared separately."""
        held, module = vars(self._module), self._module
        return (
            held is self._held
            and len(held) == self._count
            and all(held.get(name, _MISSING) is value for name, value in self._constants)
            and all(held.get(name, _MISSING) is value and not value for name, value in self._empty)
            and _holds_same(module._modules, self._submodules)
            and _holds_same(module._buffers, self._buffers)
            and _holds_same(module._parameters, self._parameters)
            and all(parameter.requires_grad == flag for parameter, flag in self._trained)
        )

    def others(self) -> list[Any]:
        """Return the attributes that may change inside."""
        return [self._held.get(name, _MISSING) for name in self._others]


def _holds_same(now: dict[str, Any], before: dict[str, Any]) -> bool:
    return len(now) == len(before) and all(now.get(name, _MISSING) is value for name, value in before.items())


class StateWatch:
    """The Python state of one model, computed again only after a change.

    Args:
        model: the user's module.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules: list[_WatchedModule] = []
        self._own: dict[int, Hashable] = {}
        self._others: list[Hashable] = []
        self._state: ModuleState | None = None

    def state(self) -> ModuleState:
        """Return a value equal to ``module_state`` of the model: the same object while nothing changes."""
        if self._state is None or not all(module.is_same() for module in self._modules):
            return self._compute()
        return self._state if self._compared() == self._others else self._compute()

    def _compute(self) -> ModuleState:
        self._modules = [_WatchedModule(module) for module in self._model.modules()]
        self._own = own_tensors(self._model)
        self._others = self._compared()
        self._state = module_state(self._model)
        return self._state

    def _compared(self) -> list[Hashable]:
        seen = dict(self._own)
        others = [value for module in self._modules for value in module.others()]
        found = [comparable(value, seen) for value in others]
        return [*found, *outside_attributes(self._model, others, self._own).items()]
