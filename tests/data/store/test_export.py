from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from data.errors import StoreError
from data.store.export import export_ngff04, pixels_of
from data.store.layout import LevelSize, pyramid_levels
from data.store.slide_store import SlideStore, slide_path
from data.store.writer import SlideWriter
from hyfi_core.errors import RequestError
from hyfi_core.plan.box import Box

SIZES = [LevelSize(1100, 4200), LevelSize(550, 2100)]


def make_slide(store: Path, seed: int = 0, source: str = "") -> tuple[Path, list[np.ndarray], np.ndarray]:
    store.mkdir(exist_ok=True)
    rng = np.random.default_rng(seed)
    noise = rng.integers(0, 256, (3, 1100, 4200), dtype=np.uint8)
    noise[:, :, 1000:3000] = 255  # chunks of background alone
    levels = [noise, noise[:, ::2, ::2].copy()]
    mask = rng.random((138, 525)) > 0.5
    with SlideWriter(store, "s", pyramid_levels(SIZES, 0.5)) as writer:
        for k, pixels in enumerate(levels):
            for x in range(0, pixels.shape[2], 4096):
                writer.write(k, 0, x, pixels[:, :, x : x + 4096])
        writer.write_tissue(mask, 4.0)
        writer.publish({"kind": "resampled", **({"sha256": source} if source else {})})
    return slide_path(store, "s"), levels, mask


def test_the_copy_has_equal_pixels_and_passes_as_ngff_04(tmp_path: Path) -> None:
    import zarr
    from ome_zarr_models.v04 import Image

    path, levels, mask = make_slide(tmp_path / "store")
    (tmp_path / "out").mkdir()
    seen: list[int] = []
    assert export_ngff04(path, tmp_path / "out", 2, seen.append)
    assert sum(seen) == pixels_of(path) == 1100 * 4200 + 550 * 2100
    copy = tmp_path / "out" / "s.zarr"
    group = zarr.open_group(copy, mode="r", zarr_format=2)
    image = Image.from_zarr(group)
    assert image.labels is not None and image.attributes.omero is not None
    assert [axis.name for axis in image.attributes.multiscales[0].axes] == ["c", "y", "x"]
    for k, pixels in enumerate(levels):
        assert np.array_equal(group[str(k)][:], pixels)
    assert np.array_equal(group["labels/tissue/0"][:] != 0, mask)
    array = json.loads((copy / "0/.zarray").read_text())
    assert (array["zarr_format"], array["dimension_separator"], array["compressor"]["id"]) == (2, "/", "blosc")
    scales = [
        d["coordinateTransformations"] for d in json.loads((copy / ".zattrs").read_text())["multiscales"][0]["datasets"]
    ]
    own = json.loads((path / "zarr.json").read_text())["attributes"]["ome"]["multiscales"][0]["datasets"]
    assert scales == [d["coordinateTransformations"] for d in own]
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["s.zarr"]


def test_a_chunk_of_the_copy_decodes_without_zarr_python(tmp_path: Path) -> None:
    from numcodecs import Blosc

    path, levels, _ = make_slide(tmp_path / "store")
    export_ngff04(path, tmp_path, 1)
    chunk = np.frombuffer(Blosc().decode((tmp_path / "s.zarr/0/2/1/4").read_bytes()), np.uint8).reshape(1024, 1024)
    assert np.array_equal(chunk[:76, :104], levels[0][2, 1024:, 4096:])


def test_a_copy_is_made_once_for_each_form_of_the_slide(tmp_path: Path) -> None:
    path, _, _ = make_slide(tmp_path / "store")
    assert export_ngff04(path, tmp_path, 1) and not export_ngff04(path, tmp_path, 1)
    _, levels, _ = make_slide(tmp_path / "store", seed=1)
    assert export_ngff04(path, tmp_path, 1)
    import zarr

    assert np.array_equal(zarr.open_group(tmp_path / "s.zarr", mode="r")["1"][:], levels[1])


def test_the_copy_of_another_slide_of_the_same_name_is_not_replaced(tmp_path: Path) -> None:
    path, levels, _ = make_slide(tmp_path / "store", source="a")
    other, _, _ = make_slide(tmp_path / "other", seed=1, source="b")
    assert export_ngff04(path, tmp_path, 1)
    with pytest.raises(RequestError, match="copy of another slide of this name"):
        export_ngff04(other, tmp_path, 1)
    import zarr

    assert np.array_equal(zarr.open_group(tmp_path / "s.zarr", mode="r")["1"][:], levels[1])


def test_what_is_no_copy_is_not_replaced(tmp_path: Path) -> None:
    path, _, _ = make_slide(tmp_path / "store")
    with pytest.raises(RequestError, match="exists and was not written by hyfi export"):
        export_ngff04(path, tmp_path / "store", 1)
    assert SlideStore.open(path).read(Box(0, 5, 0, 5)).shape == (3, 5, 5)


def test_a_damaged_slide_leaves_no_copy(tmp_path: Path) -> None:
    path, _, _ = make_slide(tmp_path / "store")
    shard = path / "0/c/0/0/1"
    data = bytearray(shard.read_bytes())
    data[5000] ^= 1
    shard.write_bytes(data)
    (tmp_path / "out").mkdir()
    with pytest.raises(StoreError, match="checksum"):
        export_ngff04(path, tmp_path / "out", 1)
    assert not list((tmp_path / "out").iterdir())


def test_an_interrupt_leaves_neither_a_copy_nor_work_that_is_half_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zarr.storage import LocalStore

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background may ignore it
    path, _, _ = make_slide(tmp_path / "store")
    (tmp_path / "out").mkdir()
    begun, ended, put = [], [], LocalStore.set

    async def slow(self: LocalStore, key: str, *value: object) -> None:
        begun.append(key)
        if key.endswith("0/0/0/0") and begun.count(key) == 1:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.3)
        await put(self, key, *value)  # type: ignore[arg-type]
        ended.append(key)

    monkeypatch.setattr(LocalStore, "set", slow)
    with pytest.raises(KeyboardInterrupt):
        export_ngff04(path, tmp_path / "out", 2)
    assert any(key.endswith("0/0/0/0") for key in begun) and sorted(begun) == sorted(ended)
    assert not list((tmp_path / "out").iterdir())


def test_a_full_disk_leaves_nothing_of_the_chunks_that_zarr_still_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zarr.storage import LocalStore

    path, _, _ = make_slide(tmp_path / "store")
    (tmp_path / "out").mkdir()
    put = LocalStore.set
    waiting: list[str] = []

    async def full(self: LocalStore, key: str, *value: object) -> None:
        if not key.startswith("0/") or key.endswith(".zarray"):
            return await put(self, key, *value)  # type: ignore[arg-type, no-any-return]
        if key == "0/0/0/0":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        waiting.append(key)
        await asyncio.sleep(0.3)
        await put(self, key, *value)  # type: ignore[arg-type]
        waiting.remove(key)

    monkeypatch.setattr(LocalStore, "set", full)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        export_ngff04(path, tmp_path / "out", 2)
    assert not waiting
    time.sleep(0.5)
    assert not list((tmp_path / "out").iterdir())
