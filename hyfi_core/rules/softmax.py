"""Rules for softmax over all pixels and for attention: a maximum over ranks, then a sum over ranks.

    softmax      m = max over ranks of x      s = Σ over ranks of exp(x - m)      y = exp(x - m) / s
    attention    the same, and Σ over ranks of exp(x - m) · v in the same message

The shift by m avoids overflow and does not change the result, so m has no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from hyfi_core.capture.program import Operator
from hyfi_core.ops.reduce import LargestOverRanks, SumOverRanks
from hyfi_core.rules.accepted_maps import one_map
from hyfi_core.rules.builder import Builder
from hyfi_core.rules.calls import bound, emit, renamed
from hyfi_core.rules.instructions import Split
from hyfi_core.rules.moves.strips import along_space
from hyfi_core.rules.operator_facts import OperatorFacts
from hyfi_core.rules.pointwise import operands

_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def softmax(builder: Builder, op: Operator) -> None:
    """``softmax`` and ``log_softmax`` over the pixels of a flat map."""
    name = op.args[0].name
    split = builder.splits[name].owned
    part = _in_requested_dtype(builder, op, builder.part(name, split), split)
    output = op.first_output
    largest, total = _exponentials(builder, part, (split.dims[0],))
    logarithm = "log_softmax" in op.text
    result_dtype = builder.values[output].dtype

    def finish(x: torch.Tensor, shift: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
        # Shifted by the largest of all ranks, so that no exponential overflows.
        exponents = x.to(sums.dtype) - shift
        result = exponents - sums.log() if logarithm else exponents.exp() / sums
        return result.to(result_dtype)

    builder.compute(finish, (part, largest, total), op.outputs[:1], split)


def _in_requested_dtype(builder: Builder, op: Operator, part: str, split: Split) -> str:
    """Return the name of the part in the softmax's ``dtype``, to which PyTorch converts the map first, too."""
    dtype = op.args[2] if len(op.args) > 2 else op.kwargs.get("dtype")
    current = builder.values[part].dtype
    # 16 bits are computed in float32 anyway.
    if not isinstance(dtype, torch.dtype) or dtype in (current, torch.promote_types(current, torch.float32)):
        return part
    converted = builder.fresh(part, dtype=dtype)
    builder.compute(lambda x: x.to(dtype), (part,), (converted,), split)
    return converted


def logsumexp(builder: Builder, op: Operator) -> None:
    """``logsumexp`` over any dims."""
    name = op.args[0].name
    split, shape = builder.splits[name].owned, builder.shape(name)
    argument = op.args[1]
    dims = tuple(sorted(dim % len(shape) for dim in ([argument] if isinstance(argument, int) else argument)))
    keepdim = bool(op.args[2]) if len(op.args) > 2 else bool(op.kwargs.get("keepdim", False))
    reduced = set(split.dims) & set(dims)
    part = builder.part(name, split)
    if not reduced:
        map_dims = split.dims if keepdim else tuple(d - sum(r < d for r in dims) for d in split.dims)
        emit(builder, op, {name: part}, Split(split.layout, (map_dims[0], map_dims[1]), map_counts=split.map_counts))
        return
    if reduced != set(split.dims):
        along_space(builder, op, dims, keepdim)
        return
    largest, total = _exponentials(builder, part, dims)
    result_dtype = builder.values[op.first_output].dtype

    def finish(shift: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
        result = sums.log() + shift
        return (result if keepdim else result.squeeze(dims)).to(result_dtype)

    builder.compute(finish, (largest, total), op.outputs)


def _exponentials(builder: Builder, part: str, dims: tuple[int, ...]) -> tuple[str, str]:
    """Return the names of the maximum m over ``dims`` and ranks, and of Σ exp(x - m); ``dims`` are kept as size 1."""
    largest = largest_over_ranks(builder, part, dims)
    wide = torch.promote_types(builder.values[part].dtype, torch.float32)
    partial, total = builder.fresh(part, dtype=wide), builder.fresh(part, dtype=wide)

    def of_part(x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return (x.to(shift.dtype) - shift).exp().sum(dims, keepdim=True)

    builder.compute(of_part, (part, largest), (partial,))
    builder.communicate(SumOverRanks(), (partial,), (total,), "reduce")
    return largest, total


def largest_over_ranks(builder: Builder, part: str, dims: tuple[int, ...]) -> str:
    """Return the name of a map's maximum over ``dims``, kept as size 1, and over ranks; it has no gradient."""
    wide = torch.promote_types(builder.values[part].dtype, torch.float32)
    local, largest = builder.fresh(part, dtype=wide), builder.fresh(part, dtype=wide)

    def of_part(x: torch.Tensor) -> torch.Tensor:
        # Detached: the shift does not change the result, so it has no gradient.
        x = x.detach().to(torch.promote_types(x.dtype, torch.float32))
        if x.numel():
            return x.amax(dims, keepdim=True)
        return x.new_full([1 if dim in dims else side for dim, side in enumerate(x.shape)], -math.inf)

    builder.compute(of_part, (part,), (local,))
    builder.communicate(LargestOverRanks(), (local,), (largest,), "reduce")
    return largest


def attention(builder: Builder, op: Operator) -> None:
    """Scaled-dot-product attention.

    within windows, each on one rank        local
    queries are pixels                      keys and values are gathered, if they are small enough
    only keys and values are pixels         softmax over all ranks, see ``_over_all_pixels``
    """
    arguments: dict[str, Any] = {**dict(zip(_ATTENTION, op.args, strict=False)), **op.kwargs}
    if _try_attention_within_windows(builder, op, arguments):
        return
    if arguments.get("attn_mask") is not None or arguments.get("is_causal") or arguments.get("dropout_p"):
        builder.refuse(op, "has a mask or dropout", "attention without a mask and without dropout")
    names = [arguments[key].name for key in ("query", "key", "value")]
    for name in names:
        split = builder.splits.get(name)
        if split is not None and (not split.flat or split.dims[0] != len(builder.shape(name)) - 2):
            builder.refuse(
                op, f"takes {builder.shape(name)} whose height and width are dims {split.dims}", "positions in dim -2"
            )
    query, key, value = names
    if query in builder.splits:
        wholes = {name: builder.gather(op, name, "is attention between all positions") for name in (key, value)}
        split = builder.splits[query].owned
        function, inputs = bound(renamed(op, {query: builder.part(query, split), **wholes}))
        if query in wholes:  # one value as query and key
            builder.refuse(op, "takes the same tensor as query and key", "separate projections for query and key")
        # If keys have more dims, the queries broadcast to them.
        at = len(builder.shape(op.first_output)) - 2
        builder.compute(function, inputs, op.outputs[:1], replace(split, dims=(at, at)))
        return
    if key not in builder.splits or value not in builder.splits:
        builder.refuse(op, "has keys and values, and only one of them is a map", "maps for both, or for neither")
    if builder.splits[key].pixels != builder.splits[value].pixels:
        builder.refuse(op, "has keys and values of different maps", "maps of equal size for both")
    if _heads(builder, names) is None:
        builder.refuse(op, "has different numbers of heads for queries and keys", "the same number of heads, or one")
    _over_all_pixels(builder, op, (query, key, value), arguments.get("scale"))


def _try_attention_within_windows(builder: Builder, op: Operator, arguments: dict[str, Any]) -> bool:
    """Emit attention within windows that each lie on one rank; return False if it is another attention."""
    splits = [builder.split_of(arguments[key]) for key in ("query", "key", "value")]
    dims = len(builder.shape(arguments["query"].name))
    first = splits[0]
    # Attention multiplies the last two dims. Height and width among the others count windows, each with its own
    # attention.
    if first is None or max(first.dims) >= dims - 2 or arguments.get("dropout_p"):
        return False
    if any(split is None or split.dims != first.dims or split.pixels != first.pixels for split in splits):
        return False
    names, split = operands(builder, op, builder.shape(op.first_output))
    function, inputs = bound(renamed(op, names))
    builder.compute(function, inputs, op.outputs[:1], split)
    return True


def _heads(builder: Builder, names: Sequence[str]) -> tuple[int, ...] | None:
    """Return the dims before the last two to which values broadcast; None if they do not, as for grouped queries."""
    try:
        return tuple(torch.broadcast_shapes(*(builder.shape(name)[:-2] for name in names)))
    except RuntimeError:
        return None


def _over_all_pixels(builder: Builder, op: Operator, names: tuple[str, str, str], scale: float | None) -> None:
    """Emit attention of replicated queries to keys and values that are pixels, each rank having those of its part.

    Args:
        builder: builder of the rank's program.
        op: the attention.
        names: names of query (..., N, C), key (..., H · W, C) and value (..., H · W, V).
        scale: factor of the scores; None: 1 / √C.
    """
    query, key, value = names
    key_split = builder.splits[key].owned
    value_split = replace(key_split, dims=builder.splits[value].dims)
    key, value = builder.part(key, key_split), builder.part(value, value_split)
    output, heads = op.first_output, _heads(builder, (query, key)) or ()
    shape = (*heads, *builder.shape(query)[-2:])
    wide = torch.promote_types(builder.values[query].dtype, torch.float32)
    factor = 1.0 / math.sqrt(shape[-1]) if scale is None else float(scale)
    # Scores (..., N, H · W): each rank computes those of its pixels.
    scores, last = builder.fresh(query, (*shape[:-1], builder.shape(key)[-2]), wide), len(shape) - 1
    score_split = Split(key_split.layout, (last, last), map_counts=key_split.map_counts)
    builder.compute(lambda q, k: ((q * factor) @ k.transpose(-1, -2)).to(wide), (query, key), (scores,), score_split)
    largest = largest_over_ranks(builder, scores, (last,))
    partial, total = builder.fresh(output, dtype=wide), builder.fresh(output, dtype=wide)

    def of_part(x: torch.Tensor, shift: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        weights = (x.to(shift.dtype) - shift).exp()
        # Autocast would make the product of the exponentials narrow again.
        with torch.autocast(v.device.type, enabled=False):
            # Numerators and denominators in one message.
            products, sums = weights @ v.to(weights.dtype), weights.sum(-1, keepdim=True)
            return torch.cat([products, sums.expand(*products.shape[:-1], 1)], -1)

    builder.compute(of_part, (scores, largest, value), (partial,))
    builder.communicate(SumOverRanks(), (partial,), (total,), "reduce")
    result_dtype = builder.values[output].dtype
    builder.compute(lambda sums: (sums[..., :-1] / sums[..., -1:]).to(result_dtype), (total,), (output,))


FACTS = {
    "logsumexp": OperatorFacts(one_map(logsumexp)),
    "scaled_dot_product_attention": OperatorFacts(attention, keeps="inputs and outputs"),
}
