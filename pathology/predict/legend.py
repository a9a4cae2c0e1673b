"""Legends below pictures: samples of colours and lines with labels, and a scale bar."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import Literal

from PIL import Image, ImageDraw, ImageFont

TEXT_RGB = (31, 41, 55)
STRIP_RGB = (255, 255, 255)
_GAP = 1.8
"""Space between two items, in heights of the text."""


@dataclass(frozen=True)
class Key:
    """A sample of a colour or line, with a label.

    Attributes:
        kind: ``class``: a filled rectangle; ``outline``: a line; ``region``: a framed rectangle; ``unseen``: grey;
            ``note``: no sample, the text only.
        text: The label.
        color: RGB; only for ``class``.
    """

    kind: Literal["class", "outline", "region", "unseen", "note"]
    text: str
    color: tuple[int, int, int] = (0, 0, 0)


@dataclass(frozen=True)
class ScaleBar:
    """A scale bar of a round length, for a picture with ``um_per_px`` micrometres per pixel."""

    um_per_px: float


LegendItem = Key | ScaleBar


Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


def typeset(text: str, size_px: int) -> tuple[str, Font]:
    """Return a text and a font that can draw it.

    Pillow's own font has little beyond ASCII. For other texts DejaVu Sans is used if it is installed; otherwise accents
    are dropped, and letters that the font lacks become question marks.
    """
    default = ImageFont.load_default(size_px)
    if all(_has(default, letter) for letter in text):
        return text, default
    try:
        return text, ImageFont.truetype("DejaVuSans.ttf", size_px)
    except OSError:
        plain = "".join(letter for letter in unicodedata.normalize("NFKD", text) if not unicodedata.combining(letter))
        return "".join(letter if _has(default, letter) else "?" for letter in plain), default


def _has(font: Font, letter: str) -> bool:
    """Whether a font has a letter: it is not drawn as the sign for unknown letters (of U+FFFF)."""
    return letter == " " or bytes(font.getmask(letter)) != bytes(font.getmask("\uffff"))


def add_legend(image: Image.Image, items: list[LegendItem]) -> Image.Image:
    """Return ``image`` with a legend below it, in as many rows as the items need.

    A picture that is narrower than the longest item gets white space on its right, so that no text is cut off.
    """
    unit = max(13, min(28, round(image.width / 68)))
    longest = max((_width(item, unit, image.width) for item in items), default=0)
    width = max(image.width, longest + 2 * unit)
    # Rows are as wide as the picture, not as the wider strip: the white space on its right stays free.
    rows = _rows(items, image.width, unit)
    row_px = round(unit * 2.1)
    result = Image.new("RGB", (width, image.height + row_px * len(rows) + unit), STRIP_RGB)
    result.paste(image, (0, 0))
    draw = ImageDraw.Draw(result)
    for index, row in enumerate(rows):
        x = unit
        y = image.height + unit / 2 + row_px * (index + 0.5)
        for item in row:
            _draw_item(draw, item, x, y, unit, image.width)
            x += _width(item, unit, image.width) + round(_GAP * unit)
    return result


def bar_length_um(um_per_px: float, longest_px: float) -> float:
    """Return the longest bar of 1, 2 or 5 × 10ⁿ micrometres that has at most ``longest_px``."""
    lengths = [digit * 10.0**power for power in range(-1, 7) for digit in (1, 2, 5)]
    fitting = [length for length in lengths if length / um_per_px <= longest_px]
    return fitting[-1] if fitting else lengths[0]


def _rows(items: list[LegendItem], width_px: int, unit: int) -> list[list[LegendItem]]:
    """Divide items into rows that fit into ``width_px``; ``unit`` is the height of the text in pixels."""
    rows: list[list[LegendItem]] = [[]]
    used = unit
    for item in items:
        width = _width(item, unit, width_px) + round(_GAP * unit)
        if rows[-1] and used + width > width_px:
            rows.append([])
            used = unit
        rows[-1].append(item)
        used += width
    return rows


def _sample_px(item: LegendItem, unit: int, width_px: int) -> int:
    """Return the width of an item's sample or bar."""
    if isinstance(item, Key) and item.kind == "note":
        return 0
    if isinstance(item, ScaleBar):
        return round(bar_length_um(item.um_per_px, width_px / 8) / item.um_per_px)
    return round(unit * 1.9)


def _text(item: LegendItem, width_px: int) -> str:
    if isinstance(item, Key):
        return item.text
    return f"{bar_length_um(item.um_per_px, width_px / 8) / 1000:g} mm"


def _width(item: LegendItem, unit: int, width_px: int) -> int:
    text, font = typeset(_text(item, width_px), unit)
    return _text_offset_px(item, unit, width_px) + round(font.getlength(text))


def _text_offset_px(item: LegendItem, unit: int, width_px: int) -> int:
    sample_px = _sample_px(item, unit, width_px)
    return sample_px + round(unit * 0.6) if sample_px else 0


def _draw_item(draw: ImageDraw.ImageDraw, item: LegendItem, x: float, y: float, unit: int, width_px: int) -> None:
    """Draw an item of the legend, from ``x``, centred at ``y``; ``unit`` is the size of its text in pixels."""
    length = _sample_px(item, unit, width_px)
    half = unit * 0.5
    if isinstance(item, ScaleBar):
        draw.line((x, y, x + length, y), fill=TEXT_RGB, width=3)
        for end in (x, x + length):
            draw.line((end, y - half * 0.7, end, y + half * 0.7), fill=TEXT_RGB, width=3)
    elif item.kind == "class":
        draw.rectangle((x, y - half, x + length, y + half), fill=item.color)
    elif item.kind == "outline":
        draw.line((x, y, x + length, y), fill=(52, 64, 84), width=2)
    elif item.kind == "region":
        draw.rectangle((x, y - half, x + length, y + half), outline=(17, 24, 39), width=2)
    elif item.kind == "unseen":
        draw.rectangle((x, y - half, x + length, y + half), fill=(228, 228, 231), outline=(180, 180, 186))
    text, font = typeset(_text(item, width_px), unit)
    draw.text((x + _text_offset_px(item, unit, width_px), y), text, fill=TEXT_RGB, font=font, anchor="lm")
