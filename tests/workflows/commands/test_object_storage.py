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
from tests.data.store.test_object_store import serve_folder
from tests.google_server import any_bucket, google, google_bucket
from tests.object_server import ObjectServer, bucket, copy_to, server
from tests.pathology.slides import draw_slide, write_slide
from tests.workflows.archive import make_config
from tests.workflows.predictions import rows_of
from tests.workflows.runs import run_here, run_on

__all__ = ["any_bucket", "bucket", "google", "google_bucket", "server"]


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


def test_the_whole_job_on_a_bucket_is_that_of_a_folder(
    any_bucket: str, hyfi_here: Hyfi, tmp_path: Path, in_process: None
) -> None:
    lines = ["path,label,case_id,split"]
    for number, split in enumerate(("train", "train", "train", "train", "val", "val")):
        write_slide(tmp_path / f"{number}.tiff", draw_slide(seed=number))
        lines.append(f"{number}.tiff,{'ab'[number % 2]},case-{number},{split}")
    (tmp_path / "slides.csv").write_text("\n".join(lines))
    losses, rows = [], []
    for name, place in (("here", str(tmp_path / "store")), ("there", f"{any_bucket}/archive/store")):
        told = hyfi_here("ingest", "slides.csv", "--out", place, "--mpp", "2.0", "--workers", "1")
        assert told.returncode == 0 and "6 done" in told.stdout + told.stderr, told.stderr
        (tmp_path / name).mkdir()
        config = make_config(tmp_path / name, Path("store"), data={"store": place, "view": "crop", "min_coverage": 0.0})
        losses.append(trained(config, tmp_path / name / "run", "data.size_px=96", "data.mpp=2.0"))
        latest = tmp_path / name / "run" / "checkpoints" / "latest"
        told = hyfi_here("predict", latest, place, "--out", f"{name}/predictions", "--allow-partial")
        assert told.returncode == 0, told.stderr
        rows.append({slide: row["p_a"] for slide, row in rows_of(tmp_path / name / "predictions").items()})
    assert losses[0] == losses[1] and len(losses[0]) >= 3
    assert rows[0] == rows[1] and len(rows[0]) == 6 and all(map(float, rows[0].values()))


def test_training_on_a_web_server_gives_the_losses_of_a_folder(store: Path, tmp_path: Path, in_process: None) -> None:
    config = make_config(tmp_path, store)
    with serve_folder(store.parent) as address:
        there = trained(config, tmp_path / "there", f"data.store={address}/{store.name}")
    assert trained(config, tmp_path / "here") == there


def test_training_on_memory_gives_the_losses_of_a_folder(store: Path, tmp_path: Path, in_process: None) -> None:
    pytest.importorskip("obstore", reason="object storage needs hyfi[cloud]")
    config = make_config(tmp_path, store)
    place = copy_to(store, location(f"memory://{tmp_path.name}/store"))
    assert trained(config, tmp_path / "there", f"data.store={place}") == trained(config, tmp_path / "here")


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
