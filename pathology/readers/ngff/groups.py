"""Groups of zarr 2 and 3 and their NGFF attributes, on a disk or on object storage.

```
x.zarr/           zarr 2: .zgroup, .zattrs      attributes of NGFF at the top       NGFF 0.1 to 0.4
x.zarr/           zarr 3: zarr.json             attributes of NGFF below `ome`      NGFF 0.5
```
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from data.location import is_remote
from pathology.errors import SlideError

_IMAGES = ("multiscales", "bioformats2raw.layout", "plate", "well", "image-label")
"""Attributes: every NGFF group has one of them."""
_NAMES = (".zarr", ".zarr3")


@dataclass(frozen=True, slots=True)
class ZarrGroup:
    """A group: its place, the version of zarr, its NGFF attributes, and whether `hyfi ingest` wrote it."""

    path: Path
    zarr_format: Literal[2, 3]
    attributes: Mapping[str, Any]
    ours: bool


def read_group(path: Path) -> ZarrGroup | None:
    """Return the zarr group at a path; None if there is none.

    Raises:
        SlideError: It cannot be read, or its JSON is damaged.
    """
    # zarr 3 first, because converted stores may also have the files of version 2.
    document = read_document(path / "zarr.json")
    if document is not None:
        attributes = _object(document.get("attributes"))
        if document.get("node_type", "group") != "group":
            return None
        ours = isinstance(attributes.get("hyfi"), dict)
        # Since NGFF 0.5, its attributes are below "ome".
        return ZarrGroup(path, zarr_format=3, attributes=_object(attributes.get("ome")) or attributes, ours=ours)
    attributes_v2 = read_document(path / ".zattrs")
    if attributes_v2 is None and read_document(path / ".zgroup") is None:
        return None
    return ZarrGroup(path, zarr_format=2, attributes=attributes_v2 or {}, ours=False)


def is_ome_zarr(path: Path) -> bool:
    """Whether a folder is an OME-Zarr store, even a damaged one: by its metadata, or without any, by `.ome.zarr`."""
    if not _may_be_group(path):
        return False
    try:
        group = read_group(path)
        if group is not None and not any(name in group.attributes for name in _IMAGES):
            # Older versions of bioformats2raw wrote no attributes at the top.
            group = read_group(path / "0")
    except SlideError:
        return True  # the reader reports what is wrong with it
    if group is None:
        return path.name.endswith(".ome.zarr")
    return any(name in group.attributes for name in _IMAGES)


def is_own_slide(path: Path) -> bool:
    """Whether a folder is a slide that `hyfi ingest` wrote; False if its metadata cannot be read."""
    with suppress(SlideError):
        group = read_group(path) if _may_be_group(path) else None
        return group is not None and group.ours
    return False


def _may_be_group(path: Path) -> bool:
    # os.path returns False for inaccessible paths, where Path raises.
    return is_remote(path) or os.path.isdir(path)  # noqa: PTH112


def name_of_store(path: Path) -> str:
    """Return the name of a store's folder without its ending, as in ``a`` for ``a.ome.zarr``."""
    name = path.name
    for ending in _NAMES:
        if name.lower().endswith(ending):
            name = name[: -len(ending)]
    return name[: -len(".ome")] if name.lower().endswith(".ome") else name


def read_document(path: Path) -> dict[str, Any] | None:
    """Return a JSON object; None if there is no such file.

    Raises:
        SlideError: It cannot be read, or is not a JSON object.
    """
    data = read_bytes(path)
    if data is None:
        return None
    try:
        document = json.loads(data)
    except ValueError as error:
        raise SlideError(f"its {path.name} is damaged: {error}") from error
    if not isinstance(document, dict):
        raise SlideError(f"its {path.name} is damaged: it is not a JSON object")
    return document


def read_bytes(path: Path) -> bytes | None:
    """Return a file's content; None if there is no such file.

    Raises:
        SlideError: It cannot be read.
    """
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except OSError as error:
        raise SlideError(f"{path.name} in it cannot be read: {error.strerror or error}") from error


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
