"""A picture of the evidence of a slide's blocks, for its report."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from pathology.predict.colors import NEGATIVE_RGB, class_color
from pathology.predict.evidence.block_evidence import BlockEvidence
from pathology.predict.legend import Key, ScaleBar, add_legend

OPACITY = 0.75
CONTRAST = 0.6  # of the slide under the colours


def draw_evidence(
    thumbnail: NDArray[np.uint8], evidence: BlockEvidence, channel: int, slide_size_px: tuple[int, int]
) -> Image.Image:
    """Return a pale picture of the slide with its blocks: coloured if an output drops without them, grey if it rises.

    Args:
        thumbnail: (h, w, 3), the whole slide.
        evidence: The slide's evidence.
        channel: The output that is shown.
        slide_size_px: (height, width) of the slide at the model's resolution.
    """
    height, width = thumbnail.shape[:2]
    rows, columns = (
        np.minimum(((np.arange(n) + 0.5) * side / n / evidence.block_px).astype(int), count - 1)
        for n, side, count in zip((height, width), slide_size_px, evidence.drops.shape[1:], strict=True)
    )
    strongest = evidence.strongest(channel)
    share = np.nan_to_num(evidence.drops[channel] / (strongest or 1.0))[rows[:, None], columns].astype(np.float64)
    color = np.where((share >= 0)[..., None], np.array(class_color(channel)), np.array(NEGATIVE_RGB))
    pale = 255 - (255 - thumbnail.astype(np.float64)) * CONTRAST
    mixed = pale + (color - pale) * (OPACITY * np.abs(share))[..., None]
    picture = Image.fromarray(mixed.round().clip(0, 255).astype(np.uint8))
    name = evidence.names[channel]
    um_per_px = evidence.mpp[1] * slide_size_px[1] / width
    when = "when covered" if evidence.kind == "occlusion" else "when covered (estimate)"
    drops = [
        Key("class", f"{name} drops {when}", class_color(channel)),
        *([Key("class", f"{name} rises {when}", NEGATIVE_RGB)] if share.min() < 0 else []),
        Key("note", f"strongest colour: {strongest:.3g}"),
    ]
    return add_legend(picture, [*drops, ScaleBar(um_per_px)])
