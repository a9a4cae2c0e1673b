"""Stores as the readers and validators of other people see them: whole, valid, and of the same pixels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data.store.export import export_ngff04
from data.store.layout import LevelSize
from tests.data.store.test_writer import pixels_of, write_slide

SIZES = [LevelSize(1100, 2300), LevelSize(550, 1150)]
FORMS = ("sharded", "unsharded", "NGFF 0.4")


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, list[np.ndarray], np.ndarray]:
    """A slide in one of the forms that `hyfi` writes, its levels and its tissue."""
    levels, mask = pixels_of(SIZES), np.random.default_rng(0).random((138, 288)) > 0.4
    slide = write_slide(tmp_path / "store", levels, mask, sharded=request.param != "unsharded")
    if request.param != "NGFF 0.4":
        return slide.path, levels, mask
    (tmp_path / "out").mkdir()
    export_ngff04(slide.path, tmp_path / "out", 2, lambda px: None)
    return tmp_path / "out" / slide.path.name, levels, mask


def test_ome_zarr_py_reads_every_level_and_the_tissue(form: tuple[Path, list[np.ndarray], np.ndarray]) -> None:
    from ome_zarr.io import parse_url
    from ome_zarr.reader import Reader

    path, levels, mask = form
    location = parse_url(path, mode="r")
    assert location is not None
    nodes = {node.zarr.basename(): node for node in Reader(location)()}
    image, tissue = nodes[path.name], nodes["tissue"]
    assert all(np.array_equal(np.asarray(found), pixels) for found, pixels in zip(image.data, levels, strict=True))
    assert np.array_equal(np.asarray(tissue.data[0]) != 0, mask)
    assert [axis["name"] for axis in image.metadata["axes"]] == ["c", "y", "x"]


def test_ngff_zarr_validates_and_reads_them(form: tuple[Path, list[np.ndarray], np.ndarray]) -> None:
    import ngff_zarr

    path, levels, mask = form
    image = ngff_zarr.from_ngff_zarr(str(path), validate=True)
    assert all(
        np.array_equal(np.asarray(found.data), pixels) for found, pixels in zip(image.images, levels, strict=True)
    )
    assert [found.scale["y"] for found in image.images] == [1.0, 2.0] and image.images[0].axes_units is not None
    tissue = ngff_zarr.from_ngff_zarr(str(path / "labels" / "tissue"), validate=True)
    assert np.array_equal(np.asarray(tissue.images[0].data) != 0, mask)
