"""Labels and functions as short texts, which ranks compare."""

from __future__ import annotations

import functools
import re
import types
import zlib
from collections.abc import Iterator, Mapping, Set
from typing import Any

import torch
from torch import nn

_DEPTH = 4
"""Depth to which closures, arguments of partials and attributes of objects are described."""
_ITEMS = 4096
"""Longer containers are left out, and of longer tensors only the first values are described."""
_NO_MODULES: Set[nn.Module] = frozenset()
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)


def describe_labels(labels: torch.Tensor) -> str:
    """Return labels as text: the first ones, and a digest of all; of labels on a device only their shape.

    Reading labels from a device would make every step wait for it.
    """
    if labels.device.type != "cpu":
        return f"{tuple(labels.shape)} on {labels.device.type}"
    flat = labels.detach().cpu().contiguous().flatten()
    first = ", ".join(f"{value:.6g}" for value in flat[:8].tolist())
    digest = zlib.crc32(flat.view(torch.uint8).numpy().tobytes())
    return f"{tuple(labels.shape)} {first}{' …' if flat.numel() > 8 else ''} (digest {digest:08x})"


def describe_function(value: object, without: Set[nn.Module] = _NO_MODULES) -> str:
    """Return a function, a module or None as text that is equal where ranks were given the same.

    The text has the values that the function holds: closures, arguments of partials, attributes of objects, tensors of
    modules. Globals that it reads are left out.

    Args:
        value: the function.
        without: modules to leave out where the function holds them: those of the model, whose weights may differ.
    """
    if value is None:
        return "none"
    settings = ", ".join(_settings(value, _DEPTH, without))
    return _name(value) + (f" with {settings}" if settings else "")


def _name(value: object) -> str:
    """Return the name of a function or module, the same in all processes, with a digest of the code of a function."""
    if isinstance(value, nn.Module):
        # Without addresses, which differ between processes: a module may hold a function, whose repr has one.
        return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    if isinstance(value, functools.partial):
        return f"partial of {_name(value.func)}"
    code = getattr(value, "__code__", None)
    name = getattr(value, "__qualname__", type(value).__qualname__)
    return name if code is None else f"{name} (digest {_digest_of_code(code):08x})"


@functools.lru_cache
def _digest_of_code(code: types.CodeType) -> int:
    return zlib.crc32(_describe_code(code).encode())


def _describe_code(code: types.CodeType) -> str:
    # The code of a nested function is a constant, too; its repr would have an address.
    constants = [_describe_code(c) if isinstance(c, types.CodeType) else _constant(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def _constant(value: Any) -> str:
    # ``x in {"a", "b"}`` is compiled to a frozenset, whose order depends on the process's hash seed.
    return str(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def _settings(value: Any, depth: int, without: Set[nn.Module]) -> Iterator[str]:
    """Yield ``name=value`` of each value that a function or an object holds."""
    if isinstance(value, nn.Module) and value in without:
        return
    if isinstance(value, functools.partial):
        yield from _settings(value.func, depth, without)
        yield from _named({**{str(i): item for i, item in enumerate(value.args)}, **value.keywords}, depth, without)
    elif isinstance(value, nn.Module):
        for path, module in value.named_modules():
            yield from _named({f"{path}.{name}".lstrip("."): v for name, v in vars(module).items()}, depth, without)
        yield from _named({**dict(value.named_parameters()), **dict(value.named_buffers())}, depth, without)
    elif isinstance(value, types.MethodType):
        yield from _settings(value.__self__, depth, without)
    elif isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        yield from _named({name: _content(cell) for name, cell in cells}, depth, without)
    elif not isinstance(value, (type, types.ModuleType)):
        yield from _named(getattr(value, "__dict__", {}), depth, without)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _named(values: Mapping[str, Any], depth: int, without: Set[nn.Module]) -> Iterator[str]:
    """Yield ``name=value`` of values with public names; skip those that ``_value`` does not describe."""
    for name, value in values.items():
        if not name.rpartition(".")[2].startswith("_"):
            text = _value(value, depth - 1, without)
            if text is not None:
                yield f"{name}={text}"


def _value(value: Any, depth: int, without: Set[nn.Module]) -> str | None:
    """Return a value as text; None for one that is not described."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if depth > 0 and isinstance(value, (list, tuple)) and len(value) <= _ITEMS:
        return str([_value(item, depth - 1, without) for item in value])
    if depth > 0 and isinstance(value, dict) and len(value) <= _ITEMS:
        return str({str(name): _value(item, depth - 1, without) for name, item in value.items()})
    if isinstance(value, nn.Module) and value in without:
        return None
    if depth > 0 and isinstance(value, (types.FunctionType, types.MethodType, functools.partial, nn.Module)):
        return f"{_name(value)}({', '.join(_settings(value, depth, without))})"
    return None


def _tensor(tensor: torch.Tensor) -> str:
    """Return a tensor's shape and its sums as text; five digits, because processors round differently."""
    if tensor.device.type != "cpu" or not tensor.numel():
        return f"{tuple(tensor.shape)} on {tensor.device.type}"
    flat = tensor.detach().flatten()[:_ITEMS].double()
    weighted = flat @ torch.arange(1, len(flat) + 1, dtype=torch.float64)
    return f"{tuple(tensor.shape)} {tensor.dtype} (sums {flat.sum():.5g}, {weighted:.5g})"
