from __future__ import annotations

import csv
import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest

from data.store.slide_store import SlideStore
from hyfi_core.plan.box import Box
from tests.conftest import Hyfi
from tests.data.store.test_verify import make_slide
from workflows.commands import export


@pytest.fixture
def store(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        make_slide(tmp_path / "store", name)
    return tmp_path / "store"


def test_slides_are_copied_once_and_a_damaged_one_is_named(hyfi_here: Hyfi, store: Path, tmp_path: Path) -> None:
    import zarr

    shard = store / "b.zarr/1/c/0/0/0"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    first = hyfi_here("export", store, "--ngff", "0.4", "--out", "copies", "--json")
    assert first.returncode == 1 and "failed: b:" in first.stderr and "Traceback" not in first.stderr
    told = json.loads(first.stdout.splitlines()[-1])
    assert (told["done"], told["failed"], told["before"]) == (1, 1, 0)
    assert "b,copies/b.zarr,failed," in (tmp_path / "copies/export.csv").read_text()
    shard.write_bytes(whole)
    second = hyfi_here("export", store, "--ngff", "0.4", "--out", "copies", "--json")
    assert second.returncode == 0, second.stderr
    told = json.loads(second.stdout.splitlines()[-1])
    assert (told["done"], told["failed"], told["before"]) == (1, 0, 1)
    for name in ("a", "b"):
        own = SlideStore.open(store / f"{name}.zarr").read(Box(0, 520, 0, 1100))
        assert np.array_equal(zarr.open_group(tmp_path / f"copies/{name}.zarr", mode="r")["0"][:], own)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("store", "--ngff", "0.3", "--out", "copies"), "--ngff 0.3: allowed: 0.4"),
        (("store", "--ngff", "0.4", "--out", "store"), "choose another folder"),
        (("nowhere", "--ngff", "0.4", "--out", "copies"), "no such folder"),
        ((".", "--ngff", "0.4", "--out", "copies"), "no ingested slide"),
        (("store", "--ngff", "0.4", "--out", "store/a.zarr/zarr.json"), "is a file"),
        (("x" * 300, "--ngff", "0.4", "--out", "copies"), os.strerror(errno.ENAMETOOLONG)),
    ],
)
def test_wrong_requests_write_nothing(
    hyfi_here: Hyfi, store: Path, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    done = hyfi_here("export", *words)
    assert done.returncode == 2 and said in done.stderr
    assert not (tmp_path / "copies").exists()


def test_a_full_disk_fails_the_slides_with_its_reason(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr("data.store.export._write", lambda store, files, threads, progress: full(files.root, b""))
    assert export.run(store, "0.4", tmp_path / "copies", as_json=False) == 1
    assert [row["status"] for row in csv.DictReader((tmp_path / "copies/export.csv").open())] == ["failed", "failed"]
    monkeypatch.setattr("data.csv_table.write_atomically", full)
    assert export.run(store, "0.4", tmp_path / "copies", as_json=False) == 1
    said = capsys.readouterr().err
    assert "failed: a: " in said and "export.csv cannot be written" in said and os.strerror(errno.ENOSPC) in said
