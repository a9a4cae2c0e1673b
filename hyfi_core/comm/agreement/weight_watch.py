"""Detection of changes to one rank's weights between calls that the engine did not make.

::

    version counters, addresses     copy_, load_state_dict, p.data = ...                    every change
    64 values of each parameter     what leaves no trace: p.data.clamp_(), arrays of NumPy  other values in each step

The values are compared between ranks, so that they also show weights that differ because of something else: gradients
or an optimizer state changed on one rank only. With several stages, a rank may be the only one with a weight;
one selection of values is also compared with earlier ones.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch
from torch import nn

Scope = Literal["training", "evaluation"]
SAMPLED_VALUES = 64
"""Values of each parameter that are compared in a step."""
_Selection = tuple[dict[str, int], torch.Tensor]
"""(name -> number of values, all values in the order of the names)."""


class _FlatTensor(NamedTuple):
    """A tensor's memory as a flat view.

    Attributes:
        address: address of that memory.
        values: the view; None if the tensor is on a device, is empty, or has gaps.
        sampled: a view of every n-th value, at most ``SAMPLED_VALUES``.
    """

    address: int
    values: torch.Tensor | None
    sampled: torch.Tensor


class WeightWatch:
    """The changes of a model's parameters and buffers that the engine did not make.

    Args:
        model: the user's module; a tensor with several names is watched under its first one.
        arriving: returns the parameters that the engine will overwrite when their new values have been received.
        keeps_values: whether to compare values with earlier ones.

    Attributes:
        names: names of all parameters and buffers, in the model's order.
    """

    def __init__(
        self, model: nn.Module, arriving: Callable[[], Iterable[torch.Tensor]], keeps_values: bool = False
    ) -> None:
        self._tensors: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.names = [*self._tensors]
        # Tensors on the meta device belong to stages of other ranks.
        self._held = {name: tensor for name, tensor in self._tensors.items() if not tensor.is_meta}
        self._arriving = arriving
        # Parameters of which a few values are compared with earlier ones.
        self._compared = [name for name in self._held if not self.is_buffer(name)] if keeps_values else []
        self._flat: dict[str, _FlatTensor] = {}
        # Names of changed tensors, for each kind of call until its ranks have compared them.
        self._changed: dict[Scope, set[str]] = {"training": set(), "evaluation": set()}
        self._lost: set[str] = set()  # names whose change was overwritten by values sent to this rank
        # Version counters, addresses and values as the engine left them: other ones show a change.
        self._last = self._marks()

    def changed(self, scope: Scope) -> set[str]:
        """Return the names changed since ``agreed`` was last called for a scope."""
        self._notice()
        return set(self._changed[scope])

    def lost(self) -> set[str]:
        """Return the names of weights whose change was overwritten by values that were being sent to this rank."""
        return set(self._lost)

    def agreed(self, scope: Scope) -> None:
        """Forget the changes of a scope: they are the same on all its ranks."""
        self._changed[scope].clear()
        if scope == "training":
            self._lost.clear()

    @contextmanager
    def changing(self, noticed: bool = False) -> Iterator[None]:
        """Context in which the engine itself changes weights.

        Args:
            noticed: whether ``changed`` was called just before, so that earlier changes are recorded already.
        """
        if not noticed:
            self._notice()
        yield
        self._last = self._marks()  # what the engine has changed does not count as changed by the user

    def sample(self, names: Sequence[str], turn: int) -> int:
        """Return a digest of a few values of each tensor that is in the host's memory.

        Args:
            names: names of the tensors.
            turn: which values; n turns one after the other select all of a tensor with up to n · 64 values.
        """
        digest = 0
        for _, values in self._selected(names, turn):
            digest = zlib.crc32(values.view(torch.uint8).numpy().tobytes(), digest)
        return digest

    def digest(self, name: str) -> int:
        """Return a digest of all values of a tensor, in the order of its dims; 0 if it has none here."""
        return _digest(self._held[name], 0) if name in self._held else 0

    def is_buffer(self, name: str) -> bool:
        """Whether a name is that of a buffer."""
        return not isinstance(self._tensors[name], nn.Parameter)

    def _notice(self) -> None:
        """Record what was changed since the engine last changed weights, or since the last call."""
        current = self._marks()
        (marks_before, values_before), (marks, values) = self._last, current
        changed = {name for name, before, after in zip(self._held, marks_before, marks, strict=True) if before != after}
        changed |= _changed_values(values_before, values)
        if not changed:
            return
        # The next call compares with the current values, so that each change is recorded once.
        self._last = current
        for names in self._changed.values():  # each scope compares them for itself
            names |= changed
        # Values that are being sent to this rank will overwrite the change, and no later comparison will show it.
        arriving = {id(tensor) for tensor in self._arriving()}
        self._lost |= {name for name in changed if id(self._tensors[name]) in arriving}

    def _marks(self) -> tuple[list[tuple[int, int]], list[_Selection]]:
        return [change_mark(tensor) for tensor in self._held.values()], self._selected(self._compared, 0)

    def _selected(self, names: Sequence[str], turn: int) -> list[_Selection]:
        """Return a few values of each tensor: for each dtype, (name -> number of its values, copies of all of them)."""
        views: dict[torch.dtype, dict[str, torch.Tensor]] = {}
        for name in names:
            flat = self._flattened(name)
            if flat.values is not None:
                step = -(-len(flat.values) // SAMPLED_VALUES)
                # The view for turn 0 is kept, because ``_marks`` selects it again and again.
                sampled = flat.values[turn % step :: step] if turn else flat.sampled
                views.setdefault(sampled.dtype, {})[name] = sampled
        return [
            ({name: len(view) for name, view in of_dtype.items()}, torch.cat([*of_dtype.values()]))
            for of_dtype in views.values()
        ]

    def _flattened(self, name: str) -> _FlatTensor:
        """Return the flat view of a tensor, the same object as long as its memory is the same."""
        tensor = self._tensors[name]
        address = tensor.data_ptr()
        # ``p.data = …`` gives a tensor other memory; a view of the old memory would never show a change again.
        if name not in self._flat or self._flat[name].address != address:
            readable = tensor.device.type == "cpu" and torch.ops.aten.is_non_overlapping_and_dense(tensor)
            values = tensor.detach().as_strided((tensor.numel(),), (1,)) if readable and tensor.numel() else None
            sampled = torch.empty(0) if values is None else values[:: -(-len(values) // SAMPLED_VALUES)]
            self._flat[name] = _FlatTensor(address, values, sampled)
        return self._flat[name]


def change_mark(tensor: torch.Tensor) -> tuple[int, int]:
    """Return (version counter, address) of a tensor: another pair after most changes; see the module."""
    return 0 if tensor.is_inference() else tensor._version, tensor.data_ptr()


def digest_of(state: Mapping[str, torch.Tensor]) -> int:
    """Return a digest of the names and all values of a state."""
    digest = 0
    for name in sorted(state):
        digest = _digest(state[name], zlib.crc32(name.encode(), digest))
    return digest


def _digest(tensor: torch.Tensor, begun: int) -> int:
    flat = tensor.detach().cpu().contiguous().flatten()
    return zlib.crc32(flat.view(torch.uint8).numpy().data, begun) if flat.numel() else begun


def _changed_values(before: list[_Selection], after: list[_Selection]) -> set[str]:
    """Return the names whose values differ, bit by bit."""
    changed: set[str] = set()
    for (sizes, before_part), (_, after_part) in zip(before, after, strict=False):
        if not _same_bits(before_part, after_part):
            pieces = zip(sizes, before_part.split([*sizes.values()]), after_part.split([*sizes.values()]), strict=True)
            changed |= {name for name, was, now in pieces if not _same_bits(was, now)}
    return changed


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    # As bytes: as numbers a NaN would differ from itself, and −0 would equal 0.
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
