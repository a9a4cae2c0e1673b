"""From stain planes to colours: Beer-Lambert with the case's dyes, as one look-up table."""

from __future__ import annotations

import numpy as np

from pathology.synthetic.anatomy import SlideSpec
from pathology.synthetic.fields import Array
from pathology.synthetic.sprites import E_SCALE, EOSIN, H_SCALE, HAEMATOXYLIN


def stain_table(spec: SlideSpec) -> Array:
    """Return the colour of every pair of plane values, (65536,) uint32 of R, G, B, 0 at index ``256 * H + E``.

    Dyes and their strength vary with the case, a little again with the slide; so does the light.
    """
    case = np.random.default_rng([spec.seed, 1_000_003, spec.case])
    slide = spec.rng(2)
    h = np.array(HAEMATOXYLIN) + case.normal(0, 0.03, 3) + slide.normal(0, 0.006, 3)
    e = np.array(EOSIN) + case.normal(0, 0.03, 3) + slide.normal(0, 0.006, 3)
    h_gain, e_gain = np.clip(np.exp(case.normal(0, 0.10, 2) + slide.normal(0, 0.03, 2)), 0.75, 1.3)
    glass = np.array([243.0, 242.0, 244.0]) + case.normal(0, 1.2, 3)
    levels = np.arange(256)
    density = (levels * H_SCALE * h_gain)[:, None, None] * h + (levels * E_SCALE * e_gain)[None, :, None] * e
    table = np.zeros((256, 256, 4), np.uint8)
    table[..., :3] = np.clip(glass * np.exp(-density) + 0.5, 0, 255)
    packed: Array = table.view(np.uint32).reshape(-1)
    return packed
