"""Initial weights from a local file, under the model's names or with a prefix more or less.

::

    file                       model                       taken as
    module.layer1.0.weight     layer1.0.weight             without 'module.'
    layer1.0.weight            backbone.layer1.0.weight    with 'backbone.'
    module.fc.weight (1000, )  head.weight (2, )           not at all: missing and unexpected
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from hyfi_core.errors import RequestError
from hyfi_core.runtime.checkpoint import MODEL_FILE
from workflows.console import listed
from workflows.finetuning.weights_file import WeightsFile, read_weights

_NAMED = 8
"""Largest number of names in a message."""


@dataclass(frozen=True)
class WeightsReport:
    """Which tensors of a file were loaded into a model.

    Attributes:
        loaded: Names of the model that were loaded.
        missing: Names of the model that the file does not have; these tensors keep their initial values.
        unexpected: Names of the file that the model does not have.
        reshaped: Names with different shapes in both (a head for other classes); these keep their initial values, too.
        source: Which part of the file was taken, and which prefix was changed.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    reshaped: tuple[str, ...]
    source: str = ""

    def __str__(self) -> str:
        """Return a line of totals, a line for each part of the model, and the names that the model does not have."""
        total = len(self.loaded) + len(self.missing) + len(self.reshaped)
        lines = [f"{len(self.loaded)} of {total} tensors loaded{self.source}", *self._parts()]
        for kind, names in (("missing", self.missing), ("unexpected", self.unexpected), ("reshaped", self.reshaped)):
            if names:
                lines.append(f"{kind} ({len(names)}): {listed(names, _NAMED)}")
        return "\n".join(lines)

    def _parts(self) -> list[str]:
        """Return a line for each of the model's outermost modules, in their order."""
        loaded = Counter(name.partition(".")[0] for name in self.loaded)
        absent = Counter(name.partition(".")[0] for name in (*self.missing, *self.reshaped))
        parts = loaded | absent  # modules in either
        width = max(map(len, parts), default=0)
        lines = []
        for part in parts:
            line = f"  {part:<{width}}  {loaded[part]:>4} of {loaded[part] + absent[part]:>4}"
            if absent[part]:
                line += "  the others keep initial values" if loaded[part] else "  keeps initial values"
            lines.append(line)
        return lines


@dataclass(frozen=True)
class Prefix:
    """The difference in prefix between the names of a file and those of a model.

    Attributes:
        file: Prefix to remove from the names of the file.
        model: Prefix to add to them.
    """

    file: str = ""
    model: str = ""

    def renamed(self, name: str) -> str:
        """Return the model's name for one of the file; names without the prefix keep theirs."""
        return self.model + name.removeprefix(self.file) if name.startswith(self.file) else name

    def __str__(self) -> str:
        """Return the change as words in parentheses; empty without one."""
        parts = ([f"without {self.file!r}"] if self.file else []) + ([f"with {self.model!r}"] if self.model else [])
        return f" (names {' and '.join(parts)} before them)" if parts else ""


def load_weights(model: nn.Module, path: Path) -> WeightsReport:
    """Copy matching tensors of a ``.safetensors`` or ``.pth`` file into ``model``, in place.

    Raises:
        RequestError: The file is missing, has another format, is quantised, or none of its tensors matches the model.
    """
    file, state = read_weights(path), model.state_dict()
    prefix = _prefix(file.tensors, state)
    # Names with the prefix come last, and win if the file has a name with and without it.
    in_order = sorted(file.tensors, key=lambda name: name.startswith(prefix.file))
    tensors = {prefix.renamed(name): file.tensors[name] for name in in_order}
    reshaped = tuple(name for name in state if name in tensors and state[name].shape != tensors[name].shape)
    fitting = {name: tensors[name] for name in state if name in tensors and name not in reshaped}
    _check_scale(path, state, fitting)
    counters = {name for name in state if name.endswith("num_batches_tracked")}
    # Counters of batches fit any model with batch norm, so they do not show that the file belongs to this one.
    if not set(fitting) - counters:
        raise RequestError(
            f"model.weights {path}: none of its {len(tensors)} tensors matches the model; its first names are "
            f"{', '.join(sorted(file.tensors)[:3])}, the model's {', '.join(list(state)[:3])}"
            f"{_parts_that_fit(file, state)}"
        )
    # Not strict: what is missing is reported below, and may be a new head.
    model.load_state_dict(fitting, strict=False)
    missing = tuple(name for name in state if name not in tensors and name not in counters)
    unexpected = tuple(sorted(tensors.keys() - state.keys()))
    loaded = tuple(name for name in fitting if name not in counters)
    return WeightsReport(loaded, missing, unexpected, reshaped, f"{file}{prefix}")


def other_classes(path: Path, classes: Sequence[str]) -> str | None:
    """Return a line for the user if a file is part of a checkpoint for other classes, or for these in another order."""
    try:
        described = json.loads((path.parent / MODEL_FILE).read_text(encoding="utf-8"))
        theirs = [str(name) for name in described.get("class_names", ())]
    except (OSError, ValueError, AttributeError, TypeError):  # not a file of a checkpoint
        return None
    # Other numbers of classes are other shapes, which are reported and not loaded.
    if len(theirs) != len(classes) or theirs == list(classes):
        return None
    return (
        f"{path} is of a checkpoint with the classes {', '.join(theirs)}; in this run they are, in this order, "
        f"{', '.join(classes)}: the last layer begins with weights of other classes"
    )


def _check_scale(path: Path, state: Mapping[str, torch.Tensor], fitting: Mapping[str, torch.Tensor]) -> None:
    """Refuse integers in place of weights: those of a quantised file mean nothing without its scales."""
    integers = [n for n in fitting if state[n].is_floating_point() and not fitting[n].is_floating_point()]
    if integers:
        dtype = str(fitting[integers[0]].dtype).removeprefix("torch.")
        raise RequestError(
            f"model.weights {path}: has {dtype} numbers in place of weights ({listed(integers, _NAMED)}), as in a "
            f"quantised file, whose scales are kept elsewhere; use the file in float32, float16 or bfloat16"
        )


def _prefix(file: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> Prefix:
    """Return the change of prefixes with which most names and shapes of a file match those of the model.

    Names stay as they are (an empty `Prefix`) unless a change makes more than half of the file match, and more than
    match without it: otherwise a match may be chance.
    """
    best, most = Prefix(), max(_matching(Prefix(), file, state), len(file) // 2)
    for of_file in _common_prefixes(file):
        for of_model in _common_prefixes(state):
            prefix = Prefix(of_file, of_model)
            matching = _matching(prefix, file, state)
            if matching > most:
                best, most = prefix, matching
    return best


def _parts_that_fit(file: WeightsFile, state: Mapping[str, torch.Tensor]) -> str:
    """Return which parts of a file, such as one of two networks, would fit by themselves; empty if none would."""
    prefixes = {prefix for name in file.tensors for prefix in _prefixes(name)}
    fitting = {prefix: _matching(Prefix(prefix), file.tensors, state) for prefix in prefixes}
    # A part fits if it has most of the model's tensors.
    most = sorted((p for p in fitting if 2 * fitting[p] > len(state)), key=lambda p: (-fitting[p], p))
    if not most:
        return ""
    named = ", ".join(f"{fitting[prefix]} under {prefix!r}" for prefix in most[:_NAMED])
    return f". It has several parts: {named} would fit; save the tensors of one of them alone"


def _matching(prefix: Prefix, file: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> int:
    """Return how many tensors of a file, with their names changed, are in the model with the same shape."""
    renamed = ((prefix.renamed(name), tensor) for name, tensor in file.items())
    return sum(name in state and state[name].shape == tensor.shape for name, tensor in renamed)


def _common_prefixes(names: Iterable[str]) -> list[str]:
    """Return the prefixes that more than half of the names have, the empty one first.

    Rarer prefixes belong to parts of a network: with them, blocks could be loaded into other blocks of the same shape.
    """
    names = list(names)
    count = Counter(prefix for name in names for prefix in _prefixes(name))
    return ["", *(prefix for prefix, times in count.items() if 2 * times > len(names))]


def _prefixes(name: str) -> list[str]:
    """Return the prefixes of a dotted name, the shortest first: ``a.`` and ``a.b.`` of ``a.b.c``."""
    parts = name.split(".")
    return [".".join(parts[:end]) + "." for end in range(1, len(parts))]
