"""Stain normalisation in runs: the same on any plan, kept by the checkpoint, slides without it are named."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from data.tiles.features.folder import open_features
from data.tiles.tiling import Tiling
from hyfi_core.errors import RequestError
from tests.workflows.archive import make_config, make_store
from tests.workflows.runs import PARTS, assert_plans_agree, losses, run_here, run_on
from tests.workflows.training.test_feature_runs import feature_config
from tests.workflows.training.test_tile_runs import tile_config
from workflows.commands import features, predict, validate
from workflows.config.load import load_config
from workflows.features.request import FeatureRequest
from workflows.training.job import prepare
from workflows.training.metrics_log import read_metrics

pytestmark = pytest.mark.usefixtures("in_process")
FEATURE_TESTS = "tests.workflows.training.test_feature_runs"
PRECISE = {"steps": 2, "precision": "float64"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose slides have two stains, without slide 11, of the test split, and 9, of val."""
    return make_store(tmp_path_factory.mktemp("archive"), stained={*range(9), 10})


def test_parts_cells_and_loaders_train_as_one_process(
    tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = {"stain_normalisation": "macenko"}
    config = make_config(tmp_path, store, data=data, validation={"every_steps": 2}, run=PRECISE)
    assert_plans_agree(config, [PARTS])
    said = capfd.readouterr()
    assert "could not be measured (too little tissue, or one stain only): slide-09;" in said.out + said.err
    expected = losses(tmp_path / "run")
    assert run_here(config, "plan.cells=[2,2]", f"run.dir={tmp_path / 'cells'}") == 0
    assert losses(tmp_path / "cells") == pytest.approx(expected, rel=1e-8)
    words = ("roles.loaders=1", "data.workers=1", f"run.dir={tmp_path / 'loaded'}")
    assert run_on(2, config, *words) == [0] * 2
    assert losses(tmp_path / "loaded") == pytest.approx(expected, rel=1e-8)
    assert run_here(config, "data.stain_normalisation=none", f"run.dir={tmp_path / 'plain'}") == 0
    assert losses(tmp_path / "plain") != pytest.approx(expected, rel=1e-3)


def test_validation_reads_the_normalisation_from_the_checkpoint(
    tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = make_config(
        tmp_path, store, data={"stain_normalisation": "reinhard"}, validation={"every_steps": 2}, run=PRECISE
    )
    assert_plans_agree(config, [PARTS])
    checkpoint = tmp_path / "run" / "checkpoints" / "latest"
    saved = json.loads((checkpoint / "model.json").read_text())["stain_normalisation"]
    assert saved["method"] == "reinhard" and len(saved["reference"]["std"]) == 3
    capfd.readouterr()
    assert validate.run(validate.EvaluationRequest(checkpoint, store, split="val", as_json=True)) == 0
    said = capfd.readouterr()
    last = [record for record in read_metrics(tmp_path / "run" / "metrics.jsonl") if record["kind"] == "validation"][-1]
    assert json.loads(said.out.splitlines()[-1])["loss"] == pytest.approx(last["loss"], rel=1e-10)
    assert "slide-09;" in said.err


def test_the_choices_are_named(tmp_path: Path, store: Path) -> None:
    for word, reason in (
        ("vahadane", "learned from a random start.*use macenko"),
        ("pink", "given 'pink'; allowed: none, macenko"),
    ):
        with pytest.raises(RequestError, match=f"(?s)data.stain_normalisation.*{reason}"):
            load_config(make_config(tmp_path, store, data={"stain_normalisation": word}))
    assert load_config(make_config(tmp_path, store, data={"stain_normalisation": None})).data.stain_normalisation == (
        "none"
    )


def test_tiles_are_normalised_wherever_they_are_read(
    tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """``hyfi validate`` and ``hyfi predict`` read the same tiles as the run; another checkpoint would read others."""
    stain = {"stain_normalisation": "macenko", "augment": False, "tiles": {"size_px": 32}}
    config = tile_config(tmp_path, store, data=stain, validation={"every_steps": 2}, run={"steps": 2})
    assert_plans_agree(config, [["tiles=2"]])
    checkpoint = tmp_path / "run" / "checkpoints" / "latest"
    capfd.readouterr()
    assert validate.run(validate.EvaluationRequest(checkpoint, store, split="val", as_json=True)) == 0
    last = [record for record in read_metrics(tmp_path / "run" / "metrics.jsonl") if record["kind"] == "validation"][-1]
    assert json.loads(capfd.readouterr().out.splitlines()[-1])["loss"] == pytest.approx(last["loss"], rel=1e-10)
    plain = tmp_path / "plain"
    shutil.copytree(checkpoint.resolve(), plain)
    model = json.loads((plain / "model.json").read_text())
    (plain / "model.json").write_text(json.dumps({**model, "stain_normalisation": None}))
    rows = {}
    for name, folder in (("own", checkpoint), ("plain", plain)):
        slides = [store / "slide-06.zarr", store / "slide-11.zarr"]
        arguments = predict.PredictArguments(checkpoints=[folder], inputs=slides, out=tmp_path / name)
        assert predict.run(arguments) == 0
        with (tmp_path / name / "predictions.csv").open(newline="") as file:
            rows[name] = {row["slide_id"]: row for row in csv.DictReader(file)}
    assert "stain_as_scanned" in rows["own"]["slide-11"]["flags"]
    assert "stain_as_scanned" not in rows["own"]["slide-06"]["flags"] + rows["plain"]["slide-11"]["flags"]
    assert rows["own"]["slide-11"]["p_benign"] == rows["plain"]["slide-11"]["p_benign"]
    assert rows["own"]["slide-06"]["p_benign"] != rows["plain"]["slide-06"]["p_benign"]
    assert "normalised: macenko" in (tmp_path / "own" / "slide-06" / "report.html").read_text()


def test_features_are_normalised_and_others_are_refused(
    tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The model of features keeps the method and reference; features without are of other colours."""
    for name, words in (("plain", {}), ("normal", {"stain": "macenko", "stain_reference": "slide-01"})):
        request = FeatureRequest(
            store, f"{FEATURE_TESTS}:encoder", tmp_path / name, tiling=Tiling(32, mpp=1.0), random_weights=True, **words
        )
        assert features.run(request, False) == 0
    said = capfd.readouterr().err
    assert "stain normalisation leaves slides as scanned" in said and "slide-09, slide-11" in said
    table = (tmp_path / "normal" / "features.csv").read_text()
    assert table.count("stain_as_scanned") == 2
    vectors = [open_features(tmp_path / name)["slide-00"].vectors([0]) for name in ("plain", "normal")]
    assert not np.allclose(*vectors)
    config = feature_config(tmp_path, store, tmp_path / "normal", run={"steps": 1, "dir": str(tmp_path / "aggregator")})
    assert run_here(config) == 0
    checkpoint = tmp_path / "aggregator" / "checkpoints" / "latest"
    stated = json.loads((checkpoint / "model.json").read_text())["features"]["stain_normalisation"]
    assert stated["method"] == "macenko" and stated["reference"]["strength"] == [0.9, 0.5]
    request = validate.EvaluationRequest(checkpoint, store, split="val", features=tmp_path / "plain")
    assert validate.run(request) == 2
    assert "features with stain normalisation none, but the model was trained with macenko" in capfd.readouterr().err


def test_a_slide_of_the_store_is_the_reference(tmp_path: Path, store: Path) -> None:
    stain = {"stain_normalisation": "macenko", "stain_reference": "slide-01"}
    job = prepare(load_config(make_config(tmp_path, store, data=stain)))
    assert job.train.stain is not None and dict(job.train.stain.reference)["strength"] == (0.9, 0.5)
    with pytest.raises(RequestError, match="stain_reference: without stain_normalisation"):
        load_config(make_config(tmp_path, store, data={"stain_reference": "slide-01"}))
