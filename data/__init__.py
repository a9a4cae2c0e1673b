"""Stores, manifests, labels, training images and loaders; knows arrays and cases, not slide file formats.

Read a store from Python with `open_store`:

>>> import data
>>> slide = data.open_store("store", "slide-0000")
>>> slide.levels[0].mpp
(1.0, 1.0)
>>> slide.read(data.Box(0, 256, 0, 512)).shape      # rows 0 to 256, columns 0 to 512, of the finest level
(3, 256, 512)
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hyfi_core.plan.box import Box

if TYPE_CHECKING:
    from data.store.slide_store import SlideStore

__all__ = ["Box", "open_store", "slide_ids"]


def open_store(store: str | os.PathLike[str], slide_id: str | None = None) -> SlideStore:
    """Open one ingested slide for reading.

    Args:
        store: The folder that ``hyfi ingest --out`` wrote; or, without ``slide_id``, one ``<slide_id>.zarr`` in it. A
            path, or an address: ``s3://``, ``gs://``, ``https://``, ``memory://``, ``file://``.
        slide_id: The slide's name in the store.

    Returns:
        The slide: ``levels``, ``read(box, level)`` gives ``(3, h, w)`` uint8 that the caller owns, ``tissue()`` gives
        the mask. It holds no open file and may be pickled.

    Raises:
        StoreError: There is no such slide, or one of its files is missing or has the wrong size.
    """
    from data.location import location
    from data.store.slide_store import SlideStore, slide_path

    path = location(store)
    return SlideStore.open(path if slide_id is None else slide_path(path, slide_id))


def slide_ids(store: str | os.PathLike[str]) -> list[str]:
    """Return the sorted slide ids of a store's finished slides.

    Raises:
        StoreError: There is no store in this folder.
    """
    from data.location import location
    from data.store.manifest import DONE, load_manifest

    return sorted(row["slide_id"] for row in load_manifest(location(store)) if row["status"] == DONE)
