from __future__ import annotations

import csv
import errno
import json
import os
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest

from data.store.manifest import DONE, FAILED, load_manifest, load_records, record_path
from data.store.slide_store import SlideStore, slide_path
from data.store.writer import SlideWriter
from hyfi_core.errors import RequestError
from hyfi_core.plan.box import Box
from pathology.ingest.archive import IngestOptions, IngestReport, Request, ingest, ingest_slide
from pathology.ingest.discover import SlideJob
from pathology.ingest.pool import SlidePool
from pathology.ingest.work import Outcome
from pathology.readers.openslide_source import OpenSlideSource
from tests.pathology.tiffs import MakeSlide, halved, write_slide

AT_HALF = IngestOptions(mpp=0.5)


def run(
    paths: list[Path], store: Path, options: IngestOptions = AT_HALF, workers: int = 1, **how: object
) -> IngestReport:
    return ingest(Request(paths, store, options, **how), workers=workers)  # type: ignore[arg-type]


def digests(store: Path) -> dict[str, str]:
    return {f.relative_to(store).as_posix(): f.read_bytes().hex() for f in store.rglob("c/**/*") if f.is_file()}


def test_at_the_sources_own_mpp_the_pixels_are_the_sources(tmp_path: Path, make_slide: MakeSlide) -> None:
    source = make_slide(compression="jpeg", levels=2)
    record = ingest_slide(source, tmp_path / "store", AT_HALF)
    assert record.status == DONE and (record.height_px, record.width_px) == (700, 900)
    slide = SlideStore.open(slide_path(tmp_path / "store", "a"))
    pixels = OpenSlideSource(source).read(Box(0, 700, 0, 900), 0)
    assert np.array_equal(slide.read(Box(0, 700, 0, 900)), pixels.transpose(2, 0, 1))
    assert np.array_equal(slide.read(Box(0, 350, 0, 450), 1), halved(pixels).transpose(2, 0, 1))
    tissue, mpp = slide.tissue()
    assert mpp == (8.0, 8.0) and 0.2 < tissue.mean() < 0.35 and tissue[22, 28] and not tissue[3, 3]


def test_a_level_within_a_hundredth_of_what_is_asked_is_not_resampled(tmp_path: Path, make_slide: MakeSlide) -> None:
    source = make_slide(mpp=0.499, compression="jpeg", levels=2)
    pixels = OpenSlideSource(source).read(Box(0, 700, 0, 900), 0).transpose(2, 0, 1)
    for name, options in (("near", AT_HALF), ("native", IngestOptions(native=True)), ("far", IngestOptions(mpp=0.51))):
        record = ingest_slide(source, tmp_path / name, options)
        slide = SlideStore.open(slide_path(tmp_path / name, "a"))
        own = name != "far"
        assert record.store_mpp == pytest.approx(0.499 if own else 0.51, rel=1e-6)
        assert (record.height_px == 700) == own
        assert not own or np.array_equal(slide.read(Box(0, 700, 0, 900)), pixels)


def test_provenance_is_kept(tmp_path: Path, make_slide: MakeSlide) -> None:
    source = make_slide(mpp=0.25, levels=3)
    ingest_slide(source, tmp_path / "store", IngestOptions(mpp=1.0))
    facts = SlideStore.open(slide_path(tmp_path / "store", "a")).attributes
    assert facts["source"]["level_used"] == 2 and facts["source"]["vendor"] == "generic-tiff"
    assert facts["source"]["mpp"] == pytest.approx([0.25, 0.25])
    assert facts["affine"] == pytest.approx(np.array([[4, 0, 0], [0, 4, 0]]))
    assert facts["size_bytes"] == source.stat().st_size and facts["mtime_ns"] == source.stat().st_mtime_ns
    assert facts["kind"] == "resampled" and len(facts["sha256"]) == 64 and facts["versions"]["zarr"]
    assert all(len(shard["sha256"]) == 64 for shard in facts["shards"].values())


@pytest.mark.parametrize("mpp", [0.37, 0.5, 1.0, 2.3])
def test_crosses_stay_within_half_a_pixel_on_all_levels(tmp_path: Path, mpp: float) -> None:
    image = np.full((2048, 2304, 3), 255, np.uint8)
    centres = [(y, x) for y in range(128, 2048, 256) for x in range(128, 2304, 256)]
    for y, x in centres:
        image[y - 3 : y + 3, x - 24 : x + 24] = 0
        image[y - 24 : y + 24, x - 3 : x + 3] = 0
    write_slide(tmp_path / "crosses.tiff", image, mpp=0.25, levels=3)
    ingest_slide(tmp_path / "crosses.tiff", tmp_path / "store", IngestOptions(mpp=mpp))
    slide = SlideStore.open(slide_path(tmp_path / "store", "crosses"))
    checked = 0
    for k, level in enumerate(slide.levels):
        if level.mpp[0] > 8:
            continue
        dark = 255.0 - slide.read(Box.of_size(level.height_px, level.width_px), k)[0]
        scale, reach = 0.25 / level.mpp[0], int(32 / level.mpp[0])
        for y, x in centres:
            expected = np.array([y, x]) * scale
            y0, x0 = np.maximum(expected.astype(int) - reach, 0)
            window = dark[y0 : y0 + 2 * reach + 1, x0 : x0 + 2 * reach + 1]
            rows, columns = np.mgrid[: window.shape[0], : window.shape[1]] + 0.5
            found = np.array([y0 + (window * rows).sum() / window.sum(), x0 + (window * columns).sum() / window.sum()])
            assert np.abs(found - expected).max() < 0.5, (k, y, x)
            checked += 1
    assert checked >= 2 * len(centres)


@pytest.mark.parametrize(
    ("asked", "level", "upsampled"), [(1.0, 1, False), (0.99, 1, False), (0.5, 0, False), (0.48, 0, True)]
)
def test_the_coarsest_level_that_is_fine_enough_is_read(
    tmp_path: Path,
    make_slide: MakeSlide,
    asked: float,
    level: int,
    upsampled: bool,
) -> None:
    record = ingest_slide(make_slide(levels=3), tmp_path / "store", IngestOptions(mpp=asked))
    facts = SlideStore.open(slide_path(tmp_path / "store", "a")).attributes
    assert facts["source"]["level_used"] == level and ("upsampled" in record.flags) is upsampled
    assert facts["mpp"] == [asked, asked] and record.height_px == round(700 * 0.5 / asked)


@pytest.mark.parametrize("size", [(701, 903), (702, 901), (1023, 517)])
def test_the_last_row_and_column_of_odd_slides_are_there(
    tmp_path: Path, make_slide: MakeSlide, size: tuple[int, int]
) -> None:
    source = make_slide(size=size, levels=2)
    ingest_slide(source, tmp_path / "store", IngestOptions(mpp=1.0))
    slide = SlideStore.open(slide_path(tmp_path / "store", "a"))
    height, width = slide.levels[0].height_px, slide.levels[0].width_px
    assert abs(height - size[0] / 2) <= 0.5 and abs(width - size[1] / 2) <= 0.5
    for level in slide.levels:
        pixels = slide.read(Box.of_size(level.height_px, level.width_px), int(level.path))
        assert (pixels[:, -1] == 243).all() and (pixels[:, :, -1] == 243).all()


def test_a_source_too_coarse_is_refused_with_what_would_work(tmp_path: Path, make_slide: MakeSlide) -> None:
    record = ingest_slide(make_slide(), tmp_path / "store", IngestOptions(mpp=0.25))
    assert record.status == FAILED and "--mpp 0.5" in record.reason
    assert not slide_path(tmp_path / "store", "a").exists()


def test_a_bad_slide_fails_alone_with_its_reason(tmp_path: Path, make_slide: MakeSlide) -> None:
    make_slide("good.tiff")
    no_mpp = make_slide("no_mpp.tiff", mpp=None)
    (no_mpp.parent / "empty.svs").touch()
    report = run([no_mpp.parent], tmp_path / "store")
    assert [r.slide_id for r in report.done] == ["good"]
    assert {r.slide_id: r.reason.split(";")[0] for r in report.failed} == {
        "no_mpp": "the file does not state its microns per pixel",
        "empty": "the file is empty (0 bytes)",
    }
    rows = {row["slide_id"]: row for row in load_manifest(tmp_path / "store")}
    assert rows["no_mpp"]["status"] == FAILED and "--slide-mpp" in rows["no_mpp"]["reason"]
    again = run([no_mpp.parent], tmp_path / "store", IngestOptions(mpp=0.5, slide_mpp=0.5))
    assert again.skipped == ["good"] and [r.flags for r in again.done] == [("mpp_assumed",)]


def test_the_manifest_gives_mpp_names_and_columns(tmp_path: Path, make_slide: MakeSlide) -> None:
    folder = make_slide("x.tiff", mpp=None).parent
    make_slide("y.tiff", mpp=0.5)
    manifest = folder / "slides.csv"
    text = "path,slide_id,source_mpp,case_id,label\nx.tiff,first,0.5,c1,benign\ny.tiff,second,0.3,c2,malignant\n"
    manifest.write_text(text)
    report = run([manifest], tmp_path / "store")
    assert [r.slide_id for r in report.done] == ["first"] and "by more than 5 %" in report.failed[0].reason
    rows = {row["slide_id"]: row for row in load_manifest(tmp_path / "store")}
    assert rows["first"]["label"] == "benign" and rows["second"]["case_id"] == "c2"
    manifest.write_text(text.replace("benign", "other").replace(",0.3,", ",,"))
    again = run([manifest], tmp_path / "store")
    assert again.skipped == ["first"] and [r.slide_id for r in again.done] == ["second"]
    rows = {row["slide_id"]: row for row in load_manifest(tmp_path / "store")}
    assert rows["first"]["label"] == "other"


def test_a_second_run_skips_and_touches_nothing(tmp_path: Path, make_slide: MakeSlide) -> None:
    source, store = make_slide(), tmp_path / "store"
    run([source], store)
    compiled = {"manifest.csv", "contact.html"}
    before = {f: f.stat().st_mtime_ns for f in store.rglob("*") if f.is_file() and f.name not in compiled}
    assert run([source], store).skipped == ["a"]
    os.utime(source)  # a new time, the same content
    assert run([source], store).skipped == ["a"]
    after = {f: f.stat().st_mtime_ns for f in before}
    changed = {f.name for f in before if before[f] != after[f]}
    assert changed == {"a.json"} and load_records(store)["a"].identity["mtime_ns"] == source.stat().st_mtime_ns


def test_a_changed_source_is_done_again(tmp_path: Path, make_slide: MakeSlide) -> None:
    source, store = make_slide(compression=None), tmp_path / "store"
    run([source], store)
    before = digests(store)
    size = source.stat().st_size
    assert make_slide(compression=None, seed=5).stat().st_size == size
    assert [r.slide_id for r in run([source], store).done] == ["a"]
    assert digests(store) != before


def test_other_parameters_are_refused_with_the_difference(tmp_path: Path, make_slide: MakeSlide) -> None:
    source, store = make_slide(), tmp_path / "store"
    run([source], store)
    before = digests(store)
    with pytest.raises(RequestError, match=r"mpp: 0\.5 → 1\.0.*--overwrite"):
        run([source], store, IngestOptions(mpp=1.0))
    with pytest.raises(RequestError, match=r"codec: zstd:1 → zstd:5"):
        run([source], store, IngestOptions(mpp=0.5, codec="zstd:5"))
    assert digests(store) == before
    assert len(run([source], store, IngestOptions(mpp=1.0), overwrite=True).done) == 1
    assert SlideStore.open(slide_path(store, "a")).levels[0].mpp == (1.0, 1.0)


def test_a_finished_slide_survives_a_failing_repetition(tmp_path: Path, make_slide: MakeSlide) -> None:
    source, store = make_slide(), tmp_path / "store"
    run([source], store)
    source.write_bytes(b"")
    report = run([source], store)
    assert len(report.failed) == 1 and load_records(store)["a"].status == DONE
    SlideStore.open(slide_path(store, "a"))
    (row,) = csv.DictReader((store / "manifest.csv").open())
    assert row["status"] == DONE and "ingesting it again failed: the file is empty" in row["reason"]
    make_slide()
    assert run([source], store).skipped == ["a"] and load_records(store)["a"].reason == ""


@pytest.mark.parametrize("damage", ["delete", "truncate", "remove", "forget"])
def test_a_damaged_slide_is_made_again(tmp_path: Path, make_slide: MakeSlide, damage: str) -> None:
    source, store = make_slide(), tmp_path / "store"
    run([source], store)
    before, shard = digests(store), slide_path(store, "a") / "0/c/0/0/0"
    written = shard.stat().st_mtime_ns
    if damage == "delete":
        shard.unlink()
    elif damage == "truncate":
        shard.write_bytes(b"")
    elif damage == "remove":
        shutil.rmtree(slide_path(store, "a"))
    else:  # killed between publishing and the record
        record_path(store, "a").unlink()
    assert [r.slide_id for r in run([source], store).done] == ["a"]
    assert digests(store) == before and load_records(store)["a"].status == DONE
    if damage == "forget":
        assert shard.stat().st_mtime_ns == written


def test_same_names_in_different_folders_do_not_collide(tmp_path: Path, make_slide: MakeSlide) -> None:
    first, second = make_slide("one/x.tiff"), make_slide("two/x.tiff", seed=1)
    store = tmp_path / "store"
    run([first], store)
    assert load_records(store).keys() == {"x"}
    report = run([first.parent.parent], store)
    assert report.skipped == ["x"] and len(report.done) == 1
    assert {r.source_path for r in load_records(store).values()} == {str(first), str(second)}
    assert len(run([second.parent, first], store).skipped) == 2
    both = run([first.parent, second.parent], tmp_path / "other")
    assert len({r.slide_id for r in both.done}) == 2 and all(r.slide_id.startswith("x-") for r in both.done)


def test_folders_are_searched_once_links_and_unicode_included(tmp_path: Path, make_slide: MakeSlide) -> None:
    source = make_slide("déjà vu/スライド 1.tiff")
    (source.parent / "loop").symlink_to(source.parent.parent)
    (source.parent / ".hidden.tiff").touch()
    report = run([source.parent.parent], tmp_path / "store")
    assert [r.slide_id for r in report.done] == ["スライド 1"] and not report.failed


def test_damaged_tiles_are_counted_and_allowed_by_max_bad(tmp_path: Path, make_slide: MakeSlide) -> None:
    import tifffile

    source = make_slide(compression="jpeg")
    with tifffile.TiffFile(source) as tiff:
        offset = tiff.pages[0].dataoffsets[5]
    data = bytearray(source.read_bytes())
    data[offset : offset + 30] = b"\x99" * 30
    source.write_bytes(data)
    assert "decode" in run([source], tmp_path / "strict").failed[0].reason
    assert run([source], tmp_path / "few", IngestOptions(mpp=0.5, max_bad=0.05)).failed
    record = run([source], tmp_path / "store", IngestOptions(mpp=0.5, max_bad=0.1)).done[0]
    assert record.bad_tiles == 1 and "bad_tiles" in record.flags
    pixels = SlideStore.open(slide_path(tmp_path / "store", "a")).read(Box(256, 512, 256, 512))
    good = OpenSlideSource(source).read(Box(256, 512, 512, 768), 0).transpose(2, 0, 1)
    assert (pixels == 255).all()
    found = SlideStore.open(slide_path(tmp_path / "store", "a")).read(Box(256, 512, 512, 768))
    assert np.array_equal(found, good)


def test_nothing_that_names_a_person_enters_the_store(tmp_path: Path) -> None:
    import tifffile

    secret = "Jane-Doe-1961"
    description = f"Aperio Image Library v1\r\n700x700 (256x256)|AppMag = 20|MPP = 0.5|User = {secret}|Date = {secret}"
    image = np.full((700, 700, 3), 200, np.uint8)
    folder = tmp_path / secret
    folder.mkdir()
    with tifffile.TiffWriter(folder / "a.svs") as tiff:
        tiff.write(
            image, tile=(256, 256), photometric="rgb", description=description, metadata=None, compression="jpeg"
        )
        tiff.write(image[:300, :300], photometric="rgb", description=f"label {secret}", metadata=None, subfiletype=1)
    run([folder / "a.svs"], tmp_path / "store")
    assert load_records(tmp_path / "store")["a"].status == DONE
    zarr = slide_path(tmp_path / "store", "a")
    assert json.loads((zarr / "zarr.json").read_text())["attributes"]["hyfi"]["source"]["objective_power"] == 20
    for file in zarr.rglob("*"):
        assert secret not in str(file.relative_to(zarr)) and (file.is_dir() or secret.encode() not in file.read_bytes())


def test_workers_give_the_same_store_and_fail_alone(tmp_path: Path, make_slide: MakeSlide) -> None:
    for k in range(4):
        make_slide(f"{k}.tiff", seed=k)
    folder = make_slide("bad.tiff", mpp=None).parent
    one, two = run([folder], tmp_path / "one"), run([folder], tmp_path / "two", workers=2)
    assert sorted(r.slide_id for r in two.done) == sorted(r.slide_id for r in one.done) == ["0", "1", "2", "3"]
    assert [r.slide_id for r in two.failed] == ["bad"]
    assert digests(tmp_path / "one") == digests(tmp_path / "two")


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, ["No space left"]),
        (errno.EMFILE, ["Too many open files", "may have 20", "ulimit -n 1024", "--workers 1"]),
    ],
)
def test_a_full_disk_or_too_many_open_files_stop_all_and_keep_what_is_finished(
    number: int, words: list[str], tmp_path: Path, make_slide: MakeSlide, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, store = make_slide("a.tiff").parent, tmp_path / "store"
    for name in ("b.tiff", "c.tiff"):
        make_slide(name)
    write = SlideWriter.write

    def full(writer: SlideWriter, level: int, y0: int, x0: int, block: np.ndarray) -> None:
        if writer.final.name == "b.zarr" and level == 1:
            raise OSError(number, os.strerror(number))
        write(writer, level, y0, x0, block)

    monkeypatch.setattr(SlideWriter, "write", full)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (20, 4096))
    report = run([folder], store)
    assert [r.slide_id for r in report.done] == ["a"] and all(word in report.stopped for word in words)
    assert sorted(p.name for p in store.iterdir()) == [
        ".claims",
        ".records",
        "a.zarr",
        "contact",
        "contact.html",
        "manifest.csv",
    ]
    assert not list((store / ".claims").iterdir())
    monkeypatch.undo()
    again = run([folder], store)
    assert again.skipped == ["a"] and len(again.done) == 2


def test_what_a_reader_did_not_foresee_fails_its_slide_alone(
    tmp_path: Path, make_slide: MakeSlide, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: Path, pick: object) -> None:
        raise KeyError("PhotometricInterpretation")

    monkeypatch.setattr("pathology.ingest.slide.open_source", broken)
    report = run([make_slide()], tmp_path / "store")
    assert report.failed[0].reason == "KeyError: 'PhotometricInterpretation'"


class Bomb:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> tuple[object, ...]:
        return os._exit, (1,)


def test_a_slide_that_kills_its_worker_fails_alone(tmp_path: Path, make_slide: MakeSlide) -> None:
    jobs = [SlideJob(make_slide(f"{k}.tiff"), str(k)) for k in range(3)]
    jobs.insert(1, SlideJob(make_slide("bad.tiff"), "bad", {"path": Bomb()}))  # type: ignore[dict-item]
    outcomes: list[Outcome] = []
    store = tmp_path / "store"
    store.mkdir()
    SlidePool(store, AT_HALF, 2, outcomes.append).run(jobs)
    assert {o.record.slide_id: o.record.status for o in outcomes} == {"0": DONE, "1": DONE, "2": DONE, "bad": FAILED}
    assert "died" in load_records(store)["bad"].reason


@pytest.mark.parametrize(
    ("paths", "word"), [(["nothing.svs"], "no such file"), (["empty"], "no slide in this folder"), (["m.csv"], "path")]
)
def test_wrong_requests_write_nothing(tmp_path: Path, paths: list[str], word: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "m.csv").write_text("slide_id\n1\n")
    with pytest.raises(RequestError, match=word):
        run([tmp_path / p for p in paths], tmp_path / "store")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    "options", [{"mpp": 0.0}, {"slide_mpp": 99}, {"codec": "jpeg:0"}, {"max_bad": 2}, {"glass": "x"}]
)
def test_options_out_of_range_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(RequestError, match="expected"):
        IngestOptions(**options)  # type: ignore[arg-type]


def test_a_store_that_cannot_be_written_is_refused(tmp_path: Path, make_slide: MakeSlide) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match="file"):
        run([make_slide()], tmp_path / "file" / "store")
    with pytest.raises(RequestError, match="is a file"):
        run([make_slide()], tmp_path / "file")


@pytest.mark.slides
def test_the_real_slides(tmp_path: Path, real_slides: Path) -> None:
    report = run([real_slides], tmp_path / "store", IngestOptions(mpp=4.0, slide_mpp=0.5))
    done = {r.slide_id: r for r in report.done}
    failed = {r.slide_id: r.reason for r in report.failed}
    assert {"CMU-1-Small-Region", "TCGA-CR-7395-01A-01-TS1", "atlas_breast-lobular_HE_10x"} <= done.keys()
    assert {"truncated", "zero_bytes", "png_named"} == failed.keys()
    assert "truncated" in failed["truncated"] and "empty" in failed["zero_bytes"] and "PNG" in failed["png_named"]
    assert 0.35 < (done["CMU-1-Small-Region"].tissue_fraction or 0) < 0.5
    assert 0.06 < (done["atlas_breast-lobular_HE_10x"].tissue_fraction or 0) < 0.13
