"""Values between stages: how they are split in the stage that receives them, and their transfer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from hyfi_core.capture.stages import Stage
from hyfi_core.ops.boundary import BoundaryTransfer, BoundaryValue
from hyfi_core.plan.layout import Layout
from hyfi_core.rules.instructions import Split

SplitsByName = Mapping[str, Split]
Entries = Mapping[str, Split | None]


def entries_of(stage: Stage, splits: Sequence[SplitsByName], grid: tuple[int, int]) -> dict[str, Split | None]:
    """Return how the values from other stages are split in a stage: evenly, None for replicated ones.

    Args:
        stage: the receiving stage.
        splits: for each earlier stage, how its values are split.
        grid: rows and columns of the receiving stage's ranks.
    """
    entries: dict[str, Split | None] = {}
    for source, names in stage.entries.items():
        for name in names:
            split = splits[source].get(name)
            if split is not None:
                # Evenly, whatever the sender has: each stage has a grid of its own, and operators expect even parts.
                layout = Layout.even(split.layout.height, split.layout.width, grid)
                split = Split(layout, split.dims, map_counts=split.map_counts)
            entries[name] = split
    return entries


def boundary(
    source: Stage,
    target: int,
    have: SplitsByName,
    need: Entries,
    grids: tuple[tuple[int, int], tuple[int, int]],
    active: Collection[str],
    channels_last: bool,
    device: str = "cpu",
) -> BoundaryTransfer:
    """Return the transfer between two stages.

    Args:
        source: the sending stage.
        target: index of the receiving stage.
        have: how values are split in the sending stage.
        need: how they are split in the receiving stage.
        grids: (rows, columns) of the sending stage's ranks, and of the receiving stage's.
        active: values whose cotangents are sent back.
        channels_last: whether maps are received in this format.
        device: device of values.
    """
    carried = []
    for name in source.exits[target]:
        info, split, entry = source.program.values[name], have.get(name), need[name]
        gradient = name in active
        # A value that is replicated on either side is sent whole: all ranks of that side have it, or need it, whole.
        if split is None or entry is None:
            carried.append(BoundaryValue(name, info.shape, info.dtype, gradient))
        else:
            # With height and width as separate dims, as boxes divide them; the receiver folds them again.
            shape, dims = split.opened(info.shape)
            carried.append(
                BoundaryValue(
                    name,
                    shape,
                    info.dtype,
                    gradient,
                    dims,
                    have=split.layout.parts,
                    need=entry.layout.parts,
                    folded=split.folded(),
                )
            )
    sizes = [rows * columns for rows, columns in grids]
    return BoundaryTransfer(tuple(carried), sizes[0], sizes[1], channels_last, torch.device(device))
