"""DICOM slides from end to end: a file for each level, several slides in one folder, other pictures among them."""

from __future__ import annotations

import io
import os
import re
import struct
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from data.store.manifest import DONE, load_records
from data.store.slide_store import SlideStore, slide_path
from hyfi_core.errors import RequestError
from hyfi_core.plan.box import Box
from pathology.errors import SlideError, TileError
from pathology.ingest.archive import IngestOptions, Request, ingest, ingest_slide
from pathology.ingest.discover import find_jobs
from pathology.ingest.identity import SourceStamp
from pathology.ingest.staging import files_of, staged
from pathology.readers.dicom.contradictions import frame_contradiction, level_contradiction
from pathology.readers.dicom.files import WHOLE_SLIDE, DicomHeader, read_header, series_files
from pathology.readers.dicom.frames import jpeg_frames
from pathology.readers.dicom.pixels import before_pixels, frame_positions
from pathology.readers.openslide_source import OpenSlideSource
from pathology.readers.source_level import RGB, BadTile
from pathology.readers.sources import open_source
from tests.pathology.readers.dicom_slides import CT, element, write_file, write_series
from tests.pathology.readers.scanners import smooth
from tests.pathology.tiffs import stained
from workflows.commands import inspect

AT_HALF = IngestOptions(mpp=0.5)
NAME, DAY, SERIES = "Doe^Jane", "19610517", "1.2.840.99999.4711"
SIZE = Box.of_size(700, 900)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """A folder with two slides and a CT picture side by side."""
    folder = tmp_path / "archive"
    for k, name in enumerate("ab"):
        write_series(folder, name, smooth(700, 900, k), f"{SERIES}.{k}", patient=NAME, day=DAY)
    write_file(folder / "ct.dcm", smooth(128, 128), "1.2.9", "1.2.8", sop_class=CT, patient=NAME)
    return folder


def test_each_file_of_a_series_shows_the_whole_slide(archive: Path) -> None:
    names = ["a-0.dcm", "a-1.dcm", "a-2.dcm", "a-label.dcm"]
    for name in (names[0], names[-1]):
        source = open_source(archive / name)
        assert isinstance(source, OpenSlideSource) and source.vendor == "dicom" and source.objective_power == 20
        assert source.mpp == (0.5, 0.5) and [v.downsample for v in source.levels] == [(1, 1), (2, 2), (4, 4)]
        apart = np.abs(source.read(SIZE, 0) - smooth(700, 900).astype(int))
        assert apart.mean() < 2 and np.quantile(apart, 0.99) < 12
        assert [path.name for path in files_of(archive / name)] == [name, *(other for other in names if other != name)]


def test_a_folder_gives_each_slide_once_and_no_other_pictures(archive: Path) -> None:
    ids = [f"{SERIES}.0", f"{SERIES}.1"]
    assert [job.slide_id for job in find_jobs([archive], {})] == ids
    files = sorted(archive.glob("*.dcm"))
    assert [job.slide_id for job in find_jobs(files, {})] == [*ids, "ct"]
    (archive / "rows.csv").write_text("path,slide_id\nb-1.dcm,mine\n")
    assert [job.slide_id for job in find_jobs([archive / "rows.csv", archive], {})] == ["mine", ids[0]]
    assert [job.slide_id for job in find_jobs([archive, archive / "rows.csv"], {})] == [ids[0], "mine"]
    for file in files[:-1]:
        file.unlink()
    with pytest.raises(RequestError, match=r"no slide in this folder.*\.dcm"):
        find_jobs([archive], {})


def test_a_series_alone_in_its_folder_is_named_by_it_and_the_folder_is_the_slide(
    tmp_path: Path, archive: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "S21-77"
    write_series(folder, "DCM", smooth(700, 900), SERIES)
    assert [job.slide_id for job in find_jobs([folder], {})] == ["S21-77"]
    (tmp_path / "rows.csv").write_text("path,label\nS21-77,benign\narchive,malignant\n")
    one, several = find_jobs([tmp_path / "rows.csv"], {})
    assert (one.slide_id, one.source, one.row["label"]) == ("S21-77", folder / "DCM-0.dcm", "benign")
    with closing(open_source(folder)) as source:
        assert source.vendor == "dicom" and source.levels[0].height_px == 700
    with pytest.raises(SlideError, match=r"a folder of 2 DICOM slides; name one file of each: a-0\.dcm, b-0\.dcm"):
        open_source(several.source)
    assert inspect.run(folder, None, False) == 0 and "700 × 900 px" in capsys.readouterr().out
    assert inspect.run(archive, None, False) == 1 and "2 DICOM slides" in capsys.readouterr().err


def test_a_slide_is_staged_with_its_own_files_and_changes_with_them(archive: Path, tmp_path: Path) -> None:
    path = archive / "a-0.dcm"
    with staged(path, tmp_path / "cache") as local:
        assert sorted(path.name for path in local.parent.iterdir()) == [f"a-{k}.dcm" for k in (0, 1, 2, "label")]
        assert np.array_equal(open_source(local).read(SIZE, 0), open_source(path).read(SIZE, 0))
    before = SourceStamp.of(path)
    os.utime(archive / "b-1.dcm", ns=(2**62, 2**62))
    assert SourceStamp.of(path) == before
    (archive / "a-2.dcm").write_bytes((archive / "a-2.dcm").read_bytes() + b"\0")
    assert SourceStamp.of(path) != before


def test_the_store_holds_what_was_drawn_and_nothing_that_tells_of_a_person(archive: Path, tmp_path: Path) -> None:
    store, key = tmp_path / "store", tmp_path / "key.csv"
    write_series(archive, "bad", smooth(300, 300), f"{SERIES}.7", patient=NAME, day=DAY)
    write_series(archive, "bad2", smooth(301, 300), f"{SERIES}.7", patient=NAME, day=DAY, levels=1)
    write_file(archive / "bad-9.dcm", smooth(300, 300), f"{SERIES}.7.77", f"{SERIES}.7", patient=NAME)
    report = ingest(Request([archive], store, IngestOptions(mpp=0.5, cache=tmp_path), pseudonyms=key), workers=1)
    assert len(report.done) == 2 and "unexpected image" in report.failed[0].reason
    record = next(r for r in report.done if f"{r.slide_id}," in key.read_text() and r.source_mpp == 0.5)
    pixels = SlideStore.open(slide_path(store, record.slide_id)).read(SIZE, 0).transpose(1, 2, 0).astype(int)
    assert min(np.abs(pixels - smooth(700, 900, k)).mean() for k in range(2)) < 2
    for file in store.rglob("*"):
        text = str(file.relative_to(tmp_path)).encode() + (file.read_bytes() if file.is_file() else b"")
        assert not [word for word in (NAME, "Doe", DAY, SERIES, "1.2.3\0") if word.encode() in text], file


def damaged(folder: Path, name: str) -> None:
    """Damage the series NAME as its name says."""
    first = folder / f"{name}-0.dcm"
    content = first.read_bytes()
    if name == "cut":
        first.write_bytes(content[: len(content) // 2])
    elif name == "zeros":
        first.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))
    elif name == "garbage":
        at = content.index(b"\xff\xd8\xff", len(content) // 2)
        first.write_bytes(content[:at] + b"\x99" * 40 + content[at + 40 :])
    elif name == "head":
        first.write_bytes(content[:200])
    elif name == "empty":
        first.write_bytes(b"")


def test_each_damage_is_named_and_the_good_ones_are_done(tmp_path: Path, hyfi: Callable[..., object]) -> None:
    names = ("good", "cut", "zeros", "garbage", "head", "empty")
    for k, name in enumerate(names):
        write_series(tmp_path / "archive", name, smooth(400, 500), f"1.2.3.{k}")
        damaged(tmp_path / "archive", name)
    told = hyfi("ingest", "archive", "--out", "store", "--mpp", "0.5", "--workers", "1", "--json")
    assert told.returncode == 1 and "Traceback" not in told.stderr, told.stderr  # type: ignore[attr-defined]
    records = load_records(tmp_path / "store")
    assert {name for name, r in records.items() if r.status == DONE} == {"1.2.3.0"}
    for k, name in enumerate(names[1:], 1):
        slide_id = f"{name}-0" if name in ("head", "empty") else f"1.2.3.{k}"
        assert records[slide_id].reason in told.stderr, records  # type: ignore[attr-defined]


def test_without_its_finest_level_a_slide_is_refused(archive: Path, tmp_path: Path) -> None:
    (archive / "a-0.dcm").unlink()
    record = ingest_slide(archive / "a-1.dcm", tmp_path / "store", AT_HALF)
    assert "finest level has 1 µm/px" in record.reason
    record = ingest_slide(archive / "b-1.dcm", tmp_path / "store", IngestOptions(mpp=0.5, lossless=True))
    assert "dicom. Ingest it without --lossless" in record.reason


def test_uncompressed_pixels_are_not_taken_for_a_frame(tmp_path: Path) -> None:
    """They have no items, so any of their bytes would count as lengths; here these lead to a JPEG that contradicts."""
    frame = simplejpeg.encode_jpeg(stained(64, 64))
    for start, contradicts in ((b"\xfe\xff\x00\xe0", True), (b"\x01\x02\x03\x04", False)):
        pixels = start + bytes(8) + len(frame).to_bytes(4, "little") + frame
        path = write_file(tmp_path / "a.dcm", stained(64, 64), "1.2", "1.3", photometric="RGB")
        head = path.read_bytes().split(b"\xe0\x7f\x10\x00", 1)[0]
        path.write_bytes(head + b"\xe0\x7f\x10\x00OB\0\0" + len(pixels).to_bytes(4, "little") + pixels)
        assert bool(frame_contradiction(path)) == contradicts


PLACES: list[tuple[int, int] | None] = [(1 + 128 * (k % 2), 1 + 128 * (k // 2)) for k in range(4)]


@pytest.mark.parametrize(
    ("positions", "said"),
    [
        (None, "has 4 frames, but positions of 0"),  # OpenSlide crashes
        ([], "positions of 0"),  # white, all of it
        (PLACES[:3], "positions of 3"),
        ([PLACES[0], None, *PLACES[2:]], "positions of 3"),  # the frames that follow slip to places of others
        ([*PLACES[:3], PLACES[0]], "two of its frames have the same position"),
        ([*PLACES[:3], (-127, 1)], "column -127, row 1, outside of 256 × 256 px"),
        ([*PLACES[:3], (257, 129)], "column 257, row 129, outside"),
    ],
)
def test_frames_that_are_not_where_they_should_be_are_refused(
    tmp_path: Path, positions: list[tuple[int, int] | None] | None, said: str
) -> None:
    how = {"positions": positions, "organisation": "TILED_SPARSE"}
    write_series(tmp_path, "a", smooth(256, 256), SERIES, levels=1, **how)
    with pytest.raises(SlideError, match=f"a-0.dcm: .*{said}"):
        open_source(tmp_path / "a-0.dcm")
    with pytest.raises(SlideError, match=said):
        open_source(tmp_path / "a-label.dcm")


@pytest.mark.parametrize(
    ("positions", "organisation"),
    [(PLACES, "TILED_SPARSE"), (PLACES, "TILED_FULL"), ([None] * 4, "TILED_FULL"), ([], "TILED_FULL")],
)
def test_frames_at_their_places_are_read(
    tmp_path: Path, positions: list[tuple[int, int] | None], organisation: str
) -> None:
    picture = smooth(256, 256)
    write_series(tmp_path, "a", picture, SERIES, levels=1, positions=positions, organisation=organisation)
    with closing(open_source(tmp_path / "a-0.dcm")) as source:
        assert np.abs(source.read(Box.of_size(256, 256), 0) - picture.astype(int)).mean() < 2


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ((256, 128), "has 4 frames, but 256 × 128 px are 2 .several optical paths or focal planes are not read"),
        ((128, 256), "has 4 frames, but 128 × 256 px are 2"),
        ((384, 256), "has 4 frames, but 384 × 256 px are 6;"),  # a frame is missing, those that follow have moved up
        ((250, 200), ""),
    ],
)
def test_a_level_of_another_size_than_its_frames_is_refused(tmp_path: Path, stated: tuple[int, int], said: str) -> None:
    """Frames were read in rows of another length, or those of a second optical path left out, without a word."""
    (file,) = write_series(tmp_path, "a", smooth(256, 256), SERIES, levels=1)[1:]
    content = file.read_bytes()
    for tag, before, now in zip((0x00480006, 0x00480007), (256, 256), stated, strict=True):
        content = content.replace(element(tag, "UL", before), element(tag, "UL", now))
    file.write_bytes(content)
    with pytest.raises(SlideError, match=f"a-0.dcm: .*{said}") if said else nullcontext():
        open_source(file).close()


def test_parts_of_a_concatenation_are_counted_together(tmp_path: Path) -> None:
    (file,) = write_series(tmp_path, "a", smooth(256, 256), SERIES, levels=1)[1:]
    part, uid = element(0x00480006, "UL", 512), element(0x00209161, "UI", "1.2.3.99")
    content = file.read_bytes().replace(element(0x00480006, "UL", 256), part)
    assert level_contradiction(file) == ""
    file.write_bytes(content)
    assert "has 4 frames" in level_contradiction(file)
    at = content.index(element(0x00209311, "CS", "TILED_FULL"))
    file.write_bytes(content[:at] + uid + content[at:])
    assert level_contradiction(file) == ""


@pytest.mark.parametrize("change", ["", "shifted", "again from 0", "beside"])
def test_a_table_of_offsets_that_is_not_that_of_the_frames_is_refused(tmp_path: Path, change: str) -> None:
    """OpenSlide showed frames at places of others, or crashed; offsets beyond 4 GiB start again from 0."""
    (file,) = write_series(tmp_path, "a", smooth(256, 256), SERIES, levels=1)[1:]
    head, item, frames = file.read_bytes().partition(struct.pack("<HHI", 0xFFFE, 0xE000, 0))
    offsets, at = [], 0
    while frames[at : at + 4] == item[:4]:
        offsets.append(at)
        at += 8 + int.from_bytes(frames[at + 4 : at + 8], "little")
    changed = {
        "shifted": [*offsets[1:], 0],
        "again from 0": [*offsets[:2], *(offset - offsets[2] for offset in offsets[2:])],
        "beside": [0, *(offset + 2 for offset in offsets[1:])],
    }
    table = struct.pack("<4I", *changed.get(change, offsets))
    file.write_bytes(head + item[:4] + len(table).to_bytes(4, "little") + table + frames)
    if change:
        with pytest.raises(SlideError, match=r"a-0\.dcm: its table of offsets is not that of its 4 frames"):
            open_source(file)
    else:
        with closing(open_source(file)) as source:
            assert np.abs(source.read(Box.of_size(256, 256), 0) - smooth(256, 256).astype(int)).mean() < 2


def test_the_table_of_offsets_of_a_label_is_not_questioned(tmp_path: Path) -> None:
    label, file = write_series(tmp_path, "a", smooth(256, 256), SERIES, levels=1)
    empty, wrong = struct.pack("<HHI", 0xFFFE, 0xE000, 0), struct.pack("<HHII", 0xFFFE, 0xE000, 4, 2)
    for name in (label, file):
        name.write_bytes(name.read_bytes().replace(empty, wrong, 1))
    assert level_contradiction(file) and not level_contradiction(label)
    write_series(tmp_path, "b", smooth(256, 256), f"{SERIES}.1", levels=1)
    (tmp_path / "b-label.dcm").write_bytes((tmp_path / "b-label.dcm").read_bytes().replace(empty, wrong, 1))
    with closing(open_source(tmp_path / "b-0.dcm")) as source:
        assert np.abs(source.read(Box.of_size(256, 256), 0) - smooth(256, 256).astype(int)).mean() < 2


@pytest.mark.parametrize("places", [None, PLACES, PLACES[::-1]])
def test_a_frame_that_libjpeg_warns_of_is_bad(tmp_path: Path, places: list[tuple[int, int] | None] | None) -> None:
    """OpenSlide does not report a frame with bytes left over: blocks of zeros shifted tissue in silence."""
    picture = smooth(256, 256)
    (file,) = write_series(tmp_path, "a", picture, SERIES, levels=1, positions=places)[1:]
    content = file.read_bytes()
    item, ends = struct.pack("<HHI", 0xFFFE, 0xE000, 0)[:4], [at.end() for at in re.finditer(b"\xff\xd9", content)]
    start = content.rindex(item, 0, ends[1])
    length = int.from_bytes(content[start + 4 : start + 8], "little") + 40
    longer = content[start + 8 : ends[1] - 2] + b"\x11" * 40 + content[ends[1] - 2 :]
    file.write_bytes(content[: start + 4] + length.to_bytes(4, "little") + longer)
    box = Box(128, 256, 0, 128) if places == PLACES[::-1] else Box(0, 128, 128, 256)
    with closing(open_source(file)) as source:
        with pytest.raises(
            TileError, match=rf"a-0\.dcm: the frame at row {box.y0}, column {box.x0} cannot be decoded: "
        ):
            source.read(Box.of_size(256, 256), 0)
        out, bad = np.empty((256, 256, 3), np.uint8), list[BadTile]()
        source.read_into(Box.of_size(256, 256), 0, out, bad)
        assert [tile.box for tile in bad] == [box] and (out[box.slices()] == 255).all()
        if places != PLACES[::-1]:
            rest = np.abs(out[128:] - picture[128:].astype(int))
            assert rest.mean() < 2


def test_frames_are_found_by_tables_of_offsets_and_those_of_several_items_are_not_checked(tmp_path: Path) -> None:
    (file,) = write_series(tmp_path, "a", smooth(256, 256), SERIES, levels=1)[1:]
    head, empty, rest = file.read_bytes().partition(struct.pack("<HHI", 0xFFFE, 0xE000, 0))
    frames, at = [], 0
    while rest[at : at + 4] == empty[:4]:
        length = int.from_bytes(rest[at + 4 : at + 8], "little")
        frames.append(rest[at + 8 : at + 8 + length])
        at += 8 + length
    frames[1] = frames[1][: frames[1].rindex(b"\xff\xd9")] + b"\x11" * 40 + b"\xff\xd9"
    frames[1] += bytes(len(frames[1]) % 2)
    pixels, box = head.rindex(b"\xe0\x7f\x10\x00"), Box.of_size(256, 256)

    def written(kind: str, items: int) -> None:
        """Write the second and the last frame in ``items`` items, with a table of offsets of this kind."""
        parts = [
            [f[: len(f) // 4 * 2], f[len(f) // 4 * 2 :]] if k % 2 and items > 1 else [f] for k, f in enumerate(frames)
        ]
        blocks = [b"".join(empty[:4] + len(p).to_bytes(4, "little") + p for p in part) for part in parts]
        starts = np.cumsum([0, *map(len, blocks[:-1])])
        basic = starts.astype("<u4").tobytes() if kind == "basic" else b""
        extended = element(0x7FE00001, "OB", starts.astype("<u8").tobytes()) if kind == "extended" else b""
        extended = extended.replace(b"OB", b"OV", 1)
        table = empty[:4] + len(basic).to_bytes(4, "little") + basic
        file.write_bytes(head[:pixels] + extended + head[pixels:] + table + b"".join(blocks) + rest[at:])

    for kind in ("", "basic", "extended"):
        written(kind, 1)
        (frame,) = jpeg_frames(file).values()
        frame.check(Box(0, 128, 0, 128))
        with pytest.raises(TileError, match="the frame at row 0, column 128 cannot be decoded: "):
            frame.check(box)
        written(kind, 2)
        (frame,) = jpeg_frames(file).values()
        frame.check(box)


def test_pixels_are_found_behind_the_positions_of_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pydicom took 0.1 ms for each frame, several times for each opening. An offset may have the bytes of the tag."""
    (file,) = write_series(tmp_path, "a", smooth(256, 256), SERIES, levels=1, positions=PLACES)[1:]
    content = file.read_bytes()
    at = content.rindex(b"\xe0\x7f\x10\x00OB\0\0")
    offsets = element(0x7FE00001, "OB", struct.pack("<4Q", 0, 0x107FE0, 0x107FE0, 1)).replace(b"OB", b"OV", 1)
    file.write_bytes(content[:at] + offsets + content[at:])
    for count in (1, 7, 2**16):
        monkeypatch.setattr("pathology.readers.dicom.pixels._PART_BYTES", count)
        with file.open("rb") as opened:
            _, groups, found = before_pixels(opened, [])
        assert found == at + len(offsets) and frame_positions(groups) == PLACES
        assert groups.endswith(offsets)


def test_factors_of_sampling_that_turbojpeg_lacks_are_no_damage(tmp_path: Path) -> None:
    def encode(tile: RGB) -> bytes:
        """Return a grey JPEG of 4:1:0 sampling: 32 × 16 px have eight blocks of luma and two of chroma, all zero."""
        file = io.BytesIO()
        Image.fromarray(np.full((128, 128, 3), 128, np.uint8)).save(file, "JPEG", subsampling="4:4:4")
        whole = file.getvalue()
        sampling, scan = whole.index(b"\xff\xc0") + 11, whole.index(b"\xff\xda")
        bits = ("001010" * 8 + "0000" * 2) * 32
        data = int(bits + "1" * (-len(bits) % 8), 2).to_bytes(-(-len(bits) // 8), "big")
        return whole[:sampling] + b"\x24" + whole[sampling + 1 : scan + 14] + data + b"\xff\xd9"

    write_series(tmp_path, "a", smooth(256, 256), SERIES, levels=1, encode=encode)
    with closing(open_source(tmp_path / "a-0.dcm")) as source:
        assert (source.read(Box.of_size(256, 256), 0) == 128).all()


def test_a_spacing_that_coarser_levels_contradict_is_noted(tmp_path: Path) -> None:
    files = write_series(tmp_path, "a", smooth(512, 512), SERIES)
    for mpp in (0.5, 0.25):
        write_file(files[1], smooth(512, 512), f"{SERIES}.0", SERIES, mpp=mpp)
        with closing(open_source(files[2])) as source:
            notes = [note.text for note in source.facts.notes]
        said = (
            "0.25 µm/px is taken, but the values of PixelSpacing of its coarser levels say 0.5 µm/px for the finest one"
        )
        assert notes == ([] if mpp == 0.5 else [said]) and source.mpp == (mpp, mpp)
    write_file(files[3], smooth(128, 128), f"{SERIES}.2", SERIES, mpp=0.25)  # as that of the finest
    with closing(open_source(files[1])) as source:
        assert not [note for note in source.facts.notes if "PixelSpacing" in note.text]


def test_heads_of_all_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = bytes(128) + b"DICM" + element(0x00020002, "UI", WHOLE_SLIDE)
    inner = struct.pack("<HHIHHI", 0xFFFE, 0xE000, 0xFFFFFFFF, 0xFFFE, 0xE00D, 0)
    endless = struct.pack("<HH2sxxI", 8, 0x1115, b"SQ", 0xFFFFFFFF)
    series = element(0x0020000E, "UI", "1.2.3")
    explicit = start + element(0x00020010, "UI", "1.2.840.10008.1.2.1") + element(0x00080070, "LO", "a maker")
    heads = {
        b"": None,
        b"no DICOM at all" * 20: None,
        start: DicomHeader(True, ""),
        start + series: DicomHeader(True, "1.2.3"),
        start + series[:-3]: DicomHeader(True, "1.2."[:3]),
        start + endless + inner + struct.pack("<HHI", 0xFFFE, 0xE0DD, 0) + series: DicomHeader(True, "1.2.3"),
        start + endless + inner: DicomHeader(True, ""),
        start + element(0x00080070, "UN", bytes(70_000)) + series: DicomHeader(True, "1.2.3"),
        start + endless + endless * 5000 + series: DicomHeader(True, ""),
        explicit + series: DicomHeader(True, "1.2.3"),
        explicit + series.replace(b"UI\6\0", b"U\0\0\0"): DicomHeader(True, ""),  # a type that does not exist
        start + element(0x00200010, "SH", "after it"): DicomHeader(True, ""),
    }
    for content, expected in heads.items():
        (tmp_path / "a.dcm").write_bytes(content)
        assert read_header(tmp_path / "a.dcm") == expected
    with pytest.raises(SlideError, match="cannot be read"):
        SourceStamp.of(tmp_path / "none.dcm")


def test_a_pipe_that_is_named_so_is_no_slide_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.dcm")
    assert read_header(tmp_path / "a.dcm") is None and series_files(tmp_path / "a.dcm") == [tmp_path / "a.dcm"]
