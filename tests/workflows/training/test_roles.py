"""Who of the ranks does what: by number, by host, by the name of a design."""

from __future__ import annotations

from pathlib import Path

import pytest

from hyfi_core.comm.base import Communicator
from hyfi_core.comm.threads import run_ranks
from hyfi_core.errors import RequestError
from workflows.config.load import load_config
from workflows.config.ranks import RolesConfig
from workflows.launch.request import check_ranks
from workflows.training import start
from workflows.training.job import TrainingJob
from workflows.training.pace import with_shares
from workflows.training.start import Roles

SPARE = ["roles.design=offload_naive", "model.norm=group", "data.batch_size=4"]
DPUS = ["n1", "n1", "dpu-1", "n2", "n2", "dpu-2"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text("data: {store: archive, size_px: 2048}\nrun: {dir: runs/a, epochs: 3}\n")
    return file


def test_spare_ranks_train_beside_those_of_the_plan(path: Path) -> None:
    assert load_config(path, SPARE).trainers == load_config(path, SPARE).ranks == 2
    grid = [*SPARE, "plan.grids=[[1,2]]", "plan.replicas=2", "data.batch_size=8"]
    assert load_config(path, grid).ranks == 4 + 2
    assert load_config(path, [*grid, "roles.spare=4", "roles.shares=[3,3,1,1]"]).ranks == 4 + 4


def test_spare_ranks_by_host_find_their_places(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "gather_hosts", lambda world: DPUS)
    config = load_config(path, [*SPARE, "plan.grids=[[2,2]]", "roles.spare=dpu-*"])
    assert config.roles.by_host and config.ranks == 4

    def body(world: Communicator) -> tuple:
        roles = Roles.of(world, config)
        assert roles.trainers is not None
        with pytest.raises(RequestError, match=r"6 ranks train \(4 of the plan.* a replica has 4"):
            with_shares(TrainingJob(config, (), None, None, (), None), roles)  # type: ignore[arg-type]
        return roles.trainers.rank, roles.trainers.size

    assert run_ranks(6, body) == [(place, 6) for place in (0, 1, 4, 2, 3, 5)]


@pytest.mark.parametrize(
    ("design", "ranks"), [("inline", 1), ("offload_data", 2), ("offload_validation", 2), ("offload_all", 3)]
)
def test_designs_have_names(path: Path, design: str, ranks: int) -> None:
    assert load_config(path, [f"roles.design={design}"]).ranks == ranks


def test_a_design_takes_more_ranks_where_they_are_given(path: Path) -> None:
    roles = load_config(path, ["roles.design=offload_all", "roles.loaders=3", "roles.validators=v-*"]).roles
    assert (roles.loaders, roles.validators, roles.by_host) == (3, "v-*", True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["roles.design=inline", "roles.loaders=1"], "inline means loaders: 0"),
        (["roles.design=offload_all", "roles.validators=0"], "offload_all means"),
        (["roles.design=offload_naive", "roles.loaders=1"], "offload_naive means loaders: 0"),
        (["roles.spare=1"], "spare: 1 and shares: None need design: offload_naive"),
        (["roles.design=inline", "roles.shares=[1]"], "need design: offload_naive; given design: inline"),
        ([*SPARE, "model.norm=train"], r"allowed: with plan.sync_batch_norm=true, or with model.norm=group or frozen"),
        ([*SPARE, "plan.grids=[[1,2]]", "roles.spare=3"], "roles.spare: given 3; allowed: a multiple of 2"),
        ([*SPARE, "data.batch_size=1"], "data.batch_size: given 1; .* each of 2 replicas takes at least one"),
        ([*SPARE, "plan.microbatches=2", "data.batch_size=5"], "data.batch_size: given 5; .* plan.microbatches = 2"),
        ([*SPARE, "roles.shares=[3,2]"], "roles.shares: given .3, 2.; .* 2 replicas, together data.batch_size = 4"),
        ([*SPARE, "roles.shares=[4]"], "roles.shares: given .4."),
        ([*SPARE, "roles.shares=[4,0]"], "roles.shares: given .4, 0."),
        ([*SPARE, "plan.microbatches=2", "roles.shares=[3,1]"], "roles.shares: given .3, 1.; .*microbatches = 2"),
        (["roles.design=offload"], "roles.design"),
        (["roles.loaders=-1"], "roles.loaders"),
    ],
)
def test_a_design_that_contradicts_its_ranks_is_refused(path: Path, words: list[str], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        load_config(path, words)


def test_roles_by_host_need_a_launcher(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(path, ["roles.loaders=dpu-*"])
    with pytest.raises(RequestError, match="need a launcher"):
        check_ranks(config, 1)
    monkeypatch.setenv("PMI_SIZE", "6")
    check_ranks(config, 6)


def test_ranks_find_their_places(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 and 5 are on DPUs: the world is put in order, trainers first, and each loader has its own trainers."""
    monkeypatch.setattr(start, "gather_hosts", lambda world: DPUS)
    config = load_config(path, ["plan.grids=[[2,2]]", "roles.loaders=dpu-*"])

    def body(world: Communicator) -> tuple:
        roles = Roles.of(world, config)
        trainer = roles.trainers.rank if roles.trainers is not None else None
        return roles.world.rank, trainer, dict(roles.loaders_of), list(roles.loader_ranks)

    found = run_ranks(6, body)
    near = {0: (4,), 1: (4,), 2: (5,), 3: (5,)}
    places, trainers = (0, 1, 4, 2, 3, 5), (0, 1, None, 2, 3, None)
    assert found == [(place, trainer, near, [4, 5]) for place, trainer in zip(places, trainers, strict=True)]


def test_every_rank_learns_the_hosts() -> None:
    names = run_ranks(2, start.gather_hosts)
    assert names[0] == names[1] and len(names[0]) == 2 and names[0][0]


def test_roles_are_numbers_by_default() -> None:
    assert RolesConfig() == RolesConfig(loaders=0, validators=0, design=None)
