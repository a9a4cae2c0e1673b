"""Files of several pictures: scenes are slides, planes and channels are refused, other files' pages are not read."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import tifffile

from data import open_store
from data.store.manifest import load_manifest, same_content
from hyfi_core.errors import RequestError
from hyfi_core.plan.box import Box
from pathology.errors import SlideError
from pathology.ingest.archive import Request, ingest
from pathology.ingest.discover import find_jobs
from pathology.ingest.options import IngestOptions
from pathology.ingest.slide import ingest_slide
from pathology.predict.inputs import find_inputs
from pathology.readers.facts.pictures import Pick, pictures_of_ome
from pathology.readers.slide_source import SlideSource
from pathology.readers.sources import open_source, scene_count
from tests.pathology.readers.czi_files import write_czi
from tests.pathology.readers.dicom_slides import write_series
from tests.pathology.readers.mrxs_files import write_mirax
from tests.pathology.readers.ngff_stores import write_by
from tests.pathology.readers.scanners import jpeg, leave_out, soft, write_encoded
from tests.pathology.readers.test_mrxs import PLAIN, picture_of
from tests.pathology.tiffs import RGB, halved

TILED = {"tile": (128, 128), "compression": "deflate"}
STRIPED = {"rowsperstrip": 64}
SCHEMA = "http://www.openmicroscopy.org/Schemas/OME/2016-06"


def whole(slide: SlideSource) -> RGB:
    return slide.read(Box.of_size(slide.levels[0].height_px, slide.levels[0].width_px), 0)


def read(path: Path, scene: int = 0, plane: int = 0) -> RGB:
    with closing(open_source(path, Pick(scene, plane))) as slide:
        return whole(slide)


def about(name: str = "", mpp: float | None = 0.5) -> dict[str, object]:
    size = {} if mpp is None else {"PhysicalSizeX": mpp, "PhysicalSizeY": mpp}
    return {"axes": "YXS", "Name": name, **size}


def write_scenes(path: Path, scenes: list[tuple[RGB, dict[str, object]]]) -> Path:
    with tifffile.TiffWriter(path, ome=True) as tiff:
        for picture, facts in scenes:
            tiff.write(picture, subifds=1, photometric="rgb", metadata=facts, **TILED)
            tiff.write(halved(picture), subfiletype=1, photometric="rgb", **TILED)
    return path


@pytest.fixture
def scenes(tmp_path: Path) -> tuple[Path, list[RGB]]:
    pictures = [soft(300, 260), soft(256, 400, seed=1)]
    label = (soft(280, 270, seed=2), about("label image", 0.5))
    macro = (soft(128, 256, seed=3), about("", 7.0))
    named = [(picture, about(f"scene {k}")) for k, picture in enumerate(pictures)]
    (tmp_path / "slides").mkdir()
    return write_scenes(tmp_path / "slides" / "two.ome.tif", [label, *named, macro]), pictures


def test_every_scene_is_a_slide_and_labels_are_not(scenes: tuple[Path, list[RGB]], tmp_path: Path) -> None:
    path, pictures = scenes
    request = Request([path.parent], tmp_path / "store", IngestOptions(mpp=0.5))
    report = ingest(request, workers=1)
    assert [(r.slide_id, r.status) for r in report.done] == [("two_scene1", "done"), ("two_scene2", "done")]
    for record, picture in zip(report.done, pictures, strict=True):
        slide = open_store(tmp_path / "store", record.slide_id)
        assert np.array_equal(slide.read(Box.of_size(*picture.shape[:2]), 0).transpose(1, 2, 0), picture)
        assert "several_scenes" in record.flags and "of 2" in record.file_notes[0]
    assert ingest(request, workers=1).skipped == ["two_scene1", "two_scene2"]
    assert [one.slide_id for one in find_inputs([path])] == ["two_scene1", "two_scene2"]
    again = find_jobs([tmp_path / "store" / "manifest.csv"], {})
    assert [(job.slide_id, job.row["scene"]) for job in again] == [("two_scene1", "1"), ("two_scene2", "2")]


def test_one_scene_is_picked(scenes: tuple[Path, list[RGB]]) -> None:
    path, pictures = scenes
    assert np.array_equal(read(path, 1), pictures[0]) and np.array_equal(read(path, 2), pictures[1])
    assert np.array_equal(read(path), pictures[1])  # the largest
    with pytest.raises(SlideError, match="no scene 3: the file has 2"):
        open_source(path, Pick(3))
    assert [(j.slide_id, j.row["scene"]) for j in find_jobs([path], {}, "largest")] == [("two", "0")]
    assert [(j.slide_id, j.row["scene"]) for j in find_jobs([path], {}, "2")] == [("two_scene2", "2")]
    with pytest.raises(RequestError, match="--scene first"):
        IngestOptions(scene="first")


def test_a_file_of_one_scene_has_no_second(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "one.tif", soft(256, 256), photometric="rgb", tile=(128, 128))
    (job,) = find_jobs([tmp_path / "one.tif"], {}, "2")
    with pytest.raises(SlideError, match="no scene 2: the file has 1"):
        open_source(tmp_path / "one.tif", Pick(int(job.row["scene"])))
    (job,) = find_jobs([tmp_path / "one.tif"], {}, "1")
    assert job.slide_id == "one" and read(tmp_path / "one.tif", 1).shape == (256, 256, 3)


@pytest.mark.parametrize("kind", ["striped", "tiled", "aperio", "ome", "czi", "dicom", "mrxs", "ngff"])
def test_a_file_of_one_plane_has_no_second(tmp_path: Path, kind: str) -> None:
    picture, rgb = soft(256, 256), {"photometric": "rgb"}
    path = tmp_path / {"czi": "a.czi", "dicom": "a", "mrxs": "a.mrxs", "ngff": "a.zarr"}.get(kind, "a.tif")
    if kind == "czi":
        write_czi(path, picture, [(0, 256, 0, 256)], levels=1)
    elif kind == "dicom":
        write_series(path, "a", picture, "1.2.3", levels=1)
    elif kind == "mrxs":
        write_mirax(path, picture_of(PLAIN), PLAIN)
    elif kind == "ngff":
        write_by("ome-zarr-py 0.5", path, picture)
    elif kind == "aperio":
        write_encoded(path, [picture], lambda tile: jpeg(tile, "rgb"), "jpeg", "rgb")
    else:
        tifffile.imwrite(path, picture, **rgb, **(STRIPED if kind == "striped" else TILED), ome=kind == "ome")
    read(path, plane=1)
    with pytest.raises(SlideError, match="no plane 2: the file has 1"):
        open_source(path, Pick(plane=2))


def test_scenes_keep_the_names_of_a_manifest(scenes: tuple[Path, list[RGB]], tmp_path: Path) -> None:
    (tmp_path / "m.csv").write_text("path,slide_id,case_id\nslides/two.ome.tif,x,P1\n")
    jobs = find_jobs([tmp_path / "m.csv"], {})
    assert [(job.slide_id, job.row["case_id"]) for job in jobs] == [("x_scene1", "P1"), ("x_scene2", "P1")]
    (tmp_path / "n.csv").write_text("path,slide_id,scene\nslides/two.ome.tif,b,2\nslides/two.ome.tif,a,1\n")
    assert [(job.slide_id, job.row["scene"]) for job in find_jobs([tmp_path / "n.csv"], {})] == [("b", "2"), ("a", "1")]


def ome_of_set(own: str, sizes: list[tuple[int, int]], uuids: list[str]) -> str:
    images = "".join(
        f'<Image ID="Image:{k}"><Pixels ID="Pixels:{k}" DimensionOrder="XYCZT" Type="uint8" SizeY="{h}" SizeX="{w}" '
        f'SizeC="3" SizeZ="1" SizeT="1" PhysicalSizeX="0.5" PhysicalSizeY="0.5"><Channel ID="C:{k}" '
        f'SamplesPerPixel="3"/><TiffData IFD="0" PlaneCount="1"><UUID FileName="s{k}.ome.tiff">{uuid}</UUID>'
        "</TiffData></Pixels></Image>"
        for k, ((h, w), uuid) in enumerate(zip(sizes, uuids, strict=True))
    )
    return f'<OME xmlns="{SCHEMA}" UUID="{own}">{images}</OME>'


@pytest.mark.parametrize("layout", [TILED, STRIPED], ids=["tiled", "striped"])
def test_a_file_of_a_set_is_only_its_own_pictures(tmp_path: Path, layout: dict[str, object]) -> None:
    pictures = [soft(330, 330), soft(300, 310, seed=1)]
    uuids = [f"urn:uuid:{k}" for k in range(2)]
    for k, picture in enumerate(pictures):
        xml = ome_of_set(uuids[k], [p.shape[:2] for p in pictures], uuids)
        with tifffile.TiffWriter(tmp_path / f"s{k}.ome.tiff") as tiff:
            tiff.write(picture, subifds=1, photometric="rgb", metadata=None, description=xml, **layout)
            tiff.write(halved(picture), subfiletype=1, photometric="rgb", metadata=None, **layout)
    for k, picture in enumerate(pictures):
        with closing(open_source(tmp_path / f"s{k}.ome.tiff")) as slide:
            assert len(slide.levels) == 2 and np.array_equal(whole(slide), picture)
    assert [job.slide_id for job in find_jobs([tmp_path], {})] == ["s0", "s1"]


def test_a_file_whose_pictures_are_all_elsewhere_is_refused(tmp_path: Path) -> None:
    xml = ome_of_set("urn:uuid:9", [(330, 330)], ["urn:uuid:0"])
    tifffile.imwrite(tmp_path / "a.ome.tiff", soft(330, 330), photometric="rgb", metadata=None, description=xml)
    with pytest.raises(SlideError, match="other files of a set"):
        open_source(tmp_path / "a.ome.tiff")


def stack(path: Path, axes: str, layout: dict[str, object], ome: bool) -> Path:
    count = 3
    colour = axes.endswith("S")
    planes = np.stack([soft(256, 256, seed=k) if colour else soft(256, 256, seed=k)[..., 0] for k in range(count)])
    how = {"photometric": "rgb" if colour else "minisblack", **layout}
    if ome:
        tifffile.imwrite(path, planes, ome=True, metadata={"axes": axes}, **how)
    else:
        with tifffile.TiffWriter(path) as tiff:
            for plane in planes:
                tiff.write(plane, metadata=None, **how)
    return path


@pytest.mark.parametrize("layout", [TILED, STRIPED], ids=["tiled", "striped"])
@pytest.mark.parametrize(
    ("axes", "words"),
    [("CYX", "3 channels"), ("ZYXS", "3 focal planes"), ("TYXS", "3 times"), ("ZYX", "3 focal planes")],
)
def test_planes_of_an_ome_tiff_are_refused_by_what_they_are(
    tmp_path: Path, axes: str, words: str, layout: dict[str, object]
) -> None:
    with pytest.raises(SlideError, match=words):
        open_source(stack(tmp_path / "a.ome.tif", axes, layout, ome=True))


@pytest.mark.parametrize("layout", [TILED, STRIPED], ids=["tiled", "striped"])
@pytest.mark.parametrize("ome", [True, False])
def test_one_focal_plane_is_picked(tmp_path: Path, layout: dict[str, object], ome: bool) -> None:
    path = stack(tmp_path / "a.tif", "ZYXS", layout, ome)
    with pytest.raises(SlideError, match=r"3 (focal planes|pictures of 256 × 256 px).*--plane N"):
        open_source(path)
    for plane in (1, 2, 3):
        assert np.array_equal(read(path, plane=plane), soft(256, 256, seed=plane - 1))
    with pytest.raises(SlideError, match="no plane 4"):
        open_source(path, Pick(plane=4))
    options = IngestOptions(mpp=0.5, slide_mpp=0.5, plane=2)
    assert ingest_slide(path, tmp_path / "store", options).status == "done"
    assert options.parameters("a")["plane"] == 2


@pytest.mark.parametrize("plane", [1, 2])
def test_a_left_out_tile_of_a_plane_is_never_that_of_another(tmp_path: Path, plane: int) -> None:
    """As in an SVS with focal planes: all planes of level 0, then all planes of each further level."""
    planes = [soft(512, 512, seed=k) for k in range(2)]
    order = [*planes, *map(halved, planes)]
    path = write_encoded(tmp_path / "a.svs", order, lambda tile: jpeg(tile, "ycbcr", quality=95), "jpeg", "ycbcr")
    leave_out(path, plane - 1, 5)
    with closing(open_source(path, Pick(plane=plane))) as slide:
        assert [(v.height_px, v.missing_tiles) for v in slide.levels] == [(512, 1), (256, 1)], "a plane has two levels"
        finest = whole(slide)
        coarse = slide.read(Box.of_size(256, 256), 1)
    assert (finest[128:256, 128:256] == 255).all()
    shown = planes[plane - 1].copy()
    shown[128:256, 128:256] = 255
    assert np.abs(finest.astype(int) - shown).mean() < 2 and np.abs(coarse.astype(int) - halved(shown)).mean() < 2


@pytest.mark.parametrize("kind", ["tiff", "aperio", "mrxs"])
def test_a_refused_plane_leaves_no_file_open(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / ("a.mrxs" if kind == "mrxs" else "a.tif")
    if kind == "mrxs":
        write_mirax(path, picture_of(PLAIN), PLAIN)
    else:
        how = {"aperio": kind == "aperio"}
        write_encoded(path, [soft(256, 256)], lambda tile: jpeg(tile, "ycbcr"), "jpeg", "ycbcr", **how)
    opened = set(Path("/proc/self/fd").iterdir())
    with pytest.raises(SlideError, match="no plane 2"):
        open_source(path, Pick(plane=2))
    assert set(Path("/proc/self/fd").iterdir()) == opened

    def fail(*args: object) -> None:
        raise SlideError("its levels cannot be compared")

    for module in ("tiff_source", "openslide_source"):
        monkeypatch.setattr(f"pathology.readers.{module}.believed_levels", fail)
    with pytest.raises(SlideError, match="cannot be compared"):
        open_source(path)
    assert set(Path("/proc/self/fd").iterdir()) == opened


def test_pages_of_a_fluorescence_scanner_are_refused(tmp_path: Path) -> None:
    """As a QPTIFF: all channels of level 0, then all channels of each further level."""
    path = tmp_path / "a.qptiff"
    levels = [[soft(256, 256, seed=k)[..., 0] for k in range(4)]]
    levels.append([level[::2, ::2] for level in levels[0]])
    with tifffile.TiffWriter(path) as tiff:
        for k, level in enumerate(levels):
            for channel in level:
                tiff.write(channel, subfiletype=bool(k), metadata=None, **TILED)
    with pytest.raises(SlideError, match=r"4 pictures of 256 × 256 px \(channels"):
        open_source(path)


def test_an_imagej_stack_of_one_directory_is_refused(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "a.tif", np.stack([soft(256, 256)[..., 0]] * 5), imagej=True, metadata={"axes": "ZYX"})
    with tifffile.TiffFile(tmp_path / "a.tif") as tiff:
        assert tiff.is_imagej
    with pytest.raises(SlideError, match="5 pictures of 256 × 256"):
        open_source(tmp_path / "a.tif")


@pytest.mark.parametrize("layout", [TILED, STRIPED], ids=["tiled", "striped"])
def test_channels_of_a_qptiff_are_refused_by_their_names(tmp_path: Path, layout: dict[str, object]) -> None:
    with tifffile.TiffWriter(tmp_path / "a.qptiff") as tiff:
        for name in ("DAPI", "Opal 520"):
            text = f"<PerkinElmer-QPI-ImageDescription><Name>{name}</Name></PerkinElmer-QPI-ImageDescription>"
            about = {"description": text, "software": "PerkinElmer-QPI", "metadata": None}
            tiff.write(soft(256, 256)[..., 0], photometric="minisblack", **about, **layout)
    for plane in (0, 1):  # a channel is no focal plane
        with pytest.raises(SlideError, match=r"2 channels \(DAPI, Opal 520\), as of fluorescence"):
            open_source(tmp_path / "a.qptiff", Pick(plane=plane))


def test_channels_of_imagej_are_refused_as_such(tmp_path: Path) -> None:
    path, picture = tmp_path / "a.tif", np.stack([soft(256, 256)[..., 0]] * 2)
    with tifffile.TiffWriter(path, imagej=True) as tiff:
        tiff.write(picture, photometric="minisblack", metadata={"axes": "CYX"}, rowsperstrip=64)
    for plane in (0, 1):
        with pytest.raises(SlideError, match=r"2 channels, as of fluorescence|ImageJ stack of 2 pictures"):
            open_source(path, Pick(plane=plane))


def test_dicom_of_several_planes_is_refused(tmp_path: Path) -> None:
    write_series(tmp_path / "one", "a", soft(512, 512), "1.2.3", levels=1)
    open_source(tmp_path / "one").close()
    write_series(tmp_path / "several", "a", soft(512, 512), "1.2.4", levels=1, focal_planes=3)
    with pytest.raises(SlideError, match="FocalPlanes value 3"):
        open_source(tmp_path / "several")


def test_a_scene_of_a_czi_is_picked(tmp_path: Path) -> None:
    picture, places = soft(640, 896), [(0, 400, 0, 320), (120, 640, 480, 896)]
    path = write_czi(tmp_path / "a.czi", picture, places)
    for scene, (y0, y1, x0, x1) in enumerate(places, 1):
        assert np.array_equal(read(path, scene), picture[y0:y1, x0:x1])
    with pytest.raises(SlideError, match="no scene 3"):
        open_source(path, Pick(3))


def test_every_scene_of_a_czi_is_a_slide(tmp_path: Path) -> None:
    picture, places = soft(640, 896), [(0, 320, 0, 320), (120, 640, 480, 896)]
    path = write_czi(tmp_path / "a.czi", picture, places)
    with closing(open_source(path)) as slide:
        assert "all 2 scenes (scene 1: 320 × 320 px" in slide.facts.notes[0].text
    report = ingest(Request([path], tmp_path / "store", IngestOptions(native=True)), workers=1)
    assert [record.slide_id for record in report.done] == ["a_scene1", "a_scene2"]
    for record, (y0, y1, x0, x1) in zip(report.done, places, strict=True):
        stored = open_store(tmp_path / "store", record.slide_id).read(Box.of_size(y1 - y0, x1 - x0))
        assert np.array_equal(stored.transpose(1, 2, 0), picture[y0:y1, x0:x1])
    assert [job.row["scene"] for job in find_jobs([path], {}, "largest")] == ["2"]
    assert [(group.slides, group.scenes) for group in same_content(load_manifest(tmp_path / "store"))] == [
        (("a_scene1", "a_scene2"), True)
    ]


def test_what_is_no_file_has_no_scenes_and_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.tiff")
    (tmp_path / "text.tiff").write_text("II*")
    assert [scene_count(tmp_path / name) for name in ("pipe.tiff", "text.tiff", "none.tiff")] == [1, 1, 1]


@pytest.mark.parametrize(
    ("size_z", "data", "directories"),
    [
        ("2", 'IFD="3" PlaneCount="1000000000000"', (3, 4)),
        ("1", 'IFD="none"', None),
        ("1", 'IFD="3" FirstZ="-2" PlaneCount="9"', None),
        ("1000000000000", 'IFD="0"', None),
    ],
)
def test_damaged_numbers_of_ome_xml_take_neither_time_nor_memory(
    size_z: str, data: str, directories: tuple[int, ...] | None
) -> None:
    xml = f"""<OME><Image><Pixels SizeX="9" SizeY="9" SizeC="3" SizeT="1" SizeZ="{size_z}">
        <Channel SamplesPerPixel="3"/><TiffData {data}/></Pixels></Image></OME>"""
    assert [picture.directories for picture in pictures_of_ome(xml, "a.ome.tiff")] == (
        [] if directories is None else [directories]
    )
