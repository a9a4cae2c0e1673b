"""The moving average where weights travel from one direction to the other behind an update."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hyfi_core.runtime.checkpoint import Checkpoint, load_checkpoint
from tests.workflows.archive import make_config, make_store
from tests.workflows.runs import losses, run_here, run_on

pytestmark = pytest.mark.usefixtures("in_process")


def saved(run: Path) -> Checkpoint:
    return load_checkpoint(run / "checkpoints" / "latest")


def test_an_average_of_weights_under_way_is_that_of_one_rank_and_changes_no_weight(tmp_path: Path) -> None:
    """Each step is averaged, saved and judged by its average, while the other direction still receives its weights.

    Whoever put the average in the place of weights that have not arrived would put the old ones back afterwards.
    """
    config = make_config(
        tmp_path,
        make_store(tmp_path),
        model={"name": "tests.workflows.faults:tiny", "norm": "group"},
        lr_schedule={"name": "constant"},
        plan={"microbatches": 2},
        validation={"every_steps": 1},
        run={"precision": "float64", "ema": 0.7, "steps": 3},
    )
    two = ["plan.grids=[[1,1],[1,1]]", "plan.cuts=[norm1]", "plan.schedule=chimera"]
    assert run_here(config, f"run.dir={tmp_path / 'one'}") == 0
    assert run_on(2, config, *two, "plan.mirror=point_to_point") == [0, 0]
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "one"), rel=1e-9)
    found, wanted = saved(tmp_path / "run"), saved(tmp_path / "one")
    for here, there in ((found.weights, wanted.weights), (found.averaged, wanted.averaged)):
        assert here is not None and there is not None and here.keys() == there.keys()
        assert all(torch.allclose(here[name], there[name], rtol=1e-8, atol=1e-10) for name in here)
    assert not torch.equal(found.weights["fc.weight"], found.averaged["fc.weight"])  # type: ignore[index]
