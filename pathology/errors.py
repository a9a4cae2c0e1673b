"""What is wrong with one slide, while the others go on."""

from __future__ import annotations


class SlideError(Exception):
    """A slide cannot be used; the message is the reason that people read in the manifest."""


class TileError(SlideError):
    """A part of a slide cannot be decoded."""
