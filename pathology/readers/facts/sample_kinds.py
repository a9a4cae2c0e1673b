"""What the samples of a TIFF's pixels are, if not 8-bit RGB or grey, and how to convert them. Each advice is tested."""

from __future__ import annotations

from typing import Any

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
    if page.sampleformat == _FLOAT:
        steps.append("a = (a * (255 if a.max() <= 1 else 1)).round().clip(0, 255).astype('uint8')")
    elif page.sampleformat == _SIGNED:
        half, unused = 2 ** (page.bitspersample - 1), page.bitspersample - 8
        steps.append(f"a = ((a.astype('int64') + {half}) >> {unused}).astype('uint8')")
    elif page.bitspersample == 1:
        steps.append("a = a.astype('uint8') * 255")
    elif page.bitspersample > 8:
        # Cameras of 10 or 12 bits leave the upper bits of 16 empty.
        steps.append("a = (a >> max(0, int(a.max()).bit_length() - 8)).astype('uint8')")
    return steps
