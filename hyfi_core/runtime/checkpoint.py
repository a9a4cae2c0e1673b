"""Checkpoints on disk: tensors as safetensors, everything else as JSON, nothing pickled.

A checkpoint is a folder that appears whole or not at all::

    step-00000120/
        model.safetensors        weights and buffers under the names of the user's model
        optimizer.safetensors    tensors of the optimiser, "<parameter name>/<key>"
        optimizer.json           its hyper-parameters, group by group, parameters by name
        state.json               where training stood: step, epoch, sample, random state
        model.json               what prediction needs; size and sha256 of the files above

Nothing in it depends on how many ranks there were. The last two words of a folder's life are a rename and
``os.replace`` of the links that point at it, so a reader never meets half a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from hyfi_core.errors import RequestError

FORMAT = 1
WEIGHTS_FILE = "model.safetensors"
OPTIMIZER_TENSORS_FILE = "optimizer.safetensors"
OPTIMIZER_FILE = "optimizer.json"
STATE_FILE = "state.json"
MODEL_FILE = "model.json"


@dataclass(frozen=True)
class Checkpoint:
    """What prediction needs.

    Attributes:
        path: the folder, links resolved.
        weights: host tensors under the names of the user's model; the caller owns them.
        model: the content of ``model.json``.
    """

    path: Path
    weights: dict[str, torch.Tensor]
    model: dict[str, Any]


@dataclass(frozen=True)
class TrainingState:
    """What resuming needs besides the weights.

    Attributes:
        optimizer: as ``optimizer_state`` returned it.
        state: the content of ``state.json``.
    """

    optimizer: dict[str, Any]
    state: dict[str, Any]


def save_checkpoint(
    folder: Path,
    *,
    weights: Mapping[str, torch.Tensor],
    model: Mapping[str, Any],
    optimizer: Mapping[str, Any] | None = None,
    state: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint beside ``folder``, sync it, rename it to ``folder``; one that is there is replaced.

    Args:
        folder: where it shall appear; its parent is made if need be.
        weights: the model's ``state_dict``, on any device.
        model: goes to ``model.json``; ``format``, ``step`` apart, its content is the caller's.
        optimizer: from ``optimizer_state``.
        state: goes to ``state.json``.

    Raises:
        OSError: nothing is left behind under ``folder`` then.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = folder.parent / f".{folder.name}.tmp-{uuid.uuid4().hex[:8]}"
    beside.mkdir()
    try:
        save_file(_storable(weights), beside / WEIGHTS_FILE)
        if optimizer is not None:
            save_file(_storable(optimizer["tensors"]), beside / OPTIMIZER_TENSORS_FILE)
            _write_json(beside / OPTIMIZER_FILE, {"format": FORMAT, "groups": optimizer["groups"]})
        if state is not None:
            _write_json(beside / STATE_FILE, {"format": FORMAT, **state})
        files = {path.name: _fingerprint(path) for path in sorted(beside.iterdir())}
        _write_json(beside / MODEL_FILE, {"format": FORMAT, **model, "files": files})
        for path in beside.iterdir():
            _sync(path)
        _sync(beside)
        replaced = folder.parent / f".{folder.name}.tmp-{uuid.uuid4().hex[:8]}"
        if folder.exists():
            folder.rename(replaced)
        beside.rename(folder)
        _sync(folder.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def load_checkpoint(path: Path) -> Checkpoint:
    """Read the weights and ``model.json`` of a checkpoint folder, or of a link to one.

    Raises:
        RequestError: not a checkpoint, of another format, or a file that is missing, short or altered.
    """
    folder, model = _open(path)
    weights = _read_tensors(folder, WEIGHTS_FILE, model)
    return Checkpoint(folder, weights, model)


def read_model_json(path: Path) -> dict[str, Any]:
    """Read ``model.json`` alone, without the weights.

    Raises:
        RequestError: as ``load_checkpoint``.
    """
    return _open(path)[1]


def load_training_state(path: Path) -> TrainingState:
    """Read optimiser and loader state of a checkpoint folder, or of a link to one.

    Raises:
        RequestError: as ``load_checkpoint``; also where a checkpoint was saved without them.
    """
    folder, model = _open(path)
    tensors = _read_tensors(folder, OPTIMIZER_TENSORS_FILE, model)
    groups = _read_json(folder, OPTIMIZER_FILE, model)["groups"]
    return TrainingState({"tensors": tensors, "groups": groups}, _read_json(folder, STATE_FILE, model))


def optimizer_state(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.nn.Parameter]]
) -> dict[str, Any]:
    """Return the optimiser's state by parameter *name*, so that it fits any plan.

    Args:
        optimizer: whose parameters are among ``named``.
        named: the model's ``named_parameters()``.

    Returns:
        ``{"tensors": {"<name>/<key>": tensor}, "groups": [{hyper-parameters, "names": [...], "values": {...}}]}``;
        ``values`` holds the entries that are not tensors. The tensors are the optimiser's own, not copies.
    """
    names = {id(parameter): name for name, parameter in named}
    tensors: dict[str, torch.Tensor] = {}
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        values: dict[str, dict[str, Any]] = {}
        for parameter in group["params"]:
            name = names[id(parameter)]
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{name}/{key}"] = value
                else:
                    values.setdefault(name, {})[key] = value
        hyper = {key: value for key, value in group.items() if key != "params"}
        groups.append({**hyper, "names": [names[id(p)] for p in group["params"]], "values": values})
    return {"tensors": tensors, "groups": groups}


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    named: Iterable[tuple[str, torch.nn.Parameter]],
    saved: Mapping[str, Any],
) -> None:
    """Give ``optimizer`` what ``optimizer_state`` saved; parameters are found by name.

    Raises:
        RequestError: the optimiser has other parameters or other groups than the saved one.
    """
    names = {id(parameter): name for name, parameter in named}
    groups = saved["groups"]
    here = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    if len(here) != len(groups) or any(
        not set(mine) <= set(group["names"]) for mine, group in zip(here, groups, strict=True)
    ):
        raise RequestError(
            "the checkpoint's optimiser holds other parameters than the model's: "
            f"{sum(len(group['names']) for group in groups)} saved, {sum(map(len, here))} now; "
            "resume with the same model"
        )
    for group, wanted in zip(optimizer.param_groups, groups, strict=True):
        group.update(
            {key: _restored(group.get(key), value) for key, value in wanted.items() if key not in ("names", "values")}
        )
        for parameter in group["params"]:
            name = names[id(parameter)]
            state = dict(wanted["values"].get(name, {}))
            for key, value in saved["tensors"].items():
                owner, _, entry = key.rpartition("/")
                if owner == name:
                    state[entry] = _like(parameter, value)
            if state:
                optimizer.state[parameter] = state


def point_link(link: Path, target: str) -> None:
    """Make ``link`` point at its neighbour ``target`` in one atomic step."""
    beside = link.parent / f".{link.name}.tmp-{uuid.uuid4().hex[:8]}"
    beside.symlink_to(target)
    beside.replace(link)
    _sync(link.parent)


def step_folder(checkpoints: Path, step: int) -> Path:
    """Return the folder of one step's checkpoint."""
    return checkpoints / f"step-{step:08d}"


def saved_steps(checkpoints: Path) -> list[int]:
    """Return the steps that have a checkpoint under ``checkpoints``, ascending."""
    if not checkpoints.is_dir():
        return []
    return sorted(int(path.name[5:]) for path in checkpoints.glob("step-*") if path.name[5:].isdigit())


def prune(checkpoints: Path, keep: int, spare: Iterable[int] = ()) -> list[int]:
    """Remove all but the ``keep`` newest checkpoints; never one that a link points at, nor one of ``spare``.

    Leftovers of a write that was killed go as well.

    Returns:
        The steps that were removed.
    """
    for leftover in checkpoints.glob(".*.tmp-*"):
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover, ignore_errors=True)
    linked = {path.resolve().name for path in checkpoints.iterdir() if path.is_symlink()}
    steps = saved_steps(checkpoints)
    removed = []
    for step in steps[: max(0, len(steps) - keep)]:
        folder = step_folder(checkpoints, step)
        if folder.name not in linked and step not in spare:
            shutil.rmtree(folder)
            removed.append(step)
    return removed


def _like(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a copy of ``value`` where the optimiser wants it: beside its parameter, in the parameter's strides."""
    if value.shape != parameter.shape:
        return value.clone()  # counters stay on the host
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def _restored(current: Any, saved: Any) -> Any:
    """Return ``saved`` in the type that the optimiser uses: JSON knows no tuples."""
    return tuple(saved) if isinstance(current, tuple) and isinstance(saved, list) else saved


def _storable(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return contiguous host tensors of which no two share memory (tied weights are stored under each name)."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        host = tensor.detach().cpu().contiguous()
        storage = host.untyped_storage().data_ptr()
        result[name] = host.clone() if storage in seen else host
        seen.add(storage)
    return result


def _open(path: Path) -> tuple[Path, dict[str, Any]]:
    if not path.exists():
        raise RequestError(
            f"checkpoint {path}: there is no such folder; give RUN/checkpoints/best, latest or step-NNNNNNNN"
        )
    folder = path.resolve()
    if not (folder / MODEL_FILE).is_file():
        hint = "; did you mean its checkpoints/best?" if (folder / "checkpoints").is_dir() else ""
        raise RequestError(f"checkpoint {path}: no {MODEL_FILE} in it, so it is not a checkpoint{hint}")
    model = _parse(folder / MODEL_FILE)
    if model.get("format") != FORMAT:
        raise RequestError(
            f"checkpoint {folder / MODEL_FILE}: format {model.get('format')!r}, this version reads format {FORMAT}; "
            "use the version of hyfi that wrote it"
        )
    return folder, model


def _read_tensors(folder: Path, name: str, model: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    _check_file(folder, name, model)
    try:
        return load_file(folder / name)
    except (SafetensorError, OSError, ValueError) as error:
        raise RequestError(
            f"checkpoint file {folder / name} cannot be read: {error}; use another checkpoint"
        ) from error


def _read_json(folder: Path, name: str, model: Mapping[str, Any]) -> dict[str, Any]:
    _check_file(folder, name, model)
    return _parse(folder / name)


def _parse(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"checkpoint file {path} cannot be read: {error}; use another checkpoint") from error
    if not isinstance(value, dict):
        raise RequestError(
            f"checkpoint file {path} holds {type(value).__name__}, not an object; use another checkpoint"
        )
    return value


def _check_file(folder: Path, name: str, model: Mapping[str, Any]) -> None:
    """Refuse a file that is not byte for byte what was saved."""
    path = folder / name
    known = model.get("files", {}).get(name)
    if not path.is_file() or known is None:
        raise RequestError(f"checkpoint {folder}: {name} is missing; use another checkpoint")
    size = path.stat().st_size
    if size != known["bytes"]:
        raise RequestError(
            f"checkpoint file {path} has {size} bytes, {known['bytes']} were saved; use another checkpoint"
        )
    if _fingerprint(path)["sha256"] != known["sha256"]:
        raise RequestError(f"checkpoint file {path} is not what was saved (its sha256 differs); use another checkpoint")


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
