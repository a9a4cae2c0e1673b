"""Colours that pictures and reports share."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Light to dark, pale amber to wine: readable on grey tissue, on paper and for colour-blind eyes (by lightness).
HEAT_ANCHORS = ("#fff3c4", "#fdc75a", "#f58a34", "#dc4a35", "#ab1f4d", "#6a0f57")

# Classes in reports and annotations: of equal weight, apart also for red-green blind eyes.
CLASS_COLORS = ((46, 116, 181), (214, 73, 51), (62, 150, 81), (148, 103, 189), (201, 148, 0), (0, 150, 160))

# From linear sRGB to cone responses and on to OKLab (B. Ottosson, "A perceptual color space", 2020).
_TO_CONES = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
_TO_LAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)


def class_color(index: int) -> tuple[int, int, int]:
    """Return the colour (red, green, blue) of a class; colours repeat where there are more classes."""
    return CLASS_COLORS[index % len(CLASS_COLORS)]


def heat_ramp(steps: int = 256) -> NDArray[np.uint8]:
    """Return (steps, 3) sRGB colours, evenly spaced in OKLab between the anchors, the lightest first."""
    anchors = np.array([[int(text[i : i + 2], 16) for i in (1, 3, 5)] for text in HEAT_ANCHORS]) / 255.0
    lab = np.cbrt(_linear(anchors) @ _TO_CONES.T) @ _TO_LAB.T
    # Steps of equal perceived difference: the anchors stand where their distance along the path puts them.
    along = np.concatenate([[0.0], np.cumsum(np.linalg.norm(np.diff(lab, axis=0), axis=1))])
    wanted = np.linspace(0.0, along[-1], steps)
    path = np.stack([np.interp(wanted, along, lab[:, channel]) for channel in range(3)], axis=1)
    linear = (path @ np.linalg.inv(_TO_LAB).T) ** 3 @ np.linalg.inv(_TO_CONES).T
    return np.round(_gamma(np.clip(linear, 0.0, 1.0)) * 255).astype(np.uint8)


def _linear(srgb: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)


def _gamma(linear: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(linear <= 0.0031308, linear * 12.92, 1.055 * linear ** (1 / 2.4) - 0.055)
