"""Plans by one word, and the grids in them."""

from __future__ import annotations

import pytest

from hyfi_core.errors import RequestError
from hyfi_core.plan.strategy import plan_for, squarest


@pytest.mark.parametrize(("ranks", "grid"), [(1, (1, 1)), (2, (1, 2)), (4, (2, 2)), (6, (2, 3)), (7, (1, 7))])
def test_grids_are_as_square_as_they_can_be(ranks: int, grid: tuple[int, int]) -> None:
    assert squarest(ranks) == grid


@pytest.mark.parametrize("ranks", range(1, 14))
def test_every_strategy_uses_all_ranks(ranks: int) -> None:
    data, spatial, model, hybrid = (plan_for(name, ranks, 4) for name in ("data", "spatial", "model", "hybrid"))
    assert data.ranks == spatial.ranks == model.ranks == hybrid.ranks == ranks
    assert data.replicas == ranks and spatial.stages == 1 and (model.stages, model.microbatches) == (ranks, 4)
    (rows, columns), *others = hybrid.grids
    assert columns <= 2 * rows or ranks < 3, "no long strips"
    assert set(others) <= {(1, 1)} and hybrid.microbatches == (4 if ranks >= 3 else 1)
    larger = [n for n in range(rows * columns + 1, ranks) if squarest(n)[1] <= 2 * squarest(n)[0]]
    assert not larger, "more ranks could share the large maps"


def test_another_strategy_is_refused() -> None:
    with pytest.raises(RequestError, match="strategy is 'best'; use one of data, model, spatial, hybrid"):
        plan_for("best", 4, 1)  # type: ignore[arg-type]
