"""Checkpoints on disk: tensors as safetensors, everything else as JSON, nothing pickled.

A checkpoint is a folder that appears whole or not at all::

    step-00000120/
        model.safetensors        weights and buffers under the names of the user's model
        ema.safetensors          their moving average, where one is kept
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
from hyfi_core.files import sync_file

FORMAT = 1
WEIGHTS_FILE = "model.safetensors"
AVERAGE_FILE = "ema.safetensors"
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
        averaged: the weights' moving average, under the same names; None where none was kept.
    """

    path: Path
    weights: dict[str, torch.Tensor]
    model: dict[str, Any]
    averaged: dict[str, torch.Tensor] | None = None

    @property
    def judged(self) -> dict[str, torch.Tensor]:
        """What is validated and predicts: the moving average where there is one, else the weights."""
        return self.weights if self.averaged is None else self.averaged


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
    averaged: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write a checkpoint beside ``folder``, sync it, rename it to ``folder``; one that is there is replaced.

    Args:
        folder: where it shall appear; its parent is made if need be.
        weights: the model's ``state_dict``, on any device.
        model: goes to ``model.json``; ``format``, ``step`` apart, its content is the caller's.
        optimizer: from ``optimizer_state``.
        state: goes to ``state.json``.
        averaged: the weights' moving average.

    Raises:
        OSError: nothing is left behind under ``folder`` then.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = folder.parent / f".{folder.name}.tmp-{uuid.uuid4().hex[:8]}"
    beside.mkdir()
    try:
        save_file(_storable(weights), beside / WEIGHTS_FILE)
        if averaged is not None:
            save_file(_storable(averaged), beside / AVERAGE_FILE)
        if optimizer is not None:
            save_file(_storable(optimizer["tensors"]), beside / OPTIMIZER_TENSORS_FILE)
            _write_json(beside / OPTIMIZER_FILE, {"format": FORMAT, "groups": optimizer["groups"]})
        if state is not None:
            _write_json(beside / STATE_FILE, {"format": FORMAT, **state})
        files = {path.name: _fingerprint(path) for path in sorted(beside.iterdir())}
        _write_json(beside / MODEL_FILE, {"format": FORMAT, **model, "files": files})
        for path in beside.iterdir():
            sync_file(path)
        sync_file(beside)
        replaced = folder.parent / f".{folder.name}.tmp-{uuid.uuid4().hex[:8]}"
        if folder.exists():
            folder.rename(replaced)
        beside.rename(folder)
        sync_file(folder.parent)
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
    kept = AVERAGE_FILE in model.get("files", {})
    return Checkpoint(folder, weights, model, _read_tensors(folder, AVERAGE_FILE, model) if kept else None)


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


def point_link(link: Path, target: str) -> None:
    """Make ``link`` point at its neighbour ``target`` in one atomic step."""
    beside = link.parent / f".{link.name}.tmp-{uuid.uuid4().hex[:8]}"
    beside.symlink_to(target)
    beside.replace(link)
    sync_file(link.parent)


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
