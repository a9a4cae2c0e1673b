"""Checkpoints written by all stages together: the first rank of each writes its part, rank 0 publishes it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hyfi_core.comm.base import Communicator
from hyfi_core.runtime.checkpoint import WEIGHTS_FILE, make_beside, publish, write_tensors


@dataclass(frozen=True)
class CheckpointPart:
    """What one rank writes of a checkpoint; every tensor is in one share.

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
    share: CheckpointPart,
    *,
    model: Mapping[str, Any],
    state: Mapping[str, Any] | None,
) -> None:
    """Write a checkpoint of which each rank has a part (collective; needs a shared file system).

    Args:
        folder: final name of the checkpoint.
        comm: the ranks that have shares; a share without weights writes nothing.
        share: this rank's.
        model: goes to ``model.json``; rank 0's counts.
        state: goes to ``state.json``; rank 0's counts.

    Raises:
        OSError: on the rank that cannot write; nothing is left at ``folder``.
    """
    writers = comm.broadcast_object(comm.gather_objects(bool(share.weights)))
    beside = Path(comm.broadcast_object(str(make_beside(folder)) if comm.rank == 0 else None))
    try:
        told: dict[str, Any] = {}
        if share.weights:
            where = (sum(writers[: comm.rank]), sum(writers))
            tensors = share.optimizer["tensors"] if share.optimizer is not None else None
            files = write_tensors(beside, share.weights, tensors, share.averaged, where)
            groups = share.optimizer["groups"] if share.optimizer is not None else None
            told = {"files": files, "groups": groups, "names": {n: t.nbytes for n, t in share.weights.items()}}
        shares = comm.gather_objects(told)
        if shares is not None:
            written = [item for item in shares if item]
            files = {name: print_ for item in written for name, print_ in item["files"].items()}
            publish(beside, folder, files, model, _merged([i["groups"] for i in written]), state, _index(written))
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    comm.barrier()  # no rank uses or removes it before it is published


def _merged(shares: Sequence[Sequence[Mapping[str, Any]] | None]) -> list[dict[str, Any]] | None:
    """Return the optimiser's groups with the parameters of all shares."""
    known = [groups for groups in shares if groups is not None]
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


def _index(shares: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the index of tensors for other tools, None for a single file."""
    if len(shares) == 1:
        return None
    stem = WEIGHTS_FILE.partition(".")[0] + "-"
    where = {name: next(f for f in share["files"] if f.startswith(stem)) for share in shares for name in share["names"]}
    return {"metadata": {"total_size": sum(sum(share["names"].values()) for share in shares)}, "weight_map": where}
