"""Many runs over one archive: each slide once, names that do not collide, parts that fit together, damage told."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tifffile

from data.store.manifest import DONE, FAILED, load_manifest, load_records, record_state
from data.store.slide_store import SlideStore, slide_path
from hyfi_core.errors import RequestError
from pathology.claims import Claim, ClaimLostError
from pathology.ingest import archive, discover, forecast
from pathology.ingest import pool as slide_pool
from pathology.ingest.archive import IngestOptions, IngestReport, Request, compare_with_store, ingest, ingest_slide
from pathology.ingest.discover import SlideJob, part_of_names
from pathology.ingest.work import CLAIMS, do_job
from pathology.memory import WORKER_BYTES, parse_bytes, worker_count
from pathology.readers.facts.pictures import Pick
from tests.conftest import ROOT
from tests.pathology.tiffs import MakeSlide, stained, write_slide
from tests.patience import PATIENCE_S

AT_HALF = IngestOptions(mpp=0.5)


def run(paths: list[Path], store: Path, options: IngestOptions = AT_HALF, **how: object) -> IngestReport:
    return ingest(Request(paths, store, options, **how), workers=1)  # type: ignore[arg-type]


def shards(store: Path) -> dict[str, bytes]:
    return {f.relative_to(store).as_posix(): f.read_bytes() for f in store.glob("*.zarr/**/c/**/*") if f.is_file()}


def test_two_runs_at_once_do_each_slide_once_and_both_end_with_all(tmp_path: Path) -> None:
    folder, store = tmp_path / "archive", tmp_path / "store"
    folder.mkdir()
    for k in range(6):
        write_slide(folder / f"{k}.tiff", stained(700, 700, k), mpp=None if k == 5 else 0.5, compression="jpeg")
    words = ["ingest", str(folder), "--out", str(store), "--mpp", "0.5", "--workers", "1", "--json"]
    command, environment = [sys.executable, "-m", "workflows.cli", *words], os.environ | {"PYTHONPATH": str(ROOT)}
    started = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in "12"]
    ended = [process.communicate(timeout=PATIENCE_S) for process in started]
    told = [json.loads(out.splitlines()[-1]) for out, _ in ended]
    done = Counter(name for one in told for name in one["done"])
    assert done == {str(k): 1 for k in range(5)}, [error for _, error in ended]
    for one in told:
        assert sorted(one["done"] + one["skipped"]) == ["0", "1", "2", "3", "4"]
        assert [failed["slide_id"] for failed in one["failed"]] == ["5"]
    assert len(load_manifest(store)) == len((store / "manifest.csv").read_text().splitlines()) - 1 == 6
    assert not list((store / CLAIMS).iterdir())


def test_a_slide_that_another_run_finishes_while_this_one_plans_is_not_ingested_again(
    tmp_path: Path, make_slide: MakeSlide, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, store = make_slide("0.tiff"), tmp_path / "store"

    def find_jobs(paths: list[Path], known: dict[str, str], scene: str, store: Path) -> list[SlideJob]:
        assert not known and ingest_slide(source, store, AT_HALF, slide_id="0").status == DONE
        return discover.find_jobs(paths, known, scene, store)

    monkeypatch.setattr(archive, "find_jobs", find_jobs)
    report = run([source], store)
    assert not report.done and report.skipped == ["0"]


def test_a_slide_that_another_run_has_is_waited_for(
    tmp_path: Path, make_slide: MakeSlide, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slide_pool, "_POLL_S", 0.01)
    sources, store = [make_slide(f"{k}.tiff", seed=k) for k in range(2)], tmp_path / "store"
    plan = compare_with_store(Request(sources, store, AT_HALF))
    other = Claim.take(store / CLAIMS, "0")
    assert other is not None
    told: list[str] = []

    def finished(outcome: object) -> None:
        told.append(outcome.record.slide_id)  # type: ignore[attr-defined]
        if told == ["1"]:  # the other run finishes slide 0 now
            assert ingest_slide(sources[0], store, AT_HALF, slide_id="0").status == DONE
            other.release()

    report = ingest(Request(sources, store, AT_HALF), workers=1, finished=finished, work=plan)  # type: ignore[arg-type]
    assert told == ["1", "0"] and [r.slide_id for r in report.done] == ["1"] and report.skipped == ["0"]


def test_a_run_that_lost_its_claim_publishes_nothing(tmp_path: Path, make_slide: MakeSlide) -> None:
    def lost(share: float) -> None:
        if share == 1.0:
            raise ClaimLostError("slide")

    with pytest.raises(ClaimLostError):
        ingest_slide(make_slide(), tmp_path / "store", AT_HALF, progress=lost)
    assert not slide_path(tmp_path / "store", "a").exists() and not load_records(tmp_path / "store")


def test_what_another_run_made_with_other_parameters_is_told(tmp_path: Path, make_slide: MakeSlide) -> None:
    source, store = make_slide(), tmp_path / "store"
    (job,) = compare_with_store(Request([source], store, AT_HALF)).jobs
    ingest_slide(source, store, IngestOptions(mpp=1.0))
    outcome = do_job(job, store, AT_HALF, 1, lambda share: None)
    assert outcome is not None and not outcome.ours and outcome.record.status == FAILED
    assert "mpp: 1.0 → 0.5" in outcome.record.reason and load_records(store)["a"].status == DONE


def test_the_same_name_given_meanwhile_to_a_slide_elsewhere(tmp_path: Path, make_slide: MakeSlide) -> None:
    first, second, store = make_slide("one/x.tiff"), make_slide("two/x.tiff", seed=1), tmp_path / "store"
    (job,) = compare_with_store(Request([second], store, AT_HALF)).jobs
    assert job.slide_id == "x"
    assert ingest_slide(first, store, AT_HALF, slide_id="x").status == DONE
    outcome = do_job(job, store, AT_HALF, 1, lambda share: None)
    assert outcome is not None and outcome.ours and outcome.record.slide_id.startswith("x-")
    assert {r.source_path for r in load_records(store).values()} == {str(first), str(second)}
    assert run([first.parent, second.parent], store).skipped == ["x", outcome.record.slide_id]
    named = replace(job, row={"slide_id": "x"})
    outcome = do_job(named, store, AT_HALF, 1, lambda share: None)
    assert outcome is not None and outcome.record.status == FAILED and "it must be unique" in outcome.record.reason


def test_a_slide_never_takes_the_place_of_another_of_its_name_in_silence(tmp_path: Path, make_slide: MakeSlide) -> None:
    """Two hospitals number their slides from 1: labels of the one were joined to pixels of the other."""
    store, manifests = tmp_path / "store", [tmp_path / f"{place}.csv" for place in ("one", "two")]
    slides = [make_slide(f"{place}/x.tiff", seed=k) for k, place in enumerate(("one", "two"))]
    for slide, manifest in zip(slides, manifests, strict=True):
        manifest.write_text(f"path,slide_id,label\n{slide},7,{slide.parent.name}\n")
    run([manifests[0]], store)
    before = shards(store)
    refused = rf"'7' is {slides[0]} in the store, and {slides[1]} has other content.*--overwrite"
    with pytest.raises(RequestError, match=refused):
        run([manifests[1]], store)
    slides[0].unlink()
    with pytest.raises(RequestError, match=refused):
        run([manifests[1]], store)
    # Nor do columns of a row whose file is not there.
    moved = slides[1].rename(slides[1].with_name("y.tiff"))
    assert "ingested again" not in compare_with_store(Request([manifests[1]], store, AT_HALF)).note
    (failed,) = run([manifests[1]], store).failed
    assert "No such file" in failed.reason
    assert shards(store) == before and load_manifest(store)[0]["label"] == "one"
    moved.rename(slides[1])
    assert len(run([manifests[1]], store, overwrite=True).done) == 1
    assert shards(store) != before and load_manifest(store)[0]["label"] == "two"


def test_files_that_were_scanned_again_are_named(tmp_path: Path, make_slide: MakeSlide) -> None:
    source, store = make_slide(), tmp_path / "store"
    run([source], store)
    make_slide(seed=5)
    assert compare_with_store(Request([source], store, AT_HALF)).note.endswith("any more: a")
    moved = source.rename(source.with_name("b.tiff"))
    manifest = tmp_path / "m.csv"
    manifest.write_text(f"path,slide_id\n{moved},a\n")
    with pytest.raises(RequestError, match="other content"):
        run([manifest], store)
    assert len(run([manifest], store, overwrite=True).done) == 1
    moved.rename(source)
    manifest.write_text(f"path,slide_id\n{source},a\n")
    assert run([manifest], store).skipped == ["a"]  # the same content at another place


def test_parts_are_disjoint_and_make_the_whole(tmp_path: Path, make_slide: MakeSlide) -> None:
    sources = [make_slide(f"{k}.tiff", seed=k) for k in range(5)]
    names = [f"slide-{k}" for k in range(4000)]
    parts = Counter(part for part in (1, 2, 3, 4) for _ in part_of_names(names, part, 4))
    assert parts.keys() == {1, 2, 3, 4} and min(parts.values()) > 900
    assert [len(part_of_names(names[:12], part, 4)) for part in (1, 2, 3, 4)] == [3, 3, 3, 3]
    assert part_of_names(names, 1, 3) == part_of_names(reversed(names), 1, 3)
    assert part_of_names(["anything"], 1, 1) == {"anything"}
    jobs = [compare_with_store(Request(sources, tmp_path / "store", AT_HALF, part=(k, 3))).jobs for k in (1, 2, 3)]
    assert sorted(job.slide_id for part in jobs for job in part) == ["0", "1", "2", "3", "4"]
    for k in (3, 1, 2):
        run(sources, tmp_path / "store", part=(k, 3))
    assert len(load_manifest(tmp_path / "store")) == 5


def garbage_in_a_tile(path: Path) -> None:
    with tifffile.TiffFile(path) as tiff:
        offset = tiff.pages[0].dataoffsets[5]
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\x99" * 40)


def zeroed_tail(path: Path) -> None:
    with tifffile.TiffFile(path) as tiff:
        page = tiff.pages[0]
        last, length = page.dataoffsets[-1], page.databytecounts[-1]
        middle = page.dataoffsets[4]
    with path.open("r+b") as file:
        file.seek(middle)
        file.write(bytes(last + length - middle))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 3)


def only_text(path: Path) -> None:
    path.write_text("This is no slide.\n" * 100)
    path.rename(path.with_suffix(".svs"))


def index_without_its_folder(path: Path) -> None:
    path.write_bytes(b"\xff\xd8\xff\xe0" + bytes(2000))
    path.rename(path.with_suffix(".mrxs"))


def link_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def nothing(path: Path) -> None:
    path.write_bytes(b"")


def pipe(path: Path) -> None:
    """To open one is to wait until somebody writes into it."""
    path.unlink()
    os.mkfifo(path)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "garbage": (garbage_in_a_tile, "decode"),
    "zeros": (zeroed_tail, "decode"),
    "cut": (cut, "truncated|damaged|cannot"),
    "text": (only_text, "not|no reader|cannot"),
    "folderless": (index_without_its_folder, "folder|cannot|not"),
    "looped": (link_to_itself, "symbolic links"),
    "empty": (nothing, "empty"),
    "pipe": (pipe, "not a regular file"),
}


def test_each_damage_is_named_and_the_good_ones_are_done(tmp_path: Path, hyfi: Callable[..., object]) -> None:
    folder, store = tmp_path / "archive", tmp_path / "store"
    folder.mkdir()
    image = stained(900, 900)
    for name in ("good", "gut, schön – 良い", *DAMAGES):
        write_slide(folder / f"{name}.tiff", image, compression="jpeg", levels=2)
    write_slide(folder / "mpp zero.tiff", image, mpp=None)
    with tifffile.TiffFile(folder / "mpp zero.tiff", mode="r+b") as tiff:
        tiff.pages[0].tags[282].overwrite((0, 1))
        tiff.pages[0].tags[283].overwrite((0, 1))
    for name, (damage, _) in DAMAGES.items():
        damage(folder / f"{name}.tiff")
    (folder / "around").symlink_to(folder)
    unreadable = folder / "locked.tiff"
    shutil.copy(folder / "good.tiff", unreadable)
    unreadable.chmod(0)
    told = hyfi("ingest", folder, "--out", "store", "--mpp", "0.5", "--workers", "2", "--json")
    assert told.returncode == 1 and "Traceback" not in told.stderr, told.stderr  # type: ignore[attr-defined]
    records = load_records(store)
    good = {"good", "gut, schön – 良い"} | ({"locked"} if os.access(unreadable, os.R_OK) else set())
    assert {name for name, r in records.items() if r.status == DONE} == good
    assert records.keys() == good | DAMAGES.keys() | {"mpp zero", "locked"}
    expected = {name: words for name, (_, words) in DAMAGES.items()} | {"mpp zero": "--slide-mpp"}
    for name, words in expected.items():
        reason = records[name].reason
        assert any(word in reason for word in words.split("|")), (name, reason)
        assert f"{name}." in told.stderr and reason in told.stderr  # type: ignore[attr-defined]
    assert {p.name for p in store.iterdir() if p.name.endswith(".zarr")} == {f"{name}.zarr" for name in good}
    sheet = (store / "contact.html").read_text()
    assert f"Failed ({len(records) - len(good)})" in sheet and "gut, schön" in sheet


def test_a_folder_that_takes_no_more_ends_the_run(
    tmp_path: Path, make_slide: MakeSlide, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [make_slide(f"{k}.tiff", seed=k) for k in range(2)]
    monkeypatch.setattr(forecast, "free_bytes", lambda folder: 1000)
    report = run(sources, tmp_path / "store")
    assert not report.done and not report.failed
    assert "disk full" in report.stopped and "0.001 MB are free" in report.stopped
    # How small JPEG is, or a slide without its glass, nobody knows before.
    small = run(sources[:1], tmp_path / "jpeg", replace(AT_HALF, codec="jpeg:80"))
    assert f"needs at least {forecast.size_text(forecast.RESERVE_BYTES)}" in small.stopped
    monkeypatch.undo()
    assert len(run(sources, tmp_path / "store").done) == 2


def test_an_error_of_the_sources_disk_fails_the_slide_alone(
    tmp_path: Path, make_slide: MakeSlide, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pathology.ingest import slide as module

    opened = module.open_source

    def failing(path: Path, pick: Pick) -> object:
        if path.name == "0.tiff":
            raise OSError(5, "Input/output error", str(path))
        return opened(path, pick)

    monkeypatch.setattr(module, "open_source", failing)
    report = run([make_slide(f"{k}.tiff", seed=k) for k in range(2)], tmp_path / "store")
    assert [r.slide_id for r in report.done] == ["1"] and not report.stopped
    assert report.failed[0].reason == "the file cannot be read: Input/output error"


def test_a_slide_beside_the_store_is_not_in_it_though_their_paths_begin_alike(
    tmp_path: Path, make_slide: MakeSlide, monkeypatch: pytest.MonkeyPatch
) -> None:
    def removed(path: Path, pick: Pick) -> object:
        raise OSError(errno.ENOENT, "No such file or directory", str(tmp_path / "store-slides" / path.name))

    monkeypatch.setattr("pathology.ingest.slide.open_source", removed)
    report = run([make_slide("a.tiff")], tmp_path / "store")
    assert not report.stopped and [record.slide_id for record in report.failed] == ["a"]


def test_bad_tiles_beyond_a_stricter_limit_are_not_skipped(tmp_path: Path, make_slide: MakeSlide) -> None:
    source, store = make_slide(compression="jpeg"), tmp_path / "store"
    garbage_in_a_tile(source)
    record = run([source], store, replace(AT_HALF, max_bad=0.5)).done[0]
    assert record.bad_tiles == 1 and record.tiles == 12 and record.bad_share == pytest.approx(1 / 12)
    row = load_manifest(store)[0]
    assert row["bad_share"] == "0.0833333" and row["tiles"] == "12"
    assert run([source], store, replace(AT_HALF, max_bad=0.2)).skipped == ["a"]
    with pytest.raises(RequestError, match="bad tiles"):
        run([source], store, AT_HALF)


def test_the_digest_is_compared_only_when_the_time_differs(
    tmp_path: Path, make_slide: MakeSlide, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, store = make_slide(), tmp_path / "store"
    run([source], store)
    read: list[Path] = []
    monkeypatch.setattr("pathology.ingest.archive.source_digest", lambda path: read.append(path) or "other")
    assert run([source], store).skipped == ["a"] and not read
    os.utime(source)
    assert len(compare_with_store(Request([source], store, AT_HALF)).jobs) == 1 and read == [source]


def test_a_shard_that_is_finished_is_not_written_again(tmp_path: Path, make_slide: MakeSlide) -> None:
    image = np.full((4300, 4200, 3), 243, np.uint8)
    image[500:3000, 500:3000] = stained(5000, 5000, 1)[1250:3750, 1250:3750]
    source, store = write_slide(tmp_path / "a.tiff", image, compression="jpeg"), tmp_path / "store"
    times: dict[str, int] = {}

    def stop_late(share: float) -> None:
        if share > 0.98:
            part = next(store.glob(".a.zarr.part-*"))
            ended = time.monotonic() + PATIENCE_S
            while not times and time.monotonic() < ended:
                time.sleep(0.01)  # the disk may take its time; nobody waits for it
                lines = (part / "journal.jsonl").read_text().split("\n")[:-1]
                names = [json.loads(line)["name"] for line in lines if line]
                times.update({name: (part / name).stat().st_mtime_ns for name in names})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ingest_slide(source, store, AT_HALF, progress=stop_late)
    assert times
    assert ingest_slide(source, store, AT_HALF).status == DONE
    after = {name: (slide_path(store, "a") / name).stat().st_mtime_ns for name in times}
    assert after == times
    whole = ingest_slide(source, tmp_path / "other", AT_HALF)
    assert whole.status == DONE and shards(tmp_path / "other") == shards(store)
    assert (
        SlideStore.open(slide_path(store, "a")).attributes["tissue"]
        == (SlideStore.open(slide_path(tmp_path / "other", "a")).attributes["tissue"])
    )


def test_memory_decides_how_many_work(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [parse_bytes(t) for t in ("8GB", "8 GiB", "1.5g", "800M", "77")] == [
        8 * 10**9,
        2**33,
        15 * 10**8,
        8 * 10**8,
        77,
    ]
    assert worker_count(8, 3 * WORKER_BYTES) == 3 and worker_count(2, 30 * WORKER_BYTES) == 2
    for text in ("lots", "8 apples", "-1GB"):
        with pytest.raises(RequestError, match="8GB"):
            parse_bytes(text)
    with pytest.raises(RequestError, match="one worker needs"):
        worker_count(1, WORKER_BYTES // 2)
    monkeypatch.setattr("pathology.memory.available_bytes", lambda: 5 * WORKER_BYTES)
    assert worker_count(64, None) == 4


def test_a_records_state_changes_with_each_save(tmp_path: Path, make_slide: MakeSlide) -> None:
    assert record_state(tmp_path, "a") == ""
    record = ingest_slide(make_slide(), tmp_path / "store", AT_HALF)
    before = record_state(tmp_path / "store", "a")
    record.save(tmp_path / "store")
    assert before and record_state(tmp_path / "store", "a") != before
