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
from typing import Any, NamedTuple

from hyfi_core.capture.program import Operator, Program, refs_in
from hyfi_core.errors import RequestError


@dataclass(frozen=True)
class Stage:
    """One stage of a program.

    Attributes:
        program: its operators, with the parameters and buffers that they use.
        entries: earlier stage -> values received from it.
        exits: later stage -> values sent to it.
        outputs: the leaves of the model's output in the last stage; empty in others.
    """

    program: Program
    entries: Mapping[int, tuple[str, ...]]
    exits: Mapping[int, tuple[str, ...]]
    outputs: tuple[Any, ...]

    @property
    def sent(self) -> tuple[str, ...]:
        """The values that other stages need, each once."""
        return tuple(dict.fromkeys(name for names in self.exits.values() for name in names))

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
        RequestError: a cut is not a module with operators, cuts are out of order, or a buffer is used in two stages.
    """
    return ProgramCutter(program, results).cut(cuts)


class _ValueUses(NamedTuple):
    """A value and the operators that it connects.

    Attributes:
        name: name of the value.
        maker: position of the operator that computes it.
        users: positions of the operators that take it, ascending; results count as one more, after all operators.
        in_order: whether, for any cuts, no user is in an earlier stage than the users before it.
    """

    name: str
    maker: int
    users: tuple[int, ...]
    in_order: bool


class ProgramCutter:
    """Cuts a program in many ways; what does not depend on the cuts is computed once.

    An operator is identified by its position among the operators that the results need.

    Args:
        program: the captured model.
        results: the leaves of its output that are needed.
    """

    def __init__(self, program: Program, results: tuple[Any, ...]) -> None:
        # A changed buffer is a result, too, even if no output depends on it.
        alive = program.needed({*refs_in(results), *program.mutations.values()})
        self._program, self._results = program, results
        self._operators = tuple(op for op in program.operators if any(o in alive for o in op.outputs if o is not None))
        # Never sent: each stage that needs such a value computes it again.
        self._free = free_values(program, self._operators)
        self._ordinals = {op.name: at for at, op in enumerate(program.operators)}
        self._makers = {o: at for at, op in enumerate(self._operators) for o in op.outputs if o is not None}
        self._for_mutations = self._serving_mutations_only()
        self._uses = self._uses_of_values()
        # Later operators overwrite earlier ones, so the last operator of each module stays.
        self._last_operator = {name: at for at, op in enumerate(self._operators) for name in _enclosing(op.module)}
        # A buffer that changes must be read and changed in one stage.
        self._changed_buffer_of = _values_of_changed_buffers(program)

    def cut(self, cuts: Sequence[str]) -> tuple[Stage, ...]:
        """Return the stages; each but the last ends after the last operator of one of the modules ``cuts``."""
        ends = self._ends(cuts)
        stage_of, stages = self._owners(ends), len(ends)
        operators_of_stages, sent = self._pieces(stage_of, stages), self._sent(stage_of)
        self._check_buffers(operators_of_stages)
        return tuple(
            Stage(
                _part_of(self._program, operators_of_stages[stage], self._ordinals),
                entries={sender: names for (sender, receiver), names in sent.items() if receiver == stage},
                exits={receiver: names for (sender, receiver), names in sent.items() if sender == stage},
                outputs=self._results if stage == stages - 1 else (),
            )
            for stage in range(stages)
        )

    def _serving_mutations_only(self) -> dict[int, tuple[int, ...]]:
        """Return, for each operator that serves only new values of buffers, the operators that compute its inputs.

        Operators whose inputs are all weights, buffers or the image are left out.
        """
        needed_by_results = self._program.needed(set(refs_in(self._results)))
        makers_of_inputs = {}
        for at, op in enumerate(self._operators):
            makers = tuple(self._makers[name] for name in op.inputs if name in self._makers)
            if makers and not any(name in needed_by_results for name in op.outputs if name is not None):
                makers_of_inputs[at] = makers
        return makers_of_inputs

    def _uses_of_values(self) -> tuple[_ValueUses, ...]:
        """Return the uses of all values that may be sent between stages."""
        users: dict[str, list[int]] = {name: [] for name in self._makers}
        for at, op in enumerate(self._operators):
            for name in op.inputs:
                # Free values are never sent: each stage computes them again.
                if name in users and name not in self._free:
                    users[name].append(at)
        for name in refs_in(self._results):
            if name in users:
                users[name].append(len(self._operators))
        # Users are in order, except that `_owners` may move operators that serve mutations alone to earlier stages.
        moved = self._for_mutations.keys()
        return tuple(
            _ValueUses(name, at, tuple(users[name]), in_order=moved.isdisjoint((at, *users[name])))
            for name, at in self._makers.items()
            if users[name]
        )

    def _ends(self, cuts: Sequence[str]) -> list[tuple[int, int]]:
        """Return the half-open range of operators of each stage."""
        bounds = [0]
        for cut in cuts:
            last = self._last_operator.get(cut)
            if last is None:
                raise RequestError(f"plan.cuts names {cut!r}, {_nearest(self._operators, cut)}")
            if last + 1 <= bounds[-1]:
                raise RequestError(
                    f"plan.cuts lists {cut!r} after {cuts[len(bounds) - 2]!r}, but the model runs it earlier; list the "
                    f"cuts in the order in which the model runs them"
                )
            bounds.append(last + 1)
        if cuts and bounds[-1] == len(self._operators):
            raise RequestError(
                f"plan.cuts ends with {cuts[-1]!r}, but the model computes nothing after it, so the last "
                f"stage would be empty; cut earlier"
            )
        bounds.append(len(self._operators))
        return list(pairwise(bounds))

    def _owners(self, ends: Sequence[tuple[int, int]]) -> list[int]:
        """Return the stage of each operator, and as one more entry the last stage, which takes the results.

        A capture computes new values of buffers after everything else. Operators that only serve these belong to the
        stage that computes their inputs, where the model changes the buffers.
        """
        owner = [stage for stage, (a, b) in enumerate(ends) for _ in range(a, b)]
        for at, makers in self._for_mutations.items():
            # The first stage that has all inputs. Operators that compute these come earlier in the loop.
            owner[at] = min(owner[at], max(owner[maker] for maker in makers))
        return [*owner, len(ends) - 1]

    def _pieces(self, owner: Sequence[int], stages: int) -> list[tuple[Operator, ...]]:
        """Return the operators of each stage, with copies of earlier operators whose values the stage recomputes."""
        if self._free:
            return [self._with_copies(owner, stage) for stage in range(stages)]
        pieces: list[list[Operator]] = [[] for _ in range(stages)]
        for op, stage in zip(self._operators, owner, strict=False):
            pieces[stage].append(op)
        return [tuple(piece) for piece in pieces]

    def _with_copies(self, owner: Sequence[int], stage: int) -> tuple[Operator, ...]:
        """Return the operators of a stage, with copies of the earlier operators that compute free values for it."""
        chosen = {at for at, of in enumerate(owner[:-1]) if of == stage}
        names = {name for at in chosen for name in self._operators[at].inputs}
        # In reverse order, so that operators whose results a copied one reads are copied, too.
        for at in reversed(range(len(self._operators))):
            outputs = {o for o in self._operators[at].outputs if o is not None}
            if owner[at] < stage and outputs & names & self._free:
                chosen.add(at)
                names.update(self._operators[at].inputs)
        return tuple(self._operators[at] for at in sorted(chosen))

    def _sent(self, owner: Sequence[int]) -> dict[tuple[int, int], tuple[str, ...]]:
        """Return (stage that sends, stage that receives) -> values, in the order in which they are computed."""
        sent: dict[tuple[int, int], list[str]] = {}
        for value in self._uses:
            sender = owner[value.maker]
            # If users are in order and the last one is in the maker's stage, all are.
            if value.in_order and owner[value.users[-1]] == sender:
                continue
            for receiver in sorted({owner[user] for user in value.users} - {sender}):
                sent.setdefault((sender, receiver), []).append(value.name)
        return {edge: tuple(names) for edge, names in sorted(sent.items())}

    def _check_buffers(self, pieces: Sequence[Sequence[Operator]]) -> None:
        """Refuse a buffer that one stage changes and another reads: within a step their values would differ."""
        stages: dict[str, set[int]] = {name: set() for name in self._changed_buffer_of.values()}
        for stage, operators in enumerate(pieces):
            for op in operators:
                # Outputs, too: the value after a change is an output of the operator that changes the buffer.
                for value in (*op.inputs, *op.outputs):
                    if value in self._changed_buffer_of:
                        stages[self._changed_buffer_of[value]].add(stage)
        for buffer, users in stages.items():
            if len(users) > 1:
                raise RequestError(
                    f"buffer {buffer!r} is read or changed in several stages ({sorted(users)}); choose cuts "
                    f"that keep all calls of its module in one stage"
                )


def edges(stages: Sequence[Stage]) -> tuple[tuple[int, int], ...]:
    """Return (from, to) of all pairs of stages between which values are sent, in order."""
    return tuple((a, b) for a, stage in enumerate(stages) for b in sorted(stage.exits))


def active_values(program: Program, results: tuple[Any, ...], sources: Iterable[str]) -> frozenset[str]:
    """Return the values through which the output depends on a source: they carry gradients.

    A gradient ends where a value is detached or neither floating point nor complex, as in ``(x > 0).float()``.
    """

    def carrying(names: Iterable[str | None]) -> list[str]:
        # An assertion (of a dtype before a cast) has a name, but its result is not a tensor.
        values = (name for name in names if name is not None and name in program.values)
        return [name for name in values if program.values[name].differentiable]

    passing = [op for op in program.operators if op.text != "aten.detach.default"]
    # Values carry gradients that sources reach (forwards) and on which outputs depend (backwards).
    reached = set(sources)
    for op in passing:
        if any(name in reached for name in op.inputs):
            reached.update(carrying(op.outputs))
    names = set(carrying(refs_in(results)))
    for op in reversed(passing):
        if any(name in names for name in carrying(op.outputs)):
            names.update(carrying(op.inputs))
    return frozenset(reached & names)


def _enclosing(module: str) -> list[str]:
    """Return the paths of a module and the modules around it: ``a.b`` gives ``a`` and ``a.b``."""
    parts = module.split(".")
    return [".".join(parts[: n + 1]) for n in range(len(parts))]


def _nearest(operators: Sequence[Operator], cut: str) -> str:
    modules: dict[str, None] = {}
    for op in operators:
        modules.update((name, None) for name in _enclosing(op.module) if op.module)
    close = difflib.get_close_matches(cut, modules, n=3) or [name for name in modules if "." not in name]
    return f"but the model has no such module, or it computes nothing; available: {', '.join(close[:8])} …"


def free_values(program: Program, operators: Sequence[Operator]) -> set[str]:
    """Return values that depend on neither image nor parameters nor buffers."""
    # Buffers, too: their values may change from step to step.
    bound = {program.image, *program.parameters, *program.buffers}
    free: set[str] = set()
    for op in operators:
        names = {o for o in op.outputs if o is not None}
        if any(name in bound for name in op.inputs):
            bound |= names
        else:
            free |= names
    return free


def _values_of_changed_buffers(program: Program) -> dict[str, str]:
    """Return value -> name of the buffer, for both values of each buffer that the program changes: before and after."""
    changed = {name: value for value, name in program.buffers.items() if name in program.mutations}
    return {value: name for name, value in changed.items()} | {program.mutations[name]: name for name in changed}


def _part_of(program: Program, operators: tuple[Operator, ...], ordinals: dict[str, int]) -> Program:
    """Return the program of some operators only; ``ordinals``: operator -> its position in the whole program."""
    computed = {o for op in operators for o in op.outputs if o is not None}
    used = {name for op in operators for name in op.inputs}
    mutations = {name: value for name, value in program.mutations.items() if value in computed}
    # A buffer that this part replaces is used, also if it is not read.
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
