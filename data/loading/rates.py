"""Rates at which one core of a loader prepares images, for forecasts.

Measured by ``python -m workflows.benchmarks.loader`` on one slide, zstd, a local disk.
"""

from __future__ import annotations

from data.samples.augment import Augment

_READ_BYTES_PER_S = 350e6
_MOVE_BYTES_PER_S = 550e6
"""Of flips and turns; most images have one."""
_RECOLOUR_BYTES_PER_S = 180e6


def core_bytes_per_s(augment: Augment | None) -> float:
    """Return the bytes of pixels that one core reads, decodes and augments in a second."""
    each_s = 1 / _READ_BYTES_PER_S
    if augment is not None:
        each_s += augment.flips / _MOVE_BYTES_PER_S
        each_s += bool(augment.stain or augment.colour) / _RECOLOUR_BYTES_PER_S
    return 1 / each_s
