"""What the HTML pages of ingest and prediction share: templates, pictures inside the page, meanings of flags."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

from PIL import Image

TEMPLATES = Path(__file__).parent / "templates"

FLAG_MEANINGS = {
    "no_tissue": "no tissue was found on this slide",
    "cropped": "not all tissue fits into the image that the network was given; the rest was not seen",
    "mpp_assumed": "the file does not say how large a pixel is; the size given by the user was taken",
    "mpp_replaced": "the file's own microns per pixel were replaced by what the user gave",
    "mpp_changed": "predicted at another resolution than the network was trained with",
    "truncated": "the file is cut off in its last directories; the level that was read is whole",
    "tissue_given": "where the tissue is was given by the user, not found",
    "upsampled": "the scan is slightly coarser than the network's resolution and was enlarged",
    "blur": "parts of the tissue are out of focus",
    "pen": "there are pen marks on the glass",
    "bad_tiles": "some tiles of the file cannot be decoded; they were left white",
    "incomplete": "less of the tissue was seen than the network needs for its answer to count",
    "several_images": "the network takes images of one size; several show the slide, their evidence is combined",
    "heatmap_by_centre": "cells of the heatmap are put where their centres lie, up to half a cell off",
}
"""Every flag of a slide, in words for people."""


def render(template: str, **values: Any) -> str:
    """Return a page as HTML; every text in it is escaped, a name that the template misses is an error."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**values)


def jpeg_uri(encoded: bytes) -> str:
    """Return an encoded JPEG as a data URI."""
    return "data:image/jpeg;base64," + base64.b64encode(encoded).decode("ascii")


def data_uri(image: Image.Image, longest_px: int, quality: int = 86) -> str:
    """Return a picture as a JPEG data URI, shrunk to ``longest_px`` where it is larger."""
    shown = image.convert("RGB")
    shown.thumbnail((longest_px, longest_px), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    shown.save(buffer, "JPEG", quality=quality, optimize=True, subsampling=0)
    return jpeg_uri(buffer.getvalue())
