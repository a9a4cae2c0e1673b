"""The user's own change of colours of training images, named ``package.module:function``.

::

    function(pixels (3, h, w) uint8, rng: numpy.random.Generator) -> (3, h, w) uint8

Ranks read parts of an image. For the parts to fit together, a pixel's new colour may depend only on its old colour and
on ``rng``, which is the same for all parts of an image and differs between images and epochs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hyfi_core.errors import RequestError
from hyfi_core.user_code import load_user_code

KEY = "data.augment"
_WHAT = "a function of (pixels, rng)"
_TRIED_PX = (24, 40)


def own_colours(name: str, pixels: NDArray[np.uint8], draw: float) -> NDArray[np.uint8]:
    """Return (3, h, w) pixels after a user's change of colours; ``draw`` (0 to 1) is the seed of its ``rng``.

    Raises:
        RequestError: The function cannot be imported.
    """
    # Back to the 53 random bits from which `draw` was made.
    rng = np.random.default_rng(int(draw * 2**53))
    # A copy: the function may change its pixels in place, and these may belong to the cache.
    changed: NDArray[np.uint8] = load_user_code(KEY, name, _WHAT)(pixels.copy(), rng)
    return changed


def try_colours(name: str) -> None:
    """Try a user's function on a small image, whole and in parts.

    Raises:
        RequestError: It cannot be imported, fails, returns another shape or dtype, or returns different colours when it
            is called again, or for a part of the image.
    """
    image = np.random.default_rng(0).integers(0, 256, (3, *_TRIED_PX), dtype=np.uint8)
    try:
        whole = own_colours(name, image, 0.5)
        again = own_colours(name, image, 0.5)
        # Not at a corner, and of another shape: shows whether colours depend on position, size or neighbours.
        part = own_colours(name, image[:, 5:17, 8:], 0.5)
    except RequestError:
        raise
    except Exception as error:
        raise RequestError(
            f"{KEY} {name!r}: fails for pixels {image.shape} uint8 and a numpy Generator: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(whole, np.ndarray) or whole.shape != image.shape or whole.dtype != np.uint8:
        kind = f"{whole.shape} {whole.dtype}" if isinstance(whole, np.ndarray) else f"a {type(whole).__name__}"
        raise RequestError(f"{KEY} {name!r}: of pixels {image.shape} uint8 it returns {kind}; it must return the same")
    if not np.array_equal(whole, again):
        raise RequestError(f"{KEY} {name!r}: differs from call to call; take all random numbers from its argument rng")
    if not isinstance(part, np.ndarray) or not np.array_equal(whole[:, 5:17, 8:], part):
        raise RequestError(
            f"{KEY} {name!r}: changes a part of an image otherwise than the whole; a pixel's new colour may depend on "
            "its old colour and a few numbers of rng only, not on its position, its neighbours or the size"
        )
