"""The features of the tiles of one slide, in a file of hyfi or another program.

::

    HDF5   features (N, D) or (1, N, D)    coords (N, 2): (x, y) in level-0 pixels     TRIDENT, CLAM
           feats (N, D)                    coords (N, 2): (x, y) in micrometres        STAMP
    zarr   features (N, D)                 coords (N, 2): (y, x) in level-0 pixels     hyfi features
    pt     one tensor (N, D)               none                                        CLAM
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from hyfi_core.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

Unit = Literal["px", "um"]
_OLD_STAMP_TILE_UM, _OLD_STAMP_TILE_PX = 256.0, 224.0
"""Side of a tile of STAMP before version 2, whose files do not state it; their positions are in these pixels."""


def import_h5py() -> ModuleType:
    """Return the module ``h5py``.

    Raises:
        RequestError: It is not installed.
    """
    try:
        return import_module("h5py")
    except ImportError as error:
        raise RequestError(
            f"h5py cannot be imported ({error}), which files of features (.h5) need; install it with "
            f"`pip install 'hyfi[encoders]'`"
        ) from error


@dataclass(frozen=True)
class StoredFeatures:
    """The features of one slide: shapes and attributes of its file. Vectors and positions are read on request.

    Attributes:
        slide_id: The file's name without its ending.
        path: The file, or the folder of zarr.
        count: N, the number of tiles.
        features: D, the length of a vector.
        encoder: Name of the encoder, if the file states it.
        unit: Unit of `coords`: level-0 pixels or micrometres; None: the file has no coords.
        tile_size: Height and width of a tile in ``unit``, if the file states it.
        tile_px: Height and width, in pixels, of a tile at the encoder's input, if the file states it.
        slide_px: Height and width of the slide's level 0, if the file states them.
    """

    slide_id: str
    path: Path
    count: int
    features: int
    encoder: str | None = None
    unit: Unit | None = None
    tile_size: float | None = None
    tile_px: int | None = None
    slide_px: tuple[int, int] | None = None

    @classmethod
    def of(cls, path: Path) -> StoredFeatures:
        """Read shapes and attributes of a file of features.

        Raises:
            RequestError: It is damaged, or not a file of features.
        """
        with _opened(path) as content:
            name, vectors = _vectors(path, content)
            shape = tuple(vectors.shape)
            # Some files have a batch of one in front.
            shape = shape[1:] if len(shape) == 3 and shape[0] == 1 else shape
            if len(shape) != 2 or not shape[1] or np.dtype(str(vectors.dtype).removeprefix("torch.")).kind != "f":
                raise RequestError(f"{path}: {name} is {vectors.dtype} {tuple(vectors.shape)}; expected floats (N, D)")
            count, features = int(shape[0]), int(shape[1])
            if not count:
                raise RequestError(f"{path}: it has no tiles")
            coords = content.get("coords")
            if coords is not None and tuple(coords.shape[-2:]) != (count, 2):
                raise RequestError(f"{path}: coords are {tuple(coords.shape)} for {count} tiles; expected (N, 2)")
            unit, tile_size, _ = _frame(content)
            encoder, (tile_px, slide_px) = _encoder(content, vectors), _pixels(content)
            name = path.name.rpartition(".")[0]
            return cls(name, path, count, features, encoder, unit, tile_size, tile_px, slide_px)

    def vectors(self, indices: Sequence[int] | None = None) -> NDArray[np.float32]:
        """Return the vectors of some tiles, or of all, ``(n, D)`` float32 that the caller owns.

        Raises:
            RequestError: The file is damaged, or a value is not finite.
            IndexError: There is no such tile.
        """
        chosen = None if indices is None else np.asarray(indices, dtype=np.int64)
        if chosen is not None and len(chosen) and not 0 <= int(chosen.min()) <= int(chosen.max()) < self.count:
            raise IndexError(f"{self.path}: tiles {chosen.min()} to {chosen.max()} of {self.count}")
        with _opened(self.path) as content:
            read = np.array(_rows(_vectors(self.path, content)[1], chosen), dtype=np.float32)
        if not np.isfinite(read).all():
            raise RequestError(f"{self.path}: its features are not all finite; compute them again")
        return read

    def coords(self) -> NDArray[np.float64] | None:
        """Return ``(N, 2)``: (y, x) of each tile's upper left corner in `unit`; None if the file has none.

        Raises:
            RequestError: The file is damaged.
        """
        if self.unit is None:
            return None
        with _opened(self.path) as content:
            _, _, scale = _frame(content)
            coords: NDArray[np.float64] = np.asarray(content["coords"][:], dtype=np.float64).reshape(self.count, 2)
        # Files of other programs have (x, y).
        return coords if self.path.suffix == ".zarr" else np.ascontiguousarray(coords[:, ::-1] * scale)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Context that yields the content of a file: datasets by name, ``attrs``.

    Raises:
        RequestError: It cannot be opened or read.
    """
    try:
        if path.suffix == ".zarr":
            yield import_module("zarr").open_group(path, mode="r")
        elif path.suffix == ".pt":
            yield {"tensor": _tensor(path)}
        else:
            with import_h5py().File(path, "r") as file:
                yield file
    except RequestError:
        raise
    except Exception as error:  # h5py, zarr and torch raise many kinds
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RequestError(f"{path}: damaged, or not a file of features ({reason}); compute it again") from error


def _tensor(path: Path) -> Any:
    """Return the tensor of a ``.pt``, mapped into memory: only rows in use are read. Old files are read as a whole."""
    mapped = zipfile.is_zipfile(path)  # the format of torch.save since PyTorch 1.6
    return import_module("torch").load(path, map_location="cpu", weights_only=True, mmap=mapped)


def _vectors(path: Path, content: Any) -> tuple[str, Any]:
    """Return the name and the dataset of the vectors."""
    # Names of ours, TRIDENT and CLAM; of STAMP; and that of `_opened` for the tensor of a ``.pt``.
    for name in ("features", "feats", "tensor"):
        if name in content and hasattr(content[name], "shape"):
            return name, content[name]
    raise RequestError(
        f"{path}: it has {', '.join(map(repr, content)) or 'nothing'}, but neither 'features' nor 'feats'; give a "
        f"folder that hyfi features, TRIDENT, CLAM or STAMP wrote"
    )


def _rows(stored: Any, chosen: NDArray[np.int64] | None) -> Any:
    """Return some rows (None: all) of a dataset ``(N, D)`` or ``(1, N, D)``, as ``(n, D)``."""
    low: int
    high: int | None
    if chosen is None:
        low, high = 0, None
    else:
        low, high = (int(chosen.min()), int(chosen.max()) + 1) if len(chosen) else (0, 0)
    # h5py is slow with lists of indices: read a range that contains all of them, and choose in memory.
    some = stored[low:high] if len(stored.shape) == 2 else stored[0, low:high]
    return some if chosen is None else np.asarray(some)[chosen - low]


def _frame(content: Any) -> tuple[Unit | None, float | None, float]:
    """Return (unit of positions, side of a tile in this unit, factor from stored positions to this unit).

    What a file has shows which program wrote it: ours, STAMP (``feats``), or TRIDENT or CLAM.
    """
    if "coords" not in content:
        return None, None, 1.0
    attributes = dict(getattr(content, "attrs", {}))
    if "hyfi_features" in attributes:
        height, width = attributes["hyfi_features"]["tile_source_px"]
        return "px", float((height + width) / 2), 1.0
    if "feats" in content:
        # The attribute's name differs between versions of STAMP.
        size_um = attributes.get("tile_size_um")
        if not size_um and attributes.get("unit") == "um":
            size_um = attributes.get("tile_size")
        if size_um:
            return "um", float(size_um), 1.0
        # Before version 2, STAMP stated no size, and positions in pixels of its tiles.
        return "um", _OLD_STAMP_TILE_UM, _OLD_STAMP_TILE_UM / _OLD_STAMP_TILE_PX
    return "px", _trident_size(dict(content["coords"].attrs)), 1.0


def _trident_size(attributes: Mapping[str, Any]) -> float | None:
    """Return the side of a tile in level-0 pixels, from attributes of TRIDENT or CLAM; None without them."""
    if "patch_size_level0" in attributes:
        return float(attributes["patch_size_level0"])
    if "patch_size" in attributes and "downsample" in attributes:
        return float(attributes["patch_size"]) * float(np.mean(attributes["downsample"]))
    return None


def _pixels(content: Any) -> tuple[int | None, tuple[int, int] | None]:
    """Return (side of a tile, (height, width) of the slide), in pixels; None if the file does not state it."""
    if "coords" not in content:
        return None, None
    attributes = dict(getattr(content, "attrs", {}))
    if "hyfi_features" in attributes:
        stated = attributes["hyfi_features"]
        height, width = stated.get("source_size_px") or (None, None)
        tile = stated.get("size_px")
    elif "feats" in content:
        tile, height, width = attributes.get("tile_size_px"), None, None
    else:
        of_coords = dict(content["coords"].attrs)
        tile, height, width = (of_coords.get(name) for name in ("patch_size", "level0_height", "level0_width"))
    slide = None if height is None or width is None else (int(height), int(width))
    return (None if not tile else int(tile)), slide


def _encoder(content: Any, vectors: Any) -> str | None:
    """Return the encoder's name from the attributes of a file or of its vectors; None without one."""
    attributes = dict(getattr(content, "attrs", {}))
    named = attributes.get("hyfi_features", {}).get("encoder") or attributes.get("extractor")
    named = named or dict(getattr(vectors, "attrs", {})).get("encoder")
    return str(named) if named and str(named) != "None" else None
