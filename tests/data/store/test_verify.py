from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.errors import StoreError
from data.store.codec import PixelCodec
from data.store.layout import ArrayLayout, LevelSize, StoredLevel, pyramid_levels
from data.store.manifest import SlideRecord
from data.store.slide_store import slide_path
from data.store.verify import VerifyReport, verify_slide, verify_store
from data.store.writer import SlideWriter

SIZES = [LevelSize(520, 1100), LevelSize(260, 550)]


def make_slide(store: Path, slide_id: str = "s", sharded: bool = True, blank: bool = False) -> Path:
    store.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    mask = np.ones((65, 138), bool)
    if blank:
        mask[:, 60:] = False
    tissue = (mask, 8.0) if blank else None
    with SlideWriter(store, slide_id, pyramid_levels(SIZES, 1.0, sharded=sharded), tissue=tissue) as writer:
        for k, size in enumerate(SIZES):
            writer.write(k, 0, 0, rng.integers(0, 256, (3, size.height_px, size.width_px), dtype=np.uint8))
        writer.write_tissue(mask, 8.0)
        writer.publish({"kind": "resampled", "sha256": "abc"})
    return slide_path(store, slide_id)


def said(found: VerifyReport) -> str:
    return "\n".join(f"{fault.slide_id} {fault.path} {fault.reason}" for fault in found.faults)


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("blank", [True, False])
def test_a_store_as_it_was_written_has_no_fault(tmp_path: Path, sharded: bool, blank: bool) -> None:
    path = make_slide(tmp_path / "store", sharded=sharded, blank=blank)
    seen: list[int] = []
    found = verify_store(tmp_path / "store", 2, lambda size, name: seen.append(size))
    assert not found.faults and found.slides == 1
    files = [f for f in path.rglob("c/**/*") if f.is_file()]
    assert sum(seen) == found.size_bytes == sum(f.stat().st_size for f in files)


def _flip(path: Path, where: int) -> None:
    data = bytearray(path.read_bytes())
    data[where] ^= 16
    path.write_bytes(data)


def _swap(path: Path) -> None:
    other = path.parents[4] / "1/c/0/0/0"
    a, b = path.read_bytes(), other.read_bytes()
    path.write_bytes(b)
    other.write_bytes(a)


def _set(path: Path, *keys_and_value: Any) -> None:
    document = json.loads(path.read_text())
    *keys, last, value = keys_and_value
    inner = document
    for key in keys:
        inner = inner[key]
    inner[last] = value
    path.write_text(json.dumps(document))


DAMAGE: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "flipped bit": ("0/c/0/0/0", lambda f: _flip(f, 800_000), "the checksum is wrong in chunk 1"),
    "flipped bit, digest": ("0/c/0/0/0", lambda f: _flip(f, 800_000), "the shard was altered"),
    "flipped bit in the index": ("0/c/0/0/0", lambda f: _flip(f, -500), "the checksum is wrong in its index"),
    "flipped bit in a label": ("labels/tissue/0/c/0/0", lambda f: _flip(f, 3), "the checksum is wrong in chunk 0"),
    "deleted shard": ("1/c/0/0/0", Path.unlink, "missing or cannot be read"),
    "zero-length shard": ("0/c/0/0/0", lambda f: f.write_bytes(b""), "has 0 bytes; expected"),
    "cut shard": ("0/c/0/0/0", lambda f: f.write_bytes(f.read_bytes()[:-1]), "bytes; expected"),
    "swapped shards": ("0/c/0/0/0", _swap, "bytes; expected"),
    "foreign file": ("0/c/0/0/9", lambda f: f.write_bytes(b"x"), "was not written with the slide"),
    "foreign text": ("notes.txt", lambda f: f.write_text("x"), "was not written with the slide"),
    "altered metadata": ("0/zarr.json", lambda f: f.write_text(f.read_text().replace("1100", "1101")), "was altered"),
    "no metadata": ("labels/zarr.json", Path.unlink, "cannot be read"),
    "altered attributes": (
        "zarr.json",
        lambda f: f.write_text(f.read_text().replace("abc", "abd")),
        "metadata was altered",
    ),
    "altered scale": ("zarr.json", lambda f: f.write_text(f.read_text().replace("2.0", "4.0")), "metadata was altered"),
    "array without a grid": ("0/zarr.json", lambda f: _set(f, "chunk_key_encoding", 5), "bytes; expected"),
    "list without sizes": ("zarr.json", lambda f: _set(f, "attributes", "hyfi", "metadata", "0/zarr.json", []), "None"),
    "not a JSON": ("zarr.json", lambda f: f.write_text("{"), "not valid JSON"),
}


@pytest.mark.parametrize("kind", list(DAMAGE))
def test_every_fault_is_named_with_slide_and_file(tmp_path: Path, kind: str) -> None:
    path = make_slide(tmp_path / "store")
    make_slide(tmp_path / "store", "whole")
    name, damage, word = DAMAGE[kind]
    damage(path / name)
    found = verify_store(tmp_path / "store", 2)
    assert {fault.slide_id for fault in found.faults} == {"s"}
    assert word in said(found) and str(path / name) in said(found)
    assert found.slides == 2


def test_a_chunk_that_vanished_from_shard_and_digest_alike_is_told(tmp_path: Path) -> None:
    path = make_slide(tmp_path / "store", blank=True)
    meta = json.loads((path / "zarr.json").read_text())
    entry = meta["attributes"]["hyfi"]["shards"]["0/c/0/0/0"]
    assert entry["blank"] == [1, 2, 9, 10]
    entry["blank"] = [8]
    (path / "zarr.json").write_text(json.dumps(meta))
    text = said(verify_slide(path, 1))
    assert (
        "chunks 1, 2, 9, 10 are missing in their shard" in text
        and "chunks 8 exist" in text
        and "metadata was altered" in text
    )


def test_a_left_out_chunk_that_came_back_is_told(tmp_path: Path) -> None:
    path = make_slide(tmp_path / "store", sharded=False, blank=True)
    (path / "0/c/0/0/2").write_bytes(b"x")
    assert "was omitted when the slide was written" in said(verify_slide(path, 1))


def test_a_file_that_no_list_has_is_told(tmp_path: Path) -> None:
    path = make_slide(tmp_path / "store")
    meta = json.loads((path / "zarr.json").read_text())
    del meta["attributes"]["hyfi"]["shards"]["0/c/0/0/0"]
    (path / "zarr.json").write_text(json.dumps(meta))
    assert "this file is missing in the slide's file list" in said(verify_slide(path, 1))


def test_records_and_slides_must_be_the_same_ones(tmp_path: Path) -> None:
    store = tmp_path / "store"
    for name in ("kept", "changed", "unknown"):
        make_slide(store, name)
    for name, digest in (("kept", "abc"), ("changed", "xyz"), ("lost", "abc")):
        SlideRecord(name, f"/{name}.svs", "done", identity={"sha256": digest}).save(store)
    SlideRecord("bad", "/bad.svs", "failed", reason="broken").save(store)
    (store / ".records" / "torn.json").write_text("{")
    found = verify_store(store, 1)
    assert {fault.slide_id for fault in found.faults} == {"changed", "unknown", "lost", "torn"}
    text = said(found)
    assert "a different file" in text and "no record" in text and "is missing" in text and "not valid JSON" in text


def test_a_folder_that_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="not a store"):
        verify_store(tmp_path, 1)


def test_copied_tiles_are_verified_too(tmp_path: Path) -> None:
    import simplejpeg

    rng = np.random.default_rng(0)
    tiles = [simplejpeg.encode_jpeg(rng.integers(0, 256, (64, 48, 3), dtype=np.uint8)) for _ in range(6)]
    # Its markers stand, so a copy cannot see it; what is between them is none of a JPEG.
    damaged = tiles[4][:-600] + bytes(598) + tiles[4][-2:]
    layout = ArrayLayout((3, 100, 130), (64, 48), (128, 144), codec=PixelCodec("jpeg", None))
    for name, last in (("good", tiles[4]), ("bad", damaged)):
        with SlideWriter(tmp_path, name, [StoredLevel(layout, (0.5, 0.5))]) as writer:
            writer.write_encoded(0, (0, 0), [(tile,) for tile in (*tiles[:4], last, tiles[5])])
            writer.write_tissue(np.ones((7, 9), bool), 8.0)
            writer.publish({"kind": "source"})
    path = slide_path(tmp_path, "good")
    assert not verify_slide(path, 1).faults
    assert "chunk 4 cannot be decoded" in said(verify_slide(slide_path(tmp_path, "bad"), 1))
    _flip(path / "0/c/0/0/0", 2 * len(tiles[0]) + 1_000)
    assert "the checksum is wrong in chunk 2" in said(verify_slide(path, 1))
