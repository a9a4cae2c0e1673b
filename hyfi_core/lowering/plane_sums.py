"""Sums of branches: each plane adds its own branches first, so that it sends one value instead of all of them.

```
((a + b) + c) + d        plane 0 has a and c, plane 1 has b and d
(a + c) + (b + d)        exchanged: a + c, and b + d
```
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from hyfi_core.capture.program import Operator, Program, Ref, refs_in
from hyfi_core.plan.branches import Branches


def sum_in_planes(program: Program, branches: Branches, results: Iterable[str]) -> tuple[Program, Branches]:
    """Return a program whose sums of several values of one plane are computed there, and its branches.

    Only sums of values of one shape and dtype change, and only in the order in which these are added.

    Args:
        program: a stage of a model.
        branches: which plane computes what.
        results: values that must not change: outputs and those that other stages use.
    """
    if not branches.owners:
        return program, branches
    # A partial sum that another operator reads has to stay unchanged.
    uses = Counter(name for op in program.operators for name in op.inputs)
    uses.update((*results, *refs_in(program.outputs), *program.mutations.values()))
    maker = {name: op for op in program.operators for name in op.outputs if name is not None}
    sums = [op for op in program.operators if op.name not in branches.owners and _is_sum(program, op)]
    inner = _inner_sums(sums, maker, uses)
    owners, replacements = dict(branches.owners), dict[str, list[Operator]]()
    for root in sums:
        if root.name in inner:
            continue
        tree, terms = _tree(root, maker, inner)
        planes: dict[int, list[str]] = {}  # plane -> the terms that it computes and that only this sum reads
        for name in terms:
            if name in maker and maker[name].name in owners and uses[name] == 1:
                planes.setdefault(owners[maker[name].name], []).append(name)
        together = {plane: names for plane, names in planes.items() if len(names) > 1}
        if together:
            # The tree's sums are written anew at its root, when all of its terms are there.
            replacements.update({op.name: [] for op in tree})
            replacements[root.name] = _regrouped(tree, terms, together, owners)
    if not replacements:
        return program, branches
    positions = {op.name: program.ordinal(op) for op in program.operators}  # random numbers depend on them
    operators = tuple(new_op for op in program.operators for new_op in replacements.get(op.name, (op,)))
    new_names = {name: tuple(op.name for op in ops) for name, ops in replacements.items()}
    regions = tuple(
        tuple(new_name for name in region for new_name in new_names.get(name, (name,))) for region in branches.regions
    )
    return replace(program, operators=operators, ordinals=positions), replace(branches, regions=regions, owners=owners)


def _inner_sums(sums: Sequence[Operator], maker: Mapping[str, Operator], uses: Mapping[str, int]) -> set[str]:
    """Return the names of the sums that only another sum reads: they are part of that one's tree."""
    names = {op.name for op in sums}
    terms = [term for op in sums for term in op.inputs if term in maker and uses[term] == 1]
    return names & {maker[term].name for term in terms}


def _is_sum(program: Program, op: Operator) -> bool:
    """Whether an operator adds two values of one shape and dtype, without a factor."""
    if op.text != "aten.add.Tensor" or op.kwargs or not all(isinstance(item, Ref) for item in op.args):
        return False
    infos = [program.values[name] for name in (*op.inputs, op.first_output)]
    return len(op.args) == 2 and all(info == infos[0] for info in infos)


def _tree(root: Operator, maker: dict[str, Operator], inner: set[str]) -> tuple[list[Operator], list[str]]:
    """Return (the sums within a sum, itself last; the terms of all of them, in order).

    Args:
        root: the outermost sum.
        maker: value -> the operator that computes it.
        inner: names of the sums that only another sum reads.
    """
    tree: list[Operator] = []
    terms: list[str] = []
    for name in (item.name for item in root.args):
        if name in maker and maker[name].name in inner:
            below, further = _tree(maker[name], maker, inner)
            tree += below
            terms += further
        else:
            terms.append(name)
    return [*tree, root], terms


def _regrouped(
    tree: Sequence[Operator], terms: Sequence[str], together: dict[int, list[str]], owners: dict[str, int]
) -> list[Operator]:
    """Return the sums of a tree in another order: first the terms of each plane, then all others.

    Args:
        tree: the sums, the root last.
        terms: the terms of the sum, in order.
        together: plane -> its terms, two or more.
        owners: operator -> plane; gets an entry for each sum of terms of one plane.
    """
    sums: list[Operator] = []

    def total(names: Sequence[str], plane: int | None) -> str:
        """Append the sums that add these values, on ``plane`` or on all (None); return the name of the last one."""
        first = names[0]
        for name in names[1:]:
            # n terms need n - 1 sums in any order: the names of the old ones are enough.
            op = tree[len(sums)]
            sums.append(replace(op, args=(Ref(first), Ref(name))))
            if plane is not None:
                owners[op.name] = plane
            first = op.first_output
        return first

    partial = [total(names, plane) for plane, names in together.items()]
    grouped = {name for names in together.values() for name in names}
    # Last, and so by the root itself, whose name others read.
    total([*partial, *(name for name in terms if name not in grouped)], None)
    return sums
