"""Initial weights from a local file."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from hyfi_core.errors import RequestError


@dataclass(frozen=True)
class WeightsReport:
    """Which tensors of a file were loaded into a model.

    Attributes:
        loaded: Number of tensors loaded.
        missing: Names of the model that the file does not have; these tensors keep their initial values.
        unexpected: Names of the file that the model does not have.
        reshaped: Names with different shapes in both (a head for other classes); these keep their initial values, too.
    """

    loaded: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    reshaped: tuple[str, ...]

    def __str__(self) -> str:
        """Return one line for each kind, without empty kinds."""
        lines = [f"{self.loaded} tensors loaded"]
        for kind in ("missing", "unexpected", "reshaped"):
            names = getattr(self, kind)
            if names:
                lines.append(f"{kind} ({len(names)}): {', '.join(names)}")
        return "\n".join(lines)


def load_weights(model: nn.Module, path: Path) -> WeightsReport:
    """Copy matching tensors of a ``.safetensors`` or ``.pth`` file into ``model``, in place.

    A ``.pth`` file is read with ``weights_only=True``, so that no code in it runs.

    Raises:
        RequestError: The file is missing, has another format, or none of its tensors matches the model.
    """
    given = _read(path)
    own = model.state_dict()
    reshaped = tuple(sorted(n for n in own.keys() & given.keys() if own[n].shape != given[n].shape))
    fitting = {name: given[name] for name in own if name in given and name not in reshaped}
    counters = {name for name in own if name.endswith("num_batches_tracked")}
    if not set(fitting) - counters:
        raise RequestError(
            f"model.weights {path}: none of its {len(given)} tensors matches the model; its first names are "
            f"{', '.join(sorted(given)[:3])}, the model's {', '.join(list(own)[:3])}"
        )
    model.load_state_dict(fitting, strict=False)
    missing = tuple(sorted(own.keys() - given.keys() - counters))
    return WeightsReport(len(fitting), missing, tuple(sorted(given.keys() - own.keys())), reshaped)


def _read(path: Path) -> dict[str, torch.Tensor]:
    if not path.is_file():
        raise RequestError(f"model.weights {path}: no such file; use a local .safetensors or .pth file")
    value: Any
    try:
        if path.suffix == ".safetensors":
            value = load_file(path)
        else:
            value = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, RuntimeError, ValueError, OSError, EOFError, KeyError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RequestError(f"model.weights {path}: not a file of tensors only: {reason}") from error
    if isinstance(value, dict) and isinstance(value.get("state_dict"), dict):
        value = value["state_dict"]
    if not isinstance(value, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in value.values()):
        raise RequestError(f"model.weights {path}: has a {type(value).__name__}, not a state_dict (names and tensors)")
    return {str(name).removeprefix("module."): tensor for name, tensor in value.items()}
