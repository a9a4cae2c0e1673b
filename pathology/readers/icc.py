"""From a scanner's colours to sRGB, where the user asks for it: a slide's pixels are kept as they are otherwise."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image, ImageCms

from pathology.errors import SlideError
from pathology.readers.per_thread import PerThread
from pathology.readers.source_level import RGB

_WIDEST_PX = 2**20
"""Pixels converted at a time: what Pillow copies stays small."""


class ToSrgb:
    """Converts with an ICC profile: relative colorimetric with black point compensation, as viewers do.

    Args:
        profile: The bytes of the slide's profile.

    Raises:
        SlideError: They are no profile of RGB pixels.
    """

    def __init__(self, profile: bytes) -> None:
        self._profile = profile
        # A transform of Little CMS remembers its last colour: it is not for two threads.
        self._transforms = PerThread(self._build, lambda transform: None)
        self._transforms.get()

    def _build(self) -> Any:
        try:
            return ImageCms.buildTransform(
                ImageCms.ImageCmsProfile(io.BytesIO(self._profile)),
                ImageCms.createProfile("sRGB"),
                "RGB",
                "RGB",
                renderingIntent=ImageCms.Intent.RELATIVE_COLORIMETRIC,
                flags=ImageCms.Flags.BLACKPOINTCOMPENSATION,
            )
        except (ImageCms.PyCMSError, OSError, ValueError) as error:
            raise SlideError(f"its ICC profile cannot be applied: {error}") from error

    def __reduce__(self) -> tuple[Any, ...]:
        return ToSrgb, (self._profile,)

    def __call__(self, pixels: RGB) -> RGB:
        """Return ``(h, w, 3)`` uint8 in sRGB, new, of ``(h, w, 3)`` uint8 of any strides."""
        height, width = pixels.shape[:2]
        out: RGB = np.empty((height, width, 3), np.uint8)
        step = max(1, _WIDEST_PX // max(1, width))
        for y in range(0, height, step):
            image = Image.fromarray(np.ascontiguousarray(pixels[y : y + step]))
            out[y : y + step] = np.asarray(ImageCms.applyTransform(image, self._transforms.get()))
        return out

    def planes(self, pixels: RGB) -> RGB:
        """Return ``(3, h, w)`` uint8 in sRGB, new, of ``(3, h, w)`` uint8."""
        return np.ascontiguousarray(self(pixels.transpose(1, 2, 0)).transpose(2, 0, 1))
