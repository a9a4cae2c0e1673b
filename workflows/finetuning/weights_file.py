"""A file of weights: which of its entries are tensors, whoever wrote it."""

from __future__ import annotations

import argparse
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.serialization import get_unsafe_globals_in_checkpoint

from hyfi_core.errors import RequestError
from workflows.console import listed

_WRAPPERS = (
    "state_dict",
    "model_state_dict",
    "model",
    "module",
    "net",
    "weights",
    "params",
    "teacher",
    "student",
    "state_dict_ema",
    "model_ema",
    "ema",
)
"""Keys under which training scripts keep the weights, in the order in which they are looked for."""
_DEEPEST = 3
_NAMED = 3
"""Largest number of classes, entries or files in a message."""
_SUFFIXES = {".safetensors", ".pth", ".pt", ".bin", ".ckpt"}
_OTHER_CONTENT = {
    b"version https://git-lfs": "is a pointer of Git LFS, not the file itself; run git lfs pull in its repository",
    b"<": "is a web page, not the file itself; download it again",
}
"""First bytes of files that are often there in place of weights, and what to say of them."""


@dataclass(frozen=True)
class WeightsFile:
    """The tensors of a file.

    Attributes:
        tensors: Name -> tensor, as in the file.
        key: The key that has them in the file, as in ``model.state_dict``; empty if the file has nothing else.
        others: Keys beside it that have tensors, too, such as an average of the weights.
    """

    tensors: dict[str, torch.Tensor]
    key: str = ""
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return which part of the file was taken, as words in parentheses; empty if all of it was."""
        if not self.key:
            return ""
        beside = f"; it has {' and '.join(repr(key) for key in self.others)}, too" if self.others else ""
        return f" ({self.key!r} of the file{beside})"


def read_weights(path: Path) -> WeightsFile:
    """Read a ``.safetensors`` file, or one of ``torch.save`` with ``weights_only=True``, so that no code in it runs.

    Raises:
        RequestError: The file is missing, has another format, or has no tensors where they are usually found.
    """
    if path.is_dir():
        files = sorted(file.name for file in path.iterdir() if file.suffix in _SUFFIXES)
        inside = f"name one of its files: {listed(files, _NAMED)}" if files else "name a .safetensors or .pth file"
        raise RequestError(f"model.weights {path}: is a folder; {inside}")
    if not path.is_file():
        raise RequestError(f"model.weights {path}: no such file; use a local .safetensors or .pth file")
    value: Any
    try:
        if path.suffix == ".safetensors":
            value = load_file(path)
        else:
            # Scripts save their arguments beside the weights (DINO, MAE): an object with attributes, and no code.
            with torch.serialization.safe_globals([argparse.Namespace]):
                value = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, SafetensorError, RuntimeError, ValueError, OSError, EOFError, KeyError) as error:
        raise RequestError(f"model.weights {path}: {_describe_unreadable(path, error)}") from error
    return _unwrapped(path, value)


def _describe_unreadable(path: Path, error: Exception) -> str:
    """Return why a file could not be read, and what would help."""
    try:
        with path.open("rb") as file:
            first = file.read(32).lstrip()
    except OSError as unreadable:  # such as one of another user
        return f"cannot be read ({unreadable.strerror})"
    for start, description in _OTHER_CONTENT.items():
        if first.startswith(start):
            return description
    if not first:
        return "is empty"
    if isinstance(error, pickle.UnpicklingError):
        return _describe_pickle(path, error)
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    if "TorchScript" in reason:
        code = f"import torch; torch.save(torch.jit.load({str(path)!r}).state_dict(), 'weights.pth')"
        return f'is a program of TorchScript. If you trust the file, write its tensors: python -c "{code}"'
    return f"not a file of tensors only: {reason}"


def _describe_pickle(path: Path, error: Exception) -> str:
    """Return what a file has besides tensors, and a command that extracts the tensors, for users who trust it."""
    try:
        classes = [name for name in get_unsafe_globals_in_checkpoint(str(path)) if name != "argparse.Namespace"]
    except Exception:  # not a file of torch.save, or an old one
        classes = re.findall(r"GLOBAL (\S+) was not", str(error))
    if not classes:
        return "not a file of tensors only: it is damaged, or neither of safetensors nor of torch.save"
    # Dicts within dicts keep their keys, so that weights are found where they are in the file.
    code = (
        "import torch; t = lambda v: t(v.state_dict()) if hasattr(v, 'state_dict') else {k: t(x) for k, x in v.items() "
        "if isinstance(x, dict) or hasattr(x, 'state_dict') or hasattr(x, '__array__')} if isinstance(v, dict) else "
        f"torch.as_tensor(v); torch.save(t(torch.load({str(path)!r}, map_location='cpu', weights_only=False)), "
        "'weights.pth')"
    )
    return (
        f"has objects besides tensors ({listed(sorted(classes), _NAMED)}), which may run code when they are loaded, as "
        f"a whole model has that was saved instead of its state_dict(). If you trust the file, write its tensors: "
        f'python -c "{code}"'
    )


def _unwrapped(path: Path, value: Any) -> WeightsFile:
    """Return the state_dict of a loaded file, also from below keys such as ``model``; refuse files without one."""
    keys: list[str] = []
    other_keys: tuple[str, ...] = ()
    for _ in range(_DEEPEST):
        if _is_state(value):
            return WeightsFile({str(name): tensor for name, tensor in value.items()}, ".".join(keys), other_keys)
        inside = [] if not isinstance(value, dict) else [key for key in _WRAPPERS if isinstance(value.get(key), dict)]
        if not inside:
            break
        keys.append(inside[0])
        # Such as an average beside the weights: the user should know that it was not taken.
        other_keys += tuple(inside[1:])
        value = value[inside[0]]
    if isinstance(value, dict) and sum(isinstance(tensor, torch.Tensor) for tensor in value.values()) > 1:
        others = [f"{name!r} ({type(v).__name__})" for name, v in value.items() if not isinstance(v, torch.Tensor)]
        raise RequestError(
            f"model.weights {path}: has entries that are not tensors among the weights: {listed(others, _NAMED)}; save "
            f"the file without them"
        )
    kind = f"a dict with {', '.join(map(repr, list(value)[:5]))}" if isinstance(value, dict) else type(value).__name__
    raise RequestError(
        f"model.weights {path}: has {kind}, not a state_dict (names and tensors), nor one under "
        f"{', '.join(map(repr, _WRAPPERS))}; save the model's state_dict() alone"
    )


def _is_state(value: Any) -> bool:
    """Whether a value is a state_dict: a dict of tensors only, and not empty."""
    return (
        isinstance(value, dict) and bool(value) and all(isinstance(tensor, torch.Tensor) for tensor in value.values())
    )
