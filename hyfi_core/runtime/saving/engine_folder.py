"""The folder of ``engine.save``: a checkpoint of weights, optimizer, buffers and random state, valid for any plan."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hyfi_core.comm.agreement.agree import agree, compare
from hyfi_core.comm.base import Communicator
from hyfi_core.errors import RequestError
from hyfi_core.runtime.calls.local_use import local_state
from hyfi_core.runtime.checkpoint import (
    MODEL_FILE,
    OPTIMIZER_FILE,
    Checkpoint,
    TrainingState,
    load_checkpoint,
    load_training_state,
)
from hyfi_core.runtime.saving.checkpoint_writer import CheckpointPart, CheckpointWriter
from hyfi_core.runtime.subject import RandomKey


def save_engine(
    folder: Path,
    comm: Communicator,
    part: CheckpointPart,
    random: RandomKey,
    extra: Mapping[str, Any] | None,
    model_json: Mapping[str, Any] | None,
) -> None:
    """Write a checkpoint beside ``folder`` and rename it (collective); an earlier checkpoint there is replaced.

    Args:
        folder: folder to write, equal on every rank, on a disk that all ranks see.
        comm: all ranks.
        part: this rank's part of the checkpoint.
        random: its key of random operators.
        extra: JSON of the user's own, which is loaded again with the checkpoint.
        model_json: further entries of ``model.json``; JSON.

    Raises:
        RequestError: on every rank: the folder has other files, or ``extra`` or ``model_json`` is not JSON.
        OSError: on every rank: it cannot be written; an earlier checkpoint stays as it was.
    """
    compare(comm, {"the folder to save to": str(folder)})
    agree(comm, lambda: _check_request(folder, extra, model_json))
    # As text, because JSON has no bytes; the state of torch's generator has 5 kB.
    state = {"random": [random.seed, random.step], "rng": bytes(torch.get_rng_state().tolist()).hex()}
    writer = CheckpointWriter(comm, writes=bool(part.weights))
    writer.begin(
        folder,
        part,
        step=random.step,
        model={**(model_json or {}), "saved_by": "Engine.save"},
        state={**state, "extra": extra},
    )
    try:
        # Two rounds: in the first all ranks write their parts, in the second rank 0 publishes.
        while writer.open_step is not None:
            agree(comm, writer.wait, (OSError,), OSError)  # if one rank fails, all do
            writer.advance()
    except OSError:
        writer.discard()
        raise


def read_engine(
    folder: Path, comm: Communicator, model: nn.Module, with_optimizer: bool
) -> tuple[Checkpoint, TrainingState | None]:
    """Open a checkpoint for a model (collective).

    Args:
        folder: folder of the checkpoint, the same on every rank.
        comm: all ranks.
        model: its names and shapes must be those of the checkpoint.
        with_optimizer: whether optimizer and random state are needed.

    Raises:
        RequestError: on every rank: it is not a checkpoint, is damaged or of another model, or has no optimizer.
    """
    compare(comm, {"the folder to load from": str(folder)})
    return agree(comm, lambda: _opened(folder, (comm.rank, comm.size), local_state(model), with_optimizer))


def restore_random(random: RandomKey, state: Mapping[str, Any]) -> None:
    """Restore the random state of a checkpoint's ``state.json``, that of torch's generator included."""
    random.seed, random.step = state["random"]
    torch.set_rng_state(torch.tensor(list(bytes.fromhex(state["rng"])), dtype=torch.uint8))


def _check_request(folder: Path, extra: Mapping[str, Any] | None, model_json: Mapping[str, Any] | None) -> None:
    """Refuse a folder with other files, and values that JSON cannot represent."""
    has_other_files = (
        folder.exists() and not (folder / MODEL_FILE).is_file() and (folder.is_file() or any(folder.iterdir()))
    )
    if has_other_files:
        raise RequestError(f"{folder} exists and is not a checkpoint: engine.save would replace it; pass a new folder")
    for name, value in (("extra", extra), ("model_json", model_json)):
        try:
            # Tried now, although it is written last: nothing is written yet.
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise RequestError(
                f"{name} cannot be saved as JSON ({error}); pass numbers, texts, lists and dicts"
            ) from error
    if reserved := sorted({"files", "format", "saved_by", "step"}.intersection(model_json or ())):
        raise RequestError(f"model_json has {reserved[0]!r}, which engine.save writes itself; leave it out")


def _opened(
    folder: Path, share: tuple[int, int], own: Mapping[str, torch.Tensor], with_optimizer: bool
) -> tuple[Checkpoint, TrainingState | None]:
    """Return a checkpoint and, if asked for, its training state; refuse one that does not fit the model.

    Args:
        folder: folder of the checkpoint.
        share: (rank, ranks): the part of the files whose digests this rank checks.
        own: this rank's ``state_dict`` of the model.
        with_optimizer: whether the training state is needed.
    """
    checkpoint = load_checkpoint(folder, share)
    check_names(folder, checkpoint.weights, own)
    saved = OPTIMIZER_FILE in checkpoint.model["files"]
    if with_optimizer and not saved:
        raise RequestError(
            f"checkpoint {folder} has no optimizer, but this engine has one; load its weights alone with "
            f"engine.load_state_dict"
        )
    return checkpoint, load_training_state(folder, share) if with_optimizer else None


def check_names(folder: Path, saved: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> None:
    """Refuse the weights of another model.

    Args:
        folder: folder of the checkpoint.
        saved: its weights.
        own: the model's ``state_dict``.

    Raises:
        RequestError: names or shapes differ; the message has the first.
    """
    for name in (*own, *saved):
        if name not in saved or name not in own:
            has, lacks = ("the model", "the checkpoint") if name in own else ("the checkpoint", "the model")
            raise RequestError(f"checkpoint {folder} is of another model: {has} has {name!r}, {lacks} does not")
        if saved[name].shape != own[name].shape:
            shapes = f"{tuple(saved[name].shape)} in the checkpoint, {tuple(own[name].shape)} in the model"
            raise RequestError(f"checkpoint {folder} is of another model: {name!r} is {shapes}")
