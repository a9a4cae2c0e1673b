"""The Python state of a model at every step: a fast path of ``module_state``.

::

    constants: bool, float, str, (3, 3) …      compared by identity
    empty containers: registries of hooks …    compared by identity, and must still be empty
    all others: lists, tensors, settings …     compared by identity and in full

If anything differs, the state is computed again, which takes several times as long.

A call of the engine observes the state once, for all its cells. A capture may change the state, too, such as by a
warning that is given once. A second capture must then give the same program, and the state after it counts.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import nn

from hyfi_core.capture.module_state import (
    OUTSIDE,
    REGISTRIES,
    ModuleState,
    changed_since,
    comparable,
    is_empty,
    module_state,
    outside_attributes,
    own_objects,
)
from hyfi_core.capture.patching import PATCHING
from hyfi_core.capture.program import Program
from hyfi_core.capture.storing.later_forwards import is_constant
from hyfi_core.errors import RequestError

_MISSING = object()
_MOST_CHANGES = 3
"""Most repeated captures, while each of them changes the state."""


class _Contents:
    """The names and values of a dict, by identity; they are kept alive, so that no address is used again."""

    def __init__(self, contents: dict[str, Any]) -> None:
        self._held, self._values = contents, [*contents.values()]
        self._names, self._ids = [*contents], [*map(id, self._values)]

    def are_same(self) -> bool:
        """Whether the dict holds the same objects under the same names, in the same order."""
        return [*map(id, self._held.values())] == self._ids and [*self._held] == self._names


class _WatchedModule:
    """The attributes of a module when the state was computed: constants, empty containers and all others.

    Attributes:
        empty: the containers that were empty.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._kind, self._held = module, type(module), vars(module)
        registries: list[dict[str, Any]] = [module._modules, module._buffers, module._parameters]
        # The objects in the module's dict and in its registries are compared by identity. For constants, an empty
        # tuple among them, this is enough: they cannot change.
        self._contents = [_Contents(held) for held in (self._held, *filter(None, registries))]
        attributes = [(name, value) for name, value in self._held.items() if name not in REGISTRIES]
        variable = [(name, value) for name, value in attributes if not is_constant(value)]
        # Containers that must still be empty, and the names of attributes whose contents must be compared.
        self.empty = [value for _, value in variable if is_empty(value)]
        self.empty += [registry for registry in registries if not registry]
        self._others = [name for name, value in variable if not is_empty(value)]
        self._parameters = [p for p in module._parameters.values() if p is not None]
        self._trained = [p.requires_grad for p in self._parameters]

    def is_same(self) -> bool:
        """Whether no attribute was added, removed or replaced; ``empty`` and ``others`` are compared elsewhere."""
        # Code may assign ``module.__class__`` or ``module.__dict__``.
        if type(self._module) is not self._kind or vars(self._module) is not self._held:
            return False
        if [p.requires_grad for p in self._parameters] != self._trained:
            return False
        # A list, not a generator: for the few entries of a module, this is faster in every step.
        return all([contents.are_same() for contents in self._contents])

    def others(self) -> list[Any]:
        """Return the attributes that may change inside."""
        return [self._held.get(name, _MISSING) for name in self._others]


class StateWatch:
    """The Python state of one model, computed again only after a change.

    Args:
        model: the user's module.

    Attributes:
        observed: the state of the present call; None before the first.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules: list[_WatchedModule] = []
        self._empty: list[Any] = []  # containers that were empty: items in one of them are a change
        self._own: dict[int, Hashable] = {}  # by id, the objects of the model itself
        self._others: list[Hashable] = []  # what `_compared` returned for the state
        self._state: ModuleState | None = None
        # The tensors passed to `compare`, and their versions at that time.
        self._cached: list[tuple[torch.Tensor, int]] = []
        self.observed: ModuleState | None = None

    def observe(self) -> ModuleState:
        """Observe the state, which counts for the next call, and return it."""
        with PATCHING:  # another thread may be running a forward
            self.observed = self.state()
        return self.observed

    def settled(self, capture: Callable[[], Program]) -> Program:
        """Capture the model until a capture leaves its state unchanged; observe that state and return the program.

        A state that changes with each capture, as a counter does, is accepted after `_MOST_CHANGES` equal programs.

        Args:
            capture: captures the model.

        Raises:
            RequestError: the forward changes something outside of the model, and computes otherwise afterwards.
        """
        with PATCHING:
            before, program = self.observe(), capture()
            for _ in range(_MOST_CHANGES):
                after = self.observe()
                if after == before:
                    break
                # The state has changed, perhaps only by a warning that is given once. A second capture shows whether
                # the program has changed, too.
                if not capture().equals(program):
                    raise RequestError(_changes(before, after))
                before = after
            self.observe()
        return program

    def state(self) -> ModuleState:
        """Return a value equal to ``module_state`` of the model: the same object while nothing changes."""
        # ``any``: a container that is no longer empty is true.
        if self._state is None or any(self._empty) or not all([module.is_same() for module in self._modules]):
            return self._compute()
        return self._state if self._compared() == self._others else self._compute()

    def compare(self, tensors: Iterable[torch.Tensor]) -> None:
        """From now on, let in-place changes of these tensors count: only one of two equal programs reads them."""
        ids = {id(tensor) for tensor, _ in self._cached}
        self._cached += [(tensor, _version(tensor)) for tensor in tensors if id(tensor) not in ids]

    def _compute(self) -> ModuleState:
        """Return the state of the model, and record with what the next call is compared to notice a change."""
        self._modules = [_WatchedModule(module) for module in self._model.modules()]
        self._empty = [container for module in self._modules for container in module.empty]
        self._own = own_objects(self._model)
        # Of all objects that may change inside, such as lists, the present contents.
        self._others = self._compared()
        self._state = state = module_state(self._model)
        # ``module_state`` leaves out tensors that were passed to ``compare``: add the versions of those that changed.
        if changed := self._changed():
            # In the last part, which has the attributes; a state without such tensors stays equal to ``module_state``.
            *others, attributes = state
            self._state = ModuleState((*others, (*attributes, ((OUTSIDE, "a cached tensor"), tuple(changed)))))
        return self._state

    def _compared(self) -> list[Hashable]:
        """Return hashable values of all objects that may change inside, to compare with ``_others``."""
        values = dict(self._own)
        attributes = [value for module in self._modules for value in module.others()]
        compared = [comparable(value, values) for value in attributes]
        return [*compared, *outside_attributes(self._model, attributes, self._own).items(), *self._changed()]

    def _changed(self) -> list[Hashable]:
        """Return (index, version) of each tensor of ``_cached`` that has changed in place."""
        versions = [(_version(tensor), was) for tensor, was in self._cached]
        return [(number, version) for number, (version, was) in enumerate(versions) if version != was]


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _changes(before: ModuleState, after: ModuleState) -> str:
    """Return the message about a state that changes with every forward."""
    names = [name if path == OUTSIDE else f"{path}.{name}" for path, name in changed_since(before, after)]
    return (
        f"the forward changes {names[0] if names else 'a value'!r} outside of the model and computes otherwise "
        f"afterwards, which capture cannot record. Make it a buffer (register_buffer) changed in place, or change it "
        f"between steps"
    )
