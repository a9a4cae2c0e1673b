"""The last map before the output, whose positions are explained one by one.

    feature maps      ── (B, C, h, w) ── mean or maximum over space ── linear ── logits
    tiles of an image ── (B · h · w, C), or (B, h · w, C) ── aggregator ── linear ── logits      positions are tiles

For tiles it is the last value that has a vector for each tile: behind attention, the weighted vectors.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from hyfi_core.capture.program import refs_in
from hyfi_core.errors import NoMapError
from hyfi_core.lowering.joined_calls import unjoined
from hyfi_core.lowering.segments import Tape, build_tape
from hyfi_core.rules.instructions import RankProgram


def last_map(ranked: RankProgram) -> tuple[str, int] | None:
    """Return (name of the last split map on which the output depends, index of the instruction after it).

    None if the output is not reduced from a map.
    """
    needed_names = set(refs_in(ranked.outputs))
    tile_grids = _grids_of_tiles(ranked)
    for index in range(len(ranked.instructions) - 1, -1, -1):
        instruction = ranked.instructions[index]
        outputs = [o for o in instruction.outputs if o in needed_names and o is not None]
        if not outputs:
            continue
        map_name = next((o for o in outputs if o in ranked.splits and o in ranked.program.values), None)
        if map_name is not None and ranked.floating(map_name) and _is_explained(ranked, map_name, tile_grids):
            return map_name, index + 1
        # From the output backwards, so that the first map reached is the last one before the output.
        needed_names.update(name for name in instruction.inputs if name is not None)
    return None


def has_last_map(ranked: RankProgram) -> bool:
    """Whether the output is reduced from a map."""
    return last_map(replace(ranked, instructions=unjoined(ranked.instructions))) is not None


def is_feature_map(ranked: RankProgram, name: str) -> bool:
    """Whether a split value is ``(B, C, H, W)``, not some other shape with space in it."""
    split = ranked.splits[name]
    return split.has_own_dims and split.dims == (2, 3) and len(ranked.values[name].shape) == 4


def as_map(ranked: RankProgram, name: str, part: torch.Tensor, rank: int) -> torch.Tensor:
    """Return a rank's part of the last map as ``(B, C, h, w)``; a view where possible.

    Args:
        ranked: the rank's program.
        name: the last map.
        part: the rank's tensor of it.
        rank: its position in the layout.
    """
    if is_feature_map(ranked, name):
        return part
    split, shape = ranked.splits[name].owned, ranked.values[name].shape
    opened, (y, x) = part.reshape(split.opened_here(shape, rank)), split.opened(shape)[1]
    if y == 0:  # one image: the batch dim is that of its tiles, so a dim for images is added
        opened, y, x = opened[None], y + 1, x + 1
    return opened.movedim((y, x), (-2, -1)).flatten(1, -3)


def _is_explained(ranked: RankProgram, name: str, tile_grids: set[tuple[int, int]]) -> bool:
    """Whether each position of a split value can be explained: it is a feature map, or has a vector for each tile."""
    return is_feature_map(ranked, name) or _has_vectors_of_tiles(ranked, name, tile_grids)


def _grids_of_tiles(ranked: RankProgram) -> set[tuple[int, int]]:
    """Return the rows and columns of the tiles ``(N, C, h, w)`` that the model encodes.

    Grids of one row do not count: they are groups of tiles, whose positions in the image are not known.
    """
    maps = (split for name, split in ranked.splits.items() if len(ranked.values[name].shape) == 4 and split.in_batch)
    return {split.layout.map.shape for split in maps if split.layout.height > 1}


def _has_vectors_of_tiles(ranked: RankProgram, name: str, tile_grids: set[tuple[int, int]]) -> bool:
    """Whether a split value has one vector for each tile of each image: ``(N, C)``, ``(B, N, C)`` or ``(B, C, N)``."""
    split, shape = ranked.splits[name], ranked.values[name].shape
    if not split.flat or split.layout.map.shape not in tile_grids:
        return False
    images = ranked.values[ranked.program.image].shape[0]
    if split.in_batch:
        return len(shape) == 2 and split.map_counts == (images, 1)
    return len(shape) == 3 and shape[0] == images and split.map_counts == (1, 1)


def split_tape(ranked: RankProgram) -> tuple[str, Tape, Tape]:
    """Return (name of the last map, tape up to it, tape from there to the output with gradients of the map).

    Raises:
        NoMapError: the output is not reduced from a map.
    """
    map_and_index = last_map(ranked)
    if map_and_index is None:
        raise NoMapError("the model does not pool a feature map into its output, so its pixels have no contributions")
    name, index = map_and_index
    body = build_tape(ranked, (), stop=index)
    head = build_tape(ranked, (name,), start=index)
    return name, body, head
