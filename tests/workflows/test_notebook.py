"""The notebook of the docs runs, and what it shows is a picture of the slide with its heatmap."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import data
import pathology
import workflows
from hyfi_core.errors import RequestError
from tests.workflows.archive import SPLITS, make_config, make_store
from tests.workflows.runs import run_here

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebook.ipynb"


def run_cells(path: Path) -> list[Any]:
    """Run a notebook's cells of code one after the other; return the value of the last expression of each."""
    values: list[Any] = []
    names: dict[str, Any] = {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            *body, last = ast.parse("".join(cell["source"])).body
            assert isinstance(last, ast.Expr)
            exec(compile(ast.Module(body, []), str(path), "exec"), names)
            values.append(eval(compile(ast.Expression(last.value), str(path), "eval"), names))
    return values


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_store(tmp_path, size_px=96)
    slides, shape, picture, validations, done, over = run_cells(NOTEBOOK)
    assert slides[-1] == "slide-11" and shape == (3, 64, 96)
    assert isinstance(picture, Image.Image) and picture.size == (96, 96)
    assert [step for step, _ in validations] == [4] and done[0][0] == "slide-11"
    run = workflows.TrainedRun(Path("run"), Path("run/checkpoints/best"), ({"kind": "train"},) * 99, False)
    assert len(repr(run)) < 120
    assert over.size == (64, 96) and not np.array_equal(np.array(over), np.array(picture)[:, :64])
    slide = data.open_store(tmp_path / "store", "slide-11")
    with pytest.raises(RequestError, match="no channel 'score x'; it has: score benign"):
        pathology.show(slide, heatmap="predictions", channel="score x")
    with pytest.raises(RequestError, match="no heatmap of slide-11"):
        pathology.show(slide, heatmap="elsewhere")
    with pytest.raises(RequestError, match="has no pixel of slide-11, 96 × 96"):
        pathology.show(slide, data.Box(100, 120, 0, 10))


def test_wrong_settings_are_refused_in_python(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"^settings: (.|\n)*data\.stores: unknown"):
        workflows.train_model({"data": {"stores": "x"}, "run": {"dir": tmp_path}})


@pytest.mark.usefixtures("in_process")
def test_a_model_of_numbers_is_predicted_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = make_store(tmp_path, size_px=96)
    rows = [f"slide-{k:02d},{10 + k},{split}" for k, split in enumerate(SPLITS)]
    (tmp_path / "labels.csv").write_text("\n".join(["slide_id,age,split", *rows]))
    data_keys = {"labels": "labels.csv", "target": "age", "task": "regression", "class_weights": "none", "size_px": 96}
    config = make_config(tmp_path, store, data=data_keys, run={"steps": 1}, validation={"every_steps": 1})
    assert run_here(config) == 0
    checkpoint, slides = "run/checkpoints/best", [data.open_store(store, f"slide-{k}") for k in (10, 11)]
    with pytest.raises(RequestError, match=r"its task is 'regression'; predict with .* or workflows.predict_slides"):
        pathology.predict_slides(checkpoint, slides, "plain")
    report = workflows.predict_slides(checkpoint, slides, "out", evidence="gradient")
    assert [one.slide_id for one in report.done] == ["slide-10", "slide-11"] and len(report.done[0].values) == 3
    assert (tmp_path / "out/index.html").is_file() and (tmp_path / "out/slide-10/gradient.tiff").is_file()
    assert len(workflows.predict_slides(checkpoint, slides, "out").skipped) == 2  # the folder is free again
    with pytest.raises(RequestError, match="there is no option 'tiles'; the options are mpp, "):
        workflows.predict_slides(checkpoint, slides, "out", tiles=3)
