from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer.main

from data.store.manifest import load_manifest
from tests.conftest import ROOT, Hyfi
from tests.pathology.tiffs import stained, write_slide
from tests.patience import PATIENCE_S
from workflows.cli import app
from workflows.commands.ingest import Pace, _unread_manifest_note, duration


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """A folder with two slides and one that does not state its mpp."""
    folder = tmp_path / "archive"
    folder.mkdir()
    for name, mpp in (("a", 0.5), ("b", 0.5), ("unknown", None)):
        write_slide(folder / f"{name}.tiff", stained(1000, 1000), mpp=mpp, levels=2)
    return folder


def test_ingest_names_what_failed_and_goes_on_next_time(hyfi_here: Hyfi, archive: Path, tmp_path: Path) -> None:
    first = hyfi_here("ingest", archive, "--out", "store", "--workers", "1", "--json")
    assert first.returncode == 1
    assert "unknown.tiff" in first.stderr and "--slide-mpp" in first.stderr and "Traceback" not in first.stderr
    assert "note: the same content (source files that are equal byte by byte): a, b\n" in first.stderr
    told = json.loads(first.stdout.splitlines()[-1])
    assert told["done"] == ["a", "b"] and told["failed"][0]["slide_id"] == "unknown"
    second = hyfi_here(
        "ingest", archive, "--out", "store", "--slide-mpp", "0.5", "--workers", "1", "--resume", "--json"
    )
    assert second.returncode == 0, second.stderr
    told = json.loads(second.stdout.splitlines()[-1])
    assert told["skipped"] == ["a", "b"] and told["done"] == ["unknown"]
    third = hyfi_here("ingest", archive, "--out", "store", "--mpp", "2")
    assert third.returncode == 2 and "mpp: 1.0 → 2.0" in third.stderr and "--overwrite" in third.stderr
    shown = hyfi_here("inspect", "store", "--png", "sheet.png", "--json")
    assert shown.returncode == 0, shown.stderr
    assert {s["slide_id"]: s["status"] for s in json.loads(shown.stdout.splitlines()[-1])["slides"]} == {
        "a": "done",
        "b": "done",
        "unknown": "done",
    }
    assert (tmp_path / "sheet.png").read_bytes().startswith(b"\x89PNG")


def test_an_mpp_that_is_not_used_is_named(
    archive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("workflows.cli.exit_with", lambda command, **how: command())
    command = typer.main.get_command(app).commands["ingest"]  # type: ignore[attr-defined]
    words = [str(archive), "--out", "store", "--slide-mpp", "0.25", "--workers", "1"]
    for _ in range(2):  # also of slides that an earlier run has finished
        command.main(words, standalone_mode=False)
        said = capsys.readouterr().err
        assert said.count("--slide-mpp 0.25 was not used for 2 slides") == 1 and "(a: 0.5); --force-mpp" in said
    command.main([*words, "--overwrite", "--force-mpp"], standalone_mode=False)
    assert "was not used" not in capsys.readouterr().err


def test_a_dry_run_writes_nothing(hyfi_here: Hyfi, archive: Path, tmp_path: Path) -> None:
    told = hyfi_here("ingest", archive, "--out", "store", "--dry-run", "--json")
    assert told.returncode == 1 and "unknown.tiff" in told.stderr
    numbers = json.loads(told.stdout.splitlines()[-1])
    assert numbers["slides"] == 2 and numbers["source_px"] == 2 * 500 * 500 and numbers["store_bytes"] > 0
    assert not (tmp_path / "store").exists()


def test_every_flag_does_what_it_says(hyfi_here: Hyfi, archive: Path, tmp_path: Path) -> None:
    (archive / "unknown.tiff").unlink()
    common = ("ingest", archive, "--workers", "1", "--json")
    flags = (
        "--crop-tissue",
        "--glass",
        "blank",
        "--unsharded",
        "--codec",
        "jpeg:90",
        "--icc",
        "apply",
        "--cache",
        "near",
    )
    told = hyfi_here(*common, "--out", "one", "--mpp", "0.5", *flags)
    assert told.returncode == 0, told.stderr
    facts = json.loads((tmp_path / "one/a.zarr/zarr.json").read_text())["attributes"]["hyfi"]
    asked = {"crop_tissue": True, "glass": "blank", "sharded": False, "codec": "jpeg:90", "icc": "apply"}
    assert asked.items() <= facts["parameters"].items() and not list((tmp_path / "near").iterdir())
    again = hyfi_here(*common, "--out", "one", "--mpp", "0.5")
    assert again.returncode == 2 and "glass: blank → None" in again.stderr
    parts = [hyfi_here(*common, "--out", "two", "--part", f"{k}/2", "--pseudonyms", "key.csv") for k in (1, 2)]
    done = [name for part in parts for name in json.loads(part.stdout.splitlines()[-1])["done"]]
    assert len(done) == 2 and all(name.startswith("s-") for name in done)
    said = "".join(part.stdout + part.stderr for part in parts)
    assert "a.tiff" not in said and "a.tiff" in (tmp_path / "key.csv").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nothing.svs", "--out", "store"), "no such file"),
        ((".", "--out", "store"), "no slide in this folder"),
        (("archive", "--out", "store", "--codec", "gzip"), "zstd:1"),
        (("archive", "--out", "store", "--glass", "tinted"), "blank"),
        (("archive", "--out", "store", "--icc", "maybe"), "apply"),
        (("archive", "--out", "store", "--lossless", "--crop-tissue"), "leave --crop-tissue out"),
        (("archive", "--out", "store", "--part", "3/2"), "1/4"),
        (("archive", "--out", "store", "--memory", "10MB"), "one worker needs"),
        (("archive", "--out", "store", "--pseudonyms", "store/key.csv"), "inside the store"),
        (("archive", "--out", "store", "--cache", "file"), "file is a file; choose a folder for --cache"),
        (("archive", "--out", "file/store"), "file/store"),
    ],
)
def test_wrong_requests_exit_2_and_write_nothing(
    hyfi_here: Hyfi, archive: Path, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    (tmp_path / "file").touch()
    if said.startswith("no slide"):
        for slide in archive.iterdir():
            slide.unlink()
    told = hyfi_here("ingest", *words)
    assert told.returncode == 2 and said in told.stderr and "Traceback" not in told.stderr
    assert not (tmp_path / "store").exists() and not (tmp_path / "key.csv").exists()


def test_inspect_shows_a_file_and_an_ingested_slide(hyfi_here: Hyfi, archive: Path, tmp_path: Path) -> None:
    file = hyfi_here("inspect", archive / "a.tiff", "--png", "file.png", "--json")
    assert file.returncode == 0, file.stderr
    facts = json.loads(file.stdout.splitlines()[-1])
    assert facts["levels"][1]["height_px"] == 500 and 0.2 < facts["tissue"]["fraction"] < 0.4
    assert hyfi_here("ingest", archive / "a.tiff", "--out", "store", "--workers", "1").returncode == 0
    slide = hyfi_here("inspect", "store/a.zarr", "--png", "slide.png", "--json")
    facts = json.loads(slide.stdout.splitlines()[-1])
    assert facts["levels"][0] == {"height_px": 500, "width_px": 500, "mpp": [1.0, 1.0]}
    assert "a: resampled" in slide.stdout
    assert (tmp_path / "file.png").exists() and (tmp_path / "slide.png").exists()
    (tmp_path / "store/a.zarr/0/c/0/0/0").unlink()
    for of in ("store", "store/a.zarr"):
        damaged = hyfi_here("inspect", of, "--json")
        assert damaged.returncode == 1 and "0/c/0/0/0" in damaged.stdout
        assert json.loads(damaged.stdout.splitlines()[-1])["status"] == "damaged"
    refused = hyfi_here("inspect", archive / "b.tiff", "--png", archive)
    assert refused.returncode == 2 and "is a folder" in refused.stderr and "Traceback" not in refused.stderr
    assert hyfi_here("inspect", "nothing").returncode == 2
    (tmp_path / "empty.svs").touch()
    empty = hyfi_here("inspect", "empty.svs")
    assert empty.returncode == 1 and "empty" in empty.stderr


def test_sigterm_ends_cleanly_and_the_same_command_goes_on(tmp_path: Path) -> None:
    folder, store = tmp_path / "archive", tmp_path / "store"
    folder.mkdir()
    for k in range(12):
        write_slide(folder / f"{k:02}.tiff", stained(1500, 1500, k), compression="jpeg")
    words = ["ingest", str(folder), "--out", str(store), "--mpp", "0.5", "--workers", "2", "--json"]
    command = [sys.executable, "-m", "workflows.cli", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, text=True, **pipes)  # type: ignore[call-overload]
    while not list(store.glob(".records/*.json")):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    printed, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 3, said
    report = json.loads(printed.splitlines()[-1])
    assert report["stopped"] == "on request" and "run the same command to continue" in printed
    assert [p.name for p in store.iterdir() if ".tmp-" in p.name] == []
    finished = {row["slide_id"] for row in load_manifest(store)}
    assert 0 < len(finished) < 12 and finished >= set(report["done"])
    assert subprocess.run(command, cwd=tmp_path, env=environment, check=False).returncode == 0
    assert len(load_manifest(store)) == 12


def test_the_pace_weighs_slides_by_their_bytes(tmp_path: Path) -> None:
    from pathology.ingest.discover import SlideJob

    small, large = tmp_path / "s", tmp_path / "l"
    small.write_bytes(bytes(1000))
    large.write_bytes(bytes(9000))
    pace = Pace([SlideJob(small, "s"), SlideJob(large, "l")])
    assert pace.done([1.0, 0.0]) == pytest.approx(0.1) and pace.done([1, 1]) == 1 and Pace([]).done([]) == 1
    assert pace.at_work([1.0, 0.5]) == "l" and pace.at_work([0.1, 0.5]) == "s and 1 more"
    assert pace.at_work([1.0, 1.0]) == pace.at_work([1.0, 0.0]) == ""
    assert pace.text(0.0) == "" and pace.text(0.5).endswith(" s left") and pace.text(1.0).endswith(" MB/s")
    assert [duration(s) for s in (40, 720, 12_000)] == ["40 s", "12 min", "3 h 20 min"]


def test_a_manifest_that_is_not_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "manifest.csv").write_text("path,label\n")
    assert "manifest.csv is not read" in _unread_manifest_note(tmp_path)
    (tmp_path / ".records").mkdir()  # a store's own
    assert [_unread_manifest_note(path) for path in (tmp_path, tmp_path / "manifest.csv", tmp_path / "none")] == [
        ""
    ] * 3
