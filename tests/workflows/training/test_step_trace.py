"""The trace of a run: what it shows of which steps, and that tracing changes nothing."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.workflows.archive import make_config
from tests.workflows.runs import losses, run_on
from workflows.training.step_trace import traced_steps


@pytest.mark.parametrize(
    ("done", "last", "count", "steps"),
    [(0, 9, 0, []), (0, 9, 2, [2, 3]), (4, 9, 99, [6, 7, 8, 9]), (0, 1, 3, [1]), (8, 9, 2, [9])],
)
def test_the_first_step_is_traced_only_if_there_is_no_other(done: int, last: int, count: int, steps: list[int]) -> None:
    assert list(traced_steps(done, last, count)) == steps


@pytest.mark.usefixtures("in_process")
def test_a_trace_has_every_trainer_and_all_that_it_did(tmp_path: Path, store: Path) -> None:
    plan: dict[str, Any] = {"grids": [[1, 2], [1, 1]], "cuts": ["conv2"], "microbatches": 2, "fused_halo": 1}
    config = make_config(tmp_path, store, plan=plan, data={"batch_size": 2}, run={"steps": 3})
    for name, steps in (("plain", 0), ("traced", 2)):
        assert run_on(3, config, f"run.dir={tmp_path / name}", f"run.trace={steps}") == [0, 0, 0]
    assert not (tmp_path / "plain" / "trace.json").exists()
    assert losses(tmp_path / "plain") == losses(tmp_path / "traced")

    rows = json.loads((tmp_path / "traced" / "trace.json").read_text())["traceEvents"]
    drawn = [row for row in rows if row["ph"] == "X"]
    assert {row["pid"] for row in drawn} == {0, 1, 2}
    names = {row["args"]["name"] for row in rows if row["name"] == "process_name"}
    assert all(name.startswith(f"rank {rank} on ") for rank, name in enumerate(sorted(names)))
    for rank in range(3):
        mine = [row for row in drawn if row["pid"] == rank]
        stage = 0 if rank < 2 else 1
        for action in (f"F0.s{stage}.d0", f"B1.s{stage}.d0", "update", "images"):
            assert sum(row["name"] == action for row in mine) == 2, action  # once a step
        assert ("halo" in {row["cat"] for row in mine}) == (rank < 2)
        assert "stage" in {row["cat"] for row in mine}
        assert all(row["ts"] >= 0 and row["dur"] >= 0 for row in mine)
        compute = sorted((row["ts"], row["ts"] + row["dur"]) for row in mine if row["cat"] in ("F", "B", "update"))
        assert all(before[1] <= after[0] + 1e-3 for before, after in pairwise(compute))
