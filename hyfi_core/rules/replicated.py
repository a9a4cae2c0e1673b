"""Rules for replicated values: replicated from the start, or gathered for one operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from hyfi_core.capture.program import Operator
from hyfi_core.rules.batch_norm import batch_norm_of_features
from hyfi_core.rules.builder import Builder
from hyfi_core.rules.calls import bound, renamed
from hyfi_core.rules.instructions import Split

_RECURRENT = frozenset(f"aten.{name}.input" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"))


def replicated(builder: Builder, op: Operator) -> None:
    """An operator on replicated values only: every rank of the stage computes the same."""
    if draws_numbers(op) and builder.grid != (1, 1):
        builder.refuse(op, "draws random numbers that would differ between ranks", "dropout, bernoulli, rand or randn")
    if draws_numbers(op):
        builder.note_draws(op)
    norm = batch_norm_of_features(builder, op)
    if norm is not None:
        function, inputs = norm
    elif op.text in ("aten.view.default", "aten._unsafe_view.default"):
        # ``reshape``, since memory formats may differ from those at capture, for example in attention.
        function, inputs = bound(replace(op, target=torch.ops.aten.reshape.default))
    else:
        function, inputs = bound(op)
    builder.compute(function, inputs, op.outputs)


def gathered(builder: Builder, op: Operator, problem: str = "cannot be computed part by part") -> None:
    """Gather the maps that an operator takes and compute it as a whole on every rank; then keep only parts of maps.

    Args:
        builder: builder of the rank's program.
        op: any operator.
        problem: the reason, for the message about maps that are too large.

    Raises:
        RequestError: a map is larger than ``gather_bytes``, or the operator draws random numbers.
    """
    maps = {name: builder.splits[name] for name in dict.fromkeys(op.inputs) if name in builder.splits}
    names = {name: builder.gather(op, name, problem) for name in maps}
    if builder.grid == (1, 1):
        replicated(builder, renamed(op, names))
        return
    # New names for whole results: the operator's own names are for the parts, which later rules expect.
    wholes = tuple(None if output is None else builder.fresh(output) for output in op.outputs)
    replicated(builder, replace(renamed(op, names), outputs=wholes))
    for output, result in zip(op.outputs, wholes, strict=True):
        if output is None or result is None:
            continue
        split = next((split for name, split in maps.items() if _has_map_of(builder, output, name, split)), None)
        if split is None:
            builder.compute(lambda tensor: torch.ops.aten.alias.default(tensor), (result,), (output,))
        else:
            part = cut_of_whole(split.owned, builder.rank, tuple(builder.shape(output)))
            builder.compute(part, (result,), (output,), split.owned)


def _has_map_of(builder: Builder, output: str, name: str, split: Split) -> bool:
    """Whether an output has the height and width of an input, in the same dims, so that it can be cut into parts.

    Args:
        builder: knows the shapes.
        output: result of an operator on gathered maps.
        name: one of these maps.
        split: split of that map; outputs are cut only if height and width have their own dims.
    """
    input_shape, output_shape = builder.shape(name), builder.shape(output)
    return (
        split.has_own_dims
        and len(input_shape) == len(output_shape)
        and all(input_shape[dim] == output_shape[dim] for dim in split.dims)
    )


def cut_of_whole(split: Split, rank: int, shape: tuple[int, ...]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that cuts a rank's part out of a replicated value; dims of size 1 are not cut.

    Args:
        split: how the result is split; its dims are those of ``shape``, or negative for a missing one.
        rank: the rank.
        shape: shape of the replicated value.
    """
    if not split.has_own_dims:
        return _cut_of_folded(split, rank, shape)
    box, (y, x) = split.held[rank], split.dims

    def call(tensor: torch.Tensor) -> torch.Tensor:
        for dim, start, length in ((y, box.y0, box.height), (x, box.x0, box.width)):
            if dim >= 0 and shape[dim] > 1:
                tensor = tensor.narrow(dim, start, length)
        return tensor

    return call


def _cut_of_folded(split: Split, rank: int, shape: tuple[int, ...]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function of ``cut_of_whole`` for a value whose height and width are not dims of their own.

    They are one dim (flat), or share theirs with a number of maps, ``split.map_counts``.
    """
    box, map_box, (y, x) = split.held[rank], split.layout.map, split.dims
    cuts = [(y, box.y0, box.height), (x, box.x0, box.width)]

    def call(tensor: torch.Tensor) -> torch.Tensor:
        """Return the rank's part: height and width are opened to dims of their own, cut, and folded again."""
        if split.flat:
            # Missing or of size 1, the dim is broadcast: all positions have the same value, so nothing is cut.
            if y < 0 or (shape[y] == 1 and split.sides[0] != 1):
                return tensor
            opened = tensor.unflatten(y, (split.map_counts[0], *map_box.shape))
            cut: torch.Tensor = opened.narrow(y + 1, box.y0, box.height).narrow(y + 2, box.x0, box.width)
            return cut.flatten(y, y + 2)
        # From the last dim to the first, so that opening a dim does not renumber the next ones.
        for axis, (dim, start, length) in sorted(enumerate(cuts), key=lambda item: -item[1][0]):
            if dim >= 0 and shape[dim] > 1:
                opened = tensor.unflatten(dim, (split.map_counts[axis], map_box.shape[axis]))
                tensor = opened.narrow(dim + 1, start, length).flatten(dim, dim + 1)
        return tensor

    return call


def draws_numbers(op: Operator) -> bool:
    """Whether an operator draws random numbers; attention and recurrent layers do so only with dropout."""
    tags = getattr(op.target, "tags", ())
    if op.text in _RECURRENT:
        # Dropout is between layers, so a single layer has none.
        layers, dropout, train = op.args[4:7]
        return bool(train and dropout and layers > 1)
    if op.text == "aten.scaled_dot_product_attention.default":
        return bool(op.args[4] if len(op.args) > 4 else op.kwargs.get("dropout_p", 0.0))
    return torch.Tag.nondeterministic_seeded in tags
