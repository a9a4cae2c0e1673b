"""Loaders send tiles and validators validate them: bit for bit the run of trainers that do both themselves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.workflows.runs import assert_same_run, run_here, run_on
from tests.workflows.training.test_tile_runs import tile_config

pytestmark = pytest.mark.usefixtures("in_process")
ROLES = ("roles.loaders=1", "roles.validators=1", "data.workers=1")


def test_a_run_with_a_loader_and_a_validator_is_the_same(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tile_config(tmp_path, store)
    words = "run.precision=float32", "run.ema=0.9", "plan.memory_bytes=4000000000"
    assert run_here(config, *words) == 0
    capsys.readouterr()
    assert run_on(3, config, *words, *ROLES, f"run.dir={tmp_path / 'roles'}") == [0, 0, 0]
    assert_same_run(tmp_path / "roles", tmp_path / "run", 4)
    said = capsys.readouterr()
    assert re.search(r"1 loader: \d\.\d MB read, \d\.\d MB sent", said.out + said.err)
