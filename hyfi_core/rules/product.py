"""Rules for matrix products: matmul, bmm, einsum. N are pixels, in any dim.

    (B, N, C) x (C, D)            the result has pixels: each rank multiplies its own
    (B, K, N) x (B, N, C)         the sum is over pixels: partial products, one small all-reduce
    (B, N, C) x (B, C, N)         all pairs of pixels: one factor is gathered, if it is small enough

Every dim is named by a letter, as in einsum. The case follows from the letters of height and width in factors and
result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hyfi_core.capture.program import Operator, Ref
from hyfi_core.ops.reduce import SumOverRanks
from hyfi_core.rules.builder import Builder
from hyfi_core.rules.calls import bound
from hyfi_core.rules.instructions import Split
from hyfi_core.rules.operator_facts import OperatorFacts
from hyfi_core.rules.replicated import cut_of_whole

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Letters:
    """The letters of a product's dims.

    Attributes:
        factors: (value name, its letters), in order.
        result: letters of the result.
    """

    factors: tuple[tuple[str, str], ...]
    result: str


def matmul(builder: Builder, op: Operator) -> None:
    """``matmul``, ``bmm`` and ``mm``.

    As the einsum of (batch…, y, k) and (batch…, k, z) to (batch…, y, z); a vector has k alone.
    """
    first, second = op.args[0].name, op.args[1].name
    dims = len(builder.shape(first)), len(builder.shape(second))
    batch = _LETTERS[: max(0, max(dims) - 2)]
    # Batch dims are aligned at their ends, as in broadcasting.
    left = batch[len(batch) - max(0, dims[0] - 2) :] + ("yk" if dims[0] > 1 else "k")
    right = batch[len(batch) - max(0, dims[1] - 2) :] + ("kz" if dims[1] > 1 else "k")
    result = batch + ("y" if dims[0] > 1 else "") + ("z" if dims[1] > 1 else "")
    _product(builder, op, Letters(((first, left), (second, right)), result))


def einsum(builder: Builder, op: Operator) -> None:
    """``einsum`` with a letter for every dim."""
    names = [item.name for item in op.args[1]]
    equation = _spelled(str(op.args[0]).replace(" ", ""), [len(builder.shape(name)) for name in names])
    operands, arrow, result = equation.partition("->")
    terms = operands.split(",")
    if not arrow:
        # The default of einsum: letters that occur once, in alphabetical order.
        result = "".join(sorted(letter for letter in set(operands) - {","} if operands.count(letter) == 1))
    if "." in equation or any(len(set(term)) < len(term) for term in terms):
        builder.refuse(op, f"has the equation {equation!r}", "one letter for each dim, none twice in one operand")
    _product(builder, op, Letters(tuple(zip(names, terms, strict=True)), result))


def _spelled(equation: str, dim_counts: list[int]) -> str:
    """Return an equation with capital letters instead of ellipses; unchanged if that is not possible.

    ``"...nk,...km"`` for operands of 4 and 3 dims becomes ``"ABnk,Bkm->ABmn"``: ellipses are aligned at their ends.
    """
    if "..." not in equation:
        return equation
    operands, arrow, result = equation.partition("->")
    terms = operands.split(",")
    # How many dims each ellipsis stands for; it has three characters itself.
    counts = [dim_count - len(term) + 3 for term, dim_count in zip(terms, dim_counts, strict=True) if "..." in term]
    dots = "ABCDEFGH"[: max(counts)]
    # The letters for the ellipsis must be new ones.
    if set(dots) & set(equation) or max(counts) > 8:
        return equation
    spelled = []
    for term, dim_count in zip(terms, dim_counts, strict=True):
        count = dim_count - len(term) + 3
        spelled.append(term.replace("...", dots[len(dots) - count :]))
    if not arrow:
        letters = {letter for letter in operands if letter.isalpha()}
        result = "..." + "".join(sorted(letter for letter in letters if operands.count(letter) == 1))
    return ",".join(spelled) + "->" + result.replace("...", dots)


def _product(builder: Builder, op: Operator, letters: Letters) -> None:
    """Emit a product, given the letter of each dim; the letters of the first map's height and width decide its form."""
    anchor_name, anchor_term = next((name, term) for name, term in letters.factors if name in builder.splits)
    anchor = builder.splits[anchor_name].owned
    space = anchor_term[anchor.dims[0]], anchor_term[anchor.dims[1]]
    # A size of 1 may be broadcast, so the letter would not say whether a factor has the map's pixels.
    if builder.splits[anchor_name].flat and builder.shape(anchor_name)[anchor.dims[0]] == 1:
        builder.refuse(op, "takes a map of a single pixel", "a map of more than one pixel")
    survives = [letter in letters.result for letter in space]
    if survives[0] != survives[1]:
        builder.refuse(op, "sums over only one of height and width", "a sum over both, or over neither")
    # (value, dims with the letters of height and width, -1: none) -> name of what the product takes. With these dims,
    # because a value multiplied by itself may be needed as its part and whole.
    names: dict[tuple[str, int, int], str] = {}
    factors = [(name, term.find(space[0]), term.find(space[1])) for name, term in letters.factors]
    for (name, term), factor in zip(letters.factors, factors, strict=True):
        if factor not in names:
            names[factor] = _laid_out(builder, op, name, term, anchor, space)
    function, inputs = bound(replace(op, args=_with_factors(op.args, iter([names[factor] for factor in factors]))))
    if all(survives):
        dims = letters.result.index(space[0]), letters.result.index(space[1])
        builder.compute(function, inputs, op.outputs, replace(anchor, dims=dims))
    else:
        sum_of_parts(builder, function, inputs, op.first_output)


def _with_factors(argument: Any, names: Iterator[str]) -> Any:
    """Return an operator's arguments with its values replaced by ``names``, in order."""
    if isinstance(argument, Ref):
        return Ref(next(names))
    if isinstance(argument, (list, tuple)):
        return type(argument)(_with_factors(item, names) for item in argument)
    return argument


def _laid_out(builder: Builder, op: Operator, name: str, term: str, anchor: Split, space: tuple[str, str]) -> str:
    """Return the name of a factor with the pixels of the anchor; gather it if its pixels have other letters.

    Args:
        builder: builder of the rank's program.
        op: the product.
        name: name of the factor.
        term: its letters, one for each dim.
        anchor: the split of the first factor that is a map.
        space: the letters of the anchor's height and width.
    """
    split = builder.splits.get(name)
    if split is not None and (term[split.dims[0]], term[split.dims[1]]) == space and split.pixels == anchor.pixels:
        return builder.part(name, replace(anchor, dims=split.dims))
    # A map with other pixels or letters, such as the second factor of all pairs.
    if split is not None:
        name = builder.gather(op, name, "multiplies two maps over their pixels")
    if not any(letter in term for letter in space):
        return name
    shape = builder.shape(name)
    dims = tuple(term.index(letter) if letter in term else -1 for letter in space)
    result = builder.fresh(name)
    builder.compute(cut_of_whole(replace(anchor, dims=dims), builder.rank, shape), (name,), (result,))  # type: ignore[arg-type]
    return result


def sum_of_parts(builder: Builder, function: Any, inputs: Sequence[str], output: str) -> None:
    """Emit the sum over ranks of ``function(*inputs)``; floats are summed in float32 or wider, integers as they are."""
    partial, summed = builder.fresh(output), builder.fresh(output)

    def of_part(*tensors: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = function(*tensors)
        if not result.is_floating_point():
            return result
        # Converted before the sum: 16 bits would be rounded on each rank, and again in the sum.
        return result.to(torch.promote_types(result.dtype, torch.float32))

    dtype = builder.values[output].dtype
    rounded_to = dtype if dtype in (torch.bfloat16, torch.float16) else None
    builder.compute(of_part, tuple(inputs), (partial,))
    builder.communicate(SumOverRanks(), (partial,), (summed,), "reduce")
    builder.compute(lambda total: total.clone() if rounded_to is None else total.to(rounded_to), (summed,), (output,))


FACTS = {
    **dict.fromkeys(("matmul", "bmm", "mm"), OperatorFacts(matmul, "matmul", keeps="other factors")),
    "addmm": OperatorFacts(None, "matmul"),
    "einsum": OperatorFacts(einsum),
}
