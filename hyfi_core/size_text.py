"""Sizes of memory, files and disks in messages."""

from __future__ import annotations


def size_text(size_bytes: float) -> str:
    """Return a size in GB or MB as text: three significant digits below 100, rounded to a whole number from 100 on."""
    unit, unit_bytes = ("GB", 1e9) if size_bytes >= 1e9 else ("MB", 1e6)
    value = size_bytes / unit_bytes
    return f"{value:.3g} {unit}" if value < 100 else f"{value:,.0f} {unit}"
