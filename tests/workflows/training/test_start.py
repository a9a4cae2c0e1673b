"""Ranks that a launcher has scattered over nodes take other places of the plan; the run stays the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from hyfi_core.comm.base import Communicator
from hyfi_core.comm.threads import run_ranks
from tests.workflows.archive import make_config, make_store
from tests.workflows.runs import assert_same_run, in_this_process, run_on
from workflows.config.load import load_config
from workflows.training import start
from workflows.training.start import Roles

SCATTERED = ["a", "b", "a", "b", "a"]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    plan = {"grids": [[1, 4]], "fused_halo": 1}
    return make_config(tmp_path, make_store(tmp_path), plan=plan, roles={"loaders": 1}, validation={"every_steps": 2})


def test_scattered_ranks_train_the_same(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    with in_this_process(monkeypatch):
        assert run_on(5, config, f"run.dir={one}", "run.steps=2") == [0] * 5
        assert "node by node" not in capsys.readouterr().out
        monkeypatch.setattr(start, "gather_hosts", lambda world: SCATTERED)
        assert run_on(5, config, f"run.dir={other}", "run.steps=2") == [0] * 5
    assert "in the order 0, 2, 1, 3 only" in capsys.readouterr().out
    assert_same_run(one, other, 2)


def test_places_follow_hosts_and_loaders_follow_trainers(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_config(config)
    monkeypatch.setattr(start, "_place_order", lambda *given: [0, 2, 1, 3])

    def places(world: Communicator) -> tuple[int, dict[int, tuple[int, ...]]]:
        roles = Roles.of(world, settings, 2)
        return roles.world.rank, dict(roles.loaders_of)

    monkeypatch.setattr(start, "gather_hosts", lambda world: SCATTERED)
    assert [place for place, _ in run_ranks(5, places)] == [0, 2, 1, 3, 4]
    monkeypatch.setattr(start, "gather_hosts", lambda world: ["a", "a", "b", "b", "b"])
    assert [place for place, _ in run_ranks(5, places)] == [0, 1, 2, 3, 4]
