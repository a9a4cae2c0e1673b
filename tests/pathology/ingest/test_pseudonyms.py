from __future__ import annotations

import csv
import errno
import os
import stat
import tempfile
from pathlib import Path

import numpy as np
import pytest
import tifffile

from data.store.manifest import DONE, FAILED, load_manifest, load_records
from hyfi_core.errors import RequestError
from pathology.ingest.archive import IngestOptions, Request, compare_with_store, ingest
from pathology.ingest.discover import SlideJob
from pathology.ingest.pseudonyms import KeyFile, scrubbed
from tests.pathology.tiffs import MakeSlide, stained

AT_HALF = IngestOptions(mpp=0.5)
NAME, DAY, PLACE, CASE = "Jane-Doe-1961", "2019:05:17 08:30:00", "Ward-Seven-B", "Case-99-Q"


def personal_slide(path: Path, good: bool = True) -> Path:
    """Write a slide whose name, place, tags, description and label picture all tell of a person."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = stained(600, 700)
    description = f"Aperio Image Library v1\r\n700x600 (256x256)|AppMag = 20|MPP = 0.5|User = {NAME}|Date = {DAY}"
    tags = [(315, "s", 0, NAME, True), (316, "s", 0, PLACE, True), (33432, "s", 0, DAY, True)]
    with tifffile.TiffWriter(path) as tiff:
        tiff.write(
            image,
            tile=(256, 256),
            photometric="rgb",
            description=description,
            software=NAME,
            datetime=DAY,
            metadata=None,
            compression="jpeg",
            extratags=tags,
        )
        tiff.write(image[:300, :300], photometric="rgb", description=f"label {NAME}", metadata=None, subfiletype=1)
    if not good:
        path.write_bytes(f"{NAME} {DAY} is no slide at all".encode())
    return path


def archive(folder: Path) -> Path:
    """Return a manifest of two slides of one person and a file that is none."""
    for name, good in ((f"{NAME}-1.svs", True), (f"{NAME}-2.svs", True), (f"broken {NAME}.svs", False)):
        personal_slide(folder / PLACE / name, good)
    rows = [f"{PLACE}/{NAME}-1.svs,{NAME}-1,{CASE},benign,{NAME},{DAY}", f"{PLACE}/{NAME}-2.svs,,{CASE},benign,,"]
    rows.append(f"{PLACE}/broken {NAME}.svs,,other-{CASE},,,")
    manifest = folder / "slides.csv"
    manifest.write_text("path,slide_id,case_id,label,patient,born\n" + "\n".join(rows) + "\n")
    return manifest


def run(manifest: Path, store: Path, key: Path) -> object:
    return ingest(Request([manifest], store, AT_HALF, pseudonyms=key), workers=1)


@pytest.mark.parametrize("told", [NAME, DAY, DAY[:10], PLACE, CASE, "Jane", "no slide at all"])
def test_nothing_that_tells_of_a_person_is_in_any_byte_of_the_store(
    personal_store: tuple[Path, Path, Path], told: str
) -> None:
    manifest, store, _ = personal_store
    found = [str(f) for f in store.rglob("*") if told in str(f.relative_to(store))]
    found += [str(f) for f in store.rglob("*") if f.is_file() and told.lower().encode() in f.read_bytes().lower()]
    assert not found
    times = {str(f.stat().st_mtime_ns).encode() for f in manifest.parent.rglob("*.svs")}
    records = b"".join(f.read_bytes() for f in (store / ".records").iterdir())
    assert not any(time in records for time in times)


@pytest.fixture(scope="module")
def personal_store(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    folder = tmp_path_factory.mktemp("people")
    manifest, store, key = archive(folder / "archive"), folder / "store", folder / "key.csv"
    run(manifest, store, key)
    return manifest, store, key


def test_the_key_leads_back_and_is_its_owners_alone(personal_store: tuple[Path, Path, Path]) -> None:
    _, store, key = personal_store
    assert stat.S_IMODE(key.stat().st_mode) == 0o600 and not list(key.parent.glob(".key*"))
    rows = {row["slide_id"]: row for row in csv.DictReader(key.open())}
    records = load_records(store)
    assert rows.keys() == records.keys() and len(rows) == 3
    assert sorted(r.status for r in records.values()) == [DONE, DONE, FAILED]
    first = next(row for row in rows.values() if row["source_path"].endswith("-1.svs"))
    assert (first["real_slide_id"], first["real_case_id"], first["patient"], first["born"]) == (
        f"{NAME}-1",
        CASE,
        NAME,
        DAY,
    )
    record = records[first["slide_id"]]
    assert (
        record.source_path == "" and record.extra["label"] == "benign" and record.extra["case_id"] == first["case_id"]
    )
    cases = {row["case_id"] for row in rows.values()}
    assert len(cases) == 2 and all(case.startswith("c-") and CASE not in case for case in cases)


def test_a_second_run_gives_the_same_names_and_does_nothing(personal_store: tuple[Path, Path, Path]) -> None:
    manifest, store, key = personal_store
    before = key.read_bytes()
    report = ingest(Request([manifest], store, AT_HALF, pseudonyms=key), workers=1)
    assert len(report.skipped) == 2 and not report.done and len(report.failed) == 1 and key.read_bytes() == before
    with pytest.raises(RequestError, match="--pseudonyms KEY"):
        compare_with_store(Request([manifest], store, AT_HALF))
    with pytest.raises(RequestError, match="inside the store"):
        compare_with_store(Request([manifest], store, AT_HALF, pseudonyms=store / "sub" / "key.csv"))
    other = compare_with_store(Request([manifest], store, AT_HALF, pseudonyms=key.with_name("other.csv")))
    assert {job.slide_id for job in other.jobs}.isdisjoint(load_records(store)) and not other.finished


def test_a_store_of_real_names_takes_no_pseudonyms(tmp_path: Path, make_slide: MakeSlide) -> None:
    source = make_slide()
    ingest(Request([source], tmp_path / "store", AT_HALF), workers=1)
    with pytest.raises(RequestError, match="own names"):
        compare_with_store(Request([source], tmp_path / "store", AT_HALF, pseudonyms=tmp_path / "key.csv"))


def test_a_key_that_cannot_be_written_is_refused_before_anything_is(
    tmp_path: Path, make_slide: MakeSlide, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = tempfile.TemporaryFile

    def read_only(dir: Path) -> object:
        if Path(dir) == tmp_path:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return make(dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", read_only)
    with pytest.raises(RequestError, match=os.strerror(errno.EROFS)):
        ingest(Request([make_slide()], tmp_path / "store", AT_HALF, pseudonyms=tmp_path / "key.csv"), workers=1)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("cell", [NAME, "19610517"])
def test_what_is_no_mpp_stays_out_of_the_store(tmp_path: Path, make_slide: MakeSlide, cell: str) -> None:
    manifest, store = make_slide().with_name("m.csv"), tmp_path / "store"
    manifest.write_text(f"path,source_mpp\na.tiff,{cell}\n")
    report = ingest(Request([manifest], store, AT_HALF, pseudonyms=tmp_path / "key.csv"), workers=1)
    assert len(report.failed) == 1 and "source_mpp" in report.failed[0].reason
    assert not [f for f in store.rglob("*") if f.is_file() and cell.encode() in f.read_bytes()]


def test_what_is_no_key_is_left_alone(tmp_path: Path, make_slide: MakeSlide) -> None:
    key = tmp_path / "key.csv"
    key.write_text("a,b\n1,2\n")
    with pytest.raises(RequestError, match="not a key of an earlier ingest"):
        compare_with_store(Request([make_slide()], tmp_path / "store", AT_HALF, pseudonyms=key))
    assert key.read_text() == "a,b\n1,2\n"


@pytest.mark.parametrize("secrets", [("one", "another"), ("one", ""), ("",)])
def test_a_key_without_one_secret_in_all_rows_is_refused(
    tmp_path: Path, make_slide: MakeSlide, secrets: tuple[str, ...]
) -> None:
    key = tmp_path / "key.csv"
    rows = [f"s-{k},,{secret},/a/{k}.svs,{k}," for k, secret in enumerate(secrets)]
    key.write_text("slide_id,case_id,secret,source_path,real_slide_id,real_case_id\n" + "\n".join(rows) + "\n")
    with pytest.raises(RequestError, match="the column secret is empty, or differs"):
        compare_with_store(Request([make_slide()], tmp_path / "store", AT_HALF, pseudonyms=key))


def test_of_two_runs_that_begin_together_the_slower_takes_the_fasters_names(tmp_path: Path) -> None:
    jobs = [SlideJob(tmp_path / f"{k}.svs", str(k), {"case_id": "one"}) for k in range(3)]
    fast, slow = (KeyFile(tmp_path / "key.csv", tmp_path / "store") for _ in range(2))
    given, lost = fast.pseudonymise(jobs), slow.pseudonymise(jobs[1:])
    assert given[1].slide_id != lost[0].slide_id
    assert fast.commit() and not slow.commit()
    assert slow.pseudonymise(jobs[1:]) == given[1:] and slow.commit()
    later = KeyFile(tmp_path / "key.csv", tmp_path / "store")
    more = later.pseudonymise([SlideJob(tmp_path / "9.svs", "9", {"case_id": "one"})])
    assert more[0].row["case_id"] == given[0].row["case_id"] and later.commit()
    assert len(list(csv.DictReader((tmp_path / "key.csv").open()))) == 4


def test_a_moved_slide_keeps_its_pseudonym(tmp_path: Path, make_slide: MakeSlide) -> None:
    source, key, store = make_slide("one/a.tiff"), tmp_path / "key.csv", tmp_path / "store"
    first = ingest(Request([source], store, AT_HALF, pseudonyms=key), workers=1).done[0].slide_id
    moved = source.parent.parent / "two"
    source.parent.rename(moved)
    assert ingest(Request([moved], store, AT_HALF, pseudonyms=key), workers=1).skipped == [first]
    assert [row["source_path"] for row in csv.DictReader(key.open())] == [str(moved / "a.tiff")]


def test_another_patients_file_of_the_same_name_does_not_get_the_pseudonym(
    tmp_path: Path, make_slide: MakeSlide
) -> None:
    first, key, store = make_slide("one/1.tiff"), tmp_path / "key.csv", tmp_path / "store"
    ingest(Request([first], store, AT_HALF, pseudonyms=key), workers=1)
    second, before = make_slide("two/1.tiff", seed=3), key.read_bytes()
    first.unlink()
    with pytest.raises(RequestError, match=r"two/1.tiff has the name of .*one/1.tiff, which is gone"):
        ingest(Request([second], store, AT_HALF, pseudonyms=key), workers=1)
    assert key.read_bytes() == before
    other = second.rename(second.with_name("2.tiff"))
    ingest(Request([other], store, AT_HALF, pseudonyms=key), workers=1)
    assert len(list(csv.DictReader(key.open()))) == len(load_manifest(store)) == 2


def test_reasons_are_scrubbed(tmp_path: Path) -> None:
    source = tmp_path / PLACE / f"{NAME}.svs"
    reason = f"{source}: not a TIFF, header=b'Jane', beside {source.parent}/other.dat, {source.stem} 'said {DAY}'"
    clean = scrubbed(reason, source, "s-1")
    assert all(word not in clean for word in (NAME, PLACE, DAY, "Jane", str(tmp_path))) and "not a TIFF" in clean
    assert np.char.startswith(clean, "s-1")
