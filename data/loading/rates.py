"""Rates at which one core of a loader prepares images, for forecasts.

Measured by ``python -m workflows.benchmarks.loader`` on one slide, zstd, a local disk.
"""

from __future__ import annotations

from typing import Literal

from data.samples.augment import Augment

_READ_BYTES_PER_S = 700e6
_MOVE_BYTES_PER_S = 1250e6
"""Flips and turns by 90°; most images have one."""
_RECOLOUR_BYTES_PER_S = 310e6
_STAIN_BYTES_PER_S = {"macenko": 310e6, "reinhard": 145e6}
"""Scaled by the rate of recolouring, which was timed in the same process."""


def core_bytes_per_s(augment: Augment | None, stain: Literal["none", "macenko", "reinhard"] = "none") -> float:
    """Return the bytes of pixels that one core reads, decodes, normalises and augments in a second."""
    each_s = 1 / _READ_BYTES_PER_S
    if augment is not None:
        each_s += augment.flips / _MOVE_BYTES_PER_S
        each_s += bool(augment.stain or augment.colour) / _RECOLOUR_BYTES_PER_S
    each_s += 0.0 if stain == "none" else 1 / _STAIN_BYTES_PER_S[stain]
    return 1 / each_s
