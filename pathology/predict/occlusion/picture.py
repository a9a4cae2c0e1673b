"""A picture of a slide's occlusion, for its report."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from pathology.predict.colors import NEGATIVE_RGB, class_color
from pathology.predict.legend import Key, ScaleBar, add_legend
from pathology.predict.occlusion.occlusion import Occlusion

OPACITY = 0.75
CONTRAST = 0.6  # of the slide under the colours


def draw_occlusion(
    thumbnail: NDArray[np.uint8], occlusion: Occlusion, channel: int, slide_size_px: tuple[int, int]
) -> Image.Image:
    """Return the pale slide with its blocks: in the colour of an output where it drops, grey where it rises.

    Args:
        thumbnail: (h, w, 3), the whole slide.
        occlusion: Of the slide.
        channel: The output that is shown.
        slide_size_px: (height, width) of the slide at the model's resolution.
    """
    height, width = thumbnail.shape[:2]
    rows, columns = (
        np.minimum(((np.arange(n) + 0.5) * side / n / occlusion.block_px).astype(int), count - 1)
        for n, side, count in zip((height, width), slide_size_px, occlusion.drops.shape[1:], strict=True)
    )
    strongest = occlusion.strongest(channel)
    share = np.nan_to_num(occlusion.drops[channel] / (strongest or 1.0))[rows[:, None], columns].astype(np.float64)
    color = np.where((share >= 0)[..., None], np.array(class_color(channel)), np.array(NEGATIVE_RGB))
    pale = 255 - (255 - thumbnail.astype(np.float64)) * CONTRAST
    mixed = pale + (color - pale) * (OPACITY * np.abs(share))[..., None]
    picture = Image.fromarray(mixed.round().clip(0, 255).astype(np.uint8))
    name = occlusion.names[channel]
    um_per_px = occlusion.mpp[1] * slide_size_px[1] / width
    drops = [
        Key("class", f"{name} drops when covered", class_color(channel)),
        *([Key("class", f"{name} rises when covered", NEGATIVE_RGB)] if share.min() < 0 else []),
        Key("note", f"strongest colour: {strongest:.3g}"),
    ]
    return add_legend(picture, [*drops, ScaleBar(um_per_px)])
