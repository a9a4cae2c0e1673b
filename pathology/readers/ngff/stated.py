"""Facts about an image of OME-Zarr from its metadata: whether it is a colour picture, and its microns per pixel."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pathology.readers.facts.pictures import NAMES_OF_OTHERS, Picture, PlanesError
from pathology.readers.facts.slide_facts import Note, StatedMpp
from pathology.readers.facts.stated_mpp import elements, stated_by_pixels, um_of_unit
from pathology.readers.ngff.image import NgffImage

SCALE = "the scale of level 0"
_CHANNELS_FLAG = "colour"
_COLOURS = {"FF0000": 0, "00FF00": 1, "0000FF": 2}
_PRIMARIES = {"red": 0, "r": 0, "green": 1, "g": 1, "blue": 2, "b": 2}
_SAYS_NOTHING = re.compile(r"(channel|ch|c)?[\s:_-]*[\d:]*|rgb|brightfield|bf|tl|transmitted.*", re.IGNORECASE)
_DYES = ("EmissionWavelength", "ExcitationWavelength", "Fluor")
RGB_ORDER = (0, 1, 2)


def picture_of(image: NgffImage, shape: Sequence[int]) -> Picture:
    """Return an image as a picture; scenes and planes are picked like those of an OME-TIFF.

    Args:
        image: The image.
        shape: Shape of its finest level.
    """
    sizes = {axis.name: size for axis, size in zip(image.axes, shape, strict=True)}
    depths, channels = sizes.get("z", 1), sizes.get("c", 1)
    stated, _ = stated_mpp(image)
    xml_name = "" if image.xml is None else image.xml.get("Name", "")
    return Picture(
        size_px=(sizes["y"], sizes["x"]),
        planes=(depths, sizes.get("t", 1)),
        channels=channels,
        # Three channels are red, green and blue, unless they are named after stains.
        separate_channels=channels != 1 and (channels != 3 or _are_stains(image)),
        stated_scale_x=f"{stated[0].um[1]}" if stated else "",
        named_other=bool(NAMES_OF_OTHERS.search(f"{image.name} {xml_name}")),
        directories=tuple(range(depths)),
    )


def stated_mpp(image: NgffImage) -> tuple[tuple[StatedMpp, ...], str]:
    """Return (statements of microns per pixel in scales and OME-XML, why a scale cannot be used or ``""``)."""
    statements, doubt = [], ""
    y, x = image.axis("y"), image.axis("x")
    assert y is not None and x is not None, "checked when the image was read"
    scale = image.levels[0].scale
    unit_y, unit_x = (um_of_unit(image.axes[k].unit) for k in (y, x))
    if scale is not None and unit_y is not None and unit_x is not None:
        # For each axis: micrometres per unit, and the correction that was needed to read the unit's name.
        (um_y, repaired_y), (um_x, repaired_x) = unit_y, unit_x
        statements.append(StatedMpp((scale[y] * um_y, scale[x] * um_x), SCALE, repaired=repaired_y or repaired_x))
    elif scale is not None and (scale[y], scale[x]) != (1.0, 1.0):
        unit = image.axes[x].unit
        doubt = f"{SCALE} says {scale[x]:g} in {f'the unit {unit!r}' if unit else 'no unit'}"
    for pixels in [] if image.xml is None else elements(image.xml, "Pixels")[:1]:
        of_xml = stated_by_pixels(pixels)
        statements += [] if of_xml is None else [of_xml]
    return tuple(statements), "" if statements else doubt


def colour_order(image: NgffImage) -> tuple[tuple[int, int, int], Note | None]:
    """Return (indices of the channels that are red, green and blue; note if these are not 0, 1, 2, else None)."""
    # The colour of each channel by its name, and by its stated colour: 0, 1 or 2 for red, green or blue; else None.
    by_names = [_PRIMARIES.get(label.strip().lower()) for label, _ in image.channels]
    by_colours = [_COLOURS.get(colour) for _, colour in image.channels]
    for places, source in ((by_names, "names"), (by_colours, "colours")):
        # All three colours occur, in another order.
        if len(places) == 3 and set(places) == {0, 1, 2} and places != [0, 1, 2]:
            order = (places.index(0), places.index(1), places.index(2))
            text = f"the channels' {source} say that red, green and blue are {', '.join(f'{k}' for k in order)}"
            return order, Note(_CHANNELS_FLAG, text)
    return RGB_ORDER, None


def refuse_dark_ground(median: float, picture: Picture) -> None:
    """Refuse an image with a dark background, such as fluorescence: stores do not state whether channels are colours.

    Args:
        median: Median over the overview of the brightest channel, without exact black; nan if all is black.
        picture: The image.

    Raises:
        PlanesError: The background is dark.
    """
    if median < _DARK:
        raise PlanesError(
            f"its ground is dark (median {median:.0f} of 255), as of fluorescence ({picture.described}); slides are "
            f"stained and in colour on bright glass"
        )


_DARK = 64


def _are_stains(image: NgffImage) -> bool:
    """Whether the names of three channels, or their dyes, show that they are not the colours of one picture."""
    described = [] if image.xml is None else elements(image.xml, "Channel")
    if any(channel.get(dye) for channel in described for dye in _DYES):
        return True
    labels = [label.strip() for label, _ in image.channels]
    names = {label.lower() for label in labels or [channel.get("Name", "").strip() for channel in described]}
    says_rgb = all(name in _PRIMARIES or _SAYS_NOTHING.fullmatch(name) for name in names)
    return not says_rgb and len(names) > 1
