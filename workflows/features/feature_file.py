"""The files of one slide's features: written beside, synced, renamed."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self, get_args

import numpy as np
from numpy.typing import NDArray

from data.files import publish_directory, remove_leftovers, sync_tree, temporary_path
from data.tiles.features.stored import import_h5py
from hyfi_core.errors import RequestError
from hyfi_core.files import sync_file
from workflows.features.hdf5 import Hdf5Features
from workflows.features.tiled_slide import TiledSlide
from workflows.features.zarr_features import ZarrFeatures

FeatureFormat = Literal["trident", "clam", "stamp", "zarr"]


class FeatureWriter(Protocol):
    """Writes the vectors of one slide's tiles."""

    def write(self, start: int, vectors: NDArray[np.float32]) -> None:
        """Write the vectors of tiles ``start`` and following."""
        ...

    def close(self) -> None:
        """Finish the file."""
        ...


def feature_format(text: str) -> FeatureFormat:
    """Parse ``--format``, and check that its library is installed.

    Raises:
        RequestError: It is not known, or the library is missing.
    """
    for name in get_args(FeatureFormat):
        if text == name:
            if name != "zarr":
                import_h5py()
            return name  # type: ignore[no-any-return]
    raise RequestError(f"--format {text}: use one of {', '.join(get_args(FeatureFormat))}")


def files_of(slide_id: str, form: FeatureFormat) -> tuple[str, ...]:
    """Return the paths of a slide's files below the folder of features; the first has the vectors."""
    if form == "clam":
        return f"h5_files/{slide_id}.h5", f"pt_files/{slide_id}.pt"
    return (f"{slide_id}.{'zarr' if form == 'zarr' else 'h5'}",)


class FeatureFile:
    """The files of one slide, being written. A context manager; they appear only if `publish` was called.

    Args:
        folder: The folder of features, which must exist.
        slide: The slide and its tiles.
        features: Length of a vector.
        form: The format.
    """

    def __init__(self, folder: Path, slide: TiledSlide, features: int, form: FeatureFormat) -> None:
        self._paths = [folder / name for name in files_of(slide.slide_id, form)]
        for path in self._paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Files that a killed process left beside this one.
            remove_leftovers(path)
        # Where they are written until `publish`: in the same folder, as a rename is atomic only within a file system.
        self._temporary, self._form = [temporary_path(path) for path in self._paths], form
        self._open = True
        self._writer: FeatureWriter
        if form == "zarr":
            self._writer = ZarrFeatures(self._temporary[0], slide, features)
        else:
            self._writer = Hdf5Features(self._temporary[0], slide, features, stamp=form == "stamp")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the files, and remove those that were not published."""
        if self._open:
            with suppress(OSError, RuntimeError, ValueError):  # on a full disk, the first error must be reported
                self._writer.close()
        # After `publish`, nothing has these names any more.
        for path in self._temporary:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def write(self, start: int, vectors: NDArray[np.float32]) -> None:
        """Write the vectors ``(n, D)`` of tiles ``start`` and following; in order, without gaps.

        Raises:
            FeatureError: A value is too large for the file's type.
        """
        self._writer.write(start, vectors)

    def publish(self) -> None:
        """Finish the files and give them their names, replacing earlier ones.

        Memory: CLAM's ``.pt`` needs all vectors of the slide; other formats need nothing more.

        Raises:
            OSError: They cannot be written.
        """
        self._writer.close()
        self._open = False
        if self._form == "clam":
            h5_path, pt_path = self._temporary
            _write_pt(h5_path, pt_path)
        for temporary, path in zip(self._temporary, self._paths, strict=True):
            if temporary.is_dir():
                sync_tree(temporary)
                publish_directory(temporary, path)
            else:
                # Data first, then the name, then the folder with the name: a crash leaves the old file or the whole new
                # one.
                sync_file(temporary)
                temporary.replace(path)
                sync_file(path.parent)


def _write_pt(hdf5: Path, path: Path) -> None:
    """Write the vectors of an HDF5 file as CLAM trains on them: one tensor, with ``torch.save``."""
    import torch

    with import_h5py().File(hdf5, "r") as file:
        torch.save(torch.from_numpy(file["features"][:]), path)
