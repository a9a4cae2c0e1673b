"""Where the ranks of stages are: by counting, for plans of any grids."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.plan.placement import Placement

Grid = tuple[int, int]
GRIDS = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=4).map(tuple)


def plan(grids: tuple[Grid, ...], interleave: int = 1, **fields: object) -> ParallelPlan:
    cuts = tuple("abcde"[: len(grids) * interleave - 1])
    return ParallelPlan(grids, cuts, interleave=interleave, **fields)  # type: ignore[arg-type]


@settings(deadline=None, max_examples=40)
@given(GRIDS)
def test_ranks_are_counted_through_the_stages_and_back_in_the_other_direction(grids: tuple[Grid, ...]) -> None:
    placement = Placement.of(plan(grids, schedule="gems_mast", microbatches=2))
    there, back = placement.ranks
    assert [rank for stage in there for rank in stage] == list(range(placement.size))
    assert [len(stage) for stage in there] == [rows * columns for rows, columns in grids]
    assert [[placement.size - 1 - rank for rank in stage] for stage in back] == [list(stage) for stage in there]


@settings(deadline=None, max_examples=40)
@given(GRIDS, st.tuples(st.integers(1, 3), st.integers(1, 3)))
def test_cells_of_a_rank_are_a_part_of_its_stages_grid(grids: tuple[Grid, ...], cells: Grid) -> None:
    placement = Placement.of(plan(grids))
    by_cells = placement.by_cells(cells)
    for grid, fine, ranks, all_cells in zip(
        placement.grids, by_cells.grids, placement.ranks[0], by_cells.ranks[0], strict=True
    ):
        assert fine == (grid[0] * cells[0], grid[1] * cells[1]) and len(all_cells) == fine[0] * fine[1]
        for (row, column), (y, x) in product(product(*map(range, grid)), product(*map(range, cells))):
            cell = all_cells[(row * cells[0] + y) * fine[1] + column * cells[1] + x]
            assert cell == ranks[row * grid[1] + column] * cells[0] * cells[1] + y * cells[1] + x


@pytest.mark.parametrize("interleave", [1, 3])
def test_pieces_of_a_stage_are_on_its_ranks(interleave: int) -> None:
    placement = Placement.of(plan(((1, 2), (2, 1)), schedule="1f1b", microbatches=4, interleave=interleave))
    assert placement.ranks == (((0, 1), (2, 3)) * interleave,) and placement.stages == 2 * interleave
