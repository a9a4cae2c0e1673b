"""Pen mask and blur map as JSON for a slide's attributes: small PNGs in base64, with their resolution."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from data.arrays import Mask
from pathology.arrays import Float
from pathology.tissue.blur import PATCH_PX, BlurMap

SHARPNESS_STEP = 1 / 200
"""Sharpness per grey level of a blur map. Level 0 means not measured; level 255 also stands for all larger values."""
_PEN_BLOCK_PX = 4


def blur_to_json(blur: BlurMap, mpp_um: float) -> dict[str, Any]:
    """Return a blur map as JSON, one pixel for each patch.

    Args:
        blur: The map.
        mpp_um: Microns per pixel at which sharpness was measured; a pixel of the PNG is `PATCH_PX` times as wide.
    """
    measured = np.isfinite(blur.values)
    # At least 1, because 0 means that a patch was not measured.
    levels = np.clip(np.rint(np.nan_to_num(blur.values) / SHARPNESS_STEP), 1, 255)
    grey = np.where(measured, levels, 0).astype(np.uint8)
    return {"mpp": mpp_um * PATCH_PX, "step": SHARPNESS_STEP, "png": _encoded(Image.fromarray(grey))}


def blur_from_json(value: dict[str, Any]) -> tuple[Float, float]:
    """Return the sharpness ``(rows, columns)``, NaN where it was not measured, and the microns per patch."""
    grey = _decoded(value["png"]).astype(np.float32)
    return np.where(grey > 0, grey * np.float32(value["step"]), np.float32(np.nan)), float(value["mpp"])


def pen_to_json(pen: Mask, mpp_um: float) -> dict[str, Any]:
    """Return a pen mask as JSON, reduced 4 × 4; a pixel is set if any of the sixteen is."""
    block = _PEN_BLOCK_PX
    small = np.zeros((-(-pen.shape[0] // block), -(-pen.shape[1] // block)), bool)
    if pen.any():  # most slides have none, and any() is faster than nonzero()
        y, x = np.nonzero(pen)
        small[y // block, x // block] = True
    return {"mpp": mpp_um * block, "png": _encoded(Image.fromarray(small))}


def pen_from_json(value: dict[str, Any]) -> tuple[Mask, float]:
    """Return the pen mask ``(rows, columns)`` and its microns per pixel."""
    return _decoded(value["png"]) > 0, float(value["mpp"])


def _encoded(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def _decoded(text: str) -> npt.NDArray[np.uint8]:
    with Image.open(io.BytesIO(base64.b64decode(text))) as image:
        return np.asarray(image.convert("L"))
