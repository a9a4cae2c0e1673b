"""The contact sheet: all slides of a store on one page, for a quick check.

```
STORE/contact.html                 one page with embedded pictures, without network and scripts
STORE/contact/<slide_id>.png       each slide with its outline, pen and blur, larger
STORE/contact/<slide_id>.jpg       thumbnail of this picture
```
"""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
from PIL import Image

from data.arrays import Mask
from data.files import write_atomically
from data.location import each
from data.store.manifest import DONE, SlideRecord, load_records
from data.store.slide_store import SlideStore, StoreError, slide_path
from pathology.ingest.thumbnail import thumbnail_of_store
from pathology.pages import FLAG_MEANINGS, jpeg_uri, render
from pathology.tissue.blur import OUT_OF_FOCUS
from pathology.tissue.quality_maps import blur_from_json, pen_from_json

RGB = npt.NDArray[np.uint8]

PICTURE_PX = 1200
SMALL_PX = 240
PEN = (230, 30, 30)
BLUR = (255, 150, 0)
_TINT = 0.45
_HATCH_PX = 8


@dataclass(frozen=True, slots=True)
class Card:
    """One slide on the sheet. Texts are escaped by the template; ``link`` is URL-encoded here."""

    name: str
    picture: str = ""
    link: str = ""
    facts: str = ""
    flags: tuple[tuple[str, str], ...] = ()
    reason: str = ""


def write_contact(store: Path) -> Path:
    """Write ``contact.html`` with all slides of ``store``, after drawing missing pictures; return its path.

    Raises:
        OSError: The store cannot be written.
    """
    records = load_records(store).values()
    cards = each(lambda record: _card(store, record), records, store)
    groups = [
        ("Failed", [c for c in cards if c.reason]),
        ("To check", [c for c in cards if c.flags and not c.reason]),
        ("No flags", [c for c in cards if not c.flags and not c.reason]),
    ]
    path = store / "contact.html"
    write_atomically(
        path, render("contact.html", groups=groups, summary=_summary(records)).encode("utf-8", "surrogateescape")
    )
    return path


def write_picture(store: Path, slide_id: str) -> None:
    """Write the pictures of a finished slide with outline, pen and blur, in both sizes.

    Raises:
        StoreError: The slide is damaged.
        OSError: The store cannot be written.
    """
    drawn = Image.fromarray(draw(SlideStore.open(slide_path(store, slide_id))))
    large, small = _files(store, slide_id)
    large.parent.mkdir(exist_ok=True)
    buffer = io.BytesIO()
    # A palette needs few bytes and keeps outlines sharp, which JPEG blurs.
    drawn.quantize(128, Image.Quantize.FASTOCTREE).save(buffer, "PNG", optimize=True)
    write_atomically(large, buffer.getvalue())
    # Last, because `thumbnail` changes the picture in place.
    drawn.thumbnail((SMALL_PX, SMALL_PX), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    drawn.save(buffer, "JPEG", quality=80, optimize=True)
    write_atomically(small, buffer.getvalue())


def draw(slide: SlideStore, longest_px: int = PICTURE_PX) -> RGB:
    """Return the picture ``(h, w, 3)`` of a slide: tissue outlined, ink red, out-of-focus areas hatched orange.

    Raises:
        StoreError: The slide is damaged.
    """
    picture = thumbnail_of_store(slide, longest_px).drawn()
    maps = slide.attributes.get("maps")
    if maps is None:
        return picture
    size = slide.levels[0]
    extent_um = (size.height_px * size.mpp[0], size.width_px * size.mpp[1])
    blur, patch_um = blur_from_json(maps["blur"])
    # ``blur`` is NaN where there is no tissue, which is not below the limit.
    with np.errstate(invalid="ignore"):
        unsharp = _resampled(blur < OUT_OF_FOCUS, patch_um, picture.shape, extent_um)
    y, x = np.ogrid[: picture.shape[0], : picture.shape[1]]
    _tint(picture, unsharp & ((y + x) % _HATCH_PX < _HATCH_PX // 2), BLUR)
    pen, pen_um = pen_from_json(maps["pen"])
    _tint(picture, _resampled(pen, pen_um, picture.shape, extent_um), PEN)
    return picture


def _resampled(mask: Mask, mpp_um: float, shape: tuple[int, ...], extent_um: tuple[float, float]) -> Mask:
    """Return a mask, resampled (nearest neighbour) to the ``shape`` of a picture of the whole slide.

    Args:
        mask: The mask, whose corner is the slide's corner.
        mpp_um: Microns per pixel of the mask.
        shape: Shape of the picture, (height, width, …).
        extent_um: Height and width of the slide.
    """

    def nearest(axis: int) -> npt.NDArray[np.intp]:
        # The mask's pixel under the centre of each pixel of the picture.
        position = (np.arange(shape[axis]) + 0.5) * extent_um[axis] / shape[axis] / mpp_um
        clipped: npt.NDArray[np.intp] = np.minimum(position.astype(np.intp), mask.shape[axis] - 1)
        return clipped

    rows, columns = nearest(0), nearest(1)
    result: Mask = mask[rows][:, columns]
    return result


def _tint(picture: RGB, where: Mask, colour: tuple[int, int, int]) -> None:
    """Blend a colour over part of a picture, in place."""
    picture[where] = (picture[where] * (1 - _TINT) + np.array(colour) * _TINT).astype(np.uint8)


def _files(store: Path, slide_id: str) -> tuple[Path, Path]:
    """Return the paths of a slide's pictures: the large and the small one."""
    folder = store / "contact"
    return folder / f"{slide_id}.png", folder / f"{slide_id}.jpg"


def _card(store: Path, record: SlideRecord) -> Card:
    """Return the card of a slide, after drawing its picture if that is missing."""
    if record.status != DONE:
        return Card(record.slide_id, reason=record.reason or "failed")
    large, small = _files(store, record.slide_id)
    if not (large.exists() and small.exists()):
        try:
            write_picture(store, record.slide_id)
        except StoreError as error:
            return Card(record.slide_id, reason=f"damaged: {error}")
    picture = ""
    with suppress(FileNotFoundError):
        picture = jpeg_uri(small.read_bytes())
    flags = tuple((flag, FLAG_MEANINGS.get(flag, "")) for flag in record.flags)
    link = f"contact/{quote(os.fsencode(large.name))}"
    return Card(record.slide_id, picture=picture, link=link, facts=_facts(record), flags=flags)


def _facts(record: SlideRecord) -> str:
    """Return the line of facts below a picture."""
    mpp = record.store_mpp or 0.0
    facts = [f"{(record.width_px or 0) * mpp / 1000:.1f} × {(record.height_px or 0) * mpp / 1000:.1f} mm"]
    facts.append(f"tissue {record.tissue_fraction or 0:.0%}")
    if record.blurred_share:
        facts.append(f"blur {record.blurred_share:.0%}")
    if record.pen_fraction:
        facts.append(f"pen {record.pen_fraction:.1%}")
    if record.bad_tiles:
        facts.append(f"{record.bad_tiles} bad tiles")
    return " · ".join(facts)


def _summary(records: Iterable[SlideRecord]) -> str:
    status = Counter(record.status for record in records)
    flags = Counter(flag for record in records for flag in record.flags)
    words = [f"{sum(status.values())} slides", *(f"{count} {name}" for name, count in sorted(status.items()))]
    return " · ".join([*words, *(f"{count} × {flag}" for flag, count in sorted(flags.items()))])
