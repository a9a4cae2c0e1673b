"""Every field of a plan on both sides of what is allowed, and a plan with all of them as text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hyfi_core import ParallelPlan
from hyfi_core.errors import RequestError
from hyfi_core.plan.batch_shapes import BatchShapes

TWO: dict[str, Any] = {"grids": ((1, 2), (1, 1))}
ONE: dict[str, Any] = {"grids": ((1, 2),)}
CHIMERA = {**TWO, "schedule": "chimera", "microbatches": 2}
PIECES = {**ONE, "interleave": 3}
CELLS = {**ONE, "cells": (2, 2)}
TILES: dict[str, Any] = {"tiles": 2}


@pytest.mark.parametrize(
    ("fields", "name", "values"),
    [
        (TWO, "microbatches", [1, 3]),
        (TWO, "replicas", [1, 2]),
        (TWO, "branches", [1, 2]),
        (TWO, "fused_halo", [1, 4, "auto"]),
        (TWO, "gather_bytes", [0, 1]),
        (TWO, "memory_bytes", [None, 1]),
        (TWO, "reduce_dtype", [None, "bfloat16"]),
        (TWO, "cells", [None, (1, 1), (3, 2)]),
        (TWO, "cuts", ["auto", ("a",)]),
        (TWO, "interleave", [1, 2]),
        (TWO, "recompute", [False, True, (), (0,), (0, 1)]),
        (TWO, "sync_batch_norm", [False, True]),
        (TWO, "shares", [None, (1,), (7,)]),
        ({**TWO, "microbatches": 2, "replicas": 2}, "shares", [(2, 2), (4, 6)]),
        (CHIMERA, "microbatches", [2, 6]),
        (CHIMERA, "mirror", ["all_reduce", "point_to_point"]),
        (PIECES, "spill", [None]),
        (CELLS, "spill", [None, "memory", "/scratch"]),
        (CELLS, "branches", [1]),
        ({**CELLS, "spill": "memory"}, "cells", ["auto", (1, 1)]),
        ({**CELLS, "spill": "memory"}, "schedule", ["1f1b", "gpipe"]),
        ({**TWO, "cells": (2, 2), "spill": "memory"}, "interleave", [2]),
        (TILES, "tiles", [1, 5]),
        (TILES, "grids", [(), ((1, 2),)]),
        (TILES, "replicas", [3]),
        (TILES, "memory_bytes", [10]),
        (TILES, "gather_bytes", [10]),
        (TILES, "microbatches", [2]),
        (TILES, "reduce_dtype", ["bfloat16"]),
        (TILES, "branches", [1]),
    ],
)
def test_what_is_allowed_is_kept(fields: dict[str, Any], name: str, values: list[Any]) -> None:
    for value in values:
        kept = getattr(ParallelPlan(**{**fields, name: value}), name)
        assert kept == (((1, 2),) if name == "grids" else value)


@pytest.mark.parametrize(
    ("fields", "name", "values", "words"),
    [
        (TWO, "microbatches", [0, -1, 1.0, True, "1"], "use a whole number from 1"),
        (TWO, "interleave", [0, 1.5], "use a whole number from 1"),
        (TWO, "fused_halo", [0, True, "all"], 'use "auto" or a whole number from 1'),
        (TWO, "gather_bytes", [-1, True, 1.0], "use a whole number from 0"),
        (TWO, "memory_bytes", [0, True, 0.5], "use null, or a number of bytes from 1"),
        (TWO, "reduce_dtype", ["float16"], "use null or bfloat16"),
        (TWO, "mirror", ["both"], "use one of all_reduce, point_to_point"),
        (TWO, "mirror", ["point_to_point"], "has one direction and nothing to mirror"),
        (TWO, "cells", [(0, 2), (2, 0), (True, 2), (2.0, 2)], "both are whole numbers from 1"),
        (TWO, "cells", [(2,), (1, 2, 3), 4], 'use null, "auto", or rows and columns'),
        (TWO, "cells", ["auto"], "needs plan.spill"),
        (TWO, "cuts", [(), ("a", "b")], "need 1; name the module"),
        (TWO, "cuts", ["a", (1,), None, 2], 'use "auto" or a list of module names'),
        ({**TWO, "cuts": ("a",)}, "interleave", ["2", 0], "use a whole number from 1"),
        (TWO, "sync_batch_norm", ["false", None, 1], "use true or false"),
        (TWO, "spill", ["memory"], "needs plan.cells"),
        (TWO, "recompute", [1, "a", (2,), (-1,), (True,), (0.0,), None, 0.5], "stages from 0 to 1"),
        (TWO, "shares", [(0,), (True,), (1, 1), ()], "use null, or a multiple"),
        ({**TWO, "schedule": "gpipe"}, "interleave", [2], "use schedule 1f1b"),
        ({**TWO, "microbatches": 2, "replicas": 2}, "shares", [(2, 3), (3, 2), (2,)], "plan.microbatches = 2"),
        (CHIMERA, "microbatches", [1, 3], "use an even number, such as [24]"),
        ({**PIECES, "cells": (1, 2)}, "spill", ["memory"], "pieces compute again"),
        (CELLS, "spill", ["", 1, True], 'use null, "memory", or a folder'),
        (CELLS, "branches", [2], "cells of one rank take turns"),
        ({**CELLS, "spill": "memory"}, "schedule", ["zb_h1"], "use schedule 1f1b, or spill=None"),
        (TILES, "tiles", [0, True, 1.0], "null, or a number of ranks from 1"),
        (TILES, "grids", [((1, 1),), ((2, 1),), ((1, 2), (1, 2))], "leave grids out"),
        (TILES, "branches", [2], "does not go with plan.tiles"),
        (TILES, "sync_batch_norm", [True], "does not go with plan.tiles"),
        (TILES, "cuts", [("a",)], "does not go with plan.tiles"),
    ],
)  # fmt: skip
def test_what_is_not_allowed_is_refused(fields: dict[str, Any], name: str, values: list[Any], words: str) -> None:
    ParallelPlan(**fields)
    for value in values:
        with pytest.raises(RequestError, match=words):
            ParallelPlan(**{**fields, name: value})


@pytest.mark.parametrize(
    "fields", [TWO, CHIMERA, PIECES, {**CELLS, "spill": "memory"}, TILES, {**TWO, "recompute": (1,)}]
)
def test_plans_survive_json(fields: dict[str, Any]) -> None:
    plan = ParallelPlan(**fields)
    assert ParallelPlan.from_json(plan.to_json()) == plan
    lists = [value for value in plan.to_json().values() if isinstance(value, tuple)]
    assert not lists, "JSON has no tuples"


def test_fields_that_json_needs() -> None:
    with pytest.raises(RequestError, match="a plan needs 'grids'"):
        ParallelPlan.from_json({"microbatches": 2})
    with pytest.raises(RequestError, match="a plan needs 'grids'"):
        ParallelPlan.from_json({"tiles": None})
    assert ParallelPlan.from_json({"tiles": 3}).grids == ((1, 3),)


def test_cells_become_ranks() -> None:
    plan = ParallelPlan(((1, 2), (2, 1)), cells=(3, 5), spill="memory")
    fine = plan.by_cells()
    assert (fine.grids, fine.cells, fine.spill, fine.fused_halo) == (((3, 10), (6, 5)), None, None, 1)
    assert ParallelPlan(**CELLS, fused_halo=4).by_cells().fused_halo == 4
    whole = ParallelPlan(**TWO)
    assert whole.by_cells() is whole and whole.cell_grid is None and plan.cell_grid == (3, 5)


def test_stages_that_recompute() -> None:
    plan = ParallelPlan(**TWO, recompute=(1,))
    assert [plan.recomputes(stage) for stage in (0, 1)] == [False, True]
    assert ParallelPlan(**TWO, recompute=True).recomputes(0) and not ParallelPlan(**TWO).recomputes(1)


EVERYTHING = """\
30 trainers: 3 replicas of 10 ranks, 2 stages, 2 micro-batches, schedule chimera
of every 12 samples, the replicas take 2, 4, 6
each rank computes its part in 3 x 5 cells, one after the other
activations that no cell needs are moved to the host's memory until they are needed, so that a rank needs at most \
12,345 bytes; cheap ones are recomputed
replica 0, direction 0, stage 0: 2 x 3 ranks, to the end of layer1, recomputed
     0 │  1 │  2
     3 │  4 │  5
replica 0, direction 0, stage 1: 2 x 2 ranks
     6 │  7
     8 │  9
replica 0, direction 1, stage 0: 2 x 3 ranks, to the end of layer1, recomputed
     9 │  8 │  7
     6 │  5 │  4
replica 0, direction 1, stage 1: 2 x 2 ranks
     3 │  2
     1 │  0
"""


def test_a_plan_is_described_in_full() -> None:
    plan = ParallelPlan(
        ((2, 3), (2, 2)), ("layer1",), 2, "chimera", 3, recompute=(0,), shares=(2, 4, 6), cells=(3, 5), spill="memory",
        memory_bytes=12345,
    )  # fmt: skip
    text = plan.describe() + "\n"
    assert text.startswith(EVERYTHING)
    assert text.count("\n") == 4 + 3 * 12 and text.endswith(f"    {'23':>2} │ 22\n    21 │ 20\n")
    folder = ParallelPlan(**ONE, cells="auto", spill="/scratch").describe()
    assert "in as many cells as its memory requires\n" in folder
    assert "moved to /scratch until they are needed; cheap ones are recomputed\n" in folder
    planes = ParallelPlan(((1, 1),), replicas=2, branches=2).describe().splitlines()
    assert planes == [
        "4 trainers: 2 replicas of 2 ranks, 1 stage, 1 micro-batch, schedule 1f1b",
        "parallel branches are divided among the 2 planes of a replica",
        *(line for n in range(4) for line in (f"replica {n // 2}, plane {n % 2}, stage 0: 1 x 1 ranks", f"    {n}")),
    ]


def test_plans_of_tiles_are_described() -> None:
    assert ParallelPlan(tiles=1).describe() == "1 trainer: 1 replica of 1 rank"
    assert ParallelPlan(tiles=2, replicas=2).describe() == (
        "4 trainers: 2 replicas of 2 ranks; the 2 ranks of a replica share the tiles of each slide"
    )


def test_of_ten_rows_and_replicas_four_are_drawn_at_either_end() -> None:
    text = ParallelPlan(grids=((10, 1),), replicas=10).describe().splitlines()
    of_first = ["replica 0, stage 0: 10 x 1 ranks", *(f"    {n:>2}" for n in range(4)), "     ⋮"]
    assert text[1:11] == [*of_first, *(f"    {n:>2}" for n in range(6, 10))]
    named = [int(line.split()[1].rstrip(",")) for line in text if line.startswith("replica")]
    assert named == [0, 1, 2, 3, 6, 7, 8, 9] and text[1 + 4 * 10] == "⋮"


def test_shapes_of_batches() -> None:
    plain = BatchShapes.of(ParallelPlan(**TWO, microbatches=2), (6, 3, 10, 20))
    assert plain == BatchShapes((6, 3, 10, 20), (3, 3, 10, 20), (3, 3, 10, 20))
    shared = BatchShapes.of(ParallelPlan(**TWO, microbatches=2, replicas=2, shares=(4, 8)), (4, 3, 10, 20))
    assert shared == BatchShapes((4, 3, 10, 20), (2, 3, 10, 20), (4, 3, 10, 20))


def test_a_plan_of_tiles_may_be_made_again_from_its_fields() -> None:
    """Its grid is set by ``tiles``, and may be given with it, as by ``replace``; no other grid may."""
    plan = ParallelPlan(tiles=3)
    assert plan.grids == ((1, 3),) and replace(plan, replicas=2) == ParallelPlan(tiles=3, replicas=2)
    for grids in (((2, 3),), ((1, 2),), ((1, 3), (1, 1))):
        with pytest.raises(RequestError, match="leave grids out"):
            ParallelPlan(grids, tiles=3)
