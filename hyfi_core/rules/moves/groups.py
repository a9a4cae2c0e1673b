"""Groups of tiles, for models that encode the tiles of their image group by group, and join the vectors.

    tiles 0 … 14 on 2 ranks     0 1 2 3 4 5 6 │ 7 8 9 10 11 12 13 14        in order: one exchange, none if rows of
    tiles[0:6], tiles[6:12], …  0 1 2 3 4 5   │                             tiles are whole on each rank
                                            6 │ 7 8 9 10 11
                                              │              12 13 14
    cat                         0 1 2 3 4 5 6 │ 7 8 9 10 11 12 13 14        nothing moves

Tiles in order are a flat map of one row. A rank that has none of a group does nothing for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from weakref import WeakKeyDictionary

import torch

from hyfi_core.capture.program import Operator
from hyfi_core.plan.boxes import Boxes
from hyfi_core.plan.layout import Layout
from hyfi_core.rules.builder import Builder
from hyfi_core.rules.instructions import Split

_IN_ORDER: WeakKeyDictionary[Builder, dict[str, tuple[str, Split]]] = WeakKeyDictionary()
"""Builder -> name of tiles -> (name of these tiles in order, its split), so that all groups share one exchange."""


def group(builder: Builder, name: str, output: str | None, start: int, stop: int) -> None:
    """Emit ``output``, the tiles ``[start, stop)`` of a value with tiles in dim 0."""
    ordered = _in_order(builder, name)
    cuts, rank = builder.splits[ordered].layout.columns, builder.rank
    # Where ranks cut the group: cuts clamped to it, and counted from its start.
    inner = tuple(min(max(cut, start), stop) - start for cut in cuts)
    first, count = max(start - cuts[rank], 0), inner[rank + 1] - inner[rank]
    builder.compute(lambda tiles: tiles.narrow(0, first, count), (ordered,), (output,), _split_in_order(inner))


def cat_of_groups(builder: Builder, op: Operator, names: Sequence[str]) -> None:
    """Emit the ``cat`` of groups of tiles: each rank joins the tiles that it has, which must be consecutive.

    Args:
        builder: builder of the rank's program.
        op: the operator.
        names: names of the groups.

    Raises:
        RequestError: some rank's tiles are not consecutive.
    """
    splits = [builder.splits.get(name) for name in names]
    cuts = _joined([split for split in splits if split is not None and _is_in_order(split)])
    if cuts is None or not all(split is not None and _is_in_order(split) for split in splits):
        builder.refuse(op, "joins tiles in another order than theirs", "groups of tiles, in order")
    is_present = [split is not None and not split.held[builder.rank].empty for split in splits]
    dtype = builder.values[op.first_output].dtype

    def call(*parts: torch.Tensor) -> torch.Tensor:
        # With groups of several dtypes, a rank may have parts of one dtype only.
        return torch.cat([part for part, present in zip(parts, is_present, strict=True) if present]).to(dtype)

    builder.compute(call, tuple(names), op.outputs, _split_in_order(cuts))


def _split_in_order(cuts: tuple[int, ...]) -> Split:
    """Return the split of tiles in dim 0 of which each rank has consecutive ones, as a flat map of one row."""
    return Split(Layout((0, 1), cuts), (0, 0))


def _is_in_order(split: Split) -> bool:
    """Whether each rank has consecutive tiles, in the order of ranks."""
    return split.in_batch and split.map_counts == (1, 1) and split.layout.rows == (0, 1)


def _joined(groups: list[Split]) -> tuple[int, ...] | None:
    """Return the cuts of groups that are joined in order; None if some rank's tiles are then not consecutive."""
    ranks = {len(split.layout.parts) for split in groups}
    if len(ranks) != 1:
        return None
    cuts = [0]
    for rank in range(ranks.pop()):
        # Along the groups in order, this rank's tiles must continue where its last ones ended.
        end, offset = cuts[-1], 0
        for split in groups:
            start, stop = (offset + cut for cut in split.layout.columns[rank : rank + 2])
            if stop > start and start != end:
                return None
            end = stop if stop > start else end
            offset += split.layout.width
        cuts.append(end)
    return tuple(cuts) if cuts[-1] == sum(split.layout.width for split in groups) else None


def _in_order(builder: Builder, name: str) -> str:
    """Return the name of tiles in order: each rank has consecutive ones; redistributed tiles are divided evenly."""
    if _is_in_order(builder.splits[name]):
        return name
    ordered = _IN_ORDER.setdefault(builder, {})
    result, split = ordered.get(name, ("", None))
    if split is None or builder.splits.get(result) is not split:  # a builder may have been rewound
        result = _put_in_order(builder, name)
        ordered[name] = result, builder.splits[result]
    return result


def _put_in_order(builder: Builder, name: str) -> str:
    """Emit tiles in the order of the batch, each rank with a row of consecutive ones; return the value's name."""
    split, shape, result = builder.splits[name].owned, builder.shape(name), builder.fresh(name)
    part, (down, across) = builder.part(name, split), split.layout.map.shape
    images, ranks = split.map_counts[0], len(split.layout.parts)
    # Where ranks have whole rows of one image, each rank's tiles are consecutive as they are.
    whole_rows = images == 1 and len(split.layout.columns) == 2
    cuts = tuple(cut * across for cut in split.layout.rows) if whole_rows else _even(shape[0], ranks)
    if ranks == 1:
        builder.compute(lambda tiles: tiles.view_as(tiles), (part,), (result,), _split_in_order(cuts))
        return result
    opened, pieces, own_spans = builder.opened(part), [], []
    for image in range(images):
        first = image * down * across
        spans = [
            (max(start, first) - first, min(stop, first + down * across) - first) for start, stop in pairwise(cuts)
        ]
        # Boxes have whole rows of tiles: a rank receives each row of which it needs a tile, then drops the tiles of
        # other ranks at both ends.
        rows = tuple((start // across, -(-stop // across)) if start < stop else (0, 0) for start, stop in spans)
        pieces.append(builder.moved(_image(builder, opened, image, images), Boxes(rows, ((0, across),))))
        start, stop = spans[builder.rank]
        own_spans.append((start - rows[builder.rank][0] * across, max(stop - start, 0)))

    def call(*tiles: torch.Tensor) -> torch.Tensor:
        chosen = [piece.flatten(0, 1).narrow(0, *own) for piece, own in zip(tiles, own_spans, strict=True) if own[1]]
        return chosen[0] if len(chosen) == 1 else torch.cat(chosen)

    builder.compute(call, tuple(pieces), (result,), _split_in_order(cuts))
    return result


def _image(builder: Builder, opened: str, image: int, images: int) -> str:
    """Return the name of the tiles (rows, columns, …) of one image, out of those of all images."""
    if images == 1:
        return opened
    result = builder.fresh(opened, builder.shape(opened)[1:])
    split = Split(builder.splits[opened].layout, (0, 1))
    builder.compute(lambda tiles: tiles[image], (opened,), (result,), split)
    return result


def _even(length: int, count: int) -> tuple[int, ...]:
    return Layout.even(1, length, (1, count)).columns
