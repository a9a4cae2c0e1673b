"""The reference of stain normalisation: published numbers, or those measured on a slide or picture of the user."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
from PIL import Image

from data.arrays import Pixels
from data.errors import StoreError
from data.samples.colours.reinhard import LabStatistics
from data.samples.colours.slide_colours import glass_colour, glass_of, stains_of, tissue_windows
from data.samples.colours.stain_normalisation import StainMethod, StainNormalisation
from data.store.slide_store import SlideStore, slide_path
from hyfi_core.errors import RequestError
from pathology.tissue.stain import estimate_stains

_MOST_PX = 2**26
"""Larger pictures are refused, because stains are measured in memory."""
Reference = Mapping[str, tuple[float, ...]]


def stain_normalisation(
    method: Literal["none", "macenko", "reinhard"], reference: str | None, store: Path, key: str
) -> StainNormalisation | None:
    """Return stain normalisation to a reference; None for ``none``.

    Args:
        method: How colours are changed.
        reference: A slide of the store by its name, a stored slide (``STORE/NAME.zarr``), or a picture of tissue, PNG,
            JPEG or TIFF; None: the method's published reference.
        store: The store.
        key: Option or key of the reference, for messages.

    Raises:
        RequestError: There is no such slide or picture, or its stains cannot be measured.
    """
    if method == "none" or reference is None:
        return StainNormalisation.of(method)
    path = Path(reference).expanduser()
    # A name without folders is a slide of the store first; a picture in the current folder comes second.
    stored = slide_path(store, reference) if "/" not in reference else path
    try:
        if path.suffix == ".zarr" or stored.is_dir():
            measured = _of_slide(SlideStore.open(path if path.suffix == ".zarr" else stored), method)
        else:
            measured = _of_picture(_picture(path, store, key), method)
    except StoreError as error:
        raise RequestError(f"{key} {reference}: {error}") from error
    if measured is None:
        raise RequestError(
            f"{key} {reference}: its colours cannot be measured (too little stained tissue, or one stain only); give "
            f"another slide, or a picture that is mostly tissue in haematoxylin and eosin"
        )
    return StainNormalisation.of(method, measured)


def _of_slide(slide: SlideStore, method: StainMethod) -> Reference | None:
    """Return the reference numbers of a stored slide; None if they cannot be measured."""
    if method == "macenko":
        return _numbers(stains_of(slide))
    return _statistics(LabStatistics.of(tissue_windows(slide), glass_of(slide)))


def _of_picture(picture: Pixels, method: StainMethod) -> Reference | None:
    """Return the reference numbers of a picture (3, h, w); None if they cannot be measured."""
    glass, flat = glass_colour(picture), picture.reshape(3, -1)
    if method == "reinhard":
        return _statistics(LabStatistics.of([flat], glass))
    stains = estimate_stains(flat.T, glass)
    if stains is None:
        return None
    # `stains_of` checks the numbers; it expects a stored slide, so one is imitated.
    return _numbers(stains_of(SimpleNamespace(attributes={"stains": stains.to_json()})))


def _numbers(stains: Mapping[str, Any] | None) -> Reference | None:
    names = ("haematoxylin", "eosin", "strength")
    return None if stains is None else {name: tuple(map(float, stains[name])) for name in names}


def _statistics(measured: LabStatistics | None) -> Reference | None:
    return None if measured is None else {"mean": measured.mean, "std": measured.std}


def _picture(path: Path, store: Path, key: str) -> Pixels:
    """Return a picture as (3, h, w) uint8.

    Raises:
        RequestError: There is none, it cannot be read, or it is too large.
    """
    if not path.is_file():
        raise RequestError(
            f"{key} {path}: no slide of {store} has this name, and there is no such file; give the name of a slide, a "
            f"stored slide (STORE/NAME.zarr), or a picture of tissue (PNG, JPEG, TIFF)"
        )
    try:
        with Image.open(path) as picture:
            # Known from the header, before the picture is decoded.
            if picture.width * picture.height > _MOST_PX:
                raise RequestError(
                    f"{key} {path}: {picture.width} × {picture.height} px; give a part of at most {_MOST_PX:,} px, or "
                    f"ingest the slide and give its name"
                )
            return np.ascontiguousarray(np.asarray(picture.convert("RGB")).transpose(2, 0, 1))
    except RequestError:  # a ValueError, too
        raise
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise RequestError(
            f"{key} {path}: cannot be read as a picture ({error}); give PNG, JPEG or TIFF, or ingest the slide and "
            f"give its name"
        ) from error
