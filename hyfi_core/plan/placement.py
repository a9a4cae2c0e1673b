"""The placement: which ranks hold which stage of which direction.

Ranks of one plane (of one replica, without ``branches``) go stage by stage, row-major in each grid. In the second
direction, rank r has the position of rank k - 1 - r, so that the two pipelines run through the same ranks in opposite
order:

    grids ((2, 1), (1, 1), (1, 1))      rank          0      1      2      3
                                        direction 0   s0     s0     s1     s2
                                        direction 1   s2     s1     s0     s0

With ``interleave`` v, there are v stages on each of the D grids: stage s is on grid s mod D.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Protocol


class Stages(Protocol):
    """The fields of a ``ParallelPlan`` that determine its placement."""

    @property
    def grids(self) -> tuple[tuple[int, int], ...]:
        """Rows x columns of ranks, one entry for each grid."""
        ...

    @property
    def interleave(self) -> int:
        """Number of stages of each grid."""
        ...

    @property
    def directions(self) -> int:
        """1 or 2."""
        ...


@dataclass(frozen=True)
class Placement:
    """The ranks of the stages of one plane.

    Attributes:
        grids: rows x columns of ranks for each stage.
        ranks: for each direction, for each stage, its ranks within the plane, row-major in the stage's grid.
    """

    grids: tuple[tuple[int, int], ...]
    ranks: tuple[tuple[tuple[int, ...], ...], ...]

    @classmethod
    def of(cls, plan: Stages) -> Placement:
        """Return the placement of a plan: its grids one after the other, in each direction."""
        groups: list[tuple[int, ...]] = []
        size = 0
        for rows, columns in plan.grids:
            groups.append(tuple(range(size, size + rows * columns)))
            size += rows * columns
        forward = tuple(groups) * plan.interleave  # stage s is on grid s mod the number of grids
        directions = [forward]
        if plan.directions == 2:
            # From the other end, so that a rank of an early stage of one direction has a late one of the other.
            directions.append(tuple(tuple(size - 1 - rank for rank in group) for group in forward))
        return cls(plan.grids * plan.interleave, tuple(directions))

    def by_cells(self, cells: tuple[int, int]) -> Placement:
        """Return the placement with every cell as a rank: cell c of rank r is rank r * cells + c.

        The cells of a rank divide its part, row-major::

            grids ((1, 2),), cells (2, 1)       rank 0  rank 1        by cells ((2, 2),)
                                                cell 0  cell 0        0  2
                                                cell 1  cell 1        1  3
        """
        rows, columns = cells

        def cell_ranks(ranks: tuple[int, ...], grid: tuple[int, int]) -> tuple[int, ...]:
            """Return the ranks of all cells of a stage, row-major over the whole grid of cells."""
            rank_rows, rank_columns = grid
            result = []
            for y, x in product(range(rank_rows * rows), range(rank_columns * columns)):
                rank = ranks[y // rows * rank_columns + x // columns]
                cell = y % rows * columns + x % columns
                result.append(rank * rows * columns + cell)
            return tuple(result)

        grids = tuple((rank_rows * rows, rank_columns * columns) for rank_rows, rank_columns in self.grids)
        return Placement(grids, tuple(tuple(map(cell_ranks, stages, self.grids)) for stages in self.ranks))

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.grids)

    @property
    def directions(self) -> int:
        """1, or 2 for two pipelines through the same ranks in opposite order."""
        return len(self.ranks)

    @cached_property
    def size(self) -> int:
        """Ranks of one plane."""
        return 1 + max(rank for group in self.ranks[0] for rank in group)

    def group(self, stage: int, direction: int = 0) -> tuple[int, ...]:
        """Return the ranks of a stage, in the order of its grid's parts."""
        return self.ranks[direction][stage]

    def hosted(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Return (stage, direction) of all stages that a rank holds, direction 0 first."""
        return self._hosted[rank]

    @cached_property
    def _hosted(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each rank, the (stage, direction) that it holds."""
        hosted: list[list[tuple[int, int]]] = [[] for _ in range(self.size)]
        for direction, groups in enumerate(self.ranks):
            for stage, group in enumerate(groups):
                for rank in group:
                    hosted[rank].append((stage, direction))
        return tuple(map(tuple, hosted))
