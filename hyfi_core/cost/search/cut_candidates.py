"""Where a program can be cut: at the ends of modules.

Some modules run in one mode of the model only, such as an auxiliary head in training: a program that is to be cut for
both modes lists the others in its ``ends``.
"""

from __future__ import annotations

from dataclasses import dataclass

from hyfi_core.capture.program import Program
from hyfi_core.cost.operators import value_bytes

MOST_CANDIDATES = 300
"""Beyond this many module ends, only those of outer modules are considered."""


@dataclass(frozen=True, slots=True)
class CutCandidate:
    """A place to cut: the end of a module.

    Attributes:
        index: number of operators before the cut.
        module: the module that ends here; of several, the outermost.
        crossing_bytes: bytes of the values that are made before the cut and used after it.
    """

    index: int
    module: str
    crossing_bytes: int


def cut_candidates(program: Program) -> list[CutCandidate]:
    """Return the places where a program can be cut, in order."""
    ends: dict[int, str] = {}
    for module, index in module_ends(program).items():
        if program.ends is not None and module not in program.ends:  # no automatic cut is allowed after it
            continue
        # Of modules that end at one operator, the outermost.
        if index < len(program.operators) and (index not in ends or module.count(".") < ends[index].count(".")):
            ends[index] = module
    depth = max((module.count(".") for module in ends.values()), default=0)
    # If there are too many, drop the innermost modules first.
    while len(ends) > MOST_CANDIDATES and depth > 0:
        depth -= 1
        ends = {index: module for index, module in ends.items() if module.count(".") <= depth}
    crossing = _crossing_bytes(program)
    return [CutCandidate(index, module, crossing[index]) for index, module in sorted(ends.items())]


def module_ends(program: Program) -> dict[str, int]:
    """Return module -> number of operators up to its end, for each module that computes something."""
    end_of: dict[str, int] = {}
    for index, op in enumerate(program.operators):
        parts = op.module.split(".") if op.module else []
        # The module of the operator, and all that contain it.
        end_of.update({".".join(parts[: depth + 1]): index + 1 for depth in range(len(parts))})
    return end_of


def _crossing_bytes(program: Program) -> list[int]:
    """Return the bytes of all live values at each position between operators."""
    # ``steps``: by how much the sum changes at each position.
    last_use = {name: index for index, op in enumerate(program.operators) for name in op.inputs}
    steps = [0] * (len(program.operators) + 2)
    for index, op in enumerate(program.operators):
        for name in op.outputs:
            if name is not None and name in last_use:
                steps[index + 1] += value_bytes(program, name)
                steps[last_use[name] + 1] -= value_bytes(program, name)
    alive, total = [], 0
    for step in steps:
        total += step
        alive.append(total)
    return alive
