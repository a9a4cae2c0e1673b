"""Folders of ``engine.save`` in ``hyfi validate``, ``predict`` and ``plan``: used, or refused with what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import hyfi_core
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.errors import RequestError
from hyfi_core.models.by_name import build_model
from tests.pathology.slides import draw_slide, write_slide
from workflows.cli import app

MODEL = {"name": "resnet10", "classes": 2, "options": {"width": 8}}
JSON: dict[str, Any] = {
    "model": MODEL,
    "class_names": ["benign", "malignant"],
    "task": "multiclass",
    "mpp": 1.0,
    "size_px": [256, 256],
    "view": "pack",
    "align_px": 32,
    "normalisation": {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]},
}


def saved(folder: Path, model_json: dict[str, Any] | None, width: int = 8) -> Path:
    torch.manual_seed(0)
    model = build_model(MODEL | {"options": {"width": width}})
    plan = hyfi_core.ParallelPlan(((1, 1),))
    engine = hyfi_core.parallelize(model, (1, 3, 64, 64), plan, AloneCommunicator(), verify=False)
    engine.save(folder, model_json=model_json)
    return folder


def answer(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        app([str(word) for word in words])
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


def test_a_folder_that_says_how_images_are_read_is_validated_and_predicts(
    tmp_path: Path, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved(tmp_path / "saved", JSON)
    validate = ("validate", folder, "--store", store, "--split", "val", "--image", "trained", "--json")
    code, out, err = answer(capsys, *validate)
    assert code == 0, err
    assert json.loads(out.splitlines()[-1])["slides"] > 0
    slide = write_slide(tmp_path / "one.tiff", draw_slide())
    predict = ("predict", folder, slide, "--out", tmp_path / "out", "--image", "trained", "--allow-partial")
    code, _, err = answer(capsys, *predict)
    assert code == 0, err
    assert (tmp_path / "out" / "predictions.csv").is_file()


@pytest.mark.parametrize("lacks", ["", "normalisation", "model.name"])
def test_what_is_missing_is_named_with_what_would_work(
    tmp_path: Path, store: Path, capsys: pytest.CaptureFixture[str], lacks: str
) -> None:
    if lacks == "model.name":
        content: dict[str, Any] | None = JSON | {"model": {"classes": 2}}
    else:
        content = {key: value for key, value in JSON.items() if key != lacks} if lacks else None
    folder = saved(tmp_path / "saved", content)
    for words in (
        ("validate", folder, "--store", store),
        ("predict", folder, store, "--out", tmp_path / "out"),
        ("plan", folder, "--for", "predict"),
    ):
        code, _, err = answer(capsys, *words)
        assert code == 2
        assert "Traceback" not in err
        assert f"has no {lacks or 'model, class_names'}" in err
        assert "engine.save(folder, model_json=" in err
    assert not (tmp_path / "out").exists()


def test_weights_of_another_model_are_named(tmp_path: Path, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved(tmp_path / "saved", JSON, width=16)
    for words in (("validate", folder, "--store", store), ("predict", folder, store, "--out", tmp_path / "out")):
        code, _, err = answer(capsys, *words)
        assert code == 2
        assert "Traceback" not in err
        assert str(folder) in err


def test_what_the_engine_writes_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"'step', which engine\.save writes itself"):
        saved(tmp_path / "saved", {"step": 3})
    with pytest.raises(RequestError, match="model_json cannot be saved as JSON"):
        saved(tmp_path / "saved", {"mpp": float("nan")})
    assert not (tmp_path / "saved").exists()
