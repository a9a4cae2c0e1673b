"""Constants that a forward stores: flags, numbers and texts that a later forward may read.

```
self.height = x.shape[2]                          the same in each forward: no change
if not self.ready: self.ready = True; x = x * 2   the next forward computes otherwise           → refused
if self.training: self.trained = True             … or one in evaluation mode, if it reads it   → refused
SEEN["first"] = True, CACHE.size = (64, 64)       likewise, outside of the model
```

A capture removes all of them. The model is traced again, in both modes, with the values that a forward has stored. If a
program differs, one process would compute something else from the second call on, so the model is refused.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from hyfi_core.capture.program import Program
from hyfi_core.errors import RequestError

PLAIN_TYPES = frozenset({bool, int, str, bytes, complex, type(None), torch.dtype, torch.device, torch.memory_format})
Stored = tuple[Any, Any, Any]
"""(module, dict, class or set; attribute, key or item; value)"""
MISSING: Any = object()
"""Stands for a missing value."""


def is_constant(value: Any) -> bool:
    """Whether a value is immutable, so that the same object has the same value."""
    kind = type(value)
    if kind is tuple or kind is frozenset:
        return all(is_constant(item) for item in value)
    return kind in PLAIN_TYPES or kind is float or isinstance(value, enum.Enum)


def check_later_forwards(
    model: nn.Module, program: Program, assigned: list[Stored], trace: Callable[[list[Stored] | None], Program]
) -> None:
    """Refuse a forward that stores values with which a later forward, in training or evaluation, computes otherwise.

    Args:
        model: the user's module.
        program: program of the first forward.
        assigned: the constants that it has stored.
        trace: captures the model as it is now. It takes a list that gets the stored constants; None: attributes that
            change are refused.

    Raises:
        RequestError: a later forward computes otherwise; the message names the first of the stored values.
    """
    if not assigned:
        return
    with stored_values(assigned):
        again = trace(None)
    if not again.equals(program):
        raise RequestError(change_message(model, assigned[0]))
    # In the other mode, too, the program must be the same with and without the stored values.
    with _restored(model), contextlib.suppress(_UntracedError):
        opposite = not model.training
        for module in model.modules():
            # Not by train(), which users may override to do more than set the mode.
            vars(module)["training"] = opposite
        before = _traced(trace)
        with stored_values(assigned):
            after = _traced(trace)
        if not after.equals(before):
            raise RequestError(change_message(model, assigned[0]))


def change_message(model: nn.Module, stored: Stored) -> str:
    """Return the message that a forward stores this value, and what to write instead."""
    holder, name, _ = stored
    if isinstance(holder, nn.Module):
        path = next(path for path, module in model.named_modules() if module is holder)
        return (
            f"the forward changes the attribute {name!r} of {path or 'the model itself'}, which capture cannot "
            f"record: it would keep the first value. Make it a buffer (register_buffer) changed in place, or "
            f"change it between steps; tensors can be stored as attributes (self.{name}_0 = x), not in containers"
        )
    where = f"class {holder.__qualname__}" if isinstance(holder, type) else f"a {type(holder).__name__} or a global"
    return (
        f"the forward stores {name!r} in {where} and computes otherwise afterwards, which capture cannot record. Make "
        f"it a buffer (register_buffer) changed in place, or change it between steps"
    )


class _UntracedError(Exception):
    """The model cannot be traced in this mode; this is reported when the mode is used."""


def _traced(trace: Callable[[list[Stored] | None], Program]) -> Program:
    try:
        return trace([])
    except Exception as error:
        raise _UntracedError from error


@contextlib.contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Context that restores the mode of all modules on exit."""
    before = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in before:
            vars(module)["training"] = mode


@contextlib.contextmanager
def stored_values(assigned: list[Stored]) -> Iterator[None]:
    """Context in which values are stored in modules, dicts, classes and sets; what was there before is put back."""
    before = [(holder, name, _value(holder, name)) for holder, name, _ in assigned]
    try:
        for stored in assigned:
            put(stored)
        yield
    finally:
        # In reverse: if an attribute or key is listed twice, the value that it had first is put back last.
        for stored in reversed(before):
            put(stored)


def put(stored: Stored) -> None:
    """Store a value; remove the attribute, key or item if the value is ``MISSING``."""
    holder, name, value = stored
    if isinstance(holder, set):
        holder.discard(name) if value is MISSING else holder.add(name)
        return
    # The vars of a class are read-only.
    if isinstance(holder, type):
        delattr(holder, name) if value is MISSING else setattr(holder, name, value)
        return
    # Not by setattr, which a module's class may override.
    members: Any = vars(holder) if isinstance(holder, nn.Module) else holder
    if value is MISSING:
        members.pop(name, None)
    else:
        members[name] = value


def _value(holder: Any, name: Any) -> Any:
    """Return the present value, for ``put`` to restore it later; for an item of a set, True or ``MISSING``."""
    if isinstance(holder, set):
        return True if name in holder else MISSING
    members: Any = vars(holder) if isinstance(holder, (type, nn.Module)) else holder
    return members.get(name, MISSING)
