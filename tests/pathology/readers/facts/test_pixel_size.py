"""Which of the microns per pixel that a file states are believed, on files as programs and people write them."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import tifffile

from pathology.errors import SlideError
from pathology.ingest.options import IngestOptions
from pathology.ingest.slide import ingest_slide
from pathology.readers.sources import open_source
from tests.pathology.tiffs import stained

PLAIN = IngestOptions()
SCHEMA = "http://www.openmicroscopy.org/Schemas/OME/2016-06"


def ome(mpp: str, unit: str = "µm", size: tuple[int, int] = (64, 96), power: str = "") -> str:
    objective = f'<Instrument ID="I:0"><Objective ID="O:0" NominalMagnification="{power}"/></Instrument>' * bool(power)
    return (
        f'<?xml version="1.0" encoding="UTF-8"?><OME xmlns="{SCHEMA}">{objective}<Image ID="Image:0">'
        f'<Pixels ID="Pixels:0" DimensionOrder="XYCZT" Type="uint8" SizeY="{size[0]}" SizeX="{size[1]}" SizeC="3" '
        f'SizeZ="1" SizeT="1" PhysicalSizeX="{mpp}" PhysicalSizeXUnit="{unit}" PhysicalSizeY="{mpp}" '
        f'PhysicalSizeYUnit="{unit}"><Channel ID="Channel:0:0" SamplesPerPixel="3"/><TiffData IFD="0"/></Pixels>'
        "</Image></OME>"
    )


def aperio(**stated: str) -> str:
    return "Aperio Image Library v1\r\n96x64 (32x32)" + "".join(f"|{k} = {v}" for k, v in stated.items())


def write(path: Path, text: str = "", mpp: float | None = None, unit: int = 3, jpeg: bool = False) -> Path:
    tags = {} if mpp is None else {"resolution": (1e4 / mpp,) * 2, "resolutionunit": unit}
    image = stained(64, 96)
    how = {"compression": "jpeg"} if jpeg else {}
    text_bytes = text.encode() or None
    tifffile.imwrite(
        path, image, tile=(32, 32), photometric="rgb", metadata=None, description=text_bytes, **tags, **how
    )
    return path


def believed(path: Path, options: IngestOptions = PLAIN, **row: str) -> tuple[float, list[str]]:
    """Return the microns per pixel that an ingest uses, and the notes."""
    with closing(open_source(path)) as slide:
        return options.mpp_of(slide, row).um[0], [note.text for note in slide.facts.notes]


@pytest.mark.parametrize("unit", ["Âµm", "碌m", "?m", "Î¼m", "\ufffdm", "嘉m"])
def test_a_garbled_unit_is_micrometres_and_noted(tmp_path: Path, unit: str) -> None:
    um, notes = believed(write(tmp_path / "a.ome.tif", ome("0.5", unit)))
    assert um == 0.5 and len(notes) == 1 and repr(unit) in notes[0]


@pytest.mark.parametrize("unit", ["pixel", "reference frame", "arbitrary"])
def test_a_unit_that_is_no_length_is_refused(tmp_path: Path, unit: str) -> None:
    with pytest.raises(SlideError, match=r"does not state.*--slide-mpp"):
        believed(write(tmp_path / "a.ome.tif", ome("0.5", unit)))


def test_ome_xml_of_another_size_is_stale(tmp_path: Path) -> None:
    """The image was reduced by four or cut after the OME-XML was written, which the file cannot tell."""
    reduced = ome("0.5", size=(256, 384))
    for tags in (None, 0.5):
        with pytest.raises(SlideError, match=r"256 × 384.*64 × 96.*2 µm/px if it was reduced, 0\.5 .*--slide-mpp"):
            believed(write(tmp_path / "a.ome.tif", reduced, tags))
    um, notes = believed(write(tmp_path / "b.ome.tif", reduced, 2.0))
    assert um == pytest.approx(2.0) and "reduced" in notes[0]
    um, notes = believed(write(tmp_path / "c.ome.tif", ome("0.5", size=(400, 400)), 0.5))
    assert um == pytest.approx(0.5) and "cut" in notes[0]
    with pytest.raises(SlideError, match="400 × 400"):
        believed(write(tmp_path / "d.ome.tif", ome("0.5", size=(400, 400))))
    assert believed(tmp_path / "d.ome.tif", IngestOptions(slide_mpp=0.5))[0] == 0.5


@pytest.mark.parametrize(
    ("unit", "per_um"), [("micron", 1.0), ("um", 1.0), ("\\u00B5m", 1.0), ("mm", 1e3), ("nm", 1e-3)]
)
def test_imagejs_unit_is_that_of_its_tags(tmp_path: Path, unit: str, per_um: float) -> None:
    path = tmp_path / "a.tif"
    tifffile.imwrite(
        path, stained(64, 96), photometric="rgb", imagej=True, resolution=(2 * per_um,) * 2, metadata={"unit": unit}
    )
    assert believed(path)[0] == pytest.approx(0.5, rel=1e-3)


def test_two_statements_apart_are_refused_with_both(tmp_path: Path) -> None:
    with pytest.raises(SlideError, match=r"Aperio's text says 0\.5 .*tags say 0\.25 .*--slide-mpp"):
        believed(write(tmp_path / "a.svs", aperio(MPP="0.5"), 0.25, jpeg=True))
    with pytest.raises(SlideError, match=r"OME-XML says 0\.5 .*tags say 1\.27 .*inch and centimetre"):
        believed(write(tmp_path / "b.ome.tif", ome("0.5"), 1.27))
    with pytest.raises(SlideError, match=r"OME-XML says 0\.5 .*tags say 5 .*ten times"):
        believed(write(tmp_path / "c.ome.tif", ome("0.5"), 5.0))
    assert believed(tmp_path / "c.ome.tif", source_mpp="0.5")[0] == 0.5


@pytest.mark.parametrize(("text", "tags"), [("0.5", 0.25), ("0.25", 0.5)])
def test_magnification_decides_between_two(tmp_path: Path, text: str, tags: float) -> None:
    um, notes = believed(write(tmp_path / "a.svs", aperio(AppMag="20", MPP=text), tags, jpeg=True))
    assert um == pytest.approx(0.5) and "0.25" in notes[0] and "20×" in notes[0]
    um, notes = believed(write(tmp_path / "b.ome.tif", ome(text, power="40"), tags))
    assert um == pytest.approx(0.25) and "0.5" in notes[0] and "40×" in notes[0]


@pytest.mark.parametrize(("power", "mpp"), [("20", "0.5"), ("40", "0.2325"), ("10", "1.011"), ("20", "0.325")])
def test_usual_scanners_have_no_note(tmp_path: Path, power: str, mpp: str) -> None:
    path = write(tmp_path / "a.svs", aperio(AppMag=power, MPP=mpp), float(mpp) * 1.01, jpeg=True)
    assert believed(path) == (float(mpp), [])


def test_twice_the_usual_pixel_is_noted_of_aperio_alone(tmp_path: Path) -> None:
    """Other scanners of 0.24 µm state the 20× of their lens, before a camera of small pixels."""
    assert believed(write(tmp_path / "a.ome.tif", ome("0.2425", power="20"))) == (0.2425, [])
    um, notes = believed(write(tmp_path / "b.svs", aperio(AppMag="20", MPP="0.2425"), jpeg=True))
    assert um == 0.2425 and "20× usually has 0.5" in notes[0]


def test_pixels_against_magnification(tmp_path: Path) -> None:
    um, notes = believed(write(tmp_path / "a.svs", aperio(AppMag="40", MPP="0.5"), jpeg=True))
    assert um == 0.5 and "40×" in notes[0] and "0.25" in notes[0]
    for mpp in ("5.0", "2.6"):
        with pytest.raises(SlideError, match=rf"{float(mpp):g} .*20× usually has 0\.5.*--slide-mpp"):
            believed(write(tmp_path / "b.svs", aperio(AppMag="20", MPP=mpp), jpeg=True))


def test_finer_than_any_scanner(tmp_path: Path) -> None:
    with pytest.raises(SlideError, match=r"0\.05 µm/px, finer than any scanner.*--slide-mpp"):
        believed(write(tmp_path / "a.tif", mpp=0.05))
    assert believed(tmp_path / "a.tif", IngestOptions(slide_mpp=0.5))[0] == 0.5
    um, notes = believed(write(tmp_path / "b.ome.tif", ome("0.05"), 0.5))
    assert um == pytest.approx(0.5) and "0.05" in notes[0]
    assert believed(write(tmp_path / "c.ome.tif", ome("0.1", power="100")))[0] == pytest.approx(0.1)


def test_magnification_alone_is_proposed_and_taken_on_request(tmp_path: Path) -> None:
    path, ask = write(tmp_path / "a.svs", aperio(AppMag="20"), jpeg=True), IngestOptions(mpp_from_magnification=True)
    with pytest.raises(SlideError, match=r"20× usually has 0\.5 µm/px.*--mpp-from-magnification.*--slide-mpp"):
        believed(path)
    assert believed(path, ask)[0] == 0.5
    plain = write(tmp_path / "b.tif")
    with pytest.raises(SlideError, match=r"does not state.*40× usually has 0\.25"):
        believed(plain, objective="40x")
    assert believed(plain, ask, objective="40×")[0] == 0.25
    with pytest.raises(SlideError, match="does not state") as caught:
        believed(plain, ask)
    assert "magnification" not in str(caught.value)
    with pytest.raises(SlideError, match=r"20×.*objective 40×"):
        believed(path, ask, objective="40")
    with pytest.raises(SlideError, match="'fast'"):
        believed(path, ask, objective="fast")
    assert believed(path, ask, source_mpp="0.3")[0] == 0.3


@pytest.mark.parametrize(
    ("tags_um", "noted"),
    [
        ((0.5, 1.0, 2.0), False),  # right
        ((0.5, 0.5, 0.5), False),  # copied from the finest level
        ((0.5, None, None), False),
        ((0.5, 0.7, 3.1), False),  # by chance
        ((0.25, 1.0, 2.0), True),  # the finest level's alone was changed, to a wrong value
        ((1.0, 1.0, 2.0), False),  # a copy, and one other value
        ((5.0, 1.0, 2.0), True),
        ((None, 1.0, 2.0), False),  # nothing is believed then
        ((0.5, np.inf, np.inf), False),  # resolutions of 0, as of programs that do not know them
    ],
)
def test_tags_of_coarser_levels_are_compared(tmp_path: Path, tags_um: tuple[float | None, ...], noted: bool) -> None:
    image = stained(256, 384)
    with tifffile.TiffWriter(tmp_path / "a.tif") as file:
        for k, um in enumerate(tags_um):
            tags = {} if um is None else {"resolution": (1e4 / um,) * 2, "resolutionunit": 3}
            level = image[:: 2**k, :: 2**k]
            file.write(level, tile=(32, 32), photometric="rgb", metadata=None, subfiletype=min(k, 1), **tags)
    with closing(open_source(tmp_path / "a.tif")) as slide:
        notes = [note.text for note in slide.facts.notes if note.flag == "mpp_doubtful"]
        assert slide.mpp == (None if tags_um[0] is None else pytest.approx((tags_um[0],) * 2))
    assert bool(notes) == noted
    if noted:
        assert f"{tags_um[0]:g} µm/px is taken" in notes[0] and "coarser levels say 0.5 µm/px" in notes[0]


@pytest.mark.parametrize("damaged", [0, 1])
@pytest.mark.parametrize(
    ("tag", "kind", "value"), [("XResolution", "s", "abc"), ("XResolution", "I", 5), ("ResolutionUnit", "H", (3, 3))]
)
def test_damaged_tags_state_nothing_and_the_slide_is_read(
    tmp_path: Path, damaged: int, tag: str, kind: str, value: object
) -> None:
    path, image = tmp_path / "a.tif", stained(256, 384)
    with tifffile.TiffWriter(path) as file:
        for k in range(3):
            tags = {"resolution": (2e4 / 2**k,) * 2, "resolutionunit": 3, "subfiletype": min(k, 1)}
            file.write(image[:: 2**k, :: 2**k], tile=(32, 32), photometric="rgb", metadata=None, **tags)
    with tifffile.TiffFile(path, mode="r+") as file:
        file.pages[damaged].tags[tag].overwrite(value, dtype=kind)
    with closing(open_source(path)) as slide:
        assert not slide.facts.notes and len(slide.levels) == 3
        if damaged:
            assert slide.mpp == pytest.approx((0.5, 0.5))


def test_notes_are_kept_with_the_slide(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ome.tif", ome("0.5", "Âµm"))
    record = ingest_slide(path, tmp_path / "store", IngestOptions(mpp=0.5))
    assert record.status == "done" and "mpp_doubtful" in record.flags and "Âµm" in record.file_notes[0]
    taken = write(tmp_path / "b.svs", aperio(AppMag="20"), jpeg=True)
    record = ingest_slide(taken, tmp_path / "store", IngestOptions(mpp=0.5, mpp_from_magnification=True))
    assert record.status == "done" and record.source_mpp == 0.5 and "mpp_assumed" in record.flags


def test_a_default_of_programs_is_no_statement(tmp_path: Path) -> None:
    """Tags of 72 per inch, which many programs write, contradict nothing."""
    assert believed(write(tmp_path / "a.ome.tif", ome("0.5"), 352.8)) == (0.5, [])
    assert np.isclose(believed(write(tmp_path / "b.svs", aperio(AppMag="20", MPP="0.5"), 352.8, jpeg=True))[0], 0.5)
