from __future__ import annotations

import json
import multiprocessing
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from data.errors import StoreError
from data.store.layout import LevelSize, pyramid_levels
from data.store.slide_store import SlideStore, slide_path
from data.store.writer import SlideWriter
from hyfi_core.plan.box import Box
from tests.patience import PATIENCE_S

SIZES = [LevelSize(1101, 4301), LevelSize(551, 2151), LevelSize(276, 1076)]
LEVELS = pyramid_levels(SIZES, 1.0)


def write_store(store: Path, slide_id: str = "s") -> tuple[Path, list[np.ndarray], np.ndarray]:
    """Write a slide of two shards with noise; return its path, its levels and its mask."""
    rng = np.random.default_rng(7)
    levels = [rng.integers(0, 256, (3, s.height_px, s.width_px), dtype=np.uint8) for s in SIZES]
    mask = rng.random((138, 538)) > 0.5
    store.mkdir(exist_ok=True)
    with SlideWriter(store, slide_id, LEVELS) as writer:
        for k, pixels in enumerate(levels):
            for x in range(0, pixels.shape[2], 4096):
                writer.write(k, 0, x, pixels[:, :, x : x + 4096])
        writer.write_tissue(mask, 8.0)
        writer.publish({"kind": "resampled"})
    return slide_path(store, slide_id), levels, mask


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[np.ndarray], np.ndarray]:
    return write_store(tmp_path_factory.mktemp("store"))


@pytest.mark.parametrize(
    ("box", "level"),
    [
        (Box(0, 1101, 0, 4301), 0),
        (Box(500, 530, 4000, 4200), 0),
        (Box(-7, 20, -9, 30), 0),
        (Box(1090, 1200, 4290, 4400), 0),
        (Box(100, 101, 511, 513), 1),
        (Box(270, 280, 1000, 1080), 2),
    ],
)
@pytest.mark.parametrize("threads", [1, 3])
def test_reads_any_box_and_white_outside(
    written: tuple[Path, list[np.ndarray], np.ndarray], box: Box, level: int, threads: int
) -> None:
    path, levels, _ = written
    padded = np.full((3, 3000, 8000), 255, np.uint8)
    height, width = levels[level].shape[1:]
    padded[:, 100 : 100 + height, 100 : 100 + width] = levels[level]
    expected = padded[:, box.y0 + 100 : box.y1 + 100, box.x0 + 100 : box.x1 + 100]
    found = SlideStore.open(path).read(box, level, threads)
    assert np.array_equal(found, expected)
    found[:] = 0  # the caller owns it


def test_a_box_wholly_outside_is_white(written: tuple[Path, list[np.ndarray], np.ndarray]) -> None:
    assert (SlideStore.open(written[0]).read(Box(2000, 2010, 0, 5)) == 255).all()


def test_its_text_is_a_line(written: tuple[Path, list[np.ndarray], np.ndarray]) -> None:
    """It was all attributes, thousands of characters in a notebook."""
    expected = f"<SlideStore s: 1101 × 4301 px at 1 × 1 µm per pixel, 3 levels, {written[0]}>"
    assert repr(SlideStore.open(written[0])) == expected


def test_levels_and_masks_know_their_mpp(written: tuple[Path, list[np.ndarray], np.ndarray]) -> None:
    path, _, mask = written
    slide = SlideStore.open(path)
    assert slide.slide_id == "s"
    assert [level.mpp for level in slide.levels] == [(1.0, 1.0), (2.0, 2.0), (4.0, 4.0)]
    found, mpp = slide.tissue()
    assert np.array_equal(found, mask) and mpp == (8.0, 8.0)
    coarse, mpp = slide.tissue(30.0)
    assert coarse.shape == (35, 135) and mpp == (32.0, 32.0)


def test_zarr_python_reads_the_same(written: tuple[Path, list[np.ndarray], np.ndarray]) -> None:
    import zarr

    path, levels, mask = written
    group = zarr.open_group(path, mode="r")
    for k, pixels in enumerate(levels):
        assert np.array_equal(group[str(k)][:], pixels)
    assert np.array_equal(group["labels/tissue/0"][:] != 0, mask)


def test_the_format_is_the_one_promised(written: tuple[Path, list[np.ndarray], np.ndarray]) -> None:
    path = written[0]
    array = json.loads((path / "0" / "zarr.json").read_text())
    assert array["dimension_names"] == ["c", "y", "x"] and array["fill_value"] == 255
    assert array["chunk_grid"]["configuration"]["chunk_shape"] == [3, 4096, 4096]
    (sharding,) = array["codecs"]
    assert sharding["configuration"]["chunk_shape"] == [3, 512, 512]
    assert [c["name"] for c in sharding["configuration"]["codecs"]] == ["bytes", "zstd", "crc32c"]
    assert [c["name"] for c in sharding["configuration"]["index_codecs"]] == ["bytes", "crc32c"]
    attributes = json.loads((path / "zarr.json").read_text())["attributes"]
    datasets = attributes["ome"]["multiscales"][0]["datasets"]
    shifts = [d["coordinateTransformations"][1]["translation"] for d in datasets]
    assert shifts == [[0.0, 0.0, 0.0], [0.0, 0.5, 0.5], [0.0, 1.5, 1.5]]
    assert [c["label"] for c in attributes["ome"]["omero"]["channels"]] == ["R", "G", "B"]
    shards = attributes["hyfi"]["shards"]
    on_disk = {f.relative_to(path).as_posix() for f in path.rglob("c/**/*") if f.is_file()}
    assert set(shards) == on_disk and "0/c/0/0/1" in shards and "labels/tissue/0/c/0/0" in shards


def test_ome_zarr_models_accepts_it(written: tuple[Path, list[np.ndarray], np.ndarray]) -> None:
    import ome_zarr_models
    import zarr
    from ome_zarr_models.v05 import Image

    group = zarr.open_group(written[0], mode="r")
    image = Image.from_zarr(group)
    assert image.labels is not None and image.labels.label_paths == ["tissue"]
    assert isinstance(ome_zarr_models.open_ome_zarr(group), Image)


def _write_zero(shard: Path) -> None:
    shard.write_bytes(b"")


def _cut(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "word"), [(Path.unlink, "missing"), (_write_zero, "0 bytes"), (_cut, "bytes, expected")]
)
@pytest.mark.parametrize("shard", ["0/c/0/0/1", "1/c/0/0/0", "labels/tissue/0/c/0/0"])
def test_a_damaged_shard_is_found_on_opening(tmp_path: Path, damage: object, word: str, shard: str) -> None:
    path, _, _ = write_store(tmp_path / "store")
    damage(path / shard)  # type: ignore[operator]
    with pytest.raises(StoreError, match=word) as caught:
        SlideStore.open(path)
    assert str(path / shard) in str(caught.value)


@pytest.mark.parametrize("where", [100, 700_000, -1, -20, -900])
def test_a_flipped_bit_is_found_on_reading(tmp_path: Path, where: int) -> None:
    path, _, _ = write_store(tmp_path / "store")
    shard = path / "0/c/0/0/0"
    data = bytearray(shard.read_bytes())
    data[where] ^= 4
    shard.write_bytes(data)
    slide = SlideStore.open(path)
    with pytest.raises(StoreError, match="checksum") as caught:
        slide.read(Box(0, 1101, 0, 4096))
    assert str(shard) in str(caught.value)


def test_a_shard_that_vanishes_after_opening_is_an_error(tmp_path: Path) -> None:
    path, _, _ = write_store(tmp_path / "store")
    slide = SlideStore.open(path)
    slide.read(Box(0, 10, 0, 10))
    (path / "0/c/0/0/0").unlink()
    with pytest.raises(StoreError, match="cannot be read"):
        slide.read(Box(0, 10, 0, 10))


def test_a_store_of_another_version_is_refused(tmp_path: Path) -> None:
    path, _, _ = write_store(tmp_path / "store")
    meta = json.loads((path / "zarr.json").read_text())
    meta["attributes"]["hyfi"]["format"] = 99
    (path / "zarr.json").write_text(json.dumps(meta))
    with pytest.raises(StoreError, match="99"):
        SlideStore.open(path)


@pytest.mark.parametrize("name", ["nothing.zarr", "plain.zarr"])
def test_what_is_no_slide_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "plain.zarr").mkdir()
    (tmp_path / "plain.zarr" / "zarr.json").write_text('{"zarr_format": 3}')
    with pytest.raises(StoreError, match=name):
        SlideStore.open(tmp_path / name)


def test_nothing_appears_when_writing_fails(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), SlideWriter(tmp_path, "s", LEVELS) as writer:
        writer.write(0, 0, 0, np.zeros((3, 1101, 4096), np.uint8))
        _ = 1 // 0
    assert list(tmp_path.iterdir()) == []


def test_publishing_again_replaces_the_slide(tmp_path: Path) -> None:
    write_store(tmp_path)
    path, levels, _ = write_store(tmp_path)
    assert np.array_equal(SlideStore.open(path).read(Box(0, 50, 0, 50)), levels[0][:, :50, :50])
    assert [p.name for p in tmp_path.iterdir()] == ["s.zarr"]


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    child = multiprocessing.get_context("fork").Process(target=_die_while_writing, args=(tmp_path,))
    child.start()
    child.join(PATIENCE_S)
    assert len(list(tmp_path.iterdir())) == 1
    write_store(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["s.zarr"]


def _die_while_writing(store: Path) -> None:
    SlideWriter(store, "s", LEVELS)
    os._exit(1)


def _checksum(slide: SlideStore, seed: int) -> int:
    rng = np.random.default_rng(seed)
    total = 0
    for _ in range(20):
        y, x = int(rng.integers(0, 1000)), int(rng.integers(0, 4200))
        total = total * 31 + int(slide.read(Box(y, y + 90, x, x + 90)).sum())
    return total


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_readers_opened_before_a_fork_or_spawn_read_right(
    written: tuple[Path, list[np.ndarray], np.ndarray], method: str
) -> None:
    slide = SlideStore.open(written[0])
    expected = [_checksum(slide, seed) for seed in range(4)]
    with multiprocessing.get_context(method).Pool(2) as pool:
        assert pool.starmap(_checksum, [(slide, seed) for seed in range(4)]) == expected


def test_an_opened_slide_can_be_pickled(written: tuple[Path, list[np.ndarray], np.ndarray]) -> None:
    slide = pickle.loads(pickle.dumps(SlideStore.open(written[0])))
    assert np.array_equal(slide.read(Box(0, 9, 0, 9)), written[1][0][:, :9, :9])
