"""Colours that pictures and reports share."""

from __future__ import annotations

# Classes in reports and annotations: of equal weight, apart also for red-green blind eyes.
CLASS_COLORS = ((46, 116, 181), (214, 73, 51), (62, 150, 81), (148, 103, 189), (201, 148, 0), (0, 150, 160))


def class_color(index: int) -> tuple[int, int, int]:
    """Return the colour (red, green, blue) of a class; colours repeat where there are more classes."""
    return CLASS_COLORS[index % len(CLASS_COLORS)]
