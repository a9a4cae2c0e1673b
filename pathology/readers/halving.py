"""Means of 2 × 2 pixels, for pyramids: two pixels at a time in one number twice as wide.

```
a row      a b c d e f …        read as 16-bit numbers: ab cd ef …
low byte   a   c   e            ab & 255 = a        (which of the two is low does not matter: they are added)
high byte    b   d   f          ab >> 8  = b
sum       a+b c+d e+f           and the same of the row below, added; + 2, >> 2
```

Everything runs over memory in a row, so the processor takes 16 numbers at a time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Planes = npt.NDArray[np.uint8]
_STRIP_PX = 32
"""Source rows taken at a time: what is made of them stays in the processor's cache."""


def mean_of_2x2(block: Planes) -> Planes:
    """Return ``(c, h / 2, w / 2)`` uint8: means of 2 × 2 pixels, half rounded up.

    Args:
        block: ``(c, h, w)`` uint8 of any strides, h and w even.
    """
    channels, height, width = block.shape
    out: Planes = np.empty((channels, height // 2, width // 2), np.uint8)
    for plane, target in zip(block, out, strict=True):
        for y in range(0, height, _STRIP_PX):
            pairs = np.ascontiguousarray(plane[y : y + _STRIP_PX]).view(np.uint16)
            across = pairs & np.uint16(0xFF)
            across += pairs >> np.uint16(8)
            total = across[0::2] + across[1::2]
            total += np.uint16(2)
            total >>= np.uint16(2)
            target[y // 2 : (y + _STRIP_PX) // 2] = total
    return out
