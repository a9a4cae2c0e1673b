"""Checkpoints of which several ranks each write a part; rank 0 publishes them.

rank 0   weights, optimizer of stage 0 ──▶ model-00001-of-00002.safetensors ──▶ JSON files, rename: published
rank 1   weights, optimizer of stage 1 ──▶ model-00002-of-00002.safetensors ──╯
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hyfi_core.comm.base import Communicator
from hyfi_core.runtime.checkpoint import WEIGHTS_FILE, make_temporary, publish, write_tensors


@dataclass(frozen=True)
class CheckpointPart:
    """What one rank writes of a checkpoint; every tensor is in the part of one rank.

    Attributes:
        weights: under the names of the user's model.
        optimizer: from ``optimizer_state``, of the same parameters; None to leave it out.
        averaged: the moving average of the weights; None where none is kept.
    """

    weights: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, Any] | None = None
    averaged: Mapping[str, torch.Tensor] | None = None


def save_together(
    folder: Path,
    comm: Communicator,
    part: CheckpointPart,
    *,
    model: Mapping[str, Any],
    state: Mapping[str, Any] | None,
) -> None:
    """Write a checkpoint of which each rank has a part (collective; needs a shared file system).

    Args:
        folder: final name of the checkpoint.
        comm: all ranks with parts; a rank whose part has no weights writes nothing.
        part: this rank's.
        model: goes to ``model.json``; only used on rank 0.
        state: goes to ``state.json``; only used on rank 0.

    Raises:
        OSError: on the rank that cannot write; nothing is left at ``folder``.
    """
    writers = comm.broadcast_object(comm.gather_objects(bool(part.weights)))
    temporary = Path(comm.broadcast_object(str(make_temporary(folder)) if comm.rank == 0 else None))
    try:
        written: dict[str, Any] = {}
        if part.weights:
            number = (sum(writers[: comm.rank]), sum(writers))
            tensors = part.optimizer["tensors"] if part.optimizer is not None else None
            files = write_tensors(temporary, part.weights, tensors, part.averaged, number)
            groups = part.optimizer["groups"] if part.optimizer is not None else None
            written = {"files": files, "groups": groups, "names": {n: t.nbytes for n, t in part.weights.items()}}
        gathered = comm.gather_objects(written)
        if gathered is not None:
            parts = [item for item in gathered if item]
            files = {name: fingerprint for item in parts for name, fingerprint in item["files"].items()}
            publish(temporary, folder, files, model, _merged([item["groups"] for item in parts]), state, _index(parts))
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    comm.barrier()  # no rank uses or removes it before it is published


def _merged(parts: Sequence[Sequence[Mapping[str, Any]] | None]) -> list[dict[str, Any]] | None:
    """Return the optimiser's groups with the parameters of all parts."""
    known = [groups for groups in parts if groups is not None]
    if not known:
        return None
    return [
        {
            **group,
            "names": [name for groups in known for name in groups[index]["names"]],
            "values": {name: value for groups in known for name, value in groups[index]["values"].items()},
        }
        for index, group in enumerate(known[0])
    ]


def _index(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the index that says which file has each tensor, as transformers writes it; None for a single file."""
    if len(parts) == 1:
        return None
    stem = WEIGHTS_FILE.partition(".")[0] + "-"
    where = {name: next(f for f in part["files"] if f.startswith(stem)) for part in parts for name in part["names"]}
    return {"metadata": {"total_size": sum(sum(part["names"].values()) for part in parts)}, "weight_map": where}
