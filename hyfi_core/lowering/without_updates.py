"""Programs that leave running statistics and counters as they are: one cell of a process updates them for all.

Every cell knows the statistics of the whole map, and would compute the same running statistics from them. What only
serves these updates is about a tenth of all kernels that the cells of a ResNet start.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hyfi_core.capture.program import Operator, Program
from hyfi_core.rules.batch_norm import has_live_statistics

_RUNNING_STATISTICS = slice(3, 5)
"""Running mean and variance among the arguments of a live batch norm: it updates them, but normalises without them."""


def updates_are_apart(program: Program, results: Iterable[str]) -> bool:
    """Whether one cell can update the buffers for all: neither results nor messages depend on these updates.

    Args:
        program: the whole captured model.
        results: values of its output, and those that its stages send to others; updated buffers must not be among them,
            since cells would send old ones.
    """
    results = set(results)
    read, of_image = _values_behind(program, results), _of_image(program)
    # The forward itself reads what it updates, such as a power iteration: all cells need the new values.
    if any(value in read for value, name in program.buffers.items() if name in program.mutations):
        return False
    needed, computed = program.needed(results), program.needed({*results, *program.mutations.values()})
    updating = (op for op in program.operators if any(o in computed and o not in needed for o in op.outputs))
    # Updates that take a map may exchange parts of it, in which all cells take part.
    return not any(name in of_image for op in updating if not _normalises(op, needed) for name in op.inputs)


def without_updates(program: Program, results: Iterable[str]) -> Program:
    """Return the program, or a stage of it, without what only computes new values of buffers.

    Args:
        program: a program for which ``updates_are_apart`` holds.
        results: values that are needed: of its output, and those that other stages use.
    """
    needed = program.needed(set(results))
    operators = tuple(
        # Results that served the updates alone lose their names, so that no cell computes or keeps them.
        replace(op, outputs=tuple(name if name in needed else None for name in op.outputs))
        for op in program.operators
        if any(name in needed for name in op.outputs if name is not None)
    )
    return replace(program, operators=operators, mutations={})


def _normalises(op: Operator, needed: set[str]) -> bool:
    """Whether an operator is a live batch norm whose map is needed, so that all cells have its statistics."""
    return has_live_statistics(op) and op.outputs[0] in needed


def _of_image(program: Program) -> set[str]:
    """Return the values that depend on the image other than through statistics of batch norms, which all cells have."""
    names = {program.image}
    for op in program.operators:
        if any(name in names for name in op.inputs):
            # The first output is the map; the others are statistics, equal in all cells.
            outputs = op.outputs[:1] if has_live_statistics(op) else op.outputs
            names.update(name for name in outputs if name is not None)
    return names


def _values_behind(program: Program, results: set[str]) -> set[str]:
    """Return the names of the values from which the results are computed, step by step."""
    names = set(results)
    for op in reversed(program.operators):
        if any(name in names for name in op.outputs if name is not None):
            # A batch norm in training normalises by the statistics of its map, its first input and output. It reads the
            # running statistics only to update them: they count if the updated ones, its other outputs, do.
            only_map = has_live_statistics(op) and not any(name in names for name in op.outputs[1:] if name is not None)
            unread = {getattr(item, "name", None) for item in op.args[_RUNNING_STATISTICS]} if only_map else set()
            names.update(name for name in op.inputs if name not in unread)
    return names
