"""The functions of `pathology` for scripts, beside packages of similar names."""

from __future__ import annotations

import csv
import inspect
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn

import data
import pathology
from hyfi_core.errors import RequestError
from hyfi_core.models.by_name import build_model
from tests.conftest import ROOT
from tests.pathology.slides import draw_slide, write_slide
from tests.patience import PATIENCE_S
from tests.workflows.predictions import MODEL, save

CALLABLE = "assert callable(pathology.ingest_slides) and callable(pathology.predict_slides)\n"


@pytest.fixture(scope="module")
def slide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_slide(tmp_path_factory.mktemp("slides") / "one.tiff", draw_slide())


def test_the_functions_are_there_whatever_is_imported_between() -> None:
    between = "import pathology.ingest.discover, pathology.predict.colors; from pathology import ingest, predict\n"
    program = f"import sys\nimport pathology\n{CALLABLE}{between}{CALLABLE}"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr


def test_asking_for_the_functions_is_light() -> None:
    names = "pathology.ingest_slides, pathology.predict_slides, pathology.open_slide"
    program = f"import pathology, sys\n{names}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert not set(done.stdout.split()) & {"torch", "numpy", "zarr", "tifffile", "openslide", "mpi4py"}


def test_signatures_are_those_of_the_functions() -> None:
    assert list(inspect.signature(pathology.ingest_slides).parameters)[:2] == ["paths", "store"]
    assert list(inspect.signature(pathology.predict_slides).parameters)[:3] == ["checkpoints", "slides", "out"]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        pathology.nothing  # type: ignore[attr-defined]


def test_a_slide_is_ingested_read_and_predicted(slide: Path, tmp_path: Path) -> None:
    report = pathology.ingest_slides(slide, tmp_path / "store", mpp=1.0)
    assert [record.slide_id for record in report.done] == ["one"] and not report.failed
    again = pathology.ingest_slides([str(slide)], str(tmp_path / "store"), mpp=1.0)
    assert again.skipped == ["one"] and not again.done
    assert data.open_store(tmp_path / "store", "one").read(data.Box(0, 20, 0, 30), 0).shape == (3, 20, 30)
    checkpoint = save(tmp_path / "checkpoint")
    predicted = pathology.predict_slides(checkpoint, [tmp_path / "store"], tmp_path / "out")
    (row,) = csv.DictReader((tmp_path / "out" / "predictions.csv").open(newline=""))
    (done,) = predicted.done
    assert (row["slide_id"], row["prediction"], row["status"]) == ("one", done.prediction, "done") and done.prediction
    assert (tmp_path / "out" / "one" / "heatmap.tiff").is_file()


def test_a_given_module_takes_the_weights_of_each_checkpoint_and_stays_as_it_was(slide: Path, tmp_path: Path) -> None:
    checkpoints = [save(tmp_path / name, seed) for seed, name in enumerate(("first", "second"))]
    torch.manual_seed(5)
    module = build_model(MODEL)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    given = pathology.predict_slides(checkpoints, slide, tmp_path / "given", model=module)
    built = pathology.predict_slides([str(path) for path in checkpoints], [slide], tmp_path / "built")
    assert given.done[0].values == built.done[0].values
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    with pytest.raises(RequestError, match="first: its weights do not match its model"):
        pathology.predict_slides(checkpoints, slide, tmp_path / "other", model=nn.Linear(2, 2))


def test_wrong_requests_are_named_and_write_nothing(slide: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"no option 'mmp'; the options are mpp, "):
        pathology.ingest_slides(slide, tmp_path / "store", mmp=1.0)
    with pytest.raises(RequestError, match="no paths were given"):
        pathology.ingest_slides([], tmp_path / "store")
    with pytest.raises(RequestError, match="no option 'mmp'"):
        pathology.predict_slides(save(tmp_path / "checkpoint"), slide, tmp_path / "out", mmp=1.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]


def test_type_checkers_read_the_annotations_of_installed_packages() -> None:
    shipped = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for package in ("hyfi_core", "data", "pathology", "workflows"):
        assert "py.typed" in shipped[package] and (ROOT / package / "py.typed").is_file()


def test_a_folder_for_copies_may_be_a_string(slide: Path, tmp_path: Path) -> None:
    """Every slide failed with an AttributeError."""
    report = pathology.ingest_slides(slide, tmp_path / "store", mpp=1.0, cache=str(tmp_path / "cache"))
    assert [record.status for record in report.done] == ["done"] and not report.failed
