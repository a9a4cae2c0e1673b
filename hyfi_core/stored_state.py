"""A state on disk, of which single tensors are read by name: a rank reads what it needs of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open


class StoredState(Mapping[str, torch.Tensor]):
    """The tensors of safetensors files by name.

    A tensor is a private view of its file, of which the system reads what is used, when it is used.

    Args:
        files: every tensor is in one of them.
        identity: a text that is equal for equal contents, which ranks compare.

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
