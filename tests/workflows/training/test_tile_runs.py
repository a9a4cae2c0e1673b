"""Runs of an encoder of tiles and an aggregator: the same numbers on any ranks, resumed bit by bit, refused by name."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import hyfi_core
from data.samples.dataset import SlideDataset, SlideRef
from data.tiles.bags import TileBags
from data.tiles.tiling import Tiling
from hyfi_core.errors import RequestError
from hyfi_core.tiles.spread import AttentionSpread
from pathology.predict.members import Member
from tests.pathology.slides import draw_slide, write_slide
from tests.workflows.archive import write_config
from tests.workflows.runs import assert_same_run, losses, run_here, run_on
from workflows.commands import predict, status, validate
from workflows.commands.validate import EvaluationRequest
from workflows.config.load import dump_resolved, load_config
from workflows.training.inputs.tiles import TileInputs
from workflows.training.job import prepare
from workflows.training.metrics_log import read_metrics

pytestmark = pytest.mark.usefixtures("in_process")
CNN = "tests.workflows.tile_networks:small_cnn"


def tile_config(folder: Path, store: Path, **sections: dict[str, Any]) -> Path:
    """Write the YAML of a short run of a small encoder, with dropout and drawn tiles, in float64."""
    tree: dict[str, dict[str, Any]] = {
        "data": {
            "store": str(store), "tiles": {"size_px": 32, "most": 20}, "batch_size": 2, "class_weights": "balanced"
        },
        "model": {
            "encoder": {"name": CNN, "options": {"dropout": 0.2}},
            "aggregator": {"name": "gated_attention", "options": {"hidden": 8, "dropout": 0.1}},
        },
        "optimizer": {
            "lr": 0.01, "max_norm": 5.0, "accumulate": 2, "groups": [{"match": "encoder", "lr": 0.003}]
        },
        "validation": {"every_steps": 2},
        "run": {"dir": str(folder / "run"), "steps": 4, "seed": 3, "tensorboard": False, "precision": "float64"},
    }  # fmt: skip
    return write_config(folder, tree, sections)


@pytest.fixture(scope="module")
def alone(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process, with a moving average of the weights."""
    folder = tmp_path_factory.mktemp("alone")
    assert run_on(1, tile_config(folder, store), "run.ema=0.9") == [0]
    return folder / "run"


@pytest.mark.parametrize("plan", ["plan.tiles=2", "plan.replicas=2"])
def test_ranks_train_the_same_run(alone: Path, store: Path, tmp_path: Path, plan: str) -> None:
    assert run_on(2, tile_config(tmp_path, store), plan, "run.ema=0.9") == [0, 0]
    assert losses(tmp_path / "run") == pytest.approx(losses(alone), rel=1e-8)
    here, there = (load_file(run / "checkpoints/step-00000004/model.safetensors") for run in (tmp_path / "run", alone))
    assert here.keys() == there.keys()
    assert all(torch.allclose(here[name], there[name], 1e-8, 1e-10) for name in here)


def test_a_resumed_run_is_the_same(alone: Path, store: Path, tmp_path: Path) -> None:
    config = tile_config(tmp_path, store)
    assert run_here(config, "run.ema=0.9", "run.steps=2") == 0
    assert run_here(config, "run.ema=0.9", resume=True) == 0
    assert_same_run(tmp_path / "run", alone, 4)


def test_what_a_run_writes(alone: Path) -> None:
    records = read_metrics(alone / "metrics.jsonl")
    steps = [record for record in records if record["kind"] == "train"]
    assert [record["kind"] for record in records if record["kind"] != "train"] == ["validation"] * 2
    assert all(1 <= record["effective_tiles"] <= 20 and 1 <= record["attention_peak"] <= 20 for record in steps)
    names = load_file(alone / "checkpoints/best/model.safetensors")
    assert {name.partition(".")[0] for name in names} == {"encoder", "aggregator"}
    assert "size_px: 32" in (alone / "config.yaml").read_text()
    assert load_config(alone / "config.yaml").data.tiles is not None
    assert " slides/s, " in status.read_status(alone)["throughput"]
    page = (alone / "curves.html").read_text()
    assert all(f">{name}<" in page for name in ("slides per second", "attention peak", "effective tiles"))
    assert "images per second" not in page


def test_encoder_and_head_rates_and_parts(store: Path, tmp_path: Path) -> None:
    config = tile_config(tmp_path, store, validation={"every_steps": 4})
    assert run_here(config, "model.encoder.train=last:1", "run.precision=float32", "run.steps=1") == 0
    before = load_file(tmp_path / "run/checkpoints/latest/model.safetensors")
    assert run_here(config, "model.encoder.train=last:1", "run.precision=float32", "run.steps=3", resume=True) == 0
    after = load_file(tmp_path / "run/checkpoints/latest/model.safetensors")
    kept = {name for name in before if torch.equal(before[name], after[name])}
    assert kept == {"encoder.0.weight", "encoder.0.bias"}


def test_low_rank_updates_are_trained_saved_and_validated(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    encoder = {"name": "tests.workflows.tile_networks:small_mixer", "train": {"lora": {"rank": 2}}}
    config = tile_config(tmp_path, store, model={"encoder": encoder}, optimizer={"groups": []})
    assert run_here(config, "run.precision=float32", "run.steps=1", "validation.every_steps=3") == 0
    before = load_file(tmp_path / "run/checkpoints/latest/model.safetensors")
    assert run_here(config, "run.precision=float32", "run.steps=3", "validation.every_steps=3", resume=True) == 0
    folder = tmp_path / "run/checkpoints/step-00000003"
    after = load_file(folder / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    updates = {f"encoder.{n}.parametrizations.weight.0.{part}" for n in (4, 6) for part in ("down", "up")}
    assert {name for name in changed if name.startswith("encoder.")} == updates
    assert {name for name in before if name.startswith("aggregator.")} <= changed
    capsys.readouterr()
    assert validate.run(EvaluationRequest(folder, store, split="val", as_json=True)) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    last = [record for record in read_metrics(tmp_path / "run/metrics.jsonl") if record["kind"] == "validation"][-1]
    assert found["loss"] == last["loss"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_vectors_of_a_frozen_encoder_are_computed_once(store: Path, tmp_path: Path, ranks: int) -> None:
    """The run that keeps them is, bit for bit, the one that computes them again in each epoch."""
    frozen = {"encoder": {"name": CNN, "train": "none"}}
    whole = {"augment": False, "tiles": {"size_px": 32}}
    config = tile_config(tmp_path, store, model=frozen, data=whole, optimizer={"groups": []})
    words = ("run.steps=6", f"plan.tiles={ranks}", "run.precision=float32", "run.ema=0.9")
    again, encoded = ("run.dir=" + str(tmp_path / "again"), "model.encoder.keep_bytes=0"), {}
    for name, more in {"run": (), "again": again}.items():
        assert run_on(ranks, config, *words, *more) == [0] * ranks
        steps = [record for record in read_metrics(tmp_path / name / "metrics.jsonl") if record["kind"] == "train"]
        encoded[name] = [record["tiles_encoded"] for record in steps]
    assert_same_run(tmp_path / "run", tmp_path / "again", 6)
    assert encoded["again"][-1] >= 6 * 4 * 64 // ranks
    assert encoded["run"][-1] <= (6 + 4) * 64 // ranks + 2 * ranks  # each slide once, and the trial
    again = tile_config(tmp_path, store, model=frozen, data={"augment": True}, optimizer={"groups": []})
    assert "tiles_encoded" not in {**_steps(tmp_path, again)[0]}


def _steps(folder: Path, config: Path) -> list[dict[str, Any]]:
    assert run_here(config, "run.steps=1", f"run.dir={folder / 'anew'}", "run.precision=float32") == 0
    return [record for record in read_metrics(folder / "anew" / "metrics.jsonl") if record["kind"] == "train"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.encoder.train=lora:2", r"train: lora:2: the encoder has no linear layers; use last:N"),
        ("data.view=crop", r"data.view: has no meaning with data.tiles; leave it out \(all tissue tiles are used\)"),
        ("data.workers=1", r"data.workers: has no meaning with data.tiles.*roles.loaders=1 adds"),
        ("plan.grids=[[1, 1]]", r"plan.grids: has no meaning with data.tiles; leave it out \(use plan.tiles"),
        ("run.compile=auto", r"run.compile: has no meaning"),
        ("data.tiles=null", r"data.size_px: missing; needed: a whole number .*; or data.tiles for an encoder"),
        ("model.encoder=null", r"model.encoder: missing; data.tiles needs it"),
        ("data.tiles.stride=8", r"data.tiles.stride: unknown \(given: 8\); did you mean data.tiles.stride_px\?"),
        (
            "data.tiles={size_px: 224, stride_px: 223}",
            r"223 and size_px 224 have only 1 as common divisor.*use 224, for",
        ),
        ("data.tiles={size_px: 224, stride_px: 90}", r"have only 2 as common divisor.*use 84, for example"),
        ("data.tiles.size_px=4096", r"data.tiles: 6 slides have no tile with enough tissue:\n  slide slide-00"),
        ("model.encoder.train=last:9", r"train: last:9: the encoder has 2 blocks"),
        ("model.encoder.train=norms", r"train: norms: the encoder has no norm with parameters"),
        ("model.aggregator.name=gated", r"model.aggregator.name: given 'gated'; allowed: mean, max, gated_attention"),
        ("plan.memory_bytes=1000000", r"plan.memory_bytes is 1,000,000, but a step needs"),
    ],
)
def test_refusals_write_nothing(
    store: Path, tmp_path: Path, override: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        assert run_here(tile_config(tmp_path, store), override) == 2
        said = capsys.readouterr().err
    except RequestError as error:
        said = str(error)
    assert re.search(message, said), said
    assert not (tmp_path / "run").exists()


def test_the_resolved_file_is_the_configuration(store: Path, tmp_path: Path) -> None:
    config = load_config(tile_config(tmp_path, store))
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(dump_resolved(config))
    assert load_config(resolved) == config
    assert config.plan.build() == hyfi_core.ParallelPlan(tiles=1)


def test_tiles_are_drawn_anew_in_each_epoch(store: Path) -> None:
    dataset = SlideDataset(store, [SlideRef("slide-00")], size_px=32, mpp=1.0, seed=5)
    bags = TileBags(dataset, Tiling(32), most=7)
    first, again, other, every = bags.of(0, 0), bags.of(0, 0), bags.of(0, 1), bags.of(0)
    assert len(first) == len(other) == bags.count(0) == 7
    assert len(every) == 64
    assert (first.coords == again.coords).all()
    assert (first.coords != other.coords).any()
    assert bags.check()[0]["coverage"] == pytest.approx(1.0)


def test_spread_of_attention() -> None:
    even, one = torch.full((4,), 0.25), torch.tensor([0.0, 3.0, 0.0, 0.0])
    assert AttentionSpread.of([even]) == AttentionSpread(1.0, 4.0)
    assert AttentionSpread.of([one, even]) == AttentionSpread(2.5, 2.5)
    assert AttentionSpread.of([torch.stack([one / 3, even])]) == AttentionSpread.of([(one / 3 + even) / 2])
    assert AttentionSpread.of([]) is None
    # Eight heads, all of them at the first of three tiles: the longest dim is not that of tiles.
    assert AttentionSpread.of([torch.tensor([[1.0, 0.0, 0.0]] * 8)], [3]) == AttentionSpread(3.0, 1.0)


def test_validate_gives_the_metrics_of_the_run(
    alone: Path, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request = EvaluationRequest(alone / "checkpoints/step-00000004", store, split="val", as_json=True, out=tmp_path)
    assert validate.run(request) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    last = [record for record in read_metrics(alone / "metrics.jsonl") if record["kind"] == "validation"][-1]
    assert {name: found[name] for name in ("loss", "auroc")} == {name: last[name] for name in ("loss", "auroc")}
    assert "slide-06" in (tmp_path / "predictions.csv").read_text()
    with pytest.raises(RequestError, match=r"--cells 2,2: has no meaning for an encoder of tiles"):
        validate.run(replace(request, cells="2,2"))


def test_predict_reads_the_checkpoint(alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slide = write_slide(tmp_path / "one.tiff", draw_slide())
    checkpoint, out = alone / "checkpoints/step-00000004", tmp_path / "out"
    arguments = predict.PredictArguments(checkpoints=[checkpoint], inputs=[slide], out=out)
    assert predict.run(replace(arguments, memory="2GB")) == 0
    rows = (out / "predictions.csv").read_text().splitlines()
    assert rows[0] == "slide_id,case_id,path,prediction,p_benign,p_malignant,coverage,flags,status,reason"
    assert rows[1].startswith("one,") and ",outside_training,done," in rows[1]  # eight times the training slides
    assert "Tiles with most attention" in (out / "one" / "report.html").read_text()
    assert "one" in (out / "index.html").read_text()
    with pytest.raises(RequestError, match=r"--image trained: has no meaning for an encoder of tiles"):
        predict.run(replace(arguments, options={"image": "trained"}))
    with pytest.raises(RequestError, match=r"has an encoder of tiles; predict with `hyfi predict`, or pass model="):
        Member.load(checkpoint)


@pytest.mark.parametrize(
    ("batch_norm", "train", "warned"), [("exact", "all", 1), ("exact", "none", 0), ("frozen", "all", 0)]
)
def test_statistics_of_each_slide_in_training_alone_are_warned_of(
    store: Path, tmp_path: Path, batch_norm: str, train: str, warned: int
) -> None:
    encoder = {"name": "tests.workflows.tile_networks:normed_cnn", "batch_norm": batch_norm, "train": train}
    config = tile_config(tmp_path, store, model={"encoder": encoder})
    inputs = TileInputs(prepare(load_config(config)))
    model, _ = inputs.make_model("cpu", False, lambda line: None)
    engine: Any = SimpleNamespace(optimizer=torch.optim.SGD(model.parameters()))
    said = [line for line in inputs.warnings(engine) if "validation by an average of slides" in line]
    assert len(said) == warned and all("use frozen" in line for line in said)
    assert inputs._loaded is not None
    inputs._loaded = replace(inputs._loaded, untrained=("0.weight",))
    warnings = inputs.warnings(engine)
    assert any("normalises nothing" in line for line in warnings) == (batch_norm == "frozen")
    assert not any("use frozen" in line or "batch_norm=exact" in line for line in warnings), "neither is a remedy here"
