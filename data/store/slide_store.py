"""One ingested slide: an OME-Zarr 0.5 image with its pyramid, tissue label and provenance.

```
STORE/<slide_id>.zarr/            zarr.json: attributes `ome` (OME-Zarr) and `hyfi` (this project's)
    0/ 1/ 2/ …                    (3, y, x) uint8, each level half of the one before, or the scanner's levels
    labels/tissue/ 0/ 1/ …        (y, x) uint8, 0 glass and 1 tissue, finest level about 8 µm per pixel
```
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data.arrays import Pixels
from data.errors import StoreError
from data.location import each, is_remote, location, sizes_of
from data.store.layout import BACKGROUND
from data.store.shard import FileEntry
from data.store.sharded_array import ShardedArray, read_json
from hyfi_core.plan.box import Box

__all__ = ["FORMAT", "SlideStore", "StoreError", "StoreLevel", "slide_path"]

FORMAT = 1
"""Version of the `hyfi` attributes; stores of other versions are refused."""


@dataclass(frozen=True, slots=True)
class StoreLevel:
    """One level of the pyramid: size in pixels, microns per pixel as (y, x), path inside the group."""

    height_px: int
    width_px: int
    mpp: tuple[float, float]
    path: str


def slide_path(store: Path, slide_id: str) -> Path:
    """Return the path of a slide in ``store``."""
    return store / f"{slide_id}.zarr"


@dataclass(frozen=True)
class SlideStore:
    """A finished slide, open for reading. Holds no open file: cheap to keep, safe to fork and to pickle.

    Attributes:
        path: ``STORE/<slide_id>.zarr``.
        slide_id: The slide's name.
        levels: The pyramid, finest first.
        attributes: The `hyfi` group attributes (source, parameters, tissue, shards, versions …).
    """

    path: Path
    slide_id: str
    levels: tuple[StoreLevel, ...]
    attributes: dict[str, Any]
    _images: tuple[ShardedArray, ...]
    _masks: tuple[tuple[ShardedArray, tuple[float, float]], ...]
    _tissue_override: npt.NDArray[np.bool_] | None = None

    @classmethod
    def open(cls, path: Path, check_files: bool = True) -> SlideStore:
        """Open ``STORE/<slide_id>.zarr``; with ``check_files``, every listed shard must exist and have its size.

        Args:
            path: ``STORE/<slide_id>.zarr``, a folder or on object storage.
            check_files: Whether to check every file now; when a shard is first read, its size is checked in any case.

        Raises:
            StoreError: The slide is missing or of another version, or a shard is missing or has the wrong size.
        """
        path = location(path)
        label = path / "labels" / "tissue"
        # Both groups at once: on object storage, each is a request.
        (attributes, ome), (_, label_ome) = each(
            lambda group: group_attributes(group) if group is path else _attributes(group), (path, label), path
        )
        files = listed_files(path, attributes)
        if check_files:
            _check_shards(path, files)
        blank, sizes, content = _blank(files), _sizes(files), attributes.get("metadata_sha256")

        def array(name: str) -> ShardedArray:
            # Of the metadata, which lists the digests of all shards: it names the chunks in the node's cache.
            digest = f"{content}/{name}" if content else ""
            return ShardedArray.open(path / name, blank.get(name), sizes.get(name), digest)

        images, masks = _datasets(path, ome), _datasets(label, label_ome or {})
        names = [*(name for name, _ in images), *(f"labels/tissue/{name}" for name, _ in masks)]
        arrays = each(array, names, path)
        levels = tuple(
            StoreLevel(a.shape[-2], a.shape[-1], mpp, name) for a, (name, mpp) in zip(arrays, images, strict=False)
        )
        of_masks = tuple((a, mpp) for a, (_, mpp) in zip(arrays[len(images) :], masks, strict=True))
        slide_id = path.name.removesuffix(".zarr")
        return cls(path, slide_id, levels, attributes, tuple(arrays[: len(images)]), of_masks)

    def __repr__(self) -> str:
        """Return name, size, resolution and folder in a line; ``attributes`` has everything else."""
        finest = self.levels[0]
        size, mpp = f"{finest.height_px} × {finest.width_px} px", " × ".join(f"{side:.4g}" for side in finest.mpp)
        levels = f"{len(self.levels)} level{'s' * (len(self.levels) > 1)}"
        return f"<SlideStore {self.slide_id}: {size} at {mpp} µm per pixel, {levels}, {self.path}>"

    def check_files(self) -> None:
        """Check that every listed shard exists and has its size.

        Raises:
            StoreError: One is missing or has the wrong size.
        """
        _check_shards(self.path, listed_files(self.path, self.attributes))

    def read(self, box: Box, level: int = 0, threads: int = 1, out: Pixels | None = None) -> Pixels:
        """Return the pixels of ``box`` of a level as ``(3, h, w)`` uint8 that the caller owns.

        Memory: the result, and for each thread one chunk and a read of at most a few MB.

        Args:
            box: Rectangle in pixels of that level; pixels outside the level are 255.
            level: Index of the level; 0 is the finest.
            threads: Chunks decoded at a time.
            out: The caller's array to fill and return, ``(3, h, w)`` uint8 of any strides; default: a new one.

        Raises:
            StoreError: A shard or a chunk is missing or damaged; names file and cause.
            ValueError: ``out`` has the wrong shape or dtype.
        """
        shape = (3, *box.shape)
        if out is None:
            out = np.empty(shape, np.uint8)
        elif out.shape != shape or out.dtype != np.uint8:
            raise ValueError(f"out is {out.dtype} {out.shape}; expected uint8 {shape}")
        size = self.levels[level]
        inside = box.intersect(Box.of_size(size.height_px, size.width_px))
        if inside != box:
            out[...] = BACKGROUND
        if not inside.empty:
            target = out[(slice(None), *inside.relative_to(box).slices())]
            self._images[level].read_into(inside, target, threads)
        return out

    def tissue(self, mpp_um: float | None = None) -> tuple[npt.NDArray[np.bool_], tuple[float, float]]:
        """Return the tissue mask ``(h, w)`` and its microns per pixel ``(y, x)``; its corner is the slide's corner.

        Args:
            mpp_um: Choose the mask's level nearest to this; default: the finest, about 8 µm per pixel.

        Raises:
            StoreError: A shard or a chunk is missing or damaged.
        """
        masks = self._masks
        if self._tissue_override is not None:
            return self._tissue_override, masks[0][1]
        nearest = 0
        if mpp_um is not None:
            nearest = min(range(len(masks)), key=lambda k: abs(np.log(masks[k][1][0] / mpp_um)))
        array, mpp = masks[nearest]
        # The whole mask: at 8 µm per pixel it is small.
        return array.read(array.layout.box) != 0, mpp

    def with_tissue(self, mask: npt.NDArray[np.bool_]) -> SlideStore:
        """Return a copy of this object that uses ``mask`` as its tissue; the store on disk is not changed.

        Args:
            mask: ``(h, w)`` bool, with the shape of the finest level of the stored tissue mask; not copied.

        Raises:
            ValueError: The mask has another shape.
        """
        expected = self._masks[0][0].shape[-2:]
        if mask.shape != tuple(expected):
            raise ValueError(f"the mask has shape {mask.shape}; expected {tuple(expected)}")
        return replace(self, _tissue_override=mask)

    @property
    def images(self) -> dict[str, ShardedArray]:
        """The array of each level, by its path inside the group."""
        return {level.path: array for level, array in zip(self.levels, self._images, strict=True)}


def group_attributes(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (`hyfi` attributes, `ome` attributes) of a slide.

    Raises:
        StoreError: There is no such slide, or it is of another version.
    """
    try:
        ours, ome = _attributes(path)
    except StoreError as error:
        absent = isinstance(error.__cause__, (FileNotFoundError, NotADirectoryError))
        if absent and (is_remote(path) or not path.is_dir()):
            raise StoreError(f"{path}: no ingested slide of this name") from error
        raise
    if not isinstance(ours, dict) or not isinstance(ome, dict):
        raise StoreError(f"{path}: not a slide written by hyfi ingest (no `hyfi` attributes)")
    if ours.get("format") != FORMAT:
        stored_format = ours.get("format")
        raise StoreError(f"{path}: store format {stored_format!r}, this version reads {FORMAT}; ingest the slide again")
    return ours, ome


def _attributes(group: Path) -> tuple[Any, Any]:
    """Return (`hyfi` attributes, `ome` attributes) of a group; None if it has none."""
    attributes = read_json(group / "zarr.json").get("attributes", {})
    return attributes.get("hyfi"), attributes.get("ome")


def listed_files(path: Path, attributes: dict[str, Any]) -> dict[str, FileEntry]:
    """Return path inside the slide -> entry of each pixel file (shard or chunk).

    Raises:
        StoreError: The slide's file list is missing or damaged.
    """
    shards = attributes.get("shards")
    if not isinstance(shards, dict) or not shards:
        raise StoreError(f"{path}: the list of shards is missing; ingest the slide again")
    try:
        return {name: FileEntry.from_json(entry) for name, entry in shards.items()}
    except (ValueError, AttributeError) as error:
        raise StoreError(f"{path}: the list of shards is damaged ({error}); ingest the slide again") from error


def _check_shards(path: Path, files: dict[str, FileEntry]) -> None:
    """Refuse a slide that lacks a shard of its list, or has one with another size."""
    expected = {name: entry.size for name, entry in files.items() if entry.size is not None}
    try:
        sizes = sizes_of(path, expected)
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error.strerror})") from error
    for name, size in sizes.items():
        file = path / name
        if isinstance(size, OSError):
            raise StoreError(f"{file}: a shard is missing ({size.strerror}); ingest the slide again") from size
        if size != expected[name]:
            raise StoreError(f"{file}: the shard has {size} bytes, expected {expected[name]}; ingest the slide again")


def _sizes(files: dict[str, FileEntry]) -> dict[str, dict[str, int]]:
    """Return array -> shard -> size: ``{"0": {"c/0/0/0": 1234}}`` for the file ``0/c/0/0/0``."""
    sizes: dict[str, dict[str, int]] = {}
    for name, entry in files.items():
        if entry.size is not None:
            # zarr's default keys of chunks begin with "c/", so the names of all shards have "/c/".
            array, _, file = name.partition("/c/")
            sizes.setdefault(array, {})[f"c/{file}"] = entry.size
    return sizes


def _blank(files: dict[str, FileEntry]) -> dict[str, dict[str, frozenset[int]]]:
    """Return array -> file name -> slots of chunks left out on purpose: ``{"0": {"c/0/0/0": {5, 6}}}``."""
    slots: dict[str, dict[str, frozenset[int]]] = {}
    for name, entry in files.items():
        if entry.blank:
            array, _, file = name.partition("/c/")
            slots.setdefault(array, {})[f"c/{file}"] = frozenset(entry.blank)
    return slots


def _datasets(path: Path, ome: dict[str, Any]) -> list[tuple[str, tuple[float, float]]]:
    """Return (path, microns per pixel (y, x)) of each level, finest first."""
    try:
        datasets = ome["multiscales"][0]["datasets"]
        levels = []
        for dataset in datasets:
            scale = dataset["coordinateTransformations"][0]["scale"]
            levels.append((str(dataset["path"]), (float(scale[-2]), float(scale[-1]))))
        return levels
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise StoreError(f"{path}: its OME metadata is not complete ({error!r})") from error
