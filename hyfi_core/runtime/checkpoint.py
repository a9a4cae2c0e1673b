"""Checkpoints on disk: tensors as safetensors, everything else as JSON, nothing pickled.

A checkpoint is a folder that appears complete or not at all::

    step-00000120/
        model.safetensors        weights and buffers under the names of the user's model
        ema.safetensors          their average (moving, or of the optimizer), if kept
        buffers.safetensors      buffers that forwards change and the state_dict leaves out (persistent=False)
        optimizer.safetensors    tensors of the optimizer, "<parameter name>/<key>"
        optimizer.json           its hyper-parameters by group, parameters by name
        state.json               state of training: step, epoch, sample, random state
        model.json               metadata for prediction; size and sha256 of the files above

If a model has several stages, or 256 MB or more on several ranks, these ranks write files of their own (see
:mod:`hyfi_core.runtime.saving.checkpoint_writer` and ``shares``), and no rank needs all weights:
``model-00001-of-00003.safetensors`` and so on, with the usual ``model.safetensors.index.json``. Checkpoints do not
depend on the number of ranks. A folder is renamed when complete and then linked with ``os.replace``, so readers never
see an incomplete checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from hyfi_core.errors import RequestError
from hyfi_core.files import naming, replaced_name, swap_directory, sync_file, temporary_name
from hyfi_core.stored_state import StoredState

FORMAT = 1
WEIGHTS_FILE = "model.safetensors"
AVERAGE_FILE = "ema.safetensors"
BUFFERS_FILE = "buffers.safetensors"
OPTIMIZER_TENSORS_FILE = "optimizer.safetensors"
OPTIMIZER_FILE = "optimizer.json"
STATE_FILE = "state.json"
INDEX_FILE = "model.safetensors.index.json"
MODEL_FILE = "model.json"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint for prediction.

    Attributes:
        path: the folder, links resolved.
        weights: host tensors under the names of the user's model, read from the files when they are used.
        model: the content of ``model.json``.
        averaged: the weights' average, under the same names; None if not kept.
        buffers: those that training changed and that are not in the ``state_dict``, by name; None without any.
    """

    path: Path
    weights: Mapping[str, torch.Tensor]
    model: dict[str, Any]
    averaged: Mapping[str, torch.Tensor] | None = None
    buffers: Mapping[str, torch.Tensor] | None = None

    @property
    def inference_weights(self) -> Mapping[str, torch.Tensor]:
        """The weights for validation and prediction: their average if kept, else the weights."""
        return self.weights if self.averaged is None else self.averaged


@dataclass(frozen=True)
class TrainingState:
    """What resuming needs besides the weights.

    Attributes:
        optimizer: result of ``optimizer_state``.
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
    """Write a checkpoint to a temporary folder, sync it, and rename it to ``folder``, replacing an existing one.

    Args:
        folder: final name; its parent is created if missing.
        weights: the model's ``state_dict``, on any device.
        model: goes to ``model.json``; any content except ``format`` and ``step``.
        optimizer: result of ``optimizer_state``.
        state: goes to ``state.json``.
        averaged: the weights' average.

    Raises:
        OSError: it cannot be written; the temporary folder is removed, and an existing checkpoint stays.
    """
    temporary = temporary_name(folder)
    temporary.mkdir(parents=True)
    try:
        moments = _storable(optimizer["tensors"]) if optimizer is not None else None
        files = write_tensors(
            temporary, _storable(weights), moments, _storable(averaged) if averaged is not None else None
        )
        publish(temporary, folder, files, model, optimizer["groups"] if optimizer is not None else None, state)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_tensors(
    temporary: Path,
    weights: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, torch.Tensor] | None,
    averaged: Mapping[str, torch.Tensor] | None,
    buffers: Mapping[str, torch.Tensor] | None = None,
    number: tuple[int, int] = (0, 1),
) -> dict[str, Any]:
    """Write and sync the tensors of one rank: in host memory, contiguous, no two of them sharing memory.

    Args:
        temporary: the folder; other ranks may write into it, too.
        weights: those of this rank.
        optimizer: its tensors, "<parameter name>/<key>".
        averaged: the average of its weights.
        buffers: its buffers that are not among the weights.
        number: (index of this file, number of files).

    Returns:
        File name -> size and sha256.

    Raises:
        OSError: a file could not be written; they are removed.
    """
    kinds = {WEIGHTS_FILE: weights, AVERAGE_FILE: averaged, OPTIMIZER_TENSORS_FILE: optimizer, BUFFERS_FILE: buffers}
    paths = {temporary / _file_name(name, number): kinds[name] for name in kinds if kinds[name] is not None}
    try:
        for path, tensors in paths.items():
            _save_tensors(tensors or {}, path)
            # Before the rename: otherwise a power cut could leave the final name with empty files.
            sync_file(path)
        sync_file(temporary)
        return {path.name: _fingerprint(path) for path in paths}
    except BaseException:
        for path in paths:  # a full disk needs the room
            path.unlink(missing_ok=True)
        raise


def _save_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write a safetensors file, readable as the umask says, and raise the system's own error if that fails."""
    try:
        path.touch()
        mode = path.stat().st_mode  # by the umask; safetensors replaces the file by one that only its owner can read
        save_file(dict(tensors), path)
        path.chmod(mode)
    except SafetensorError as error:  # its way of saying that the disk is full
        # safetensors has the system's number in its text alone.
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise OSError(f"{path} cannot be written: {error}") from error
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def publish(
    temporary: Path,
    folder: Path,
    files: Mapping[str, Any],
    model: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]] | None,
    state: Mapping[str, Any] | None,
    index: Mapping[str, Any] | None = None,
) -> None:
    """Write the JSON files, and rename the checkpoint to its final name.

    Args:
        temporary: the folder that has all tensors.
        folder: final name; an existing folder is replaced.
        files: results of ``write_tensors`` of all ranks.
        model: goes to ``model.json``.
        groups: parameter groups of the optimizer.
        state: goes to ``state.json``.
        index: goes to ``model.safetensors.index.json``, as it is: other tools read it.
    """
    fingerprints = dict(files)
    optimizer = {"groups": groups} if groups is not None else None
    documents: dict[str, Mapping[str, Any] | None] = {OPTIMIZER_FILE: optimizer, STATE_FILE: state, INDEX_FILE: index}
    for name, value in documents.items():
        if value is not None:
            _write_json(temporary / name, value if name == INDEX_FILE else {"format": FORMAT, **value})
            fingerprints[name] = _fingerprint(temporary / name)
            sync_file(temporary / name)
    # Last: it has the fingerprints of all other files, and a folder without it is no checkpoint.
    _write_json(temporary / MODEL_FILE, {"format": FORMAT, **model, "files": dict(sorted(fingerprints.items()))})
    sync_file(temporary / MODEL_FILE)
    sync_file(temporary)
    swap_directory(temporary, folder, replaced_name(folder))


def _file_name(name: str, number: tuple[int, int]) -> str:
    """Return ``model.safetensors`` for one file, ``model-00002-of-00003.safetensors`` for several."""
    index, count = number
    stem, dot, suffix = name.partition(".")
    return name if count == 1 else f"{stem}-{index + 1:05d}-of-{count:05d}{dot}{suffix}"


def load_checkpoint(path: Path, share: tuple[int, int] = (0, 1)) -> Checkpoint:
    """Open the weights and read ``model.json`` of a checkpoint folder or link.

    Args:
        path: path of the folder or link.
        share: (index of this rank, number of ranks that load it together): each compares some of the digests.

    Raises:
        RequestError: not a checkpoint, an unknown format, or a missing, truncated or altered file.
    """
    folder, model = _open(path)
    weights = _stored_tensors(folder, WEIGHTS_FILE, model, share)
    sections = [
        _stored_tensors(folder, name, model, share) if _files_of(name, model) else None
        for name in (AVERAGE_FILE, BUFFERS_FILE)
    ]
    return Checkpoint(folder, weights, model, *sections)


def read_model_json(path: Path) -> dict[str, Any]:
    """Read ``model.json`` alone, without the weights.

    Raises:
        RequestError: as ``load_checkpoint``.
    """
    return _open(path)[1]


def amend_model_json(path: Path, more: Mapping[str, Any]) -> None:
    """Add the keys of ``more`` to ``model.json``, or replace them, atomically; weights are not changed.

    Raises:
        RequestError: as ``load_checkpoint``.
        OSError: it cannot be written.
    """
    folder, model = _open(path)
    temporary = folder / f".{MODEL_FILE}.{uuid.uuid4().hex}"
    try:
        _write_json(temporary, {**model, **more})
        sync_file(temporary)
        temporary.replace(folder / MODEL_FILE)
    finally:
        temporary.unlink(missing_ok=True)


def load_training_state(path: Path, share: tuple[int, int] = (0, 1)) -> TrainingState:
    """Open the optimizer's tensors and read ``state.json`` of a checkpoint; arguments as of ``load_checkpoint``.

    Raises:
        RequestError: as ``load_checkpoint``; also if a checkpoint was saved without them.
    """
    folder, model = _open(path)
    tensors = _stored_tensors(folder, OPTIMIZER_TENSORS_FILE, model, share)
    groups = _read_json(folder, OPTIMIZER_FILE, model)["groups"]
    return TrainingState({"tensors": tensors, "groups": groups}, _read_json(folder, STATE_FILE, model))


def _storable(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return contiguous host tensors without shared memory (tied weights are stored under each name)."""
    storages: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        # safetensors refuses tensors with gaps, and two that share memory.
        host = tensor.detach().cpu().contiguous()
        storage = host.untyped_storage().data_ptr()
        result[name] = host.clone() if storage in storages else host
        storages.add(storage)
    return result


def _open(path: Path) -> tuple[Path, dict[str, Any]]:
    """Return the folder of a checkpoint, without links, and its ``model.json``."""
    try:
        # A process that was killed while it replaced this checkpoint may have left the older one as ``aside``.
        aside = replaced_name(Path(os.path.realpath(path)))
        if not path.exists() and aside.is_dir():
            path = aside
        exists, has_model = path.exists(), (path / MODEL_FILE).is_file()
    except OSError as error:
        raise RequestError(
            f"checkpoint {path} cannot be read ({error.strerror}); let its owner give you access"
        ) from error
    if not exists:
        raise RequestError(f"checkpoint {path}: no such folder; use RUN/checkpoints/best, latest or step-NNNNNNNN")
    # Links are resolved once: ``latest`` may change while the files are read.
    folder = path.resolve()
    if not has_model:
        hint = "; did you mean its checkpoints/best?" if (folder / "checkpoints").is_dir() else ""
        raise RequestError(f"{path} is not a checkpoint: it has no {MODEL_FILE}{hint}")
    model = _parse(folder / MODEL_FILE)
    if model.get("format") != FORMAT:
        raise RequestError(
            f"checkpoint {folder / MODEL_FILE}: format {model.get('format')!r}, this version reads format {FORMAT}; "
            "use the version of hyfi that wrote it"
        )
    return folder, model


def _stored_tensors(folder: Path, name: str, model: Mapping[str, Any], share: tuple[int, int]) -> StoredState:
    """Return the tensors of a checkpoint's file or files, read when needed.

    Args:
        folder: folder of the checkpoint.
        name: name of the file, if there is one.
        model: its ``model.json``.
        share: (k, n): this rank checks the digests of every n-th file, from the k-th.
    """
    files = _files_of(name, model) or [name]
    for number, file in enumerate(files):
        # All ranks compare its size; one of them reads it for its digest.
        _check_file(folder, file, model, digests=number % share[1] == share[0])
    try:
        return StoredState([folder / file for file in files], " ".join(model["files"][f]["sha256"][:8] for f in files))
    except (SafetensorError, OSError, ValueError) as error:
        raise RequestError(
            f"checkpoint file {folder / files[0]} or one with it cannot be read: {error}; use another checkpoint"
        ) from error


def _files_of(name: str, model: Mapping[str, Any]) -> list[str]:
    """Return the files with the tensors of ``name``: itself, or one of each rank that wrote some."""
    stem, _, suffix = name.partition(".")
    files = model.get("files", {})
    return sorted(file for file in files if file == name or re.fullmatch(rf"{stem}-\d+-of-\d+\.{suffix}", file))


def _read_json(folder: Path, name: str, model: Mapping[str, Any]) -> dict[str, Any]:
    _check_file(folder, name, model)
    return _parse(folder / name)


def _parse(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file, an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"checkpoint file {path} cannot be read: {error}; use another checkpoint") from error
    if not isinstance(value, dict):
        raise RequestError(
            f"checkpoint file {path} holds {type(value).__name__}, not an object; use another checkpoint"
        )
    return value


def _check_file(folder: Path, name: str, model: Mapping[str, Any], digests: bool = True) -> None:
    """Refuse a file that differs from what was saved, or cannot be read."""
    try:
        _check_content(folder, name, model, digests)
    except OSError as error:
        raise RequestError(
            f"checkpoint file {folder / name} cannot be read ({error.strerror}); let its owner give you access"
        ) from error


def _check_content(folder: Path, name: str, model: Mapping[str, Any], digests: bool) -> None:
    """Refuse a file of a checkpoint that is missing or not as it was saved; ``digests``: read it whole for that."""
    path = folder / name
    fingerprint = model.get("files", {}).get(name)
    if not path.is_file() or fingerprint is None:
        raise RequestError(f"checkpoint {folder}: {name} is missing; use another checkpoint")
    size = path.stat().st_size
    if size != fingerprint["bytes"]:
        raise RequestError(
            f"checkpoint file {path} has {size} bytes, but {fingerprint['bytes']} were saved; use another checkpoint"
        )
    if digests and _fingerprint(path)["sha256"] != fingerprint["sha256"]:
        raise RequestError(
            f"checkpoint file {path} was changed after it was saved (its sha256 differs); use another checkpoint"
        )


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    with naming(path):
        path.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")
