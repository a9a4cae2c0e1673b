from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from data.errors import StoreError
from data.store.codec import PixelCodec
from data.store.layout import ArrayLayout, LevelSize, StoredLevel, pyramid_levels
from data.store.slide_store import SlideStore, slide_path
from data.store.unfinished import JOURNAL
from data.store.verify import verify_slide
from data.store.writer import SlideWriter
from hyfi_core.errors import RequestError
from hyfi_core.plan.box import Box
from tests.patience import PATIENCE_S

STRIP = [LevelSize(90, 9000), LevelSize(45, 4500)]
"""Three shards and two: thin, so that tests are quick."""
MASK = np.ones((12, 1125), bool)


def pixels_of(sizes: list[LevelSize], seed: int = 3) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, (3, s.height_px, s.width_px), dtype=np.uint8) for s in sizes]


def smooth(height: int, width: int) -> np.ndarray:
    """(3, h, w): what JPEG can keep nearly as it is."""
    y, x = np.mgrid[:height, :width]
    return np.stack([(y + x) // 9 % 256, x // 5 % 256, (y * 2) // 7 % 256]).astype(np.uint8) // 2 + 100


def write_levels(writer: SlideWriter, levels: list[np.ndarray]) -> None:
    for k, pixels in enumerate(levels):
        for y in range(0, pixels.shape[1], 4096):
            for x in range(0, pixels.shape[2], 4096):
                writer.write(k, y, x, pixels[:, y : y + 4096, x : x + 4096])


def write_slide(store: Path, levels: list[np.ndarray], mask: np.ndarray = MASK, **how: object) -> SlideStore:
    store.mkdir(exist_ok=True)
    sizes = [LevelSize(*p.shape[1:]) for p in levels]
    codec, sharded = how.pop("codec", PixelCodec()), how.pop("sharded", True)
    with SlideWriter(store, "s", pyramid_levels(sizes, 1.0, codec, sharded), **how) as writer:  # type: ignore[arg-type]
        write_levels(writer, levels)
        writer.write_tissue(mask, 8.0)
        writer.publish({"kind": "resampled"})
    return SlideStore.open(slide_path(store, "s"))


@pytest.mark.parametrize(
    ("text", "name", "level"), [("zstd:1", "zstd", 1), ("zstd:22", "zstd", 22), ("jpeg:85", "jpeg", 85)]
)
def test_codecs_are_read_from_text(text: str, name: str, level: int) -> None:
    codec = PixelCodec.parse(text)
    assert (codec.name, codec.level, str(codec)) == (name, level, text)
    assert PixelCodec.from_json(codec.to_json()) == codec


@pytest.mark.parametrize("text", ["zstd", "zstd:0", "zstd:23", "jpeg:0", "jpeg:101", "jpeg:x", "jpeg:²", "lzw:1", ""])
def test_other_codecs_are_refused_with_those_that_work(text: str) -> None:
    with pytest.raises(RequestError, match=r"zstd:1 .* jpeg:100"):
        PixelCodec.parse(text)


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("quality", [80, 95])
def test_jpeg_stores_are_nearly_the_pixels_and_small(tmp_path: Path, quality: int, sharded: bool) -> None:
    pixels = smooth(700, 1300)
    slide = write_slide(tmp_path, [pixels], codec=PixelCodec("jpeg", quality), sharded=sharded)
    for box in (Box(0, 700, 0, 1300), Box(500, 600, 1000, 1300)):
        found = slide.read(box, threads=2).astype(int)
        assert np.abs(found - pixels[(slice(None), *box.slices())]).mean() < 3
    size = sum(entry["size"] for name, entry in slide.attributes["shards"].items() if name.startswith("0/"))
    assert size < pixels.size / 10
    inner = json.loads((slide.path / "0/zarr.json").read_text())["codecs"]
    chain = inner[0]["configuration"]["codecs"] if sharded else inner
    assert [codec["name"] for codec in chain] == ["transpose", "imagecodecs_jpeg", "crc32c"]
    assert chain[1]["configuration"] == {"level": quality}


def test_a_store_without_shards_reads_the_same_here_and_by_zarr_python(tmp_path: Path) -> None:
    import zarr

    levels = pixels_of([LevelSize(700, 1100), LevelSize(350, 550)])
    slide = write_slide(tmp_path, levels, np.ones((88, 138), bool), sharded=False)
    group = zarr.open_group(slide.path, mode="r")
    for k, pixels in enumerate(levels):
        assert np.array_equal(slide.read(Box(0, *pixels.shape[1:2], 0, pixels.shape[2]), k, threads=2), pixels)
        assert np.array_equal(group[str(k)][:], pixels)
    assert {"0/c/0/1/2", "1/c/0/0/1", "labels/tissue/0/c/0/0"} <= set(slide.attributes["shards"])
    (slide.path / "0/c/0/1/2").unlink()
    with pytest.raises(StoreError, match="0/c/0/1/2"):
        SlideStore.open(slide.path)


@pytest.mark.parametrize("sharded", [True, False])
def test_ome_zarr_models_accepts_every_zstd_store(tmp_path: Path, sharded: bool) -> None:
    import zarr
    from ome_zarr_models.v05 import Image

    levels = pixels_of([LevelSize(600, 700), LevelSize(300, 350)])
    slide = write_slide(
        tmp_path, levels, np.ones((75, 88), bool), sharded=sharded, tissue=(np.eye(75, 88, dtype=bool), 8.0)
    )
    image = Image.from_zarr(zarr.open_group(slide.path, mode="r"))
    assert image.labels is not None and len(image.datasets[0]) == 2


def test_the_label_lies_on_the_image_whatever_its_mpp(tmp_path: Path) -> None:
    slide = write_slide(tmp_path, pixels_of(STRIP))
    ome = json.loads((slide.path / "labels/tissue/zarr.json").read_text())["attributes"]["ome"]
    steps = [d["coordinateTransformations"] for d in ome["multiscales"][0]["datasets"]]
    # The first pixel's centre lies half a label pixel from the corner, the image's origin half an image pixel.
    assert [s[0]["scale"] for s in steps] == [[8.0, 8.0], [16.0, 16.0]]
    assert [s[1]["translation"] for s in steps] == [[3.5, 3.5], [7.5, 7.5]]


@pytest.mark.parametrize("sharded", [True, False])
def test_blank_glass_is_left_out_and_what_is_lost_is_still_told(tmp_path: Path, sharded: bool) -> None:
    pixels = pixels_of([LevelSize(1024, 2048)])[0]
    mask = np.zeros((128, 256), bool)
    mask[10, 100] = True  # pixels 80–88, 800–808: chunk (0, 1)
    slide = write_slide(tmp_path, [pixels], mask, tissue=(mask, 8.0), sharded=sharded)
    expected = np.full_like(pixels, 255)
    expected[:, :512, 512:1024] = pixels[:, :512, 512:1024]
    assert np.array_equal(slide.read(Box(0, 1024, 0, 2048), threads=2), expected)
    listed = slide.attributes["shards"]
    if sharded:
        assert listed["0/c/0/0/0"]["blank"] == [0, 2, 3, 8, 9, 10, 11]
        slide = _rewritten(slide, "0/c/0/0/0", {"blank": [0, 2, 3, 8, 9, 10]})
        with pytest.raises(StoreError, match="chunk 11 is missing in its shard"):
            slide.read(Box(0, 1024, 0, 2048))
    else:
        assert listed["0/c/0/0/0"] == {"blank": [0]} and not (slide.path / "0/c/0/0/0").exists()


def _rewritten(slide: SlideStore, name: str, change: dict[str, object]) -> SlideStore:
    meta = json.loads((slide.path / "zarr.json").read_text())
    meta["attributes"]["hyfi"]["shards"][name].update(change)
    (slide.path / "zarr.json").write_text(json.dumps(meta))
    return SlideStore.open(slide.path)


def test_a_chunk_beside_tissue_is_kept(tmp_path: Path) -> None:
    pixels = pixels_of([LevelSize(512, 1536)])[0]
    mask = np.zeros((64, 192), bool)
    mask[5, 63] = True  # the last mask column of chunk 0: the next chunk touches it
    slide = write_slide(tmp_path, [pixels], mask, tissue=(mask, 8.0))
    assert slide.attributes["shards"]["0/c/0/0/0"]["blank"] == [2]


def test_reads_into_the_callers_memory(tmp_path: Path) -> None:
    levels = pixels_of(STRIP)
    slide = write_slide(tmp_path, levels)
    image = np.zeros((3, 200, 300), np.uint8)
    part = image[:, 50:150, 100:250]
    assert slide.read(Box(-5, 95, 8900, 9050), out=part) is part
    expected = np.full((3, 100, 150), 255, np.uint8)
    expected[:, 5:95, :100] = levels[0][:, :, 8900:]
    assert np.array_equal(part, expected) and not image[:, :50].any() and not image[:, :, :100].any()
    with pytest.raises(ValueError, match=r"expected uint8 \(3, 10, 10\)"):
        slide.read(Box(0, 10, 0, 10), out=image)


def _files(path: Path) -> dict[str, tuple[int, int]]:
    return {
        f.relative_to(path).as_posix(): (f.stat().st_ino, f.stat().st_mtime_ns)
        for f in path.rglob("c/**/*")
        if f.is_file()
    }


def _write_and_wait(store: Path, levels: list[np.ndarray], shards: int, identity: dict[str, object]) -> None:
    writer = SlideWriter(store, "s", pyramid_levels(STRIP, 1.0), identity=identity)
    for x in range(0, shards * 4096, 4096):
        writer.write(0, 0, x, levels[0][:, :, x : x + 4096])
    time.sleep(60)


def _killed(store: Path, levels: list[np.ndarray], shards: int = 2) -> Path:
    """Have a process write some shards and kill it; return the unfinished slide's folder."""
    store.mkdir(exist_ok=True)
    child = multiprocessing.get_context("fork").Process(target=_write_and_wait, args=(store, levels, shards, {"a": 1}))
    child.start()
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        found = list(store.glob(f".s.zarr.part-*/{JOURNAL}"))
        if found and found[0].read_text().count("name") == shards:
            break
        time.sleep(0.01)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    return found[0].parent


def test_after_a_kill_what_was_finished_is_not_written_again(tmp_path: Path) -> None:
    levels = pixels_of(STRIP)
    undisturbed = write_slide(tmp_path / "whole", levels, identity={"a": 1})
    before = _files(_killed(tmp_path / "store", levels))
    assert len(before) == 2
    with SlideWriter(tmp_path / "store", "s", pyramid_levels(STRIP, 1.0), identity={"a": 1}) as writer:
        assert writer.finished(0, 0, 0) and writer.finished(0, 0, 4096) and not writer.finished(0, 0, 8192)
        assert np.array_equal(writer.read_back(0, Box(0, 90, 0, 8000)), levels[0][:, :, :8000])
        assert writer.read_back(0, Box(0, 90, 8000, 9000)) is None
        write_levels(writer, levels)
        writer.write_tissue(MASK, 8.0)
        writer.publish({"kind": "resampled"})
    slide = SlideStore.open(slide_path(tmp_path / "store", "s"))
    after = _files(slide.path)
    assert {name: after[name] for name in before} == before
    assert slide.attributes["shards"] == undisturbed.attributes["shards"]
    assert [p.name for p in (tmp_path / "store").iterdir()] == ["s.zarr"]
    assert not (slide.path / JOURNAL).exists()


def test_a_finished_shard_that_was_damaged_since_is_written_again(tmp_path: Path) -> None:
    levels = pixels_of(STRIP)
    folder = _killed(tmp_path / "store", levels)
    shard = folder / "0/c/0/0/0"
    data = bytearray(shard.read_bytes())
    data[1000] ^= 1
    shard.write_bytes(data)
    with (folder / JOURNAL).open("a") as file:
        file.write('{"name": "0/c/0/0/2", "si')  # as a kill may leave it
    (folder / "0/c/0/0/.2.tmp-123").write_bytes(b"half a shard")
    slide = write_slide(tmp_path / "store", levels, identity={"a": 1})
    assert np.array_equal(slide.read(Box(0, 90, 0, 9000)), levels[0])
    assert not verify_slide(slide.path, 1).faults


@pytest.mark.parametrize(
    "other", [{"identity": {"a": 2}}, {"identity": None}, {"identity": {"a": 1}, "codec": PixelCodec("zstd", 3)}]
)
def test_what_is_left_of_another_identity_goes(tmp_path: Path, other: dict[str, object]) -> None:
    levels = pixels_of(STRIP)
    _killed(tmp_path / "store", levels)
    new = pixels_of(STRIP, seed=9)
    slide = write_slide(tmp_path / "store", new, **other)
    assert np.array_equal(slide.read(Box(0, 90, 0, 9000)), new[0])
    assert [p.name for p in (tmp_path / "store").iterdir()] == ["s.zarr"]


@pytest.mark.parametrize(("error", "kept"), [(KeyboardInterrupt, True), (ValueError, False)])
def test_what_was_stopped_can_be_gone_on_with_and_what_failed_leaves_nothing(
    tmp_path: Path, error: type[BaseException], kept: bool
) -> None:
    levels = pixels_of(STRIP)
    with pytest.raises(error), SlideWriter(tmp_path, "s", pyramid_levels(STRIP, 1.0), identity={"a": 1}) as writer:
        writer.write(0, 0, 0, levels[0][:, :, :4096])
        raise error
    assert bool(list(tmp_path.iterdir())) == kept
    write_slide(tmp_path, levels, identity={"a": 1})
    assert [p.name for p in tmp_path.iterdir()] == ["s.zarr"]


def test_a_disk_that_does_not_take_a_shard_is_told_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    levels = pixels_of(STRIP)
    monkeypatch.setattr("data.store.shard.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_slide(tmp_path, levels)
    assert not list(tmp_path.iterdir())


def test_blocks_do_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, sync = threading.Event(), os.fsync

    def slow(handle: int) -> None:
        assert disk.wait(PATIENCE_S)
        sync(handle)

    monkeypatch.setattr(os, "fsync", slow)
    levels = pixels_of(STRIP)
    with SlideWriter(tmp_path, "s", pyramid_levels(STRIP, 1.0)) as writer:
        caller = threading.Thread(target=write_levels, args=(writer, levels))
        caller.start()
        caller.join(PATIENCE_S)
        taken = not caller.is_alive()
        assert not list((tmp_path).rglob("c/0/0/0"))  # none has its name before it is on the disk
        disk.set()
        caller.join()
        assert taken
        writer.write_tissue(MASK, 8.0)
        writer.publish({"kind": "resampled"})
    assert not verify_slide(slide_path(tmp_path, "s"), 2).faults
    assert np.array_equal(SlideStore.open(slide_path(tmp_path, "s")).read(Box.of_size(90, 9000)), levels[0])


@pytest.mark.parametrize(
    "layout",
    [
        ArrayLayout((3, 5000, 4100)),
        ArrayLayout((90, 9000)),
        ArrayLayout((3, 700, 1), (240, 256), (480, 768)),
        ArrayLayout((3, 700, 900), shard_px=(512, 512), sharded=False),
    ],
)
def test_used_slots_are_those_that_hold_pixels(layout: ArrayLayout) -> None:
    slots = range(layout.slots[0] * layout.slots[1])
    for file in layout.files():
        used = [k for k in slots if not layout.chunk_box(file, k).intersect(layout.box).empty]
        assert layout.used_slots(file) == used and used


def test_encoded_chunks_are_kept_byte_by_byte(tmp_path: Path) -> None:
    import simplejpeg

    rng = np.random.default_rng(0)
    tiles = [simplejpeg.encode_jpeg(rng.integers(0, 256, (64, 48, 3), dtype=np.uint8)) for _ in range(6)]
    layout = ArrayLayout((3, 100, 130), (64, 48), (128, 144), codec=PixelCodec("jpeg", None))
    with SlideWriter(tmp_path, "s", [StoredLevel(layout, (0.5, 0.5))]) as writer:
        cut = [(tile[:100], np.frombuffer(tile, np.uint8, offset=100)) for tile in tiles[:5]]
        writer.write_encoded(0, (0, 0), [*cut, None])
        writer.write_tissue(np.ones((7, 9), bool), 8.0)
        writer.publish({"kind": "source"})
    slide = SlideStore.open(slide_path(tmp_path, "s"))
    assert slide.attributes["shards"]["0/c/0/0/0"]["blank"] == [5]
    shard = (slide.path / "0/c/0/0/0").read_bytes()
    assert all(tile in shard for tile in tiles[:5])
    found = slide.read(Box(0, 100, 0, 130))
    assert np.array_equal(found[:, :64, 48:96], simplejpeg.decode_jpeg(tiles[1]).transpose(2, 0, 1))
    assert np.array_equal(found[:, 64:, 48:96], simplejpeg.decode_jpeg(tiles[4])[:36].transpose(2, 0, 1))
    assert (found[:, 64:, 96:] == 255).all()
