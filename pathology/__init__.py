"""Slides: reading, ingest into a store, prediction.

These functions are for scripts; the commands of ``hyfi`` use the same code:

>>> import pathology
>>> slide = pathology.open_slide("SLIDES/slide-0000.tiff")
>>> slide.mpp, slide.levels[0].height_px, slide.levels[0].width_px
((0.5, 0.5), 1024, 1024)
>>> report = pathology.ingest_slides(["SLIDES/slide-0000.tiff"], "another-store", mpp=1.0)
>>> [record.slide_id for record in report.done], report.failed
(['slide-0000'], [])
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyfi_core.own_packages import check_not_hidden

if TYPE_CHECKING:
    from pathology.readers.slide_source import SlideSource
    from pathology.scripts import StrPath, ingest_slides, predict_slides
    from pathology.view.show import show

__all__ = ["ingest_slides", "open_slide", "predict_slides", "show"]

check_not_hidden("data")


def open_slide(path: StrPath) -> SlideSource:
    """Open a slide file of any supported format.

    Returns:
        The slide: ``levels`` (finest first), ``mpp`` as (y, x) or None, and ``read(box, level)``, which returns a new
        ``(h, w, 3)`` uint8 array. The caller closes it; see `pathology.readers.slide_source.SlideSource`.

    Raises:
        SlideError: No reader supports the file, or it is damaged; the message says why.
    """
    from pathology.readers.sources import open_source

    return open_source(Path(path))


def __getattr__(name: str) -> Any:
    """Import `ingest_slides`, `predict_slides` and `show` when they are first asked for."""
    if name == "show":
        return importlib.import_module("pathology.view.show").show
    if name in ("ingest_slides", "predict_slides"):
        return getattr(importlib.import_module("pathology.scripts"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
