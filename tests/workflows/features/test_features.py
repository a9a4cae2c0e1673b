"""``hyfi features``: what it writes, read in the manner of the tools it is for; run again, stopped, damaged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import zarr
from torch import nn

from data.csv_table import read_table
from data.store.manifest import SlideRecord, merge_manifest
from data.store.slide_store import SlideStore, slide_path
from data.tiles.reader import StoreTiles
from data.tiles.tiling import Tiling
from data.tiles.tissue_tiles import TissueTiles, tissue_tiles
from hyfi_core.plan.box import Box
from tests.conftest import ROOT, Hyfi
from tests.data.tiles.stored import write_slide
from tests.patience import PATIENCE_S
from workflows.features.feature_folder import FeatureFolder
from workflows.features.feature_set import FeatureSet

MINE = f"{__name__}:mean_colour"
PLAIN = ("--encoder", MINE, "--mean", "0,0,0", "--std", "1,1,1", "--tile-px", "96", "--batch-size", "50")


class Colours(nn.Module):
    """Vectors of six numbers: the mean of each channel, times weights."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((2,), scale))

    def forward(self, tiles: torch.Tensor) -> torch.Tensor:
        return (tiles.mean((2, 3))[:, None] * self.scale[:, None]).flatten(1)


def mean_colour(scale: float = 1.0) -> nn.Module:
    return Colours(scale)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two slides with tissue, and one without."""
    store = tmp_path_factory.mktemp("features") / "store"
    store.mkdir()
    mask = np.random.default_rng(8).random((138, 538)) > 0.6
    mask[:, 300:] = False
    for number, slide_id in enumerate(("a", "b", "glass")):
        write_slide(store, slide_id, mask if slide_id != "glass" else np.zeros_like(mask), seed=number)
        SlideRecord(slide_id=slide_id, source_path="", status="done").save(store)
    merge_manifest(store)
    return store


def expected(store: Path, slide_id: str, tiling: Tiling) -> tuple[TissueTiles, np.ndarray]:
    """The tiles of a slide and their vectors, computed plainly."""
    slide = SlideStore.open(slide_path(store, slide_id))
    tiles = tissue_tiles(slide, tiling)
    means = StoreTiles(slide, tiles).read(range(len(tiles))).double().mean((2, 3)).numpy() / 255
    return tiles, np.concatenate([means, means], axis=1)


def said(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    return dict(json.loads(done.stdout.splitlines()[-1]))


def trident_reads(path: Path) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    """TRIDENT: attributes of ``coords``, corners, vectors; its patcher needs three attributes."""
    with h5py.File(path, "r") as file:
        attributes, coords, features = dict(file["coords"].attrs), file["coords"][:], file["features"][:]
    needed = (attributes.get(name) for name in ("patch_size", "level0_magnification", "target_magnification"))
    assert None not in needed
    return attributes, coords, features


def clam_reads(folder: Path, slide_id: str) -> tuple[torch.Tensor, np.ndarray]:
    """CLAM: the tensor that it trains on, and corners for heatmaps."""
    with h5py.File(folder / "h5_files" / f"{slide_id}.h5", "r") as file:
        coords, same = file["coords"][:], file["features"][:]
    features = torch.load(folder / "pt_files" / f"{slide_id}.pt")
    assert torch.equal(features, torch.from_numpy(same))
    return features, coords


def stamp_reads(path: Path) -> tuple[np.ndarray, torch.Tensor, float]:
    """STAMP 2.1 and later: micrometres, vectors, µm/px."""
    with h5py.File(path, "r") as file:
        feats, coords, stated = torch.from_numpy(file["feats"][:]), file["coords"][:], dict(file.attrs)
    assert stated["feat_type"] == "tile" and stated["unit"] == "um" and stated["tile_size_um"] > 0
    assert tuple(int(part) for part in stated["stamp_version"].split(".")) <= (2, 1, 0)
    assert feats.dtype == torch.float16 and coords.dtype == np.float32 and "extractor" in stated
    return coords, feats.float(), float(stated["tile_size_um"]) / int(stated["tile_size_px"])


def test_trident_reads_corners_in_level_0_pixels(store: Path, tmp_path: Path, hyfi_here: Hyfi) -> None:
    done = hyfi_here("features", store, *PLAIN, "--out", "out", "--mpp", "1.25", "--workers", "2", "--json")
    assert done.returncode == 1 and "failed: glass: slide glass: none of its" in done.stderr
    for slide_id in ("a", "b"):
        tiles, vectors = expected(store, slide_id, Tiling(96, mpp=1.25))
        attributes, coords, features = trident_reads(tmp_path / "out" / f"{slide_id}.h5")
        assert features.dtype == np.float32 and np.allclose(features, vectors, atol=1e-6)
        assert coords.dtype == np.int64 and np.array_equal(coords, tiles.coords[:, ::-1])
        # 96 px of 1.25 µm are 300 px of 0.4 µm: 8× of 25×, which nearest usual magnification makes 20× and 6.4×.
        assert attributes["patch_size_level0"] == 300 and attributes["patch_size"] == 96
        scale = attributes["level0_magnification"] / attributes["target_magnification"]
        assert attributes["patch_size"] * scale == pytest.approx(300)
        assert (attributes["level0_width"], attributes["level0_height"]) == (10760, 2793)
        assert (attributes["name"], attributes["overlap"]) == (slide_id, 0)
    table = {row["slide_id"]: row for row in read_table(tmp_path / "out" / "features.csv", "table").rows}
    assert table["a"]["status"] == "done" and table["a"]["file"] == "a.h5" and int(table["a"]["tiles"]) > 100
    assert table["glass"]["status"] == "failed" and "is tissue to 25%" in table["glass"]["reason"]
    assert [one["slide_id"] for one in said(done)["failed"]] == ["glass"] and said(done)["done"] == ["a", "b"]


def test_clam_stamp_and_zarr_have_the_same_tiles(store: Path, tmp_path: Path, hyfi_here: Hyfi) -> None:
    tiles, vectors = expected(store, "a", Tiling(96))
    for form in ("clam", "stamp", "zarr"):
        assert hyfi_here("features", store, *PLAIN, "--out", form, "--format", form).returncode == 1
    features, coords = clam_reads(tmp_path / "clam", "a")
    assert np.allclose(features, vectors, atol=1e-6) and np.array_equal(coords, tiles.coords[:, ::-1])
    coords_um, feats, mpp = stamp_reads(tmp_path / "stamp" / "a.h5")
    assert np.allclose(feats, vectors, atol=1e-3) and mpp == pytest.approx(1.0)
    assert np.allclose(coords_um, tiles.corners[:, ::-1] * 1.0 + np.array([7, 40]) * 0.4, atol=1e-3)
    group = zarr.open_group(tmp_path / "zarr" / "a.zarr", mode="r")
    assert np.allclose(group["features"][:], vectors, atol=1e-6) and np.array_equal(group["coords"][:], tiles.coords)
    assert dict(group.attrs)["hyfi_features"]["size_px"] == 96


def test_finished_slides_are_skipped_and_damaged_ones_named(store: Path, tmp_path: Path, hyfi_here: Hyfi) -> None:
    command = ("features", store, *PLAIN, "--out", "out", "--min-tissue", "0.2", "--json")
    hyfi_here(*command)
    before = {path: path.read_bytes() for path in (tmp_path / "out").glob("*.h5")}
    assert said(hyfi_here(*command))["skipped"] == ["a", "b"]
    path = tmp_path / "out" / "a.h5"
    damaged = bytearray(before[path])
    damaged[-5] ^= 1
    path.write_bytes(damaged)
    again = hyfi_here(*command)
    assert f"a: damaged: {Path('out/a.h5')} is not the file that was written; it is computed again" in again.stderr
    assert said(again)["done"] == ["a"] and said(again)["skipped"] == ["b"] and path.read_bytes() == before[path]
    path.unlink()
    assert said(hyfi_here(*command))["done"] == ["a"]
    # A copy has another time, but the same digest.
    path.write_bytes(bytes(before[path]))
    assert said(hyfi_here(*command))["skipped"] == ["a", "b"]
    assert not [name for name in (tmp_path / "out").iterdir() if ".tmp-" in name.name]


def test_a_slide_that_was_ingested_again_is_named(tmp_path: Path, hyfi_here: Hyfi) -> None:
    store = tmp_path / "store"
    store.mkdir()
    mask = np.zeros((138, 538), bool)
    mask[:20, :20] = True
    command = ("features", "store", *PLAIN, "--out", "out", "--json")
    for seed in (1, 2):
        write_slide(store, "a", mask, seed)
        SlideRecord(slide_id="a", source_path="", status="done").save(store)
        merge_manifest(store)
        done = hyfi_here(*command)
        assert done.returncode == 0 and said(done)["done"] == ["a"]
        assert ("a: out of date: the slide was ingested again" in done.stderr) == (seed == 2)


def test_features_of_another_store_are_not_replaced_by_those_of_a_slide_of_the_same_name(
    tmp_path: Path, hyfi_here: Hyfi
) -> None:
    mask = np.ones((138, 538), bool)
    for number, name in enumerate(("one", "two")):
        (tmp_path / name).mkdir()
        write_slide(tmp_path / name, "a", mask, number, source=str(number) * 64)
        SlideRecord(slide_id="a", source_path="", status="done").save(tmp_path / name)
        merge_manifest(tmp_path / name)
    assert hyfi_here("features", "one", *PLAIN, "--out", "out").returncode == 0
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    refused = hyfi_here("features", "two", *PLAIN, "--out", "out")
    assert (
        refused.returncode == 2 and "out has features of a from another file (SHA-256 000000000000…" in refused.stderr
    )
    assert before == {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert hyfi_here("features", "two", *PLAIN, "--out", "out", "--overwrite").returncode == 0
    assert np.allclose(trident_reads(tmp_path / "out" / "a.h5")[2], expected(tmp_path / "two", "a", Tiling(96))[1])


def test_features_of_two_encoders_are_never_mixed(store: Path, tmp_path: Path, hyfi_here: Hyfi) -> None:
    command = ("features", store, *PLAIN, "--out", "out")
    hyfi_here(*command)
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    twice = ("--encoder-options", '{"scale": 2.0}')
    for more, what in (
        (twice, "weights_sha256"),
        (("--min-tissue", "0.1"), "min_tissue"),
        (("--format", "zarr"), "form"),
    ):
        refused = hyfi_here(*command, *more)
        assert refused.returncode == 2 and "has features made with another" in refused.stderr and what in refused.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == files
    assert hyfi_here(*command, *twice, "--overwrite").returncode == 1
    _, _, features = trident_reads(tmp_path / "out" / "a.h5")
    assert np.allclose(features, 2 * expected(store, "a", Tiling(96))[1], atol=1e-5)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "b.h5").write_text("of another tool")
    refused = hyfi_here("features", store, *PLAIN, "--out", "theirs")
    assert refused.returncode == 2 and "b.h5 was not written by hyfi features" in refused.stderr
    assert (tmp_path / "theirs" / "b.h5").read_text() == "of another tool"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--mpp", "0.5"), "slide a has 1 µm/px at its finest level"),
        (("--format", "hdf5"), "--format hdf5: use one of trident, clam, stamp, zarr"),
        (("--precision", "half"), "--precision half: use one of float32, bfloat16"),
        (("--encoder", "resnet"), "encoder 'resnet': use timm:NAME"),
        (("--encoder-options", "{"), "--encoder-options {: not JSON"),
        (("--mean", "grey"), "--mean grey: use three numbers"),
        (("--weights", "none.pth"), "none.pth: no such file"),
        (("--min-tissue", "2"), "use a number from 0 to 1"),
        (("--part", "3/2"), "--part 3/2"),
    ],
)
def test_a_wrong_request_writes_nothing(
    store: Path, tmp_path: Path, hyfi_here: Hyfi, words: tuple[str, ...], message: str
) -> None:
    refused = hyfi_here("features", store, *PLAIN, "--out", "out", *words)
    assert refused.returncode == 2 and message in refused.stderr and not (tmp_path / "out").exists()


def test_random_weights_are_refused_unless_asked_for(store: Path, tmp_path: Path, hyfi_here: Hyfi) -> None:
    transformers = pytest.importorskip("transformers")
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    transformers.ViTConfig(image_size=96, **size).save_pretrained(tmp_path / "vit")
    command = ("features", store, "--encoder", "transformers:vit", "--tile-px", "96", "--out", "out")
    refused = hyfi_here(*command)
    assert refused.returncode == 2 and "its weights are random (all); give all of them with --weights" in refused.stderr
    accepted = hyfi_here(*command, "--random-weights", "--part", "1/3", "--precision", "bfloat16")
    assert accepted.returncode == 0 and "its features mean nothing" in accepted.stderr
    assert sorted(path.name for path in (tmp_path / "out").glob("*.h5")) == ["a.h5"]


def not_finite() -> nn.Module:
    return Colours(float("inf"))


def test_features_that_a_file_cannot_hold_fail(store: Path, tmp_path: Path, hyfi_here: Hyfi) -> None:
    large = ("--encoder-options", '{"scale": 1e9}', "--format", "stamp")
    for more, message in (
        (large, "do not fit into float16"),
        (("--encoder", f"{__name__}:not_finite"), "is not finite"),
    ):
        done = hyfi_here("features", store, *PLAIN, "--out", more[-1].replace(":", "-"), *more, "--part", "1/3")
        assert done.returncode == 1 and message in done.stderr and "failed: a:" in done.stderr
        assert not list((tmp_path / more[-1].replace(":", "-")).glob("*.h5"))


SLOW = """
import time, torch
class Slow(torch.nn.Module):
    def forward(self, tiles):
        time.sleep(0.2 if len(tiles) > 2 else 0)
        return tiles.mean((2, 3))
"""


def test_a_request_to_stop_leaves_nothing_half_done(store: Path, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    words = ["features", str(store), "--encoder", "slow:Slow", "--out", "out", "--tile-px", "96", "--batch-size", "8"]
    words.append("--json")
    command = [sys.executable, "-P", "-m", "workflows.cli", *words]
    process = subprocess.Popen(
        command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    wait_for(lambda: any((tmp_path / "out").glob(".a.h5.tmp-*")), process)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 3 and "stopped on request" in stderr, stderr
    report = json.loads(stdout.splitlines()[-1])
    assert report["stopped"] is True and report["done"] == [] and "run the same command to continue" in stdout
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"features.csv", "features.json", ".hyfi", ".owner"}


def wait_for(ready: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    for _ in range(3000):
        if ready():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    raise AssertionError("it did not begin")


@pytest.mark.slides
def test_tiles_are_where_openslide_has_them(real_slides: Path, tmp_path: Path, hyfi_here: Hyfi) -> None:
    """Mean colours of tiles at 1 µm/px against those of the same places of the scanner's file."""
    import openslide

    path = real_slides / "CMU-1-Small-Region.svs"
    assert hyfi_here("ingest", path, "--out", "store", "--mpp", "0.5").returncode == 0
    options = ("--encoder", MINE, "--mean", "0,0,0", "--std", "1,1,1", "--mpp", "1.0")
    assert hyfi_here("features", "store", *options, "--out", "out").returncode == 0
    attributes, coords, features = trident_reads(tmp_path / "out" / f"{path.stem}.h5")
    size = int(attributes["patch_size_level0"])
    with openslide.OpenSlide(path) as slide:
        for (x, y), vector in zip(coords.tolist(), features, strict=True):
            region = np.asarray(slide.read_region((x, y), 0, (size, size)))
            inside = region[..., 3] > 0
            colour = np.where(inside[..., None], region[..., :3], 255).mean((0, 1)) / 255
            assert np.abs(vector[:3] - colour).max() < 0.004
    # A shift by a quarter of a tile would be seen.
    store = SlideStore.open(slide_path(tmp_path / "store", path.stem))
    shifted = [store.read(Box(y, y + size, x + size // 4, x + size // 4 + size)).mean((1, 2)) / 255 for x, y in coords]
    assert np.abs(np.array(shifted) - features[:, :3]).max() > 0.04


def test_reasons_of_failures_are_found_under_any_name_of_a_slide(tmp_path: Path) -> None:
    """Names that a spreadsheet would run are written with an apostrophe, and names of files need not be UTF-8."""
    folder, names = FeatureFolder(tmp_path, "trident", {}), ("=1+1", os.fsdecode(b"caf\xe9"))
    folder.begin()
    for name in names:
        folder.note_failed(name, "no tissue")
    folder.write_table()
    assert FeatureSet(tmp_path, {}, {}).failures == dict.fromkeys(names, "no tissue")
