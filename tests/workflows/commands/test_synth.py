"""``hyfi synth``: what it writes, says and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hyfi_core.errors import RequestError
from workflows.commands.synth import run


def test_draws_says_and_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a" / "slides"
    assert run(out, 1, 512, 4, False, False, True) == 0
    assert sorted(p.name for p in out.iterdir()) == ["manifest.csv", "slide-0000.tiff"]
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer == {"manifest": str(out / "manifest.csv"), "slides": 1, "cases": 1, "size_px": 512, "seed": 4}


def test_refuses_a_file_as_folder_and_writes_nothing(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("mine")
    with pytest.raises(RequestError, match="is a file"):
        run(taken, 1, 512, 0, False, False, False)
    assert taken.read_text() == "mine"


def test_a_manifest_of_own_slides_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "manifest.csv").write_text("path,slide_id,label\nslide-0000.tiff,a,benign\n")
    (tmp_path / "slide-0000.tiff").write_text("mine")
    with pytest.raises(RequestError, match="is not a manifest of synthetic slides"):
        run(tmp_path, 1, 512, 0, False, False, False)
    assert (tmp_path / "slide-0000.tiff").read_text() == "mine"
    (tmp_path / "manifest.csv").write_text("path,slide_id,case_id,label,split,source_mpp,months,died\n")
    assert run(tmp_path, 1, 512, 0, False, False, False) == 0  # again, as with another seed


def test_refuses_numbers_before_it_makes_the_folder(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="--slides"):
        run(tmp_path / "new", 0, 512, 0, False, False, False)
    assert list(tmp_path.iterdir()) == []
