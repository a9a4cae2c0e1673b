"""Commands on a store in a bucket, as a user gives them."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import yaml

from data.location import location
from tests.conftest import Hyfi
from tests.object_server import ObjectServer, bucket, copy_to, server
from tests.workflows.archive import make_config
from tests.workflows.runs import run_here, run_on

__all__ = ["bucket", "server"]


@pytest.fixture
def place(store: Path, bucket: str) -> str:
    return str(copy_to(store, location(f"{bucket}/archive/store")))


def trained(config: Path, run: Path, *overrides: str) -> list[tuple[str, float]]:
    assert run_here(config, f"run.dir={run}", "run.steps=2", *overrides) == 0
    return [(line["kind"], line["loss"]) for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())]


def test_training_on_a_bucket_gives_the_losses_of_a_folder(
    store: Path, place: str, server: ObjectServer, tmp_path: Path, in_process: None
) -> None:
    config = make_config(tmp_path, store)
    here = trained(config, tmp_path / "here")
    before = len(server.requests)
    there = trained(config, tmp_path / "there", f"data.store={place}")
    assert here == there and len(here) >= 3
    slides = len(list(store.glob("*.zarr")))
    listed = [one for one in server.requests[before:] if "list-type" in one[2]]
    assert len(listed) <= slides, "the files of each slide are looked at once, before the first step"
    assert yaml.safe_load((tmp_path / "there" / "config.yaml").read_text())["data"]["store"] == place


def test_ranks_of_a_node_read_each_part_of_a_store_once(
    store: Path, place: str, server: ObjectServer, tmp_path: Path, in_process: None
) -> None:
    config = make_config(tmp_path, store, plan={"grids": [[1, 2]]})
    pixels = Counter[tuple[str, ...]]()
    losses = {}
    for size in (0, 10**9):
        before = len(server.requests)
        run = tmp_path / f"run-{size}"
        cache = [f"data.node_cache_bytes={size}", f"data.node_cache={tmp_path / 'cache'}"]
        assert run_on(2, config, f"run.dir={run}", "run.steps=3", f"data.store={place}", *cache) == [0, 0]
        pixels = Counter(one[1:] for one in server.requests[before:] if "/0/c/" in one[1] and "labels" not in one[1])
        losses[size] = [line["loss"] for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())]
        assert (max(pixels.values()) == 1) == (size > 0), "without a cache each rank reads for itself"
    assert losses[0] == losses[10**9]


def test_other_commands_read_a_bucket(store: Path, place: str, hyfi_here: Hyfi, tmp_path: Path) -> None:
    names = sorted(path.name.removesuffix(".zarr") for path in store.glob("*.zarr"))
    told = hyfi_here("verify", place, "--json")
    assert told.returncode == 0 and json.loads(told.stdout.splitlines()[-1])["slides"] == len(names)
    told = hyfi_here("inspect", place, "--png", "sheet.png", "--json")
    assert [slide["slide_id"] for slide in json.loads(told.stdout.splitlines()[-1])["slides"]] == names
    assert told.returncode == 0 and (tmp_path / "sheet.png").exists()
    told = hyfi_here("export", f"{place}/{names[0]}.zarr", "--ngff", "0.4", "--out", "copies")
    assert told.returncode == 0 and (tmp_path / "copies" / f"{names[0]}.zarr").is_dir(), told.stderr


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["inspect", "s3://nowhere/store"], "there is no bucket 'nowhere'"),
        (["verify", "s3://nowhere/store"], "there is no bucket 'nowhere'"),
        (["ingest", "SLIDES", "--out", "s3://nowhere/store"], "there is no bucket 'nowhere'"),
        (["ingest", "SLIDES", "--out", "https://host/store"], "https:// cannot be written"),
        (["ingest", "SLIDES", "--out", "memory://host/store"], "memory:// cannot be written"),
        (["ingest", "SLIDES", "--out", "ftp://host/store"], "ftp:// is not known"),
        (["predict", "s3://b/run/checkpoints/best", "s3://b/store", "--out", "o"], "only stores are read from object"),
        (["validate", "s3://b/run/checkpoints/best", "--store", "s3://b/store"], "only stores are read from object"),
        (["predict", "checkpoint", "s3://b/store", "--out", "s3://b/o"], "only a store (hyfi ingest --out) can be"),
        (["synth", "s3://b/o", "--slides", "1", "--size", "300"], "only a store (hyfi ingest --out) can be"),
    ],
)
def test_what_cannot_be_done_is_refused_and_nothing_is_written(
    server: ObjectServer, hyfi_here: Hyfi, tmp_path: Path, words: list[str], what: str
) -> None:
    slides = tmp_path.parent / f"{tmp_path.name}-slides"
    slides.mkdir()
    (slides / "a.tiff").write_bytes(b"II*\0")
    told = hyfi_here(*[str(slides) if word == "SLIDES" else word for word in words])
    assert told.returncode == 2 and what in told.stderr, told.stderr
    assert told.stderr.count("\n") == 1 and not list(tmp_path.iterdir())
    shutil.rmtree(slides)


def test_a_run_folder_in_a_bucket_is_refused(store: Path, hyfi_here: Hyfi, tmp_path: Path) -> None:
    config = make_config(tmp_path, store)
    told = hyfi_here("train", config, "run.dir=s3://b/run")
    assert told.returncode == 2 and "s3://b/run" in told.stderr and "write to a local folder" in told.stderr
