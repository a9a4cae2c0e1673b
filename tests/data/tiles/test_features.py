"""Folders of features, whoever wrote them."""

from __future__ import annotations

import pickle
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import zarr
from torch import nn

import hyfi_core
from data.tiles.features.folder import open_features
from data.tiles.features.source import FeatureTiles
from data.tiles.features.stored import StoredFeatures
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.errors import RequestError
from hyfi_core.tiles.source import TileSource

RNG = np.random.default_rng(0)
VECTORS = RNG.normal(size=(40, 6)).astype(np.float32)
CORNERS = RNG.integers(0, 9000, (40, 2))
"""(y, x)"""


def write_trident(path: Path, batched: bool = False, encoder: str = "uni_v1", vectors: np.ndarray = VECTORS) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        features = file.create_dataset("features", data=vectors[None] if batched else vectors)
        features.attrs.update({"name": path.stem, "savetodir": "x", "encoder": encoder})
        coords = file.create_dataset("coords", data=CORNERS[: len(vectors), ::-1])
        coords.attrs.update({"patch_size": 256, "patch_size_level0": 512, "level0_magnification": 40})


def write_stamp(path: Path, old: bool = False) -> None:
    with h5py.File(path, "w") as file:
        file["feats"] = VECTORS.astype(np.float16)
        file["coords"] = (CORNERS[:, ::-1] * (224 / 256 if old else 1.0)).astype(np.float32)
        if not old:
            file.attrs.update({"unit": "um", "tile_size_um": 256.0, "tile_size_px": 224, "extractor": "ctranspath"})


def write_zarr(path: Path) -> None:
    stated = {"tile_source_px": [448.0, 448.0], "encoder": "timm:vit"}
    group = zarr.open_group(path, mode="w", zarr_format=3, attributes={"hyfi_features": stated})
    group.create_array("features", data=VECTORS)
    group.create_array("coords", data=CORNERS)


def write_clam(folder: Path) -> None:
    write_trident(folder / "h5_files" / "a.h5")
    (folder / "pt_files").mkdir()
    torch.save(torch.from_numpy(VECTORS), folder / "pt_files" / "a.pt")


def test_trident(tmp_path: Path) -> None:
    for name, batched in (("b", False), ("a", True)):
        write_trident(tmp_path / f"{name}.h5", batched)
    stored = open_features(tmp_path)
    assert list(stored) == ["a", "b"]
    for one in stored.values():
        assert (one.count, one.features, one.encoder, one.unit, one.tile_size) == (40, 6, "uni_v1", "px", 512)
        assert np.array_equal(one.vectors(), VECTORS) and np.array_equal(one.coords(), CORNERS)
        assert np.array_equal(one.vectors([7, 3, 3, 30]), VECTORS[[7, 3, 3, 30]]) and one.vectors([]).shape == (0, 6)
        for wrong in (40, -1):
            with pytest.raises(IndexError, match="of 40"):
                one.vectors([wrong])


@pytest.mark.parametrize("old", [False, True])
def test_stamp(tmp_path: Path, old: bool) -> None:
    write_stamp(tmp_path / "a.h5", old)
    one = open_features(tmp_path)["a"]
    assert (one.unit, one.tile_size, one.encoder) == ("um", 256, None if old else "ctranspath")
    assert np.array_equal(one.vectors(), VECTORS.astype(np.float16).astype(np.float32))
    assert np.allclose(one.coords(), CORNERS, rtol=1e-6)


def test_clam_and_zarr(tmp_path: Path) -> None:
    write_clam(tmp_path / "clam")
    write_zarr(tmp_path / "zarr" / "a.zarr")
    (tmp_path / "clam" / "only").mkdir()
    (tmp_path / "clam" / "pt_files" / "a.pt").rename(tmp_path / "clam" / "only" / "a.pt")
    found = [open_features(tmp_path / name)["a"] for name in ("clam", "zarr", "clam/only")]
    assert [one.unit for one in found] == ["px", "px", None] and [one.tile_size for one in found] == [512, 448, None]
    assert all(np.array_equal(one.vectors([4, 2]), VECTORS[[4, 2]]) for one in found)
    assert all(one.coords() is None or np.array_equal(one.coords(), CORNERS) for one in found)


def test_what_is_not_of_one_encoder_or_damaged_is_named(tmp_path: Path) -> None:
    for folder, name, change in (("dims", "length of vectors 6", VECTORS[:, :4]), ("names", "encoder uni_v1", None)):
        write_trident(tmp_path / folder / "a.h5")
        write_trident(tmp_path / folder / "b.h5")
        encoder = "uni_v1" if change is not None else "conch"
        write_trident(tmp_path / folder / "odd.h5", encoder=encoder, vectors=VECTORS if change is None else change)
        with pytest.raises(RequestError, match=rf"not of one encoder: {name} in 2 files, but (4|conch) in odd\.h5"):
            open_features(tmp_path / folder)
    write_trident(tmp_path / "cut" / "a.h5")
    path = tmp_path / "cut" / "a.h5"
    path.write_bytes(path.read_bytes()[:800])
    with pytest.raises(RequestError, match=r"a\.h5: damaged, or not a file of features"):
        open_features(tmp_path / "cut")
    write_trident(tmp_path / "empty" / "a.h5", vectors=VECTORS[:0])
    with pytest.raises(RequestError, match="it has no tiles"):
        open_features(tmp_path / "empty")
    write_trident(tmp_path / "nan" / "a.h5", vectors=np.full((3, 6), np.nan, np.float32))
    with pytest.raises(RequestError, match="not all finite"):
        open_features(tmp_path / "nan")["a"].vectors()
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["images"] = np.zeros(3)
    with pytest.raises(RequestError, match="'images', but neither 'features' nor 'feats'"):
        StoredFeatures.of(tmp_path / "other.h5")
    (tmp_path / "none").mkdir()
    for folder, message in (("none", "it has no features"), ("nowhere", "no such folder")):
        with pytest.raises(RequestError, match=message):
            open_features(tmp_path / folder)


def test_features_are_tiles_of_the_engine(tmp_path: Path) -> None:
    """A head trained on features has the gradients of a plain module on the vectors."""
    write_trident(tmp_path / "a.h5")
    write_trident(tmp_path / "b.h5", vectors=VECTORS[:11])
    slides = [FeatureTiles(one) for one in open_features(tmp_path).values()]
    assert all(isinstance(slide, TileSource) for slide in slides)
    assert torch.equal(pickle.loads(pickle.dumps(slides[0])).read([5])[0, :, 0, 0], torch.from_numpy(VECTORS[5]))
    head = nn.Sequential(nn.Linear(6, 3), nn.Tanh())

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = head

        def forward(self, vectors: torch.Tensor) -> torch.Tensor:
            return self.head(vectors).mean(0)

    labels = torch.tensor([0, 2])
    engine = hyfi_core.parallelize_tiles(nn.Flatten(), Mean(), hyfi_core.ParallelPlan(tiles=1), AloneCommunicator())
    loss = engine.accumulate(slides, labels)
    logits = torch.stack([head(torch.from_numpy(vectors)).mean(0) for vectors in (VECTORS, VECTORS[:11])])
    assert loss == pytest.approx(nn.functional.cross_entropy(logits, labels).item(), abs=1e-6)
    assert torch.allclose(engine.predict(slides)[0], logits, atol=1e-6)
