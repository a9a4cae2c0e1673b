"""Plans by one word, and the grids in them."""

from __future__ import annotations

import pytest

from hyfi_core.plan.strategy import squarest


@pytest.mark.parametrize(("ranks", "grid"), [(1, (1, 1)), (2, (1, 2)), (4, (2, 2)), (6, (2, 3)), (7, (1, 7))])
def test_grids_are_as_square_as_they_can_be(ranks: int, grid: tuple[int, int]) -> None:
    assert squarest(ranks) == grid
