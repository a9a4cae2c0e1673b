"""Runs of an aggregator on stored features: the same on any ranks and in any format, checked by sidecars, predicted."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from safetensors.torch import load_file
from torch import nn

from data.store.manifest import merge_manifest
from data.tiles.tiling import Tiling
from hyfi_core.errors import RequestError
from pathology.ingest.options import IngestOptions
from pathology.ingest.slide import ingest_slide
from tests.pathology.slides import FOCUS, draw_slide, write_slide
from tests.workflows.archive import write_config
from tests.workflows.runs import assert_same_run, losses, run_here, run_on
from tests.workflows.tile_networks import small_cnn
from workflows.commands import features, predict, status, validate
from workflows.commands.validate import EvaluationRequest
from workflows.config.load import dump_resolved, load_config
from workflows.features.request import FeatureRequest
from workflows.training.metrics_log import read_metrics

pytestmark = pytest.mark.usefixtures("in_process")
ENCODER = f"{__name__}:encoder"


def encoder() -> nn.Module:
    """The same weights each time."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return small_cnn()


def write_features(store: Path, out: Path, form: str = "trident", **changes: Any) -> Path:
    tiling = Tiling(32, mpp=changes.pop("mpp", 1.0))
    request = FeatureRequest(store, ENCODER, out, tiling=tiling, form=form, random_weights=True, **changes)  # type: ignore[arg-type]
    assert features.run(request, False) == 0
    return out


@pytest.fixture(scope="module")
def folder(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_features(store, tmp_path_factory.mktemp("features") / "trident")


def feature_config(folder: Path, store: Path, stored: Path, **sections: dict[str, Any]) -> Path:
    tree: dict[str, dict[str, Any]] = {
        "data": {"store": str(store), "features": str(stored), "batch_size": 2},
        "model": {"aggregator": {"name": "gated_attention", "options": {"hidden": 8, "dropout": 0.1}}},
        "optimizer": {"lr": 0.01},
        "validation": {"every_steps": 2},
        "run": {"dir": str(folder / "run"), "steps": 4, "seed": 3, "tensorboard": False, "precision": "float64"},
    }
    return write_config(folder, tree, sections)


@pytest.fixture(scope="module")
def alone(store: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("alone")
    assert run_on(1, feature_config(path, store, folder)) == [0]
    return path / "run"


@pytest.mark.parametrize("plan", ["plan.tiles=2", "plan.replicas=2"])
def test_ranks_train_the_same_run(alone: Path, store: Path, folder: Path, tmp_path: Path, plan: str) -> None:
    assert run_on(2, feature_config(tmp_path, store, folder), plan) == [0, 0]
    assert losses(tmp_path / "run") == pytest.approx(losses(alone), rel=1e-8)


@pytest.mark.parametrize("form", ["clam", "zarr"])
def test_formats_train_the_same_run(alone: Path, store: Path, tmp_path: Path, form: str) -> None:
    stored = write_features(store, tmp_path / form, form)
    assert run_here(feature_config(tmp_path, store, stored)) == 0
    assert_same_run(tmp_path / "run", alone, 4)
    if form == "clam":  # the tensors alone, without positions
        bare = feature_config(tmp_path, store, stored / "pt_files", run={"dir": str(tmp_path / "bare"), "steps": 4})
        assert run_here(bare, "run.precision=float64", "run.seed=3") == 0
        assert_same_run(tmp_path / "bare", alone, 4)


def test_vectors_from_a_loader_train_the_same_run(alone: Path, store: Path, folder: Path, tmp_path: Path) -> None:
    assert run_on(2, feature_config(tmp_path, store, folder), "roles.loaders=1", "data.workers=1") == [0, 0]
    assert_same_run(tmp_path / "run", alone, 4)


def test_a_resumed_run_is_the_same(alone: Path, store: Path, folder: Path, tmp_path: Path) -> None:
    config = feature_config(tmp_path, store, folder)
    assert run_here(config, "run.steps=2") == 0
    assert run_here(config, resume=True) == 0
    assert_same_run(tmp_path / "run", alone, 4)
    assert {name.partition(".")[0] for name in load_file(alone / "checkpoints/best/model.safetensors")} == {
        "aggregator"
    }
    assert " slides/s, " in status.read_status(alone)["throughput"]
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(dump_resolved(load_config(config)))
    assert load_config(resolved) == load_config(config)


def test_validate_needs_the_folder(
    alone: Path, store: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = alone / "checkpoints/step-00000004"
    assert validate.run(EvaluationRequest(checkpoint, store, split="val")) == 2
    said = capsys.readouterr().err
    assert re.search(r"trained on features \(8 numbers of .*:encoder\).*--features DIR", said), said
    request = EvaluationRequest(checkpoint, store, split="val", as_json=True, out=tmp_path / "out", features=folder)
    assert validate.run(request) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    last = [record for record in read_metrics(alone / "metrics.jsonl") if record["kind"] == "validation"][-1]
    assert {name: found[name] for name in ("loss", "auroc")} == {name: last[name] for name in ("loss", "auroc")}
    assert "slide-06" in (tmp_path / "out" / "predictions.csv").read_text()


def damaged(path: Path) -> None:
    with (path / "slide-01.h5").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"?")


def missing(path: Path) -> None:
    (path / "slide-06.h5").unlink()


def stale(path: Path) -> None:
    sidecar = path / ".hyfi" / "slide-01.json"
    sidecar.write_text(json.dumps(json.loads(sidecar.read_text()) | {"tiles_sha256": "0" * 64}))


@pytest.mark.parametrize(
    ("change", "override", "message"),
    [
        (damaged, "", r"slide slide-01: damaged: .*slide-01.h5 is not the file that was written"),
        (missing, "", r"1 slide has no features in .*\n  slide slide-06\n"),
        (stale, "", r"slide slide-01: out of date: the slide was ingested again"),
        (None, "data.tiles={size_px: 32}", r"data.tiles: has no meaning with data.features; leave it out"),
        (None, "model.encoder={name: timm:x}", r"model.encoder: has no meaning .*\(features are computed already\)"),
        (None, "data.augment=true", r"data.augment: has no meaning with data.features"),
        (None, "data.workers=1", r"data.workers: has no meaning with data.features.*roles.loaders=1 adds"),
        (None, "data.features=/nowhere", r"data.features: /nowhere: no such folder"),
    ],
)
def test_refusals_write_nothing(
    store: Path,
    folder: Path,
    tmp_path: Path,
    change: Any,
    override: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stored = folder
    if change is not None:
        stored = tmp_path / "stored"
        shutil.copytree(folder, stored)
        change(stored)
    try:
        assert run_here(feature_config(tmp_path, store, stored), *([override] if override else [])) == 2
        said = capsys.readouterr().err
    except RequestError as error:
        said = str(error)
    assert re.search(message, said), said
    assert not (tmp_path / "run").exists()


def test_predictions_of_features(
    alone: Path, folder: Path, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, slides, own = alone / "checkpoints/step-00000004", tmp_path / "slides", tmp_path / "store"
    slides.mkdir()
    for name, seed in (("one", 0), ("two", 1)):
        slide = write_slide(slides / f"{name}.tiff", draw_slide(seed=seed))
        assert ingest_slide(slide, own, IngestOptions(mpp=1.0), {}, name).status == "done"
    merge_manifest(own)
    stored = write_features(own, tmp_path / "stored")
    (stored / "two.h5").unlink()
    assert run_predict(checkpoint, own, tmp_path / "out", stored) == 1
    assert "two" in (said := capsys.readouterr().err) and "no features of this slide in" in said
    with tifffile.TiffFile(tmp_path / "out" / "one" / "heatmap.tiff") as file:
        scores = file.series[0].levels[0].asarray()
    assert np.isfinite(scores[-1]).any() and scores.shape[1:] == (16, 32)  # a cell is a tile of 32 px at 1 µm
    assert FOCUS[0] // 64 < 16
    assert "Tiles with most attention" in (tmp_path / "out" / "one" / "report.html").read_text()
    # The slide file, in place of the store, has the same tiles.
    assert run_predict(checkpoint, slides / "one.tiff", tmp_path / "file", stored) == 0
    with tifffile.TiffFile(tmp_path / "file" / "one" / "heatmap.tiff") as file:
        assert np.array_equal(file.series[0].levels[0].asarray(), scores, equal_nan=True)
    with pytest.raises(RequestError, match="give the folder with the features of these slides, --features DIR"):
        run_predict(checkpoint, own, tmp_path / "none", None)
    other = write_features(own, tmp_path / "other", mpp=2.0)
    assert run_predict(checkpoint, own, tmp_path / "wrong", other) == 1
    assert "tiles of 64 × 64 µm, but 32 × 32 µm in training" in capsys.readouterr().err
    assert run_predict(checkpoint, slides / "one.tiff", tmp_path / "wrong-file", other) == 1
    assert "tiles of 64 × 64 µm, but 32 × 32 µm in training" in capsys.readouterr().err


def run_predict(checkpoint: Path, slide: Path, out: Path, stored: Path | None) -> int:
    arguments = predict.PredictArguments(
        checkpoints=[checkpoint], inputs=[slide], out=out, options={"features": stored}
    )
    return predict.run(arguments)
