"""What loaders may use: a node's cache that its disk has no room for is refused; cores that trainers leave."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data.store.node_cache import VARIABLE
from hyfi_core.errors import RequestError
from tests.workflows.archive import make_config
from tests.workflows.runs import run_on
from workflows.config.load import load_config
from workflows.training import feeding
from workflows.training.feeding import CoreUse, cores_left, share_chunks


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk of 9,000,000,000 bytes, of which 2,000,000,000 are free."""
    monkeypatch.setenv(VARIABLE, "")
    whole = shutil.disk_usage
    small = SimpleNamespace(total=9_000_000_000, free=2_000_000_000, used=7_000_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: small if "cache" in str(path) else whole(path))


def shared(folder: Path, size_bytes: int) -> str | None:
    settings = {"node_cache_bytes": size_bytes, "node_cache": str(folder / "cache")}
    (folder / "cache").mkdir()
    return share_chunks(load_config(make_config(folder, folder / "store", data=settings), []).data)


def test_a_cache_larger_than_the_disk_is_refused(tmp_path: Path, disk: None) -> None:
    wanted = (
        r"data\.node_cache_bytes=10,000,000,000: the disk of .*cache.* has 9,000,000,000 bytes in all; give at most "
    )
    with pytest.raises(RequestError, match=wanted + "2,000,000,000"):
        shared(tmp_path, 10_000_000_000)


def test_a_cache_larger_than_what_is_free_is_told(tmp_path: Path, disk: None) -> None:
    note = shared(tmp_path, 3_000_000_000)
    assert note is not None
    assert note.startswith("data.node_cache_bytes=3,000,000,000: only 2,000,000,000 bytes are usable on the disk of ")


@pytest.mark.parametrize("size_bytes", [0, 1_000_000_000])
def test_a_cache_that_fits_needs_no_word(tmp_path: Path, disk: None, size_bytes: int) -> None:
    assert shared(tmp_path, size_bytes) is None


@pytest.mark.usefixtures("in_process")
def test_ranks_of_a_node_tell_it_once(
    tmp_path: Path, store: Path, disk: None, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cache").mkdir()
    settings = {"node_cache_bytes": 3_000_000_000, "node_cache": str(tmp_path / "cache")}
    config = make_config(tmp_path, store, data=settings, run={"steps": 1})
    assert run_on(2, config, "plan.grids=[[1,2]]") == [0, 0]
    assert capsys.readouterr().err.count("only 2,000,000,000 bytes are usable") == 1
    assert os.environ[VARIABLE]


def use(needs: int | None, host: str = "a", cores: int = 16, first: int = 0, usable: int | None = None) -> CoreUse:
    return CoreUse(host, tuple(range(first, first + cores)), usable or cores, needs)


@pytest.mark.parametrize(
    ("uses", "left"),
    [
        ([use(None), use(2), use(2)], 12),  # trainers with GPUs, one loader
        ([use(None), use(None), use(2), use(2)], 6),  # two loaders share the rest
        ([use(None), use(8), use(8)], 0),  # trainers on CPUs take all cores
        ([use(None), use(2, host="b"), use(2)], 14),  # another host
        ([use(None, cores=4), use(8, first=4, cores=12)], 4),  # a launcher that binds ranks to cores
        ([use(None, usable=6), use(2, usable=6)], 4),  # a quota of six cores
    ],
)
def test_loaders_share_the_cores_that_trainers_leave(uses: list[CoreUse], left: int) -> None:
    assert cores_left(uses[0], uses) == left


class Ranks:
    """A communicator whose other ranks have these uses; what it sends is JSON, as it is between processes."""

    def __init__(self, rank: int, others: list[CoreUse]) -> None:
        self.rank, self._others = rank, others

    def gather_objects(self, own: object) -> Any:
        host, cores, *_ = rows = json.loads(json.dumps(own))
        return [[host, cores, other.usable, other.needs] for other in self._others] + [rows]

    def broadcast_object(self, value: object) -> object:
        return value


@pytest.mark.parametrize(("rank", "workers", "most"), [(3, None, 6), (3, 2, None), (0, None, None)])
def test_only_loaders_without_a_fixed_number_may_raise_it(
    rank: int, workers: int | None, most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeding, "usable_cores", lambda: 8)
    job: Any = SimpleNamespace(config=SimpleNamespace(data=SimpleNamespace(workers=workers)))
    roles: Any = SimpleNamespace(world=Ranks(rank, [use(1), use(1)]), loader_ranks=range(3, 4))
    assert feeding.most_workers(job, roles, "cpu") == most


def test_that_a_loader_raises_its_workers_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    raised = feeding.RaisedWorkers("loader 1")
    raised(3, 6)
    raised(4, 6)
    assert capsys.readouterr().out == (
        "loader 1: trainers wait for images, and cores are free: 3 decoding processes, up to 6 while they wait "
        "(data.workers sets a fixed number)\n"
    )


def test_why_a_loader_raises_its_workers_no_further(capsys: pytest.CaptureFixture[str]) -> None:
    feeding.RaisedWorkers("loader 1").failed(4, OSError(12, "Cannot allocate memory"))
    assert capsys.readouterr().out == (
        "loader 1: one more decoding process cannot be started (Cannot allocate memory); it stays at 4\n"
    )
