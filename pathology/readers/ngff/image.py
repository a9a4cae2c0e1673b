"""The images of an OME-Zarr store as its metadata describe them: axes, levels, pixel size, channels.

```
x.zarr/                      one image: `multiscales` at the top
    0/ 1/ 2/                 its levels
    labels/                  no image of the slide

x.zarr/                      of bioformats2raw: `bioformats2raw.layout` at the top
    OME/METADATA.ome.xml     the same facts a second time
    0/                       a series: an image with its levels 0/0/ 0/1/ …
    1/                       another one: a scene, a label, a macro
```
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from pathology.errors import SlideError
from pathology.readers.facts.stated_mpp import elements
from pathology.readers.ngff.groups import ZarrGroup, read_bytes, read_group

_OLD_AXES = ("t", "c", "z", "y", "x")
"""Axes of NGFF 0.1 and 0.2, which state none."""
_MOST_SERIES = 10_000


@dataclass(frozen=True, slots=True)
class NgffAxis:
    """An axis: one of t, c, z, y, x; and its unit, empty if the store states none."""

    name: str
    unit: str = ""


@dataclass(frozen=True, slots=True)
class NgffLevel:
    """A level as stated: its place below the group, and its scale along each axis; None if it states none."""

    path: str
    scale: tuple[float, ...] | None


@dataclass(frozen=True, slots=True)
class NgffImage:
    """One image.

    Attributes:
        group: Its zarr group.
        name: Name that the store states; else empty.
        axes: The axes, in the order of the arrays' dimensions.
        levels: The listed levels, finest first.
        channels: (label, colour as six hexadecimal digits) of each channel; empty where not stated.
        more: Number of further multiscales of the group, which are not read.
        xml: The element Image of this image in OME-XML; None if there is none.
    """

    group: ZarrGroup
    name: str
    axes: tuple[NgffAxis, ...]
    levels: tuple[NgffLevel, ...]
    channels: tuple[tuple[str, str], ...]
    more: int
    xml: ElementTree.Element | None

    def axis(self, name: str) -> int | None:
        """Return the index of an axis; None if the image has not got it."""
        return next((k for k, axis in enumerate(self.axes) if axis.name == name), None)


def images_of(path: Path) -> tuple[list[NgffImage], str]:
    """Return (images of a store in order, its OME-XML or ``""``).

    Raises:
        SlideError: It is not an OME-Zarr store of images, or is damaged; the message says what it is.
    """
    root = read_group(path)
    if root is None:
        raise SlideError("it is a folder, but no OME-Zarr store: it has neither zarr.json nor .zattrs")
    _refuse_others(root)
    if "multiscales" in root.attributes:
        # One series of a store of bioformats2raw: the OME-XML of all series is one folder up.
        own_series = path.name.isdecimal()
        xml = _xml_of(path.parent) if own_series else _xml_of(path)
        return [_image(root, _xml_images(xml), int(path.name) if own_series else 0)], xml
    xml = _xml_of(path)
    described = _xml_images(xml)
    images: list[NgffImage] = []
    for name in _series_names(root, len(described)):
        group = read_group(path / name)
        if group is None:
            break
        _refuse_others(group)
        images.append(_image(group, described, len(images)))
    if not images:
        raise SlideError("it is a zarr group without an image of OME-Zarr (`multiscales`)")
    if len(described) > len(images):
        raise SlideError(f"its OME-XML describes {len(described)} images, but it has {len(images)}: it is not complete")
    return images, xml


def _refuse_others(group: ZarrGroup) -> None:
    """Refuse groups that are not images of a slide."""
    attributes = group.attributes
    if "plate" in attributes or "well" in attributes:
        kind = "plate" if "plate" in attributes else "well of a plate"
        raise SlideError(f"it is a {kind} of fields, as of high-content screening; give one field of it")
    if "image-label" in attributes:
        raise SlideError("it is a label image, which numbers regions of another one; give that one")


def _series_names(root: ZarrGroup, described: int) -> list[str]:
    """Return the names of the groups of the series: listed names, else 0, 1, … up to the first that does not exist.

    ``described`` is the number of images in the OME-XML, which limits the search; 0: unknown.
    """
    group = read_group(root.path / "OME")
    listed = group.attributes.get("series") if group is not None else None
    if isinstance(listed, list) and listed:
        return [_inside(str(name)) for name in listed]
    numbers = range(described) if described else count()
    return [str(k) for k in _existing(root, numbers)]


def _existing(root: ZarrGroup, numbers: range | count[int]) -> list[int]:
    """Return ``numbers`` up to the first that is not the name of a group."""
    existing = []
    for number in numbers:
        if number >= _MOST_SERIES or read_group(root.path / str(number)) is None:
            break
        existing.append(number)
    return existing


def _xml_of(path: Path) -> str:
    data = read_bytes(path / "OME" / "METADATA.ome.xml")
    return "" if data is None else data.decode("utf-8", "replace")


def _xml_images(xml: str) -> list[ElementTree.Element]:
    with suppress(ElementTree.ParseError):
        return elements(ElementTree.fromstring(xml), "Image") if xml else []
    return []


def _image(group: ZarrGroup, described: list[ElementTree.Element], index: int) -> NgffImage:
    """Return the image of a group; ``described[index]`` is its element of OME-XML, if there is one."""
    try:
        multiscales = group.attributes["multiscales"]
        first = multiscales[0]
        axes = tuple(map(_axis, first.get("axes") or _OLD_AXES))
        shared_scale = _scale(first, len(axes))
        levels = tuple(_level(dataset, shared_scale, len(axes)) for dataset in first["datasets"])
        channels = tuple(_channel(channel) for channel in (group.attributes.get("omero") or {}).get("channels") or ())
        name = str(first.get("name") or "")
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise SlideError(f"its OME-Zarr metadata (`multiscales`) are not complete: {error!r}") from error
    if not levels:
        raise SlideError("its OME-Zarr metadata (`multiscales`) list no level")
    names = [axis.name for axis in axes]
    if len(set(names)) != len(names) or not {"y", "x"} <= set(names):
        raise SlideError(f"its axes are {', '.join(names)}; a slide has y and x, and may have t, c and z")
    xml = described[index] if index < len(described) else None
    return NgffImage(group, name, axes, levels, channels, more=len(multiscales) - 1, xml=xml)


def _axis(stated: Any) -> NgffAxis:
    """Return the axis that metadata state by its name alone, or by name, type and unit."""
    facts = {"name": stated} if isinstance(stated, str) else stated
    name, kind = str(facts["name"]).lower(), facts.get("type")
    plain = {"channel": "c", "time": "t"}.get(str(kind), name)
    if plain not in _OLD_AXES:
        of_type = "" if kind is None else f" of type {kind!r}"
        raise SlideError(f"its axis {facts['name']!r}{of_type} is none of t, c, z, y, x")
    return NgffAxis(plain, str(facts.get("unit") or ""))


def _level(dataset: Mapping[str, Any], shared_scale: tuple[float, ...] | None, axes: int) -> NgffLevel:
    """Return the level of a dataset; ``shared_scale``: that of all levels, None if the multiscale states none."""
    scale = _scale(dataset, axes)
    # NGFF 0.4 and 0.5: transformations of the multiscale apply after those of each dataset.
    if scale is not None and shared_scale is not None:
        scale = tuple(a * b for a, b in zip(scale, shared_scale, strict=True))
    return NgffLevel(_inside(str(dataset["path"]).strip("/")), scale or shared_scale)


def _inside(name: str) -> str:
    """Return ``name``, by which metadata refer to a group or array, if it is inside the store.

    Raises:
        SlideError: It leads out of the store.
    """
    if name.startswith("/") or ".." in name.split("/"):
        raise SlideError(f"its OME-Zarr metadata refer to {name!r}, which is not inside of it")
    return name


def _scale(of: Mapping[str, Any], axes: int) -> tuple[float, ...] | None:
    """Return the product of the scales among the coordinate transformations of ``of``; None if there are none."""
    product: tuple[float, ...] | None = None
    for step in of.get("coordinateTransformations") or ():
        if step.get("type") == "scale" and "scale" in step:
            scale = tuple(float(value) for value in step["scale"])
            if len(scale) != axes:
                raise ValueError(f"a scale of {len(scale)} numbers for {axes} axes")
            product = scale if product is None else tuple(a * b for a, b in zip(product, scale, strict=True))
    return product


def _channel(stated: Any) -> tuple[str, str]:
    colour = str(stated.get("color") or "").lstrip("#").upper()
    return str(stated.get("label") or ""), colour if re.fullmatch(r"[0-9A-F]{6}", colour) else ""
