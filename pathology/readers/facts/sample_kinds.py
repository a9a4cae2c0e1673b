"""What the samples of a TIFF's pixels are, if not 8-bit RGB or grey, and how to convert them. Each advice is tested."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

_SIGNED, _FLOAT = 2, 3
_BEFORE = "python -c \"import tifffile as t; a = t.imread('IN.tif', key=0)"
_AFTER = (
    "t.imwrite('OUT.tif', a, photometric='rgb' if a.ndim == 3 else 'minisblack', tile=(512, 512), "
    "compression='deflate', bigtiff=True)\""
)


def sample_format(page: Any) -> str:
    """Return ``signed ``, ``float `` or nothing, for messages about a page of tifffile."""
    return {_SIGNED: "signed ", _FLOAT: "float "}.get(int(page.sampleformat), "")


def is_unsigned(page: Any) -> bool:
    """Whether samples are unsigned numbers: signed ones would be off by half of their range."""
    return int(page.sampleformat) not in (_SIGNED, _FLOAT)


def conversion(page: Any) -> str:
    """Return a sentence with the command that converts a page to 8-bit RGB or grey."""
    steps = [_BEFORE, *_steps(page), _AFTER]
    return f"Convert it first, and give its microns per pixel with --slide-mpp: {'; '.join(steps)}"


def _steps(page: Any) -> list[str]:
    if page.photometric == 5:  # inks
        return ["from PIL import Image", "import numpy", "a = numpy.asarray(Image.open('IN.tif').convert('RGB'))"]
    steps = ["a = a.transpose(1, 2, 0)"] if page.samplesperpixel > 1 and page.planarconfig != 1 else []
    if page.samplesperpixel not in (1, 3, 4):
        steps.append("a = a[..., 0]" if page.samplesperpixel == 2 else "a = a[..., :3]")
    kind = {_FLOAT: "f", _SIGNED: "i"}.get(page.sampleformat, "u")
    return steps + _to_8_bits(kind, int(page.bitspersample))


def array_conversion(dtype: np.dtype[Any], axes: Sequence[str], place: str) -> str:
    """Return a sentence with the command that converts an array of OME-Zarr to a TIFF of 8 bits.

    Args:
        dtype: Its type.
        axes: Names of its dimensions, some of t, c, z, y, x.
        place: Its place below the store.
    """
    kept = [name for name in axes if name in "cyx"]
    index = ", ".join(":" if name in kept else "0" for name in axes)
    steps = [f"python -c \"import zarr, tifffile as t; a = zarr.open_array('IN.zarr/{place}', mode='r')[{index}]"]
    order = [kept.index(name) for name in "yxc" if name in kept]
    if order != sorted(order):
        steps.append(f"a = a.transpose({', '.join(map(str, order))})")
    bits = 1 if dtype.kind == "b" else dtype.itemsize * 8
    steps += [*_to_8_bits(dtype.kind, bits), _AFTER]
    return f"Convert it first, and give its microns per pixel with --slide-mpp: {'; '.join(steps)}"


def _to_8_bits(kind: str, bits: int) -> list[str]:
    """Return the steps that convert samples of a kind of NumPy (f, i, u or b) to 8 bits."""
    if kind == "f":
        return ["a = (a * (255 if a.max() <= 1 else 1)).round().clip(0, 255).astype('uint8')"]
    if kind == "i":
        return [f"a = ((a.astype('int64') + {2 ** (bits - 1)}) >> {bits - 8}).astype('uint8')"]
    if bits == 1:
        return ["a = a.astype('uint8') * 255"]
    # Cameras of 10 or 12 bits leave the upper bits of 16 empty.
    return ["a = (a >> max(0, int(a.max()).bit_length() - 8)).astype('uint8')"] if bits > 8 else []
