"""Write one slide into a store: prepared beside, every shard listed with size and digest, synced, renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from data.files import publish_directory, remove_leftovers, sha256_of, temporary_beside
from data.sharded_array import Pixels
from data.store import BACKGROUND, FORMAT, slide_path
from hyfi_core.files import sync_file

CHUNK_PX = 512
SHARD_PX = 4096

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class LevelSize:
    """Height and width of one level in pixels."""

    height_px: int
    width_px: int


class SlideWriter:
    """A slide that is being written; a context manager that publishes nothing unless ``publish`` was called.

    Memory: one block of at most ``SHARD_PX`` squared pixels of the caller and its encoded form.

    Args:
        store: The folder of the store; must exist.
        slide_id: Name of the slide.
        levels: Sizes of the pyramid, finest first; each half of the one before.
        mpp_um: Microns per pixel of level 0, both axes.
        zstd_level: 1 (fast) to 22 (small).
    """

    def __init__(
        self, store: Path, slide_id: str, levels: Sequence[LevelSize], mpp_um: float, zstd_level: int = 1
    ) -> None:
        import zarr

        self.final = slide_path(store, slide_id)
        remove_leftovers(self.final)
        self.path = temporary_beside(self.final)
        self._levels = tuple(levels)
        self._mpp_um = mpp_um
        self._zstd_level = zstd_level
        shutil.rmtree(self.path, ignore_errors=True)
        self._group = zarr.create_group(str(self.path), zarr_format=3)
        self._arrays = [
            self._create(self._group, str(k), (3, s.height_px, s.width_px)) for k, s in enumerate(self._levels)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def write(self, level: int, y0: int, x0: int, block: Pixels) -> None:
        """Write a whole shard: ``block`` is ``(3, h, w)`` and starts at ``(y0, x0)``, multiples of ``SHARD_PX``."""
        self._arrays[level][:, y0 : y0 + block.shape[1], x0 : x0 + block.shape[2]] = block

    def write_tissue(self, mask: Mask, mpp_um: float) -> None:
        """Write the tissue label from its finest level, with as many levels as the image has (NGFF asks for that).

        Args:
            mask: ``(h, w)``; pixel 0 starts where the slide does.
            mpp_um: Microns per pixel of the mask.
        """
        labels = self._group.create_group("labels", attributes={"ome": {"version": "0.5", "labels": ["tissue"]}})
        tissue: Any = labels.create_group("tissue")
        sizes = []
        for k in range(len(self._levels)):
            array = self._create(tissue, str(k), mask.shape)
            array[:, :] = mask.astype(np.uint8)
            sizes.append(LevelSize(*mask.shape))
            mask = _halve_mask(mask)
        colours = [{"label-value": 1, "rgba": [0, 160, 80, 128]}]
        tissue.attrs["ome"] = {
            "version": "0.5",
            "image-label": {"colors": colours, "source": {"image": "../../"}},
            "multiscales": [_multiscale("tissue", ("y", "x"), len(sizes), mpp_um)],
        }

    def publish(self, attributes: dict[str, Any]) -> None:
        """List and sync what was written, then give the slide its name.

        Args:
            attributes: The `hyfi` attributes; ``format`` and ``shards`` are added here.
        """
        shards = {name: _entry(self.path / name) for name in _shard_names(self.path)}
        self._group.attrs.update(
            {
                "ome": {
                    "version": "0.5",
                    "multiscales": [_multiscale("image", ("c", "y", "x"), len(self._levels), self._mpp_um)],
                    "omero": _omero(),
                },
                "hyfi": {"format": FORMAT, **attributes, "shards": shards},
            }
        )
        _sync_tree(self.path)
        publish_directory(self.path, self.final)

    def _create(self, group: Any, name: str, shape: tuple[int, ...]) -> Any:
        from zarr.codecs import BytesCodec, Crc32cCodec, ZstdCodec

        leading = shape[:-2]
        return group.create_array(
            name,
            shape=shape,
            dtype="uint8",
            chunks=(*leading, CHUNK_PX, CHUNK_PX),
            shards=(*leading, SHARD_PX, SHARD_PX),
            serializer=BytesCodec(),
            compressors=[ZstdCodec(level=self._zstd_level), Crc32cCodec()],
            fill_value=BACKGROUND if leading else 0,
            dimension_names=("c", "y", "x")[-len(shape) :],
            # A chunk that is all background is written too: what is absent is always damage.
            config={"write_empty_chunks": True},
        )


def _multiscale(name: str, axes: tuple[str, ...], levels: int, mpp_um: float) -> dict[str, Any]:
    """Return NGFF metadata of levels that halve; pixel centres line up: the translation is (s_k − s_0) / 2."""
    channels = [1.0] * (len(axes) - 2)
    datasets = []
    for k in range(levels):
        scale, shift = mpp_um * 2**k, mpp_um * (2**k - 1) / 2
        steps = [
            {"type": "scale", "scale": [*channels, scale, scale]},
            {"type": "translation", "translation": [*(0.0 for _ in channels), shift, shift]},
        ]
        datasets.append({"path": str(k), "coordinateTransformations": steps})
    named = [
        {"name": a, "type": "channel"} if a == "c" else {"name": a, "type": "space", "unit": "micrometer"} for a in axes
    ]
    return {"name": name, "axes": named, "datasets": datasets, "type": "mean"}


def _omero() -> dict[str, Any]:
    window = {"min": 0, "max": 255, "start": 0, "end": 255}
    colours = {"R": "FF0000", "G": "00FF00", "B": "0000FF"}
    channels = [{"label": k, "color": v, "active": True, "window": window} for k, v in colours.items()]
    return {"channels": channels, "rdefs": {"model": "color"}}


def _halve_mask(mask: Mask) -> Mask:
    """Return the mask at half its size (ceil): set where at least half of the 2 × 2 pixels are."""
    padded = np.pad(mask, ((0, mask.shape[0] % 2), (0, mask.shape[1] % 2)), mode="edge").astype(np.uint8)
    total = padded[0::2, 0::2] + padded[1::2, 0::2] + padded[0::2, 1::2] + padded[1::2, 1::2]
    result: Mask = total >= 2
    return result


def _shard_names(path: Path) -> list[str]:
    files = (f for f in path.rglob("c/**/*") if f.is_file())
    return sorted(f.relative_to(path).as_posix() for f in files)


def _entry(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": sha256_of(path)}


def _sync_tree(path: Path) -> None:
    found = list(os.walk(path))
    # Together, not one after the other: a disk takes many waiting writers in one turn.
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(sync_file, [Path(folder) / file for folder, _, files in found for file in files]))
        list(pool.map(sync_file, [Path(folder) for folder, _, _ in found]))
