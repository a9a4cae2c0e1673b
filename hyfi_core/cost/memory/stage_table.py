"""Memory of every stage that a program can be cut into: between all pairs of places, in one pass over its operators.

    places      0     1     2     3           a stage begins at one and ends at a later one
    operators   a b │ c d │ e f
    save        x y   y z   z                 what backward needs again
    0 to 1      x y                           each value once, however many operators save it
    0 to 2      x y z
    1 to 3      y z

A value counts for the stages in which an operator uses it; to count it once, each use counts for the stages that begin
after the use before. So the stages of a use form a rectangle of beginnings and ends, and sums over all rectangles give
all stages together. ``StageMaps.of`` gives the same for a single stage, but for copies of operators that depend on
neither image nor weights, which every stage that needs them computes itself.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hyfi_core.capture.program import Operator, Program, refs_in
from hyfi_core.capture.stages import free_values
from hyfi_core.cost.memory.forecast import StageMaps, touched_bytes
from hyfi_core.cost.memory.lifetimes import NOTHING, Lifetime, Lifetimes
from hyfi_core.cost.operators import value_bytes
from hyfi_core.cost.search.cut_candidates import cut_candidates

Table = NDArray[np.int64]
"""Bytes of the stage from place `row` to place `column`; 0 where `column` is not behind `row`."""


@dataclass(frozen=True)
class StageTable:
    """Every stage that a program can be cut into.

    Attributes:
        names: the module that ends at each place but the first and the last.
        places: positions between operators at which a stage may begin or end.
        maps: as for one stage, but each field has a ``Table`` of all stages.
        copies: whether some operators depend on neither image nor weights: several stages may compute these.
    """

    names: tuple[str, ...]
    places: tuple[int, ...]
    maps: StageMaps
    copies: bool

    @classmethod
    def of(cls, program: Program) -> StageTable:
        """Return the table of all stages of a captured model."""
        candidates = cut_candidates(program)
        places = (0, *(candidate.index for candidate in candidates), len(program.operators))
        # By position; None for an operator on which no result depends, because stages leave it out.
        alive = program.needed({*refs_in(program.outputs), *program.mutations.values()})
        each = [op if any(name in alive for name in op.outputs) else None for op in program.operators]
        # Values that depend on neither image nor weights: no stage receives them, as each computes those that it uses.
        free = free_values(program, program.operators)
        numbered = [(name, at) for at, op in enumerate(program.operators) for name in op.outputs if name is not None]
        made_at = {name: at for name, at in numbered if name not in free}
        maps = _tables(program, places, each, made_at)
        return cls(tuple(candidate.module for candidate in candidates), places, maps, bool(free))

    def stages(self, cuts: Sequence[str]) -> list[StageMaps]:
        """Return the bytes of the stages between ``cuts``, which are some of ``names``, in order."""
        ends = [0, *(1 + self.names.index(cut) for cut in cuts), len(self.places) - 1]
        fields = {field.name: getattr(self.maps, field.name) for field in dataclass_fields(StageMaps)}
        return [
            StageMaps(**{name: _of_stage(table, a, b) for name, table in fields.items()}) for a, b in pairwise(ends)
        ]


def _of_stage(table: Any, first: int, last: int) -> Any:
    """Return the entry of a table for the stage between two places; a number is the same for all stages."""
    if isinstance(table, TablePeak):
        return _StagePeak(table, first, last)
    return int(table[first, last]) if isinstance(table, np.ndarray) else table


@dataclass(frozen=True)
class _HeldInBackward:
    """What each stage holds while each operator runs backward, in bytes; see ``cost.memory.lifetimes``.

    Attributes:
        places: positions between operators at which a stage may begin or end.
        weights: the weights of each stage.
        entering: the values of other stages that carry gradients, for each stage.
        maps: the maps of stages that begin at a place (row), while an operator (column) runs.
        missing: the gradients that the first backward has not made yet; rows and columns as in ``maps``.
        reorders: ``Lifetime.reorders`` of each operator.
    """

    places: tuple[int, ...]
    weights: Table
    entering: Table
    maps: Table
    missing: Table
    reorders: NDArray[np.int64]


class TablePeak:
    """The peak of every stage, as ``Peak`` is that of one.

    Args:
        in_backward: what all stages hold, operator by operator.
        first: whether it is the first backward of a step: ``missing`` gradients do not exist yet.
        second: the peak of the second part of a backward; None: it has one part.
    """

    def __init__(self, in_backward: _HeldInBackward, first: bool, second: TablePeak | None = None) -> None:
        self._in_backward, self._first, self._second = in_backward, first, second
        self._bytes_on: dict[int, Table] = {}

    def bytes(self, ranks: int) -> Table:
        """Return the bytes on one of ``ranks`` ranks, of every stage."""
        if ranks not in self._bytes_on:
            most = self._most(ranks)
            self._bytes_on[ranks] = most if self._second is None else np.maximum(most, self._second.bytes(ranks))
        return self._bytes_on[ranks]

    def _most(self, ranks: int) -> Table:
        """Return the peak of every stage on one of ``ranks`` ranks, without the second part of its backward."""
        in_backward = self._in_backward
        # What a stage that begins at a place (row) holds while an operator (column) runs backward, besides its weights.
        bytes_at = in_backward.maps // ranks + in_backward.reorders - (in_backward.missing if self._first else 0)
        # The most between each place and the next.
        parts = np.maximum.reduceat(bytes_at, in_backward.places[:-1], axis=1)
        rows, columns = np.indices(parts.shape)
        # Before a stage begins: never the largest. Half of the least int64, so that sums do not overflow.
        parts[columns < rows] = np.iinfo(np.int64).min // 2
        # The most from the stage's beginning up to each place where it may end.
        peaks = np.zeros_like(in_backward.weights)
        peaks[:, 1:] = np.maximum.accumulate(parts, axis=1)
        # Only ends behind beginnings are stages; all else is 0.
        after = np.triu(np.ones_like(peaks), 1)
        return after * (peaks + in_backward.weights + in_backward.entering // ranks)


@dataclass(frozen=True)
class _StagePeak:
    """The peak of one stage in a table: of that between the places ``first`` and ``last``."""

    table: TablePeak
    first: int
    last: int

    def bytes(self, ranks: int) -> int:
        """Return the bytes on one of ``ranks`` ranks."""
        return int(self.table.bytes(ranks)[self.first, self.last])


class _StageSums(NamedTuple):
    """Sums and maxima over the operators of every stage.

    Attributes:
        places: positions between operators at which a stage may begin or end.
        sizes: value -> its bytes.
    """

    places: tuple[int, ...]
    sizes: Mapping[str, int]

    def distinct(self, used: Sequence[Iterable[str]], made_at: Mapping[str, int] | None = None) -> Table:
        """Return the bytes of all values that the operators of each stage use; arguments as for ``distinct_at``."""
        return np.pad(self.distinct_at(used, made_at), ((0, 0), (1, 0)))[:, self.places]

    def distinct_at(self, used: Sequence[Iterable[str]], made_at: Mapping[str, int] | None = None) -> Table:
        """Return the bytes of the values that operators from each place (row) up to each operator (column) use.

        Each value counts once, however many operators use it.

        Args:
            used: for each operator, the values that it uses.
            made_at: value -> index of the operator that makes it; a stage does not count values that it makes itself.
        """
        # A use adds a value's bytes to a rectangle of the table: to the stages that begin behind the use before it and
        # not behind this operator (rows), from this operator on (columns). Earlier ones count the value already.
        # Only the rectangle's corners are written; two cumulative sums then fill all rectangles at once.
        changes = np.zeros((len(self.places) + 1, len(used)), dtype=np.int64)
        before = dict(made_at or {})  # value -> index of the operator that has made or used it last
        for at, names in enumerate(used):
            for name in set(names):
                changes[bisect_right(self.places, before.get(name, -1)), at] += self.sizes[name]
                changes[bisect_right(self.places, at), at] -= self.sizes[name]
                before[name] = at
        table: Table = changes.cumsum(0).cumsum(1)[:-1]
        return table

    def largest(self, each: Sequence[int]) -> Table:
        """Return the largest of the numbers ``each`` (one for each operator) within every stage."""
        count = len(self.places)
        table = np.zeros((count, count), dtype=np.int64)
        parts = [max(each[a:b], default=0) for a, b in zip(self.places, self.places[1:], strict=False)]
        for first in range(count - 1):
            table[first, first + 1 :] = np.maximum.accumulate(parts[first:])
        return table


def _tables(
    program: Program, places: tuple[int, ...], each: Sequence[Operator | None], made_at: Mapping[str, int]
) -> StageMaps:
    """Return ``StageMaps`` with tables of all stages in place of the numbers of one stage.

    Args:
        program: the captured model.
        places: positions between operators at which a stage may begin or end.
        each: the operators by position; None for those that stages leave out.
        made_at: value -> index of the operator that makes it, of the values that a stage may receive from another.
    """
    lifetimes = Lifetimes(program)
    adds = [lifetimes.of(op) if op else NOTHING for op in each]
    saved, between = [lifetime.kept for lifetime in adds], [lifetime.between for lifetime in adds]
    sizes = {name: value_bytes(program, name) for name in (*program.values, *program.parameters)}
    for of_operator in (*saved, *between):
        sizes |= of_operator
    sums = _StageSums(places, sizes)
    weights = [[name for name in op.inputs if name in program.parameters] if op else [] for op in each]
    in_backward = _HeldInBackward(
        places=places,
        weights=sums.distinct(weights),
        entering=sums.distinct(_taken_by(program, each, lifetimes.carried(made_at)), made_at),
        maps=_maps(program, each, adds, lifetimes, sums),
        missing=_missing(places, [lifetime.gradients for lifetime in adds]),
        reorders=np.array([lifetime.reorders for lifetime in adds], dtype=np.int64),
    )
    kept, kept_by_each = sums.distinct(between), sums.distinct_at(between)  # between the two parts of a backward
    tables: dict[str, Any] = {
        "weights": in_backward.weights,
        "all_weights": sum(sizes[name] for name in program.parameters),
        "largest_weight": sums.largest([max((sizes[name] for name in names), default=0) for names in weights]),
        "saved": sums.distinct(saved),
        "taken": _received_bytes(program, each, made_at, sums),
        "working": sums.largest([touched_bytes(program, op) if op else 0 for op in each]),
        # Of the stage from place a to place b: position of b minus position of a.
        "operators": np.subtract.outer(places, places).T,
        "first": TablePeak(in_backward, first=True),
        "later": TablePeak(in_backward, first=False),
        "between": kept,
        "first_in_two": _first_in_two(in_backward, adds, kept, kept_by_each),
        "later_in_two": _later_in_two(in_backward, adds, kept, kept_by_each),
    }
    return StageMaps(**tables)


def _maps(
    program: Program,
    each: Sequence[Operator | None],
    adds: Sequence[Lifetime],
    lifetimes: Lifetimes,
    sums: _StageSums,
) -> Table:
    """Return the bytes of maps that a stage from each place (row) holds while each operator (column) runs backward.

    Args:
        program: the captured model.
        each: the operators by position; None for those that stages leave out.
        adds: what each operator adds.
        lifetimes: of the program.
        sums: of the bytes of values, each once in a stage.
    """
    last = {name: at for at, op in enumerate(each) if op for name in op.inputs}
    # Outputs of the model count as used after all operators.
    last |= dict.fromkeys(refs_in(program.outputs), len(each))
    changes = np.zeros((len(sums.places) + 1, len(each) + 1), dtype=np.int64)
    for at, op in enumerate(each):
        for name in lifetimes.carried(op.outputs) if op else ():
            ends, row = last.get(name, at), bisect_right(sums.places, at)
            # Stages that begin before the operator hold the cotangent of its result from there to the last use.
            changes[0, at] += sums.sizes[name]
            changes[0, ends] -= sums.sizes[name]
            changes[row, at] -= sums.sizes[name]
            changes[row, ends] += sums.sizes[name]
    cotangents: Table = changes.cumsum(0).cumsum(1)[:-1, :-1]
    kept = sums.distinct_at([lifetime.kept for lifetime in adds])
    return cotangents + kept + np.array([lifetime.makes for lifetime in adds], dtype=np.int64)


def _first_in_two(in_backward: _HeldInBackward, adds: Sequence[Lifetime], kept: Table, by_each: Table) -> TablePeak:
    """Return the peak of every stage in the first backward of a step, if backwards have two parts.

    In it, the gradients that second parts make do not exist yet: the second part makes them, operator by operator.

    Args:
        in_backward: what stages hold in a backward in one part.
        adds: what each operator adds.
        kept: bytes that each stage keeps between the two parts.
        by_each: bytes of ``kept`` by the operators from each place (row) up to each operator (column).
    """
    apart = [lifetime.gradients_apart for lifetime in adds]  # gradients that second parts make
    up_to = np.cumsum([0, *apart])[list(in_backward.places)]
    other_gradients = in_backward.weights - np.triu(np.subtract.outer(up_to, up_to).T)
    first_part = replace(_first_part(in_backward, adds, kept, by_each), weights=other_gradients)
    second_part = replace(_second_part(in_backward, adds, by_each), missing=_missing(in_backward.places, apart))
    # ``first=False``: the weights of ``first_part`` are already without the missing gradients.
    return TablePeak(first_part, first=False, second=TablePeak(second_part, first=True))


def _later_in_two(in_backward: _HeldInBackward, adds: Sequence[Lifetime], kept: Table, by_each: Table) -> TablePeak:
    """Return every stage's peak in later backwards, when all gradients exist; arguments as for ``_first_in_two``."""
    return TablePeak(
        _first_part(in_backward, adds, kept, by_each),
        first=False,
        second=TablePeak(_second_part(in_backward, adds, by_each), first=False),
    )


def _first_part(in_backward: _HeldInBackward, adds: Sequence[Lifetime], kept: Table, by_each: Table) -> _HeldInBackward:
    """Return what stages hold in the first of two parts; arguments as for ``_first_in_two``."""
    reorders = np.array([lifetime.first_reorders for lifetime in adds], dtype=np.int64)
    entering, maps = in_backward.entering + kept, np.maximum(0, in_backward.maps - by_each)
    return replace(in_backward, entering=entering, maps=maps, reorders=reorders)


def _second_part(in_backward: _HeldInBackward, adds: Sequence[Lifetime], by_each: Table) -> _HeldInBackward:
    """Return what stages hold in the second of two parts; arguments as for ``_first_in_two``."""
    reorders = [lifetime.reorders if lifetime.between else 0 for lifetime in adds]
    return replace(in_backward, maps=by_each, reorders=np.array(reorders, dtype=np.int64))


def _missing(places: Sequence[int], gradients: Sequence[int]) -> Table:
    """Return the bytes of the gradients of all operators from each place (row) up to each operator (column)."""
    sums = np.cumsum([0, *gradients])
    table: Table = np.maximum(0, sums[None, 1:] - sums[list(places), None])
    return table


def _taken_by(program: Program, each: Sequence[Operator | None], values: Collection[str]) -> list[list[str]]:
    """Return, for each operator, which of ``values`` it takes; outputs of the model count for the last operator."""
    used = [[name for name in op.inputs if name in values] if op else [] for op in each]
    used[-1] += [name for name in refs_in(program.outputs) if name in values]
    return used


def _received_bytes(
    program: Program, each: Sequence[Operator | None], made_at: Mapping[str, int], sums: _StageSums
) -> Table:
    """Return the bytes that each stage receives from others; for a stage that receives none, those of the image."""
    received = sums.distinct(_taken_by(program, each, made_at), made_at)
    return np.where(received > 0, received, sums.sizes[program.image])
