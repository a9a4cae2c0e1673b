"""A node's cache that its disk has no room for is refused or told at start, with both numbers."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from data.store.node_cache import VARIABLE
from hyfi_core.errors import RequestError
from tests.workflows.archive import make_config
from tests.workflows.runs import run_on
from workflows.config.load import load_config
from workflows.training.feeding import share_chunks


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
