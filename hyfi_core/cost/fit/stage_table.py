"""Memory of every stage that a program can be cut into: of all pairs of places, in one pass over its operators.

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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hyfi_core.capture.program import Operator, Program, refs_in
from hyfi_core.capture.stages import free_values
from hyfi_core.cost.cuts import cut_candidates
from hyfi_core.cost.memory import StageMaps, saved_values, touched_bytes
from hyfi_core.cost.operators import value_bytes

Table = NDArray[np.int64]
"""Bytes of the stage from each place (row) to each other (column); of rows before columns only."""


@dataclass(frozen=True)
class StageTable:
    """Every stage that a program can be cut into.

    Attributes:
        names: the module that ends at each place but the first and the last.
        places: positions between operators at which a stage may begin or end.
        maps: as those of a stage, with a ``Table`` of all stages in each field.
    """

    names: tuple[str, ...]
    places: tuple[int, ...]
    maps: StageMaps

    @classmethod
    def of(cls, program: Program) -> StageTable:
        """Return that of a captured model."""
        candidates, last = cut_candidates(program), len(program.operators)
        places = (0, *(candidate.index for candidate in candidates), last)
        alive = program.needed({*refs_in(program.outputs), *program.mutations.values()})
        free = free_values(program, program.operators)
        numbered = [(name, at) for at, op in enumerate(program.operators) for name in op.outputs if name is not None]
        made = {name: at for name, at in numbered if name not in free}
        each = [op if any(name in alive for name in op.outputs) else None for op in program.operators]
        weights = [[name for name in op.inputs if name in program.parameters] if op else [] for op in each]
        sizes = {name: value_bytes(program, name) for name in (*program.values, *program.parameters)}
        count = _Counter(places, sizes)
        maps: dict[str, Any] = {
            "weights": count.distinct(weights),
            "all_weights": sum(sizes[name] for name in program.parameters),
            "largest_weight": count.largest([max((sizes[name] for name in names), default=0) for names in weights]),
            "saved": count.distinct(_saved_by(program, each)),
            "taken": _taken(program, each, made, count),
            "working": count.largest([touched_bytes(program, op) if op else 0 for op in each]),
            "operators": np.subtract.outer(places, places).T,
        }
        return cls(tuple(candidate.module for candidate in candidates), places, StageMaps(**maps))

    def stages(self, cuts: Sequence[str]) -> list[StageMaps]:
        """Return those of the stages between cuts.

        Args:
            cuts: of ``names``, in order.
        """
        ends = [0, *(1 + self.names.index(cut) for cut in cuts), len(self.places) - 1]
        fields = {field.name: np.asarray(getattr(self.maps, field.name)) for field in dataclass_fields(StageMaps)}
        return [
            StageMaps(**{name: int(table[a, b] if table.ndim else table) for name, table in fields.items()})
            for a, b in pairwise(ends)
        ]


class _Counter(NamedTuple):
    """Sums and maxima over the operators of every stage.

    Attributes:
        places: positions between operators at which a stage may begin or end.
        sizes: value -> its bytes.
    """

    places: tuple[int, ...]
    sizes: Mapping[str, int]

    def distinct(self, used: Sequence[Iterable[str]], made: Mapping[str, int] | None = None) -> Table:
        """Return the bytes of the values that operators of each stage use, each value once.

        Args:
            used: by each operator.
            made: value -> the operator that makes it; if given, stages that contain this one do not count.
        """
        changes = np.zeros((len(self.places) + 1,) * 2, dtype=np.int64)
        before = dict(made or {})
        for at, names in enumerate(used):
            end = bisect_right(self.places, at)
            for name in set(names):
                changes[bisect_right(self.places, before.get(name, -1)), end] += self.sizes[name]
                changes[end, end] -= self.sizes[name]
                before[name] = at
        found: Table = changes.cumsum(0).cumsum(1)[:-1, :-1]
        return found

    def largest(self, each: Sequence[int]) -> Table:
        """Return the largest number of the operators of each stage."""
        count = len(self.places)
        found = np.zeros((count, count), dtype=np.int64)
        parts = [max(each[a:b], default=0) for a, b in zip(self.places, self.places[1:], strict=False)]
        for first in range(count - 1):
            found[first, first + 1 :] = np.maximum.accumulate(parts[first:])
        return found


def _saved_by(program: Program, each: Sequence[Operator | None]) -> list[set[str]]:
    """Return what backward needs again of the inputs and outputs of each operator."""
    bare = replace(program, parameters={}, buffers={}, constants={})  # they are looked up here, once
    kept = {*program.parameters, *program.buffers, *program.constants}
    return [saved_values(bare, [op]) - kept if op else set() for op in each]


def _taken(program: Program, each: Sequence[Operator | None], made: Mapping[str, int], count: _Counter) -> Table:
    """Return the bytes that each stage receives from others; without any, those of the image."""
    used = [[name for name in op.inputs if name in made] if op else [] for op in each]
    used[-1] += [name for name in refs_in(program.outputs) if name in made]
    taken = count.distinct(used, made)
    return np.where(taken > 0, taken, count.sizes[program.image])
