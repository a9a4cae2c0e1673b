"""Errors of a single slide, which do not affect other slides."""

from __future__ import annotations


class SlideError(Exception):
    """A slide cannot be used; the message is the reason shown in the manifest."""


class TileError(SlideError):
    """A part of a slide cannot be decoded."""
