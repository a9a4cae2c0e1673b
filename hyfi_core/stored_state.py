"""A state on disk whose tensors are read by name: a rank reads only those that it needs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from hyfi_core.errors import RequestError


class StoredState(Mapping[str, torch.Tensor]):
    """The tensors of safetensors files by name.

    A tensor is a private view of its file; the system reads pages when they are used.

    Args:
        files: the files; each tensor is in one of them.
        identity: a text that is equal for equal contents; ranks compare it.

    Raises:
        SafetensorError: a file has another format.
        OSError: a file cannot be read.
    """

    def __init__(self, files: Sequence[Path], identity: str) -> None:
        self.identity = identity
        opened: list[Any] = [safe_open(path, framework="pt") for path in files]
        self._file_of = {name: file for file in opened for name in file.keys()}  # noqa: SIM118

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a tensor."""
        tensor: torch.Tensor = self._file_of[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        """Iterate over names."""
        return iter(self._file_of)

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self._file_of)

    def close(self) -> None:
        """Close the files; the state is empty afterwards. Tensors that are still in use stay valid."""
        self._file_of = {}


@torch.no_grad()
def fill_buffers(model: nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    """Copy values into the model's buffers of these names, except into those that this rank has released."""
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in buffers and not buffer.is_meta:
            buffer.copy_(buffers[name])


Weights = str | PathLike[str] | Mapping[str, torch.Tensor] | Callable[[str], torch.Tensor]
"""Tensors by name: a safetensors file, a folder with such files, a state, or a function of the name."""


@runtime_checkable
class PreparedWeights(Protocol):
    """A function that returns a tensor by name; before the first call, every rank passes the names that it needs."""

    def prepare(self, names: Collection[str]) -> None:
        """Make these tensors ready."""
        ...

    def __call__(self, name: str) -> torch.Tensor:
        """Return one of them."""
        ...


def tensor_reader(weights: Weights) -> Callable[[str], torch.Tensor]:
    """Return the function that returns a tensor by name.

    Args:
        weights: see ``Weights``; of a folder, ``model.safetensors`` and ``model-*-of-*.safetensors`` are read.

    Raises:
        RequestError: there are no such files, or one of them has another format. The function, too, raises it, if files
            or state have no tensor of a name.
    """
    if not isinstance(weights, (str, PathLike, Mapping)):
        return weights
    state = weights if isinstance(weights, Mapping) else _stored(Path(weights))
    where = "the given state" if isinstance(weights, Mapping) else f"{weights}"

    def read(name: str) -> torch.Tensor:
        if name not in state:
            known = ", ".join([*state][:3])
            raise RequestError(f"weights: {where} has no tensor {name!r}; its first names are {known}")
        return state[name]

    return read


def _stored(path: Path) -> StoredState:
    """Return the tensors of a safetensors file, or of those of a folder."""
    known = ("model.safetensors", "model-*-of-*.safetensors")
    files = [path] if path.is_file() else sorted(file for name in known for file in path.glob(name))
    if not files:
        raise RequestError(f"weights: {path} is neither a safetensors file nor a folder with model.safetensors")
    try:
        return StoredState(files, str(path))
    except (SafetensorError, OSError, ValueError) as error:
        raise RequestError(f"weights: {path} cannot be read: {error}; pass safetensors files") from error
