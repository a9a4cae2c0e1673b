from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hyfi_core.plan.box import Box
from pathology.errors import SlideError
from pathology.ingest import staging
from pathology.ingest.staging import files_of, staged
from pathology.readers.sources import open_source
from tests.pathology.tiffs import MakeSlide

SLIDE = Box.of_size(700, 900)


def test_a_slide_is_read_from_its_copy_which_goes_afterwards(tmp_path: Path, make_slide: MakeSlide) -> None:
    path, cache = make_slide("déjà vu.tiff"), tmp_path / "cache" / "deep"
    with staged(path, cache) as local:
        assert local != path and local.name == path.name and cache in local.parents
        assert local.read_bytes() == path.read_bytes()
        assert np.array_equal(open_source(local).read(SLIDE, 0), open_source(path).read(SLIDE, 0))
    assert list(cache.iterdir()) == [] and path.exists()


def test_the_copy_goes_when_the_slide_fails(tmp_path: Path, make_slide: MakeSlide) -> None:
    with pytest.raises(RuntimeError), staged(make_slide(), tmp_path / "cache"):
        raise RuntimeError
    assert list((tmp_path / "cache").iterdir()) == []


def test_an_mrxs_comes_with_its_folder(tmp_path: Path) -> None:
    (tmp_path / "far" / "a" / "deep").mkdir(parents=True)
    for name, text in (
        ("a.mrxs", "index"),
        ("a/Slidedat.ini", "dat"),
        ("a/deep/Data0000.dat", "x" * 100),
        ("b.mrxs", ""),
    ):
        (tmp_path / "far" / name).write_text(text)
    with staged(tmp_path / "far" / "a.mrxs", tmp_path / "cache") as local:
        root = local.parent
        found = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
        assert found == ["a.mrxs", "a/Slidedat.ini", "a/deep/Data0000.dat"]
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_vms_comes_with_the_files_that_it_names_and_no_others(tmp_path: Path) -> None:
    for name in ("a(0,0).jpg", "a_map.jpg", "other.jpg"):
        (tmp_path / name).write_bytes(b"j")
    (tmp_path.parent / "outside.jpg").write_bytes(b"o")
    text = "[Virtual Microscope Specimen]\nNoLayers=1\nImageFile=a(0,0).jpg\nMapFile=a_map.jpg\n"
    text += "MacroImage=../outside.jpg\n"
    (tmp_path / "a.vms").write_text(text)
    assert [path.name for path in files_of(tmp_path / "a.vms")] == ["a.vms", "a(0,0).jpg", "a_map.jpg"]


def test_what_does_not_fit_is_read_where_it_is(
    tmp_path: Path, make_slide: MakeSlide, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cache = make_slide(), tmp_path / "cache"
    with staged(path, cache, spare_bytes=2**62) as local:
        assert local == path

    def full(source: Path, target: Path) -> None:
        target.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(staging, "_copy", full)
    with staged(path, cache) as local:
        assert local == path
        assert list(cache.iterdir()) == []


def test_what_a_killed_run_left_is_removed_and_what_a_living_one_uses_is_not(
    tmp_path: Path, make_slide: MakeSlide
) -> None:
    child = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    host = socket.gethostname()
    dead, living = (
        tmp_path / f"hyfi-stage-{host}-{int(child.stdout)}-x",
        tmp_path / f"hyfi-stage-{host}-{os.getppid()}-x",
    )
    elsewhere, foreign = tmp_path / f"hyfi-stage-not-{host}-{int(child.stdout)}-x", tmp_path / "mine"
    for folder in (dead, living, elsewhere, foreign):
        folder.mkdir()
        (folder / "slide").touch()
    with staged(make_slide(), tmp_path):
        assert not dead.exists() and living.exists() and elsewhere.exists() and foreign.exists()


def test_a_slide_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(SlideError, match="cannot be read"), staged(tmp_path / "nothing.svs", tmp_path / "cache"):
        pass
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_slide_that_changes_while_it_is_copied_is_told(
    tmp_path: Path, make_slide: MakeSlide, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read = make_slide(), os.pread

    def grows(handle: int, length: int, offset: int) -> bytes:
        data = read(handle, length, offset)
        with path.open("ab") as file:
            file.write(b"x" if offset == 0 else b"")
        return data

    monkeypatch.setattr(staging.os, "pread", grows)
    monkeypatch.setattr(staging, "_BLOCK_BYTES", path.stat().st_size)
    os.utime(path, ns=(0, 0))
    with pytest.raises(SlideError, match="changed"), staged(path, tmp_path / "cache"):
        pass
    assert list((tmp_path / "cache").iterdir()) == []
