"""Errors that concern one slide; others can still be processed."""

from __future__ import annotations


class SlideError(Exception):
    """A slide cannot be used; the message becomes the reason in the manifest."""


class TileError(SlideError):
    """A tile of a slide cannot be decoded."""
