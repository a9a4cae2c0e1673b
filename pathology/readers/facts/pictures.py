"""The pictures of one file (scenes of tissue, focal planes, channels, labels), and the choice of the slide among them.

```
OME-TIFF   Image 0   20000 × 30000, 0.25 µm   scene 1        OME-XML says where each picture is: its directory in this
           Image 1   18000 × 25000, 0.25 µm   scene 2        file, or another file, whose pages are never read here
           Image 2     800 ×   600, 12 µm     macro: no scene
other TIFF pages of one size                  focal planes, times or channels; the file does not say which
```
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import tifffile

from pathology.errors import SlideError
from pathology.readers.facts.slide_facts import Note
from pathology.readers.facts.stated_mpp import elements
from pathology.readers.tiff_metadata import PARSE_ERRORS, keyframe

HOW_TO_PICK = "`hyfi ingest --plane N` takes one of them"
SCENES_FLAG = "several_scenes"
NAMES_OF_OTHERS = re.compile(r"label|macro|overview|thumbnail|preview|barcode", re.IGNORECASE)
_SAME_MPP = 1.05
_MOST_PLANES = 100_000
"""More focal planes than any file has: a higher number is damaged."""
_OME_SUFFIXES = {".tif", ".tiff", ".btf", ".qptiff", ".tf2", ".tf8"}


class PlanesError(SlideError):
    """The file has channels, focal planes or times of one picture, and no plane, or a missing one, was chosen."""


@dataclass(frozen=True, slots=True)
class Pick:
    """The user's choice of the picture of a file that is the slide.

    Attributes:
        scene: Number of the scene, from 1; 0: the largest; of a CZI file, all scenes at their positions on the glass.
        plane: Number of the focal plane, from 1; 0: the only one; a file with several is refused.
    """

    scene: int = 0
    plane: int = 0


WHOLE = Pick()


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture of an OME-TIFF, as its OME-XML describes it.

    Attributes:
        size_px: (height, width).
        planes: (number of focal planes, number of times).
        channels: Number of channels.
        separate_channels: Whether its channels are pictures of their own, as of fluorescence, not the colours of one.
        stated_scale_x: PhysicalSizeX as written, in its own unit; empty if the file does not state it.
        named_other: Whether its name is that of a label or macro.
        directories: Index of the page of each plane, from plane 1; None for planes in another file.
    """

    size_px: tuple[int, int]
    planes: tuple[int, int]
    channels: int
    separate_channels: bool
    stated_scale_x: str
    named_other: bool
    directories: tuple[int | None, ...]

    @property
    def area_px(self) -> int:
        """Pixels of a plane."""
        return self.size_px[0] * self.size_px[1]

    @property
    def described(self) -> str:
        """The picture in words."""
        kind = f", {self.channels} channel{'s' * (self.channels > 1)}" if self.separate_channels else ""
        depths, times = self.planes
        several = [f"{n} {name}" for n, name in ((depths, "focal planes"), (times, "times")) if n > 1]
        return f"{self.size_px[0]} × {self.size_px[1]} px (rows × columns){kind}" + "".join(f", {s}" for s in several)


def pictures_of_ome(xml: str, name: str) -> list[Picture]:
    """Return the pictures that OME-XML describes and whose pages are in this file.

    Args:
        xml: The OME-XML.
        name: Name of the file, by which a set of files names its members.
    """
    try:
        root = ElementTree.fromstring(xml)
    except ElementTree.ParseError:
        return []
    uuid = root.get("UUID", "")
    pictures_here = []
    for image in elements(root, "Image"):
        for pixels in elements(image, "Pixels")[:1]:
            picture = _picture(image, pixels, uuid, name)
            if picture is not None and any(index is not None for index in picture.directories):
                pictures_here.append(picture)
    return pictures_here


def scenes_among(pictures: list[Picture]) -> list[Picture]:
    """Return the pictures that are scenes of tissue, in the order of the file: alike in scale to the largest one."""
    candidates = [picture for picture in pictures if not picture.named_other] or pictures
    if not candidates:
        return []
    largest = max(candidates, key=lambda picture: picture.area_px)
    return [picture for picture in candidates if picture is largest or _is_alike(picture, largest)]


def scenes_of_tiff(path: Path) -> int:
    """Return the number of scenes of a TIFF; 1 for files that cannot have several, or cannot be read."""
    if path.suffix.lower() not in _OME_SUFFIXES:
        return 1
    try:
        if not path.is_file():  # opening a pipe would block
            return 1
        # Private: nothing public keeps tifffile's series from opening the other files of a set.
        with tifffile.TiffFile(path, _multifile=False) as tiff:
            xml = tiff.ome_metadata if tiff.is_ome else None
    except PARSE_ERRORS:
        return 1  # the reader will report what is wrong with it
    return max(1, len(scenes_among(pictures_of_ome(xml, path.name)))) if xml else 1


def pages_of_ome(tiff: tifffile.TiffFile, name: str, pick: Pick) -> tuple[list[Any], list[Note]] | None:
    """Return the pages of the picked picture, finest first, and notes; None if OME-XML does not tell.

    Raises:
        PlanesError: The picture has channels, focal planes or times, and no plane is picked.
        SlideError: There is no such scene or plane, or its pages are in another file.
    """
    pictures = pictures_of_ome(tiff.ome_metadata or "", name)
    scenes = scenes_among(pictures)
    if not scenes:
        if elements_in_other_files(tiff.ome_metadata or ""):
            raise SlideError("its OME-XML says that all pictures are in other files of a set; give those files")
        return None
    picture, notes = picked_scene(scenes, pick)
    index = picked_directory(picture, pick)
    if index >= len(tiff.pages):
        return None
    page = keyframe(tiff.pages[index])
    # The coarser levels are in the page's SubIFDs.
    return [page, *map(keyframe, page.pages or ())], notes


def picked_scene(scenes: list[Picture], pick: Pick) -> tuple[Picture, list[Note]]:
    """Return the picked scene, the largest if none is, and a note that lists them if there are several.

    Raises:
        SlideError: There is no such scene.
    """
    if pick.scene > len(scenes):
        raise SlideError(f"there is no scene {pick.scene}: the file has {len(scenes)}")
    # The largest scene; `-k` makes the first of equal scenes the largest.
    number = pick.scene or 1 + max(range(len(scenes)), key=lambda k: (scenes[k].area_px, -k))
    notes = []
    if len(scenes) > 1:
        listed = "; ".join(f"scene {k}: {scene.described}" for k, scene in enumerate(scenes, 1))
        notes.append(Note(SCENES_FLAG, f"scene {number} of {len(scenes)} ({listed})"))
    return scenes[number - 1], notes


def elements_in_other_files(xml: str) -> bool:
    """Whether OME-XML names other files."""
    try:
        return bool(elements(ElementTree.fromstring(xml), "UUID"))
    except ElementTree.ParseError:
        return False


def check_plane(pick: Pick, planes: int) -> None:
    """Refuse a focal plane that a file does not have.

    Raises:
        PlanesError: It has fewer.
    """
    if pick.plane > planes:
        raise PlanesError(f"there is no plane {pick.plane}: the file has {planes}")


def picked_plane(planes: list[Any], pick: Pick, size_px: tuple[int, int]) -> Any:
    """Return the picked page among several pages of one size, of a TIFF that may not state what they are.

    Args:
        planes: The pages of tifffile.
        pick: The user's choice.
        size_px: Height and width of each page, for the message.

    Raises:
        PlanesError: No plane is picked, or the file has fewer; or the pages are channels.
    """
    channels = _channel_names(planes)
    if channels is not None:
        listed = f" ({', '.join(channels)})" if channels else ""
        raise PlanesError(
            f"it has {len(planes)} channels{listed}, as of fluorescence; slides are stained and in colour"
        )
    described = f"{len(planes)} pictures of {size_px[0]} × {size_px[1]} px (channels, focal planes or times)"
    if not pick.plane:
        raise PlanesError(f"the file has {described}; {HOW_TO_PICK}")
    check_plane(pick, len(planes))
    return planes[pick.plane - 1]


def _channel_names(planes: list[Any]) -> list[str] | None:
    """Return the stated names of channels, perhaps none, if pages are channels; None if they do not state this."""
    first = planes[0]
    if first.samplesperpixel == 1 and first.is_qpi:
        names = [re.search(r"<Name>([^<]+)</Name>", page.description) for page in planes]
        return [name[1] for name in names if name]
    # ImageJ states a number of channels, and no names.
    is_several = first.is_imagej and re.search(r"^channels=(?!1$)\d+$", first.description, re.MULTILINE)
    return [] if is_several else None


def picked_directory(picture: Picture, pick: Pick) -> int:
    """Return the entry of ``picture.directories`` for the picked plane: the index of the page that is the slide.

    Raises:
        PlanesError: The picture has channels, times or focal planes, and none is picked; or there is no such plane.
        SlideError: It is in another file.
    """
    depths, times = picture.planes
    if picture.channels > 1 and picture.separate_channels:
        raise PlanesError(
            f"it has {picture.channels} channels ({picture.described}), as of fluorescence; slides are stained and in "
            f"colour"
        )
    if times > 1:
        raise PlanesError(f"it has {times} times ({picture.described}); a slide has one")
    if depths > 1 and not pick.plane:
        raise PlanesError(f"it has {depths} focal planes ({picture.described}); {HOW_TO_PICK}, from 1")
    check_plane(pick, max(1, depths))
    index = picture.directories[pick.plane - 1 if depths > 1 else 0]
    if index is None:
        raise SlideError(f"its plane {pick.plane or 1} is in another file of the set; give that file")
    return index


def _is_alike(picture: Picture, largest: Picture) -> bool:
    """Whether a picture is a scene like the largest one: with channels of the same kind, and of its scale.

    If a scale is not a number, both must state the same text, and the picture must have at least a quarter of the
    largest one's area.
    """
    if picture.separate_channels != largest.separate_channels:
        return False
    try:
        ratio = float(picture.stated_scale_x) / float(largest.stated_scale_x)
    except (ValueError, ZeroDivisionError):
        return picture.stated_scale_x == largest.stated_scale_x and picture.area_px >= largest.area_px / 4
    return 1 / _SAME_MPP <= ratio <= _SAME_MPP


def _picture(image: ElementTree.Element, pixels: ElementTree.Element, uuid: str, name: str) -> Picture | None:
    """Return the picture that an element Image of OME-XML describes; None if its numbers are not possible.

    Args:
        image: The element.
        pixels: Its Pixels.
        uuid: UUID of this file; empty if it has none.
        name: Name of this file.
    """
    try:
        height, width, channels, depths, times = (int(pixels.get(f"Size{axis}", "1")) for axis in "YXCZT")
        samples = [int(channel.get("SamplesPerPixel", "1")) for channel in elements(pixels, "Channel")]
        if not 0 <= depths <= _MOST_PLANES:
            return None
        directories = _directories(pixels, depths, uuid, name)
    except ValueError:
        return None
    # One page has all channels if there is only one, or one element Channel states as many samples; without elements,
    # three channels are red, green and blue.
    on_one_page = channels == 1 or samples == [channels] or (len(samples) == 0 and channels == 3)
    return Picture(
        size_px=(height, width),
        planes=(depths, times),
        channels=channels,
        separate_channels=not on_one_page,
        stated_scale_x=pixels.get("PhysicalSizeX", ""),
        named_other=bool(NAMES_OF_OTHERS.search(image.get("Name", ""))),
        directories=directories,
    )


def _directories(pixels: ElementTree.Element, depths: int, uuid: str, name: str) -> tuple[int | None, ...]:
    """Return the index of the page of each focal plane of the first channel and time."""
    pages: list[int | None] = [None] * max(1, depths)
    all_data = elements(pixels, "TiffData")
    for data in all_data:
        if not _is_here(data, uuid, name):
            continue
        first, index = int(data.get("FirstZ", "0")), int(data.get("IFD", "0"))
        # Without PlaneCount, a single TiffData is for all planes; one of several is for one plane.
        count = int(data.get("PlaneCount", str(depths) if len(all_data) == 1 else "1"))
        if first < 0 or int(data.get("FirstC", "0")):
            continue
        # Not beyond the last plane: with a damaged count, the loop would take hours.
        for k in range(min(count, len(pages) - first)):
            # The first element that names a plane counts.
            if pages[first + k] is None:
                pages[first + k] = index + k
    return tuple(pages)


def _is_here(data: ElementTree.Element, uuid: str, name: str) -> bool:
    """Whether an element TiffData refers to this file: by its UUID, or by its name where it has none."""
    stated = next(iter(elements(data, "UUID")), None)
    if stated is None:  # without one, the pages are in this file
        return True
    # A set's files may be renamed, so the UUID counts; old files have only the name.
    if uuid:
        return (stated.text or "").strip() == uuid
    return stated.get("FileName", name) == name
