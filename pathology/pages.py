"""Shared code of HTML pages: templates, embedded pictures, descriptions of flags."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

from PIL import Image

TEMPLATES = Path(__file__).parent / "templates"

FLAG_MEANINGS = {
    "no_tissue": "no tissue was found on this slide",
    "cropped": "not all tissue fits into the model's input image; the rest was not seen",
    "mpp_assumed": "the file does not state its microns per pixel; those given by the user, or usual at its "
    "magnification, are used",
    "mpp_doubtful": "the file contradicts itself about its microns per pixel",
    "levels_left_out": "a level of the file does not fit its finest one, or shows something else, and is not used",
    "chunks_absent": "the OME-Zarr store lacks files of chunks: empty ones, or it is not complete",
    "several_scenes": "the file has several scenes of tissue; this is one of them",
    "colour": "colours contradict the file's own statement and were corrected, are those of no stain, or have a "
    "dark ground, as of fluorescence",
    "mpp_replaced": "the file's own microns per pixel were replaced by those given by the user",
    "mpp_changed": "predicted at another resolution than the model was trained with",
    "trained_on": "the model was trained on this slide, or on another one of its case: the prediction does not show "
    "how it does on new slides",
    "outside_training": "size, resolution or stain of the slide are far from those of all training slides: the "
    "prediction may mean nothing",
    "stain_as_scanned": "the model's stain normalisation left the slide as it is, because its two stains could not be "
    "measured: too little tissue, or one stain only",
    "truncated": "the file is truncated, but the level that was read is complete",
    "tissue_given": "the tissue outline was given by the user, not detected",
    "upsampled": "the scan is slightly coarser than the model's resolution and was upsampled",
    "black": "part of the slide is exactly black: it was not scanned, or its uncompressed "
    "file was not copied completely",
    "blur": "parts of the tissue are out of focus",
    "pen": "there are pen marks on the glass",
    "bad_tiles": "some tiles of the file cannot be decoded and were replaced by white",
    "incomplete": "less tissue was seen than a prediction requires",
    "several_images": "the model takes images of a fixed size; several show the slide, and their logits are combined",
    "no_heatmap": "the model pools no map into its output, so no position has a score: there is no heatmap",
    "gradient": "as requested, gradient.tiff estimates how much the outputs drop when a block of tissue is covered",
    "occlusion": "as requested, occlusion.tiff shows how much the outputs drop when a block of tissue is covered",
    "heatmap_by_centre": "heatmap squares are placed by their centres, up to half a square off",
}
"""Description of each flag."""


def render(template: str, **values: Any) -> str:
    """Return a page as HTML.

    Args:
        template: Name of a file in `TEMPLATES`.
        values: Variables of the template; texts are escaped, and a missing variable is an error.
    """
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
    """Return a picture as a JPEG data URI, reduced to ``longest_px`` if larger."""
    shown = image.convert("RGB")
    shown.thumbnail((longest_px, longest_px), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    shown.save(buffer, "JPEG", quality=quality, optimize=True, subsampling=0)
    return jpeg_uri(buffer.getvalue())
