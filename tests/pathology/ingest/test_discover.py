from __future__ import annotations

import errno
import json
import os
import unicodedata
from pathlib import Path

import pytest

from data.files import as_on_disk
from data.store.manifest import DONE, FAILED, load_records
from hyfi_core.errors import RequestError
from pathology.errors import SlideError
from pathology.ingest.archive import IngestOptions, Request, compare_with_store, ingest
from pathology.ingest.discover import find_jobs
from pathology.ingest.slide import ingest_slide
from pathology.readers.sources import open_source
from pathology.tissue.given import GivenTissue
from tests.pathology.readers.dicom_slides import write_series
from tests.pathology.readers.scanners import soft
from tests.pathology.tiffs import MakeSlide, stained, write_slide

AT_HALF = IngestOptions(mpp=0.5)
TOO_LONG = "x" * 300 + ".tiff"


def close_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nobody search the folder; its permissions would not keep root out."""
    scan = os.scandir

    def closed(path: str | Path | int = ".") -> object:  # an int: an open folder, which pytest removes
        if not isinstance(path, int) and Path(path).absolute() == folder:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", closed)


@pytest.mark.parametrize(
    ("rows", "word"),
    [
        (("a.tiff,1,", "a.tiff,2,"), "differ in the column 'label': '1' and '2'"),
        (("a.tiff,1,one", "./a.tiff,1,two"), "differ in the column 'slide_id'"),
    ],
)
def test_rows_that_contradict_each_other_are_refused(tmp_path: Path, rows: tuple[str, ...], word: str) -> None:
    (tmp_path / "m.csv").write_text("\n".join(("path,label,slide_id", *rows)))
    with pytest.raises(RequestError, match=word):
        find_jobs([tmp_path / "m.csv"], {})


def test_the_same_row_twice_is_one_slide(tmp_path: Path) -> None:
    (tmp_path / "a.tiff").touch()
    (tmp_path / "m.csv").write_text("path,label\na.tiff,1\n./a.tiff,1\n")
    (job,) = find_jobs([tmp_path / "m.csv", tmp_path], {})
    assert (job.slide_id, job.row["label"]) == ("a", "1")


def test_a_row_whose_path_no_disk_takes_fails_alone(tmp_path: Path, make_slide: MakeSlide) -> None:
    manifest = make_slide().with_name("m.csv")
    manifest.write_text(f"path\n{TOO_LONG}\na.tiff\n")
    report = ingest(Request([manifest], tmp_path / "store", AT_HALF), workers=1)
    assert [r.slide_id for r in report.done] == ["a"]
    assert [r.reason for r in report.failed] == [f"the file cannot be read: {os.strerror(errno.ENAMETOOLONG)}"]
    again = ingest(Request([manifest], tmp_path / "store", AT_HALF), workers=1)
    assert again.skipped == ["a"] and len(again.failed) == 1


def test_names_that_the_encoding_of_files_lacks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with LC_ALL=C and PYTHONUTF8=0, where the command ended with a traceback."""
    (tmp_path / "m.csv").write_text("path\na.tiff\n\u00e4.tiff\n", encoding="utf-8")
    monkeypatch.setattr(os, "fsencode", lambda name: str(name).encode("ascii"))
    with pytest.raises(RequestError, match=r"m.csv: .*\u00e4.tiff: names of files are in ascii here.*PYTHONUTF8=1"):
        find_jobs([tmp_path / "m.csv"], {})


def test_an_argument_that_no_disk_takes_is_a_wrong_request(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=f"cannot be read .{os.strerror(errno.ENAMETOOLONG)}"):
        find_jobs([tmp_path / TOO_LONG], {})


def test_a_folder_that_cannot_be_searched_fails_until_it_can(
    tmp_path: Path, make_slide: MakeSlide, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive, store = make_slide("a.tiff").parent, tmp_path / "store"
    make_slide("sub/b.tiff")
    close_folder(archive / "sub", monkeypatch)
    report = ingest(Request([archive], store, AT_HALF), workers=1)
    assert [r.slide_id for r in report.done] == ["a"]
    reason = f"the folder cannot be searched for slides: {os.strerror(errno.EACCES)}"
    assert [(r.source_path, r.reason) for r in report.failed] == [(str(archive / "sub"), reason)]
    assert {name: r.status for name, r in load_records(store).items()} == {"a": DONE, "sub": FAILED}
    monkeypatch.undo()
    ingest(Request([archive], store, AT_HALF), workers=1)
    assert {name: r.status for name, r in load_records(store).items()} == {"a": DONE, "b": DONE}


def test_a_closed_folder_as_an_argument_is_a_wrong_request(
    tmp_path: Path, make_slide: MakeSlide, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_slide().parent
    close_folder(folder, monkeypatch)
    with pytest.raises(RequestError, match=os.strerror(errno.EACCES)):
        find_jobs([folder], {})


def test_a_store_is_not_made_among_its_slides(tmp_path: Path) -> None:
    (tmp_path / "dcm" / "deep").mkdir(parents=True)
    slide = tmp_path / "dcm" / "a.tiff"
    slide.touch()
    manifest = tmp_path / "lists" / "manifest.csv"
    manifest.parent.mkdir()
    manifest.write_text(f"path\n{slide}\n")
    dcm = tmp_path / "dcm"
    for paths, store, words in (
        ([dcm], dcm, "is the folder of slides"),
        ([dcm], dcm / "deep" / ".." / "store", "is inside the folder of slides"),
        ([slide], dcm, "a.tiff is in this folder"),
        ([manifest], dcm, "slides are in this folder"),
        ([manifest], manifest.parent, "manifest.csv is in this folder"),
        ([dcm], tmp_path, "slides are in this folder"),
        ([slide], tmp_path, "slides are in this folder"),
    ):
        with pytest.raises(RequestError, match=f"{words}.*; choose an --out outside of the slides' folders"):
            compare_with_store(Request(paths, store, IngestOptions()))
    assert manifest.read_text().startswith("path") and sorted(path.name for path in dcm.iterdir()) == ["a.tiff", "deep"]
    assert len(compare_with_store(Request([dcm, manifest], tmp_path / "store", IngestOptions())).jobs) == 1
    (dcm / "earlier" / ".records").mkdir(parents=True)  # of an earlier version: it may be continued
    assert len(compare_with_store(Request([dcm], dcm / "earlier", IngestOptions())).jobs) == 1


def test_names_of_a_manifest_that_differ_in_spelling(tmp_path: Path, make_slide: MakeSlide) -> None:
    manifest = make_slide("a.tiff").with_name("m.csv")
    for seed, name in enumerate("bc"):
        make_slide(f"{name}.tiff", seed=seed + 1)
    store = tmp_path / "store"

    def request(text: str, **options: bool) -> Request:
        manifest.write_text(text)
        return Request([manifest], store, AT_HALF, **options)

    with pytest.raises(RequestError, match=r"slide_id: .*\n  '07' and '7' differ only in zeros.*\n.*change slide_id"):
        compare_with_store(request("path,slide_id\na.tiff,7\nb.tiff,07\n", merge_alike=True))
    with pytest.raises(RequestError, match=r"case_id: .*\n  'p1' and 'P1' differ only in case"):
        compare_with_store(request("path,case_id\na.tiff,P1\nb.tiff,p1\n"))
    assert not store.exists()
    joined = compare_with_store(request("path,case_id\na.tiff,P1\nb.tiff,p1\nc.tiff,\n", merge_alike=True))
    assert [job.row["case_id"] for job in joined.jobs] == ["P1", "P1", ""]
    assert "read 'p1' as 'P1'" in joined.note and "1 of 3 slides have no case_id" in joined.note
    assert len(ingest(request("path,case_id\na.tiff,P1\n"), workers=1).done) == 1
    with pytest.raises(RequestError, match=r"'p1': the store has 'P1', another case"):
        compare_with_store(request("path,case_id\nb.tiff,p1\n"))
    named = compare_with_store(request("path,case_id\nb.tiff,p1\n", merge_alike=True))
    assert [job.row["case_id"] for job in named.jobs] == ["P1"]


def test_slides_of_one_name_in_one_folder_are_named_by_their_paths_alone(tmp_path: Path, make_slide: MakeSlide) -> None:
    folder = make_slide("x.tif", seed=1).parent
    make_slide("x.tiff", seed=2)
    make_slide("x.ome.tif", seed=3)
    make_slide("y.tif", seed=4)
    make_slide("other/y.tif", seed=5)
    twins = {folder / name: name for name in ("x.tif", "x.tiff", "x.ome.tif")}
    for paths in ([*twins], [*reversed(twins)], [folder], [folder / "x.tiff"], [folder / "x.tif"]):
        found = {job.source: job.slide_id for job in find_jobs(paths, {})}
        assert {source: name for source, name in found.items() if source in twins} == {
            source: name for source, name in twins.items() if source in found
        }
    store = tmp_path / "store"
    for paths, new in (
        ([folder / "x.tiff", folder / "y.tif"], ["x.tiff", "y"]),
        ([folder / "x.tif", folder / "x.tiff"], ["x.tif"]),
        ([folder / "y.tif"], []),
    ):
        assert [record.slide_id for record in ingest(Request(paths, store, AT_HALF), workers=1).done] == new
    plan = compare_with_store(Request([folder], store, AT_HALF))
    assert sorted(plan.finished) == ["x.tif", "x.tiff", "y"]
    other, third = sorted((job.slide_id for job in plan.jobs), reverse=True)
    assert other.startswith("y-") and third == "x.ome.tif"
    by_name = load_records(store)
    assert [by_name[name].source_path for name in ("x.tif", "x.tiff")] == [
        str(folder / "x.tif"),
        str(folder / "x.tiff"),
    ]


def test_names_stay_unique_when_a_file_is_called_like_a_twin(tmp_path: Path) -> None:
    for name in ("x.tif", "x.tiff", "x.tif.svs", "x.tif.ndpi"):
        (tmp_path / name).touch()
    names = [job.slide_id for job in find_jobs([tmp_path], {})]
    assert len(set(names)) == 4 and "x.tiff" in names


def test_names_have_no_white_space_at_their_ends_as_rows_of_tables(tmp_path: Path) -> None:
    for name in (" lead.tiff", "trail .tiff", "trail\u00a0.svs", " .hidden .tif", "in side.tif"):
        (tmp_path / name).write_bytes(b"x")
    names = {job.source.name: job.slide_id for job in find_jobs([tmp_path], {})}
    assert names[" lead.tiff"] == "lead" and names[" .hidden .tif"] == "hidden" and names["in side.tif"] == "in side"
    trails = {names["trail .tiff"], names["trail\u00a0.svs"]}
    assert len(trails) == 2 and all(name.startswith("trail-") for name in trails)  # two slides are not one


def test_names_of_an_earlier_version_stay(tmp_path: Path) -> None:
    for name in ("x.tif", "x.tiff"):
        (tmp_path / name).touch()
    known = {"x": str(tmp_path / "x.tif")}
    assert {job.source.name: job.slide_id for job in find_jobs([tmp_path], known)} == {"x.tif": "x", "x.tiff": "x.tiff"}


def test_slides_of_unread_scanners_are_named_with_their_converter(tmp_path: Path) -> None:
    for name in ("a.vsi", "b.isyntax", "c.sdpc", "d.kfb", "e.ets"):
        (tmp_path / name).write_bytes(b"something")
    assert [job.slide_id for job in find_jobs([tmp_path], {})] == ["a", "b", "c", "d"]
    for name, words in (("a.vsi", "Olympus.*bfconvert"), ("b.isyntax", "Philips.*isyntax"), ("e.ets", r"\.vsi")):
        with pytest.raises(SlideError, match=words):
            open_source(tmp_path / name)


def test_a_name_is_found_in_either_unicode_form(tmp_path: Path) -> None:
    written, listed = (unicodedata.normalize(form, "Köln/Müller-1.tif") for form in ("NFD", "NFC"))
    (tmp_path / written).parent.mkdir(exist_ok=True)
    write_slide(tmp_path / written, stained(300, 300))
    (tmp_path / "m.csv").write_text(f"path,label\n{listed},a\n")
    (job,) = find_jobs([tmp_path / "m.csv"], {})
    assert job.source.is_file() and job.slide_id == "Müller-1"
    assert find_jobs([tmp_path / listed, tmp_path], {}) == find_jobs([tmp_path / written], {})
    assert as_on_disk(tmp_path / listed) == tmp_path / written
    outlines = tmp_path / "outlines" / unicodedata.normalize("NFD", "Müller-1.geojson")
    outlines.parent.mkdir()
    square = [[0, 0], [100, 0], [100, 100], [0, 100], [0, 0]]
    feature = {"type": "Feature", "properties": {}, "geometry": {"type": "Polygon", "coordinates": [square]}}
    outlines.write_text(json.dumps({"type": "FeatureCollection", "features": [feature]}))
    assert GivenTissue(str(outlines.parent)).check(["Müller-1"]) == ""


def test_dicom_without_an_ending_is_found_by_its_content(tmp_path: Path) -> None:
    for path in write_series(tmp_path / "S1", "a", soft(512, 512), "1.2.3", levels=2):
        path.rename(path.with_suffix(""))
    (path,) = write_series(tmp_path / "S2", "b", soft(256, 256), "1.2.4", levels=1)[1:]
    path.rename(path.with_name("1.2.840.10008.77"))
    (tmp_path / "S2" / "README").write_text("no slide")
    jobs = find_jobs([tmp_path], {})
    assert [job.slide_id for job in jobs] == ["S1", "S2"]
    record = ingest_slide(jobs[0].source, tmp_path / "store", IngestOptions(mpp=0.5))
    assert record.status == "done" and record.height_px == 512
