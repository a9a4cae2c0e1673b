"""Parameters divided over ranks: tensors of ``torch.distributed`` (DTensor), divided along their first dim.

    whole, 10 rows     rank 0: 0 1 2 3    rank 1: 4 5 6 7    rank 2: 8 9        as ``torch.chunk`` divides

Only ``hyfi_core.tiles.sharding`` makes them; the functions here leave other tensors as they are, and import nothing.
"""

from __future__ import annotations

from typing import Any

import torch


def is_shard(tensor: torch.Tensor) -> bool:
    """Whether a rank holds a part of this tensor only."""
    return hasattr(tensor, "device_mesh")


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, not copied and without a graph; the whole tensor if it is no shard."""
    if not is_shard(tensor):
        return tensor.detach()
    part: torch.Tensor = tensor.detach()._local_tensor  # type: ignore[attr-defined]  # to_local copies its view's version
    return part


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor, without a graph (collective over the ranks that share it if it is a shard)."""
    if not is_shard(tensor):
        return tensor.detach()
    gathered: torch.Tensor = tensor.detach().full_tensor()  # type: ignore[attr-defined]
    return gathered


def shard_like(like: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a whole tensor as a new shard, divided like ``like``, without communication.

    Args:
        like: the shard whose division to use.
        value: tensor of the same shape, with the same values on all ranks.
    """
    from torch.distributed.tensor import DTensor

    shard: Any = like
    ranks, rank = shard.device_mesh.size(), shard.device_mesh.get_local_rank()
    # Rounded up as in ``torch.chunk``: the last ranks may have fewer rows, or none.
    rows = -(-len(value) // ranks)
    first = min(len(value), rank * rows)
    part = value[first : first + rows].to(shard.device).contiguous().clone()
    shape, stride = torch.Size(like.shape), like.stride()
    # Shape and stride are passed, since DTensor would infer rows * ranks. ``run_check`` would communicate.
    result: torch.Tensor = DTensor.from_local(
        part, shard.device_mesh, shard.placements, run_check=False, shape=shape, stride=stride
    )
    return result
