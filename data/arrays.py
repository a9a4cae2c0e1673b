"""Names of the arrays that the packages pass on."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]
"""``(h, w)``: pixels or cells that are set."""

Pixels = NDArray[np.uint8]
"""``(3, h, w)`` pixels of a box, or the bytes of a chunk."""
