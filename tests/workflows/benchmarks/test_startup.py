"""The model of the start of many ranks: each part grows with what it is made of."""

from __future__ import annotations

import pytest

from hyfi_core.cost.machines.machine_file import load_machine
from hyfi_core.plan.parallel_plan import ParallelPlan
from workflows.benchmarks.scale.startup import Imports, StartupSite, startup


def parts(rows: int, columns: int, site: StartupSite | None = None) -> dict[str, float]:
    plan = ParallelPlan(grids=((rows, columns),))
    found = startup(plan, load_machine("h100"), Imports(1.5, 1000, 500_000_000), 2.0, 100_000_000, site)
    return {part.name: part.seconds for part in found}


def test_files_are_opened_by_ranks_and_read_by_nodes() -> None:
    site = StartupSite(file_operations_per_s=1e6, file_bytes_per_s=1e9, look_ups=1.0)
    assert parts(4, 4, site)["imports, files"] == pytest.approx(16 * 1000 * 2 / 1e6 + 2 * 0.5)
    assert parts(32, 64, site)["imports, files"] == pytest.approx(2048 * 1000 * 2 / 1e6 + 256 * 0.5)


def test_trees_grow_with_the_logarithm() -> None:
    few, many = parts(4, 4), parts(32, 64)
    assert (few["launcher"], many["launcher"]) == (0.1, 0.2)  # 2 and 256 nodes, 16 for each
    assert few["groups"] < many["groups"] < 4 * few["groups"]
    assert few["imports, processor"] == many["imports, processor"] == 1.5
    assert few["planning"] == many["planning"] == 2.0
    assert many["weights"] == pytest.approx(2 * 0.1 / 50 + 11 * 41.5e-6)
