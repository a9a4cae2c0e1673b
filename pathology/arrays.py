"""Types of arrays of pixels."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Planes = NDArray[np.uint8]
"""``(3, h, w)``: red, green and blue, each a plane."""

Float = NDArray[np.float32]
"""Values of pixels, or of a colour, in float32."""
