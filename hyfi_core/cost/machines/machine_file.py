"""Files of machines: those of this package, and those that ``hyfi doctor --measure FILE.yaml`` writes."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from hyfi_core.cost.machine import (
    KINDS,
    OPTIONAL,
    PAIRS,
    Crowding,
    DeviceLink,
    MachineModel,
    SharedCores,
    UpdateCost,
)
from hyfi_core.errors import RequestError

MACHINES = Path(__file__).parent
DTYPES = ("float32", "float64", "bfloat16", "float16")


def machine_names() -> tuple[str, ...]:
    """Return the names of the machines in the package."""
    return tuple(sorted(path.stem for path in MACHINES.glob("*.yaml")))


def load_machine(name: str | Path) -> MachineModel:
    """Read a machine.

    Args:
        name: one of ``machine_names()``, or the path of a YAML file.

    Raises:
        RequestError: there is no such machine, or a key is missing or invalid; the message names it.
    """
    shipped = MACHINES / f"{name}.yaml"
    path = shipped if str(name) in machine_names() else Path(name)
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        choice = f"{', '.join(machine_names())}, or a file of `hyfi doctor --measure FILE.yaml`"
        raise RequestError(f"machine {str(name)!r}: {error.strerror}; use one of {choice}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise RequestError(f"machine {path}: not YAML: {error}") from None
    return _parse(tree, str(path))


def _parse(tree: Any, source: str) -> MachineModel:
    """Return the machine model of a parsed YAML file; ``source`` names the file in messages."""
    names = [f.name for f in fields(MachineModel)]
    if not isinstance(tree, dict):
        raise RequestError(f"machine {source}: given {type(tree).__name__}; allowed: the keys {', '.join(names)}")
    for key in sorted(set(tree) - set(names)):
        raise RequestError(f"machine {source}: {key}: unknown; allowed: {', '.join(names)}")
    for key in names:
        if key not in tree and key not in OPTIONAL:
            raise RequestError(f"machine {source}: {key}: missing")
    if tree["device"] not in ("cpu", "cuda"):
        raise RequestError(f"machine {source}: device: given {tree['device']!r}; allowed: cpu or cuda")
    peaks = _section(tree, "peak_flops_per_s", source)
    return MachineModel(
        name=str(tree["name"]),
        device=tree["device"],
        devices_per_node=_count(tree, "devices_per_node", source),
        memory_bytes=int(_number(tree, "memory_bytes", source)),
        peak_flops_per_s={dtype: _number(peaks, dtype, source) for dtype in (*DTYPES, *({"tf32"} & set(peaks)))},
        memory_bytes_per_s=_number(tree, "memory_bytes_per_s", source),
        efficiency=_pairs(tree, "efficiency", KINDS, source),
        kernel_s=_number(tree, "kernel_s", source),
        message_s=_number(tree, "message_s", source),
        node=_link(tree, "node", source),
        network=_link(tree, "network", source),
        disk_bytes_per_s=_number(tree, "disk_bytes_per_s", source),
        crowding=_crowding(tree, source) if "crowding" in tree else Crowding(),
        rail_bytes_per_s=_number(tree, "rail_bytes_per_s", source) if "rail_bytes_per_s" in tree else None,
        cores=_cores(tree, source) if "cores" in tree else None,
        strip_s=_forward_backward(tree, "strip_s", source) if "strip_s" in tree else (0.0, 0.0),
        **{key: _pairs(tree, key, tree.get(key, ()), source) for key in PAIRS},
        update=_update(tree, source) if "update" in tree else None,
        host_bytes_per_s=_number(tree, "host_bytes_per_s", source) if "host_bytes_per_s" in tree else None,
    )


def _pairs(tree: Mapping[str, Any], key: str, kinds: Iterable[str], source: str) -> Mapping[str, tuple[float, float]]:
    """Return kind -> (forward, backward) of a section; empty without the section.

    Args:
        tree: the parsed file.
        key: the section's name.
        kinds: the kinds that the section must have.
        source: names the file in messages.
    """
    if key in tree:
        section = _section(tree, key, source)
        for kind in sorted(set(section) - set(KINDS)):
            raise RequestError(f"machine {source}: {key}.{kind}: unknown; allowed: {', '.join(KINDS)}")
        return {kind: _forward_backward(section, kind, source, f"{key}.") for kind in kinds}
    return {}


def _section(tree: Mapping[str, Any], key: str, source: str) -> Mapping[str, Any]:
    if not isinstance(tree[key], dict):
        raise RequestError(f"machine {source}: {key}: given {tree[key]!r}; allowed: a section of numbers")
    return {str(name): value for name, value in tree[key].items()}


def _number(tree: Mapping[str, Any], key: str, source: str) -> float:
    value = tree.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0 or math.isinf(value):
        # YAML 1.1 reads 1e9 and 1.5e9 as texts: a number needs a point, and a sign in its exponent.
        raise RequestError(f"machine {source}: {key}: given {value!r}; allowed: a number greater than 0, as in 1.5e+9")
    return float(value)


def _count(tree: Mapping[str, Any], key: str, source: str) -> int:
    value = _number(tree, key, source)
    if not value.is_integer():
        raise RequestError(f"machine {source}: {key}: given {value!r}; allowed: a whole number from 1")
    return int(value)


def _forward_backward(tree: Mapping[str, Any], kind: str, source: str, section: str = "") -> tuple[float, float]:
    pair = tree.get(kind)
    if not isinstance(pair, list) or len(pair) != 2:
        raise RequestError(f"machine {source}: {section}{kind}: given {pair!r}; allowed: [forward, backward]")
    named = dict(zip(("forward", "backward"), pair, strict=True))
    return _number(named, "forward", source), _number(named, "backward", source)


def _link(tree: Mapping[str, Any], key: str, source: str) -> DeviceLink:
    section = _section(tree, key, source)
    return DeviceLink(_number(section, "latency_s", source), _number(section, "bytes_per_s", source))


def _cores(tree: Mapping[str, Any], source: str) -> SharedCores:
    section = _section(tree, "cores", source)
    turn_s, waiting = _number(section, "turn_s", source), _number(section, "waiting", source)
    return SharedCores(_count(section, "count", source), turn_s, waiting)


def _update(tree: Mapping[str, Any], source: str) -> UpdateCost:
    section = _section(tree, "update", source)
    keys = "tensor_s", "bytes_per_s", *(["watch_s"] if "watch_s" in section else [])
    return UpdateCost(*(_number(section, key, source) for key in keys))


def _crowding(tree: Mapping[str, Any], source: str) -> Crowding:
    section = _section(tree, "crowding", source)
    return Crowding(_number(section, "compute", source), _number(section, "memory", source))


@functools.cache
def reference_machine() -> MachineModel:
    """Return the machine model for choices that must be the same on all machines."""
    return load_machine("cpu")
