"""Stages: a captured program cut into runs of operators, and the values sent between them.

    operators   a b c │ d e f │ g h
    stage         0   │   1   │  2
    alive at cuts    c,a      f,a          a is used by d and by g: it is sent from stage 0 to 1, and from 0 to 2

A value is sent directly from the stage that computes it to every stage that uses it, so a long skip connection bypasses
the stages between. Values that depend on neither image nor weights (positions, constants) are recomputed where they are
used.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from hyfi_core.capture.program import Operator, Program, refs_in
from hyfi_core.errors import RequestError


@dataclass(frozen=True)
class Stage:
    """One stage of a program.

    Attributes:
        program: its operators, with the parameters and buffers that they use.
        entries: stage -> values received from it.
        exits: stage -> values sent to it.
        outputs: the leaves of the model's output in the last stage; empty in others.
    """

    program: Program
    entries: Mapping[int, tuple[str, ...]]
    exits: Mapping[int, tuple[str, ...]]
    outputs: tuple[Any, ...]

    @property
    def reads_image(self) -> bool:
        """Whether an operator of the stage takes the image itself."""
        return any(self.program.image in op.inputs for op in self.program.operators)


def cut_program(program: Program, results: tuple[Any, ...], cuts: Sequence[str]) -> tuple[Stage, ...]:
    """Cut a program after the last operators of the given modules.

    Args:
        program: the captured model.
        results: the leaves of its output that are needed.
        cuts: each stage but the last ends after this module.

    Raises:
        RequestError: a cut is no module with operators, cuts are out of order, or a buffer is used in two stages.
    """
    alive = program.needed({*refs_in(results), *program.mutations.values()})
    operators = tuple(op for op in program.operators if any(o in alive for o in op.outputs if o is not None))
    ends = _ends(operators, cuts)
    owner = _owners(program, operators, ends, results)
    free = free_values(program, operators)
    pieces = [_operators_of(operators, free, owner, stage) for stage in range(len(ends))]
    travels = _travels(operators, results, owner, free, len(ends))
    _check_buffers(program, pieces)
    ordinals = {op.name: at for at, op in enumerate(program.operators)}
    return tuple(
        Stage(
            _part_of(program, pieces[stage], ordinals),
            {a: names for (a, b), names in travels.items() if b == stage},
            {b: names for (a, b), names in travels.items() if a == stage},
            results if stage == len(ends) - 1 else (),
        )
        for stage in range(len(ends))
    )


def edges(stages: Sequence[Stage]) -> tuple[tuple[int, int], ...]:
    """Return (from, to) of all pairs of stages between which values are sent, in order."""
    return tuple((a, b) for a, stage in enumerate(stages) for b in sorted(stage.exits))


def active_values(program: Program, results: tuple[Any, ...], sources: Iterable[str]) -> frozenset[str]:
    """Return the values through which the output depends on a source: they carry gradients.

    A gradient ends where a value is detached or neither floating point nor complex, as in ``(x > 0).float()``.
    """

    def carrying(names: Iterable[str | None]) -> list[str]:
        # An assertion (of a dtype before a cast) has a name, but its result is no tensor.
        values = (name for name in names if name is not None and name in program.values)
        return [name for name in values if program.values[name].differentiable]

    passing = [op for op in program.operators if op.text != "aten.detach.default"]
    reached = set(sources)
    for op in passing:
        if any(name in reached for name in op.inputs):
            reached.update(carrying(op.outputs))
    names = set(carrying(refs_in(results)))
    for op in reversed(passing):
        if any(name in names for name in carrying(op.outputs)):
            names.update(carrying(op.inputs))
    return frozenset(reached & names)


def _ends(operators: Sequence[Operator], cuts: Sequence[str]) -> list[tuple[int, int]]:
    """Return the half-open range of operators of each stage."""
    bounds = [0]
    for cut in cuts:
        inside = [index for index, op in enumerate(operators) if op.module == cut or op.module.startswith(cut + ".")]
        if not inside:
            raise RequestError(f"plan.cuts names {cut!r}, {_nearest(operators, cut)}")
        if inside[-1] + 1 <= bounds[-1]:
            raise RequestError(
                f"plan.cuts lists {cut!r} after {cuts[len(bounds) - 2]!r}, but the model runs it earlier; list the "
                f"cuts in the order in which the model runs them"
            )
        bounds.append(inside[-1] + 1)
    if cuts and bounds[-1] == len(operators):
        raise RequestError(
            f"plan.cuts ends with {cuts[-1]!r}, but the model computes nothing after it, so the last "
            f"stage would be empty; cut earlier"
        )
    bounds.append(len(operators))
    return list(pairwise(bounds))


def _owners(
    program: Program, operators: Sequence[Operator], ends: Sequence[tuple[int, int]], results: tuple[Any, ...]
) -> dict[str, int]:
    """Return operator -> its stage.

    A capture writes changed buffers behind everything else. What only serves them belongs to the stage that computes
    its inputs, which is where the model changes them.
    """
    owner = {op.name: stage for stage, (a, b) in enumerate(ends) for op in operators[a:b]}
    serving = program.needed(set(refs_in(results)))
    maker: dict[str, int] = {}
    for op in operators:
        inputs = [maker[name] for name in op.inputs if name in maker]
        if inputs and not any(name in serving for name in op.outputs if name is not None):
            owner[op.name] = min(owner[op.name], max(inputs))
        maker |= {name: owner[op.name] for name in op.outputs if name is not None}
    return owner


def _nearest(operators: Sequence[Operator], cut: str) -> str:
    modules: dict[str, None] = {}
    for op in operators:
        parts = op.module.split(".")
        modules.update((".".join(parts[: n + 1]), None) for n in range(len(parts)) if op.module)
    close = difflib.get_close_matches(cut, modules, n=3) or [name for name in modules if "." not in name]
    return f"but the model has no such module, or it computes nothing; available: {', '.join(close[:8])} …"


def free_values(program: Program, operators: Sequence[Operator]) -> set[str]:
    """Return values that depend on neither image nor parameters nor buffers."""
    bound = {program.image, *program.parameters, *program.buffers}
    free: set[str] = set()
    for op in operators:
        names = {o for o in op.outputs if o is not None}
        if any(name in bound for name in op.inputs):
            bound |= names
        else:
            free |= names
    return free


def _operators_of(
    operators: Sequence[Operator], free: set[str], owner: Mapping[str, int], stage: int
) -> tuple[Operator, ...]:
    """Return a stage's operators, with copies of earlier ones whose values it recomputes."""
    chosen = [op for op in operators if owner[op.name] == stage]
    names = {name for op in chosen for name in op.inputs}
    copies: set[str] = set()
    for op in reversed(operators):
        outputs = {o for o in op.outputs if o is not None}
        if owner[op.name] < stage and outputs & names & free:
            copies.add(op.name)
            names.update(op.inputs)
    return tuple(op for op in operators if owner[op.name] == stage or op.name in copies)


def _travels(
    operators: Sequence[Operator],
    results: tuple[Any, ...],
    owner: Mapping[str, int],
    free: set[str],
    stages: int,
) -> dict[tuple[int, int], tuple[str, ...]]:
    """Return (from, to) -> values, in the order in which they are computed."""
    maker = {o: owner[op.name] for op in operators for o in op.outputs if o is not None}
    users: dict[str, set[int]] = {name: set() for name in maker}
    for op in operators:
        for name in op.inputs:
            if name in maker and name not in free:
                users[name].add(owner[op.name])
    for name in refs_in(results):
        if name in maker:
            users[name].add(stages - 1)
    travels: dict[tuple[int, int], list[str]] = {}
    for name, first in maker.items():
        for to in sorted(users[name] - {first}):
            travels.setdefault((first, to), []).append(name)
    return {edge: tuple(names) for edge, names in sorted(travels.items())}


def _check_buffers(program: Program, pieces: Sequence[Sequence[Operator]]) -> None:
    """Refuse a buffer that one stage changes and another reads: within a step their values would differ."""
    changed = {name: value for value, name in program.buffers.items() if name in program.mutations}
    watched = {value: name for name, value in changed.items()} | {program.mutations[name]: name for name in changed}
    stages: dict[str, set[int]] = {name: set() for name in changed}
    for stage, operators in enumerate(pieces):
        for op in operators:
            for value in (*(name for name in op.inputs if name in program.buffers), *op.outputs):
                if value in watched:
                    stages[watched[value]].add(stage)
    for buffer, users in stages.items():
        if len(users) > 1:
            raise RequestError(
                f"buffer {buffer!r} is read or changed in several stages ({sorted(users)}); choose cuts "
                f"that keep all calls of its module in one stage"
            )


def _part_of(program: Program, operators: tuple[Operator, ...], ordinals: dict[str, int]) -> Program:
    """Return the program of some operators only, with the ``ordinals`` of all."""
    computed = {o for op in operators for o in op.outputs if o is not None}
    used = {name for op in operators for name in op.inputs}
    mutations = {name: value for name, value in program.mutations.items() if value in computed}
    used.update(value for value, name in program.buffers.items() if name in mutations)
    return replace(
        program,
        operators=operators,
        parameters={value: name for value, name in program.parameters.items() if value in used},
        buffers={value: name for value, name in program.buffers.items() if value in used},
        constants={value: tensor for value, tensor in program.constants.items() if value in used},
        mutations=mutations,
        ordinals=ordinals,
    )
