"""Max pool before relu: ``max_pool(relu(x))`` equals ``relu(max_pool(x))`` bitwise, forward and backward.

    before    norm ──▶ a ──▶ relu ──▶ b ──▶ max pool ──▶ c         b: the largest map of a ResNet, rectified, saved
    after     norm ──▶ a ──▶ max pool ──▶ b ──▶ relu ──▶ c         b: a quarter of it

relu is monotone, so the maximum is the same, except for windows that lie in the padding, whose maximum is -inf: such a
pool stays where it is. A window whose maximum is positive has it at the same place, and any other
window has no gradient. The original order costs a pass over the large map in each direction, its memory until backward,
and a new map for the cotangent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from hyfi_core.capture.program import Operator, Program, Ref, refs_in
from hyfi_core.rules.windows import arguments as windows

_POOLS = ("aten.max_pool2d.default", "aten.max_pool2d_with_indices.default")


def pool_before_relu(program: Program, results: Iterable[str]) -> Program:
    """Return the program with every relu that is used only by a max pool moved after that pool, on a smaller map.

    Names keep their order: the pool's result gets the name of the relu's.

    Args:
        program: a model or a stage of it.
        results: values that must not change: outputs and those that other stages use.
    """
    uses = Counter(name for op in program.operators for name in op.inputs)
    uses.update((*results, *refs_in(program.outputs), *program.mutations.values()))
    relus = {op.outputs[0]: op for op in program.operators if op.text == "aten.relu.default"}
    pools: dict[str, Operator] = {}  # name of a relu -> the pool that alone uses its result
    for op in program.operators:
        relu = relus.get(op.args[0].name) if op.text in _POOLS else None
        # Not where positions are used: a window without positive pixels has its maximum elsewhere after relu, which
        # makes all of them equal.
        if relu is not None and uses[op.args[0].name] == 1 and not any(op.outputs[1:]) and not _misses(op, program):
            pools[relu.name] = op
    if not pools:
        return program
    values = dict(program.values)
    moved: dict[str, Operator] = {}
    for relu in relus.values():
        if relu.name in pools:
            pool, middle = pools[relu.name], relu.outputs[0]
            assert middle is not None and pool.outputs[0] is not None
            # The name in the middle now stands for the small map.
            values[middle] = values[pool.outputs[0]]
            moved[relu.name] = replace(pool, args=(relu.args[0], *pool.args[1:]), outputs=(middle, *pool.outputs[1:]))
            moved[pool.name] = replace(relu, args=(Ref(middle),), outputs=pool.outputs[:1])
    return replace(program, operators=tuple(moved.get(op.name, op) for op in program.operators), values=values)


def _misses(pool: Operator, program: Program) -> bool:
    """Whether a window of a pool covers no pixel of the map: its maximum is -inf before relu, and 0 after it."""

    def shape(name: str) -> tuple[int, ...]:
        return program.values[name].shape

    return windows.misses_map(pool, windows.max_pool2d(pool, shape).window, shape)
