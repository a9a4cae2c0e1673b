"""Rules for operators over the positions of a flat map, ``x.flatten(2)``, whose results are small.

    max, argmax          the first extreme of each part, then of these
    gather, index        each rank takes the positions that it has; one sum over ranks
    topk                 the k largest of each part, then of these

Of equal values at the limit of a ``topk``, one process may choose others. A map that is small enough is therefore
gathered (see ``plan.gather_bytes``), which gives the same choice.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from hyfi_core.capture.program import Operator
from hyfi_core.ops.reduce import FirstMaximum, SumOverRanks
from hyfi_core.rules.builder import Builder
from hyfi_core.rules.instructions import Split
from hyfi_core.rules.product import sum_of_parts


def over_positions(builder: Builder, op: Operator, dim: int) -> bool:
    """Whether an operator along ``dim`` of its first argument is along the positions of one flat map of real numbers.

    A ``dim`` may be negative.
    """
    name = op.args[0].name
    split = builder.splits.get(name)
    dim_count = len(builder.shape(name))
    return (
        split is not None
        and split.flat
        and split.map_counts == (1, 1)
        and dim % dim_count == split.dims[0]
        and builder.values[name].dtype.is_floating_point
    )


def _places(
    split: Split, rank: int, positions: torch.Tensor, operator: str, from_end: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (indices in this rank's part, 0 for positions of other ranks; whether each position is in this part).

    Args:
        split: split of the flat map.
        rank: rank of this process.
        positions: tensor of positions in the flat map.
        operator: its name, for the error about a position outside of the map.
        from_end: whether negative positions count from the end, as in ``h[rows, positions]``.
    """
    box, width, area = split.layout.parts[rank], split.layout.map.width, split.layout.map.area
    least = -area if from_end else 0
    # All ranks have the same positions, so all of them raise. On a GPU the host does not wait, as in PyTorch.
    torch.ops.aten._assert_async.msg(
        ((positions >= least) & (positions < area)).all(),
        f"{operator}: an index is outside of [{least}, {area}), the positions of a flat map of "
        f"{split.layout.map.height} x {width}",
    )
    positions = torch.where(positions < 0, positions + area, positions)
    y, x = positions // width, positions % width
    inside = (y >= box.y0) & (y < box.y1) & (x >= box.x0) & (x < box.x1)
    # For other ranks' positions, index 0 is read and then replaced by zeros.
    return torch.where(inside, (y - box.y0) * box.width + x - box.x0, 0), inside


def gather(builder: Builder, op: Operator) -> None:
    """``gather`` and ``index_select`` along the positions, by indices that every rank has."""
    name, dim, index = op.args[0].name, op.args[1], op.args[2].name
    split, select = builder.splits[name].owned, op.text.startswith("aten.index_select")
    dim %= len(builder.shape(name))

    def of_part(tensor: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the values at the positions that this rank has, 0 at others."""
        # Checked first: for a bad index, a rank without pixels raises as the others do, and does not wait for them.
        local, inside = _places(split, builder.rank, positions, op.text)
        if not tensor.numel():
            # An empty sum, 0, connects the result to the input, so that all ranks have the same backward.
            return tensor.sum() + tensor.new_zeros(builder.shape(op.first_output))
        if select:
            entries = tensor.index_select(dim, local)
            inside = inside.view(-1, *[1] * (tensor.dim() - 1 - dim))
        else:
            entries = tensor.gather(dim, local)
        return torch.where(inside, entries, 0.0)

    sum_of_parts(builder, of_part, (builder.part(name, split), index), op.first_output)


def index(builder: Builder, op: Operator) -> None:
    """``h[rows, positions]``, by indices that every rank has."""
    name, indexers = op.args[0].name, op.args[1]
    split = builder.splits[name].owned
    indexed_dims = [dim for dim, item in enumerate(indexers) if item is not None]
    index_names = tuple(indexers[dim].name for dim in indexed_dims)
    are_adjacent = indexed_dims == list(range(indexed_dims[0], indexed_dims[0] + len(indexed_dims)))
    # As in NumPy, the dims of the indices replace those that are indexed, or come first if these are not adjacent.
    first_dim_of_indices = indexed_dims[0] if are_adjacent else 0
    of_positions = indexed_dims.index(split.dims[0])

    def of_part(tensor: torch.Tensor, *indices: torch.Tensor) -> torch.Tensor:
        """Return the entries at the positions that this rank has, 0 for others.

        Args:
            tensor: this rank's part of the flat map.
            indices: the index of each indexed dim; that of the positions counts in the whole map.
        """
        # Checked first: for a bad index, a rank without pixels raises as the others do, and does not wait for them.
        local, inside = _places(split, builder.rank, indices[of_positions], op.text, from_end=True)
        if not tensor.numel():
            # An empty sum, 0, connects the result to the input, so that all ranks have the same backward.
            return tensor.sum() + tensor.new_zeros(builder.shape(op.first_output))
        index_of_dim = dict(zip(indexed_dims, indices, strict=True)) | {split.dims[0]: local}
        entries = tensor[tuple(index_of_dim.get(dim, slice(None)) for dim in range(tensor.dim()))]
        inside = inside.expand(torch.broadcast_shapes(*(item.shape for item in indices)))
        dims_after = entries.dim() - first_dim_of_indices - inside.dim()
        return torch.where(inside.reshape(*inside.shape, *[1] * dims_after), entries, 0.0)

    inputs = (builder.part(name, split), *index_names)
    if len(set(inputs)) < len(inputs):
        builder.refuse(op, "uses one tensor as index of two dims", "a tensor for each")
    sum_of_parts(builder, of_part, inputs, op.first_output)


def extreme(builder: Builder, op: Operator) -> None:
    """``max``, ``min``, ``argmax`` and ``argmin`` along the positions: the first of equal extremes.

    One collective operator finds maxima of maps (N, 1, height, width), so the part is brought into this shape and the
    results out of it.
    """
    name = op.args[0].name
    split, shape = builder.splits[name].owned, builder.shape(name)
    dim = op.args[1] % len(shape)
    keepdim = bool(op.args[2] if len(op.args) > 2 else op.kwargs.get("keepdim", False))
    box, is_min = split.layout.parts[builder.rank], "min" in op.text
    leading = (*shape[:dim], *shape[dim + 1 :])
    map_shape = (math.prod(leading), 1, box.height, box.width)
    result_shape = (*shape[:dim], 1, *shape[dim + 1 :]) if keepdim else leading

    def of_part(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.movedim(dim, -1).reshape(map_shape)
        # The smallest value is the largest of the negatives. Else a copy: the reshaped view has the map's memory.
        return -tensor if is_min else tensor.clone()

    def finish(top: torch.Tensor, where: torch.Tensor) -> Any:
        values = (-top if is_min else top.clone()).reshape(result_shape)
        return (
            where.reshape(result_shape).clone() if "arg" in op.text else (values, where.reshape(result_shape).clone())
        )

    maps, top = builder.fresh(name, map_shape), builder.fresh(name, (map_shape[0], 1, 1, 1))
    where = builder.fresh(name, (map_shape[0], 1, 1, 1), torch.int64)
    builder.compute(of_part, (builder.part(name, split),), (maps,))
    builder.communicate(FirstMaximum(box, split.layout.map.width, last_nan=False), (maps,), (top, where), "reduce")
    builder.compute(finish, (top, where), op.outputs)


def topk(builder: Builder, op: Operator) -> None:
    """``topk`` along the positions of a map that is too large to be gathered."""
    name, count = op.args[0].name, int(op.args[1])
    split, shape = builder.splits[name].owned, builder.shape(name)
    info, ranks = builder.values[name], len(split.layout.parts)
    dim = (op.args[2] if len(op.args) > 2 else -1) % len(shape)
    largest = bool(op.args[3]) if len(op.args) > 3 else True
    # Refused here, a small map is gathered instead (``lowering.lower``), with the choice of one process.
    small = math.prod(shape) * info.dtype.itemsize <= builder.gather_bytes
    # With so many candidates, the message would be as long as the map.
    if small or ranks * count >= shape[dim]:
        builder.refuse(op, f"takes the {count} largest of {shape[dim]} positions", "fewer values, or a gathered map")
    box, width = split.layout.parts[builder.rank], split.layout.map.width
    wide = torch.promote_types(info.dtype, torch.float32)
    candidate_counts = [min(count, part.area) for part in split.layout.parts]
    gathered_shape = (ranks, *shape[:dim], *shape[dim + 1 :], count)

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        """Return (ranks, …, count) with this rank's candidates in its row, and zeros in those of others."""
        # ``finish`` leaves the padding out: it knows the number of each rank's candidates.
        tensor = torch.nn.functional.pad(tensor, (0, count - tensor.shape[-1]))
        # Each rank fills its own row, and the sum over ranks has all of them.
        rows = (
            tensor.new_zeros((builder.rank, *tensor.shape)),
            tensor.new_zeros((ranks - 1 - builder.rank, *tensor.shape)),
        )
        return torch.cat([rows[0], tensor[None], rows[1]])

    def of_part(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tensor = tensor.movedim(dim, -1).to(wide)
        values, local = tensor.topk(min(count, box.area), -1, largest)
        # Divisors of at least 1: a rank without pixels has a box of no width.
        where = (box.y0 + local // max(1, box.width)) * width + box.x0 + local % max(1, box.width)
        return placed(values), placed(where)

    def finish(values: torch.Tensor, where: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # Only the candidates of each rank: the zeros behind them could be chosen in place of pixels.
        values, where = (
            torch.cat([row[..., :of_rank] for row, of_rank in zip(item, candidate_counts, strict=True)], -1)
            for item in (values, where)
        )
        top, at = values.topk(count, -1, largest)
        return top.to(info.dtype).movedim(-1, dim).clone(), where.gather(-1, at).movedim(-1, dim).clone()

    rows, all_rows = builder.fresh(name, gathered_shape, wide), builder.fresh(name, gathered_shape, wide)
    places, all_places = (
        builder.fresh(name, gathered_shape, torch.int64),
        builder.fresh(name, gathered_shape, torch.int64),
    )
    builder.compute(of_part, (builder.part(name, split),), (rows, places))
    builder.communicate(SumOverRanks(), (rows,), (all_rows,), "reduce")
    builder.communicate(SumOverRanks(), (places,), (all_places,), "reduce")
    builder.compute(finish, (all_rows, all_places), op.outputs)
