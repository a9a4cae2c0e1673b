"""Colours of classes in pictures and reports."""

from __future__ import annotations

# Of similar lightness, and distinguishable with red-green colour blindness.
CLASS_COLORS = ((46, 116, 181), (214, 73, 51), (62, 150, 81), (148, 103, 189), (201, 148, 0), (0, 150, 160))
NEGATIVE_RGB = (64, 68, 78)
"""Colour of negative contributions, and of blocks with which an output rises when they are covered."""


NO_CHANNEL = -1
"""Index for an output that has no channel in the heatmap, such as the lowest of several grades."""
NO_CHANNEL_RGB = (128, 134, 144)


def class_color(index: int) -> tuple[int, int, int]:
    """Return the colour (red, green, blue) of a class; colours repeat for more classes.

    `NO_CHANNEL` is grey, because any colour of the map is that of another class.
    """
    if index == NO_CHANNEL:
        return NO_CHANNEL_RGB
    return CLASS_COLORS[index % len(CLASS_COLORS)]
