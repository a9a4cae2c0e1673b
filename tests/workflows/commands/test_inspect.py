from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from data.store.slide_store import slide_path
from hyfi_core.errors import RequestError
from pathology.ingest.archive import Request, ingest
from pathology.ingest.options import IngestOptions
from pathology.ingest.slide import ingest_slide
from tests.data.store.test_verify import make_slide
from tests.pathology.readers.facts.test_contradictions import save
from tests.pathology.readers.facts.test_pixel_size import ome
from tests.pathology.tiffs import stained, write_slide
from workflows.commands import inspect


def test_a_path_that_no_disk_takes_is_a_wrong_request(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=os.strerror(errno.ENAMETOOLONG)):
        inspect.run(tmp_path / ("x" * 300), None, as_json=False)


def test_a_picture_that_the_disk_does_not_take_is_a_wrong_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    make_slide(tmp_path / "store", "a")
    monkeypatch.setattr("pathology.ingest.thumbnail.write_atomically", full)
    with pytest.raises(RequestError, match=rf"a\.png: cannot be written \({os.strerror(errno.ENOSPC)}"):
        inspect.run(tmp_path / "store/a.zarr", tmp_path / "a.png", as_json=False)


@pytest.mark.parametrize(
    ("stated", "said"),
    [(None, "the file states none"), (0.00499, "the file says 0.00499 µm/px"), (0.25, None)],
)
def test_the_first_line_has_the_resolution_that_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stated: float | None, said: str | None
) -> None:
    slide = write_slide(tmp_path / "a.tiff", stained(300, 400), mpp=stated)
    assert inspect.run(slide, None, as_json=False, slide_mpp=0.5) == 0
    first, level = capsys.readouterr().out.splitlines()[:2]
    assert first.endswith(f", 0.5 µm/px as given ({said})" if said else ", 0.25 µm/px")
    assert level.endswith(", 0.5 µm/px" if said else ", 0.25 µm/px")


@pytest.mark.parametrize(("silent_px", "says"), [(300 * 400, False), (300 * 400 - 1, True)])
def test_a_slide_without_a_small_level_says_what_is_read(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    silent_px: int,
    says: bool,
) -> None:
    monkeypatch.setattr(inspect, "_SILENT_PX", silent_px)
    assert inspect.run(write_slide(tmp_path / "a.tiff", stained(300, 400)), None, as_json=False) == 0
    assert ("no small level; 0.00012 gigapixels are read" in capsys.readouterr().err) == says


def test_pixel_sizes_that_contradict_each_other_are_in_doubt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slide = save(tmp_path / "a.ome.tif", [stained(300, 400)], 0.25, ome("0.5", size=(300, 400)))
    assert inspect.run(slide, None, as_json=False) == 0
    first, level, *_, note = capsys.readouterr().out.splitlines()
    assert first.endswith("µm/px in doubt") and level.endswith("µm/px in doubt")
    assert "OME-XML says 0.5 µm/px, but the resolution tags say 0.25" in note


def test_the_notes_of_a_file_are_shown_of_its_stored_slide_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = ome("0.5", "碌m", size=(300, 400))
    record = ingest_slide(save(tmp_path / "a.ome.tif", [stained(300, 400)], None, text), tmp_path, IngestOptions(mpp=1))
    assert "mpp_doubtful" in record.flags
    assert inspect.run(slide_path(tmp_path, record.slide_id), None, as_json=False) == 0
    assert "  note      the unit '碌m' is read as µm" in capsys.readouterr().out


def test_outlines_of_a_store_are_written_beside_a_damaged_slide(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first damaged slide ended the command as a wrong request, after some outlines were written."""
    (tmp_path / "slides").mkdir()
    for name in "abc":
        write_slide(tmp_path / "slides" / f"{name}.tiff", stained(300, 400), mpp=0.5)
    store, out = tmp_path / "store", tmp_path / "outlines"
    ingest(Request([tmp_path / "slides"], store, IngestOptions(mpp=0.5)), workers=1)
    (slide_path(store, "b") / "zarr.json").unlink()
    assert inspect.run(store, None, as_json=False, geojson=out) == 1
    assert sorted(path.name for path in out.iterdir()) == ["a.geojson", "c.geojson"]
    assert "b.zarr: no tissue outlines" in capsys.readouterr().err
    assert inspect.run(slide_path(store, "b"), None, as_json=True, geojson=out / "b.geojson") == 1
    said = capsys.readouterr().out
    assert "tissue:" not in said and "drawn" not in said
    (out / "a.geojson").unlink()
    (out / "c.geojson").write_text(edited := "outlines that were edited")
    with pytest.raises(RequestError, match=r"c.geojson exists and has other contents"):
        inspect.run(store, None, as_json=False, geojson=out)
    assert [path.name for path in out.iterdir()] == ["c.geojson"] and (out / "c.geojson").read_text() == edited
