"""Exports of models of tiles: updates merged, the same outputs from the script and from ONNX."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from hyfi_core.errors import RequestError
from tests.workflows.runs import run_on
from tests.workflows.training.test_tile_runs import tile_config
from workflows.commands import export_model
from workflows.commands.predict import load_member

pytestmark = pytest.mark.usefixtures("in_process")


@pytest.fixture(scope="module")
def checkpoint(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """After a step with updates of rank 2."""
    folder = tmp_path_factory.mktemp("lora")
    encoder = {"name": "tests.workflows.tile_networks:small_mixer", "train": {"lora": {"rank": 2}}}
    config = tile_config(folder, store, model={"encoder": encoder}, optimizer={"groups": [], "lr": 0.1})
    assert run_on(1, config, "run.precision=float32", "run.steps=2", "validation.every_steps=2") == [0]
    return folder / "run/checkpoints/step-00000002"


@pytest.fixture(scope="module")
def pixels() -> torch.Tensor:
    return torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(9))


@pytest.fixture(scope="module")
def outputs(checkpoint: Path, pixels: torch.Tensor) -> torch.Tensor:
    """What the checkpoint's own model says of a slide of five tiles."""
    model = load_member(checkpoint).model
    with torch.no_grad():
        logits, _ = model.aggregator(model.encoder(pixels / 255))
    return logits.reshape(1, -1)


def test_the_script_predicts_from_merged_weights(
    checkpoint: Path,
    pixels: torch.Tensor,
    outputs: torch.Tensor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert export_model.run(checkpoint, "torch", tmp_path / "out", None, False) == 0
    assert not [name for name in load_file(tmp_path / "out" / "model.safetensors") if "parametrizations" in name]
    for number, tile in enumerate(pixels):
        Image.fromarray(tile.permute(1, 2, 0).numpy()).save(tmp_path / f"{number}.png")
    monkeypatch.setattr(sys, "argv", ["predict.py", str(tmp_path)])
    capsys.readouterr()
    runpy.run_path(str(tmp_path / "out" / "predict.py"))
    said = dict(line.split(": ") for line in capsys.readouterr().out.splitlines())
    expected = load_member(checkpoint).readout.values(outputs[0].double().numpy()).tolist()  # calibrated
    assert [float(value) for value in said.values()] == pytest.approx(expected, abs=1e-5)
    assert [*said] == ["p_benign", "p_malignant"]
    assert "32 px, 32 px apart" in (tmp_path / "out" / "README.md").read_text()


def test_onnx_of_any_number_of_tiles(
    checkpoint: Path, pixels: torch.Tensor, outputs: torch.Tensor, tmp_path: Path
) -> None:
    assert export_model.run(checkpoint, "onnx", tmp_path / "out", None, False) == 0
    encoder, aggregator = (
        onnxruntime.InferenceSession(str(tmp_path / "out" / f"{name}.onnx"), providers=["CPUExecutionProvider"])
        for name in ("encoder", "aggregator")
    )
    parts = [encoder.run(None, {"pixels": part.numpy()})[0] for part in (pixels[:2], pixels[2:])]
    found = aggregator.run(["outputs"], {"vectors": np.concatenate(parts)})[0]
    assert np.allclose(found, outputs.numpy(), rtol=1e-4, atol=1e-5)
    with pytest.raises(RequestError, match="--size-px is for models of whole images"):
        export_model.run(checkpoint, "onnx", tmp_path / "sized", (64, 64), False)
