"""Commands that convert pixels of a TIFF or OME-Zarr which are not 8-bit RGB or grey, for messages. All are tested."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

_SIGNED, _FLOAT = 2, 3
_WHITE_IS_ZERO, _BLACK_IS_ZERO, _RGB, _PALETTE, _INKS, _YCBCR = 0, 1, 2, 3, 5, 6
_ASSOCIATED = 1
_IMPORTS = 'python -c "import tifffile as t; '
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
    """Return a sentence with the command that converts a page to 8-bit RGB or grey; without one if none is known."""
    steps = _steps(page)
    if not steps:
        return "Export it as 8-bit RGB from the program that wrote it"
    return _command(steps)


def _command(steps: Sequence[str]) -> str:
    return f"Convert it first, and give its microns per pixel with --slide-mpp: {_IMPORTS}{'; '.join([*steps, _AFTER])}"


def _steps(page: Any) -> list[str]:
    """Return statements of Python that read a page as 8-bit RGB or grey; empty if its colours are unknown."""
    number = page.index if isinstance(page.index, int) else page.index[0]  # a level of that page
    if page.photometric in (_INKS, _YCBCR):
        seek = [f"i.seek({number})"] if number else []
        opened = ["from PIL import Image", "import numpy", "Image.MAX_IMAGE_PIXELS = None", "i = Image.open('IN.tif')"]
        return [*opened, *seek, "a = numpy.asarray(i.convert('RGB'))"]
    if page.photometric == _PALETTE:
        colours = "c = p.colormap >> (8 if p.colormap.max() > 255 else 0)"
        mapped = "a = c[:, p.asarray()].transpose(1, 2, 0).astype('uint8')"
        return [f"p = t.TiffFile('IN.tif').pages[{number}]", colours, mapped]
    if page.photometric != _RGB and (page.photometric > _RGB or page.samplesperpixel > 2):
        return []
    steps = [f"a = t.imread('IN.tif', key={number})"]
    if page.samplesperpixel > 1 and page.planarconfig != 1:
        steps.append("a = a.transpose(1, 2, 0)")
    if page.samplesperpixel > 4:
        steps.append("a = a[..., :3]")
    kind = {_FLOAT: "f", _SIGNED: "i"}.get(page.sampleformat, "u")
    bits = int(page.bitspersample)
    # If 0 is white, the largest number is the darkest pixel, from which the number of used bits does not follow.
    whole_range = page.photometric == _WHITE_IS_ZERO and kind == "u" and bits > 8
    steps += [f"a = (a >> {bits - 8}).astype('uint8')"] if whole_range else _to_8_bits(kind, bits)
    if page.photometric == _WHITE_IS_ZERO:
        steps.append("a = 255 - a" if page.samplesperpixel == 1 else "a[..., 0] = 255 - a[..., 0]")
    return steps + (_grey_over_white(page) if page.samplesperpixel == 2 else [])


def _grey_over_white(page: Any) -> list[str]:
    """Return the steps that blend grey with opacity over white; a second sample that is no opacity is dropped."""
    if not page.extrasamples or page.extrasamples[0] == 0:
        return ["a = a[..., 0]"]
    grey = "a[..., 0] + (255 - o)" if page.extrasamples[0] == _ASSOCIATED else "255 - (255 - a[..., 0]) * (o / 255)"
    return ["o = a[..., 1].astype('float')", f"a = ({grey}).round().clip(0, 255).astype('uint8')"]


def array_conversion(dtype: np.dtype[Any], axes: Sequence[str], path: str) -> str:
    """Return a sentence with the command that converts an array of OME-Zarr to a TIFF of 8 bits.

    Args:
        dtype: The array's type.
        axes: Names of the array's dimensions, some of t, c, z, y, x.
        path: The array's path below the store.
    """
    kept_axes = [name for name in axes if name in "cyx"]
    index = ", ".join(":" if name in kept_axes else "0" for name in axes)
    steps = [f"import zarr; a = zarr.open_array('IN.zarr/{path}', mode='r')[{index}]"]
    order = [kept_axes.index(name) for name in "yxc" if name in kept_axes]
    if order != sorted(order):
        steps.append(f"a = a.transpose({', '.join(map(str, order))})")
    bits = 1 if dtype.kind == "b" else dtype.itemsize * 8
    return _command([*steps, *_to_8_bits(dtype.kind, bits)])


def _to_8_bits(kind: str, bits: int) -> list[str]:
    """Return statements of Python that convert samples of NumPy's kind f, i, u or b to 8 bits."""
    if kind == "f":  # floats reach up to 1, to 255, or to the maximum of a camera with more bits, such as 4095
        top = "m = 1 if a.max() < 2 else 2 ** max(8, int(a.max()).bit_length()) - 1"
        return [top, "a = (a * (255 / m)).round().clip(0, 255).astype('uint8')"]
    if kind == "i":  # programs without unsigned types write numbers ≥ 0, or subtract half of the range
        most = "int(max(a.max(), -1 - a.min())).bit_length()"
        steps = ["a = a.astype('int64')", f"a = a + (0 if a.min() >= 0 else 1 << max(7, {most}))"]
        return [*steps, _UPPER_8]
    if bits == 1:
        return ["a = a.astype('uint8') * 255"]
    return [_UPPER_8] if bits > 8 else []


_UPPER_8 = "a = (a >> max(0, int(a.max()).bit_length() - 8)).astype('uint8')"
"""Cameras of 10 or 12 bits leave the upper bits of 16 empty."""
