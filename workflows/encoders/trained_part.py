"""Which part of an encoder is trained: all of it, nothing, its last blocks, its norms, or low-rank updates."""

from __future__ import annotations

import re

from torch import nn

from hyfi_core.errors import RequestError
from workflows.encoders.lora import is_lora
from workflows.finetuning.parameter_groups import layer_depths

_LAST = re.compile(r"last:(\d+)")
_LORA = re.compile(r"lora:(\d+)")
_ALLOWED = "all, none, norms, last:N for the last N blocks, or lora:R for updates of rank R"


def lora_rank(train: str) -> int | None:
    """Return the rank of ``lora:R``; None for the others."""
    match = _LORA.fullmatch(train)
    return None if match is None else int(match[1])


def frozen_patterns(encoder: nn.Module, train: str) -> tuple[str, ...]:
    """Return the frozen parts of an encoder as patterns for ``model.freeze``, without the encoder's prefix.

    Args:
        encoder: The encoder; its values are not read. For ``lora:R`` it has its updates (`add_lora`).
        train: ``all``, ``none``, ``norms``, ``last:N`` or ``lora:R``.

    Returns:
        Names of frozen modules and parameters; empty if everything is trained, ``("*",)`` if nothing is.

    Raises:
        RequestError: ``train`` is something else, or the encoder has no norm.
    """
    names = [name for name, _ in encoder.named_parameters()]
    last = _LAST.fullmatch(train)
    if train == "all":
        return ()
    if train == "none" or (last is not None and int(last[1]) == 0):
        return ("*",)
    if train == "norms":
        trained = _of_norms(encoder)
        if not trained:
            raise RequestError("train: norms: the encoder has no norm with parameters; use all, none or last:N")
    elif lora_rank(train) is not None:
        trained = {name for name in names if is_lora(name)}
        assert trained, "updates are added before"
    elif last is not None:
        trained = _of_last(encoder, int(last[1]))
    else:
        raise RequestError(f"train: given {train!r}; allowed: {_ALLOWED}")
    return _as_modules(names, {name for name in names if name not in trained})


def _of_norms(encoder: nn.Module) -> set[str]:
    """Return the parameters of modules whose class name contains "norm" and that contain no other modules."""
    return {
        f"{path}.{name}" if path else name
        for path, module in encoder.named_modules()
        if "norm" in type(module).__name__.lower() and not any(True for _ in module.children())
        for name, _ in module.named_parameters(recurse=False)
    }


def _of_last(encoder: nn.Module, count: int) -> set[str]:
    """Return the parameters of the last blocks, and of what comes after them."""
    depths = layer_depths(encoder)
    # Blocks have a number in their name; stem and head are layers without one.
    blocks = sorted({depth for name, depth in depths.items() if re.search(r"\.\d+\.", name)})
    # No sequence of blocks: each layer counts as a block.
    if not blocks:
        blocks = sorted(set(depths.values()))
    if count > len(blocks):
        raise RequestError(f"train: last:{count}: the encoder has {len(blocks)} blocks; use all, or a smaller number")
    return {name for name, depth in depths.items() if depth >= blocks[-count]}


def _as_modules(names: list[str], frozen: set[str]) -> tuple[str, ...]:
    """Return the outermost modules all of whose parameters are frozen, and the other frozen parameters.

    Args:
        names: All parameters of the encoder.
        frozen: Those that are not trained.
    """
    patterns: list[str] = []
    for name in names:
        if name not in frozen or any(name == pattern or name.startswith(f"{pattern}.") for pattern in patterns):
            continue
        parts = name.split(".")
        modules = [".".join(parts[:end]) for end in range(1, len(parts))]
        # From the outermost on: `blocks` rather than `blocks.0`, `blocks.1` …
        patterns.append(next((module for module in modules if _is_frozen(module, names, frozen)), name))
    return tuple(patterns)


def _is_frozen(module: str, names: list[str], frozen: set[str]) -> bool:
    return all(name in frozen for name in names if name.startswith(f"{module}."))
