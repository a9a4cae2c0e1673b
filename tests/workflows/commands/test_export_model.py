"""``hyfi export-model``: what is written computes what ``hyfi predict`` computes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from data.samples.colours.stain_normalisation import StainNormalisation
from data.samples.dataset import SlideRef
from hyfi_core.plan.box import Box
from hyfi_core.runtime.checkpoint import save_checkpoint
from pathology.predict.members import Member
from tests.conftest import ROOT, Hyfi
from tests.pathology.slides import member_of
from tests.workflows.archive import make_store
from tests.workflows.predictions import rows_of, save
from workflows.evaluation.evaluator import dataset_of

OWN = """
import torch
from torch import nn

def network(classes, width):
    features = nn.Sequential(nn.Conv2d(3, width, 4, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(features, nn.Linear(width, classes))
"""


def expected(checkpoint: Path, pixels: np.ndarray) -> np.ndarray:
    """Return the probabilities of an image by the checkpoint's own module."""
    member = Member.load(checkpoint)
    numbers = member.config["normalisation"]
    mean, std = (np.array(numbers[key], dtype=np.float32) for key in ("mean", "std"))
    image = torch.from_numpy((pixels / np.float32(255) - mean) / std).permute(2, 0, 1)[None]
    with torch.no_grad():
        logits = member.model(image)[0] / member.config["calibration"]["temperature"]
    return logits.softmax(0).numpy()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A built-in network with a temperature, in a run that has validated it."""
    run = tmp_path_factory.mktemp("run")
    folder = save(run / "checkpoints" / "step-00000012")
    model = json.loads((folder / "model.json").read_text()) | {"step": 12, "calibration": {"temperature": 1.5}}
    (folder / "model.json").write_text(json.dumps(model))
    line = {"kind": "validation", "step": 12, "auroc": 0.75, "f1": 1.0, "slides": 9}
    line["intervals"] = {"auroc": [0.5, 0.9], "f1": None}
    (run / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (run / "checkpoints" / "best").symlink_to(folder.name)
    return run / "checkpoints" / "best"


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (96, 160, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "image.png")
    return tmp_path / "image.png"


def run_script(folder: Path, picture: Path, *paths: Path) -> dict[str, float]:
    """Run ``predict.py`` of an exported folder; return what it prints."""
    said = subprocess.run(
        [sys.executable, "predict.py", picture],
        cwd=folder,
        env={"PYTHONPATH": ":".join(map(str, (ROOT, *paths))), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return {name: float(value) for name, value in (line.split(": ") for line in said.stdout.splitlines())}


def test_weights_and_script(hyfi_here: Hyfi, checkpoint: Path, picture: Path, tmp_path: Path) -> None:
    said = hyfi_here("export-model", checkpoint, "--to", "torch", "--out", "away", "--json")
    assert said.returncode == 0, said.stderr
    files = json.loads(said.stdout.splitlines()[-1])["files"]
    assert {Path(name).name for name in files} == {path.name for path in (tmp_path / "away").iterdir()}
    printed = run_script(tmp_path / "away", picture)
    assert list(printed) == ["pale", "dark"]
    np.testing.assert_allclose(list(printed.values()), expected(checkpoint, np.asarray(Image.open(picture))), atol=1e-4)
    card = (tmp_path / "away" / "README.md").read_text()
    assert "| auroc | 0.7500 (0.5000 to 0.9000) |" in card and "| f1 | 1.0000 (interval undefined) |" in card
    assert "step-00000012, step 12" in card and "9 slides of the validation split" in card


def test_a_network_of_ones_own(hyfi_here: Hyfi, picture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_network.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    import their_network  # type: ignore[import-not-found]

    model = their_network.network(2, 5)
    described = {"name": "their_network:network", "classes": 2, "options": {"width": 5}}
    config = {**member_of(model).config, "model": described, "size_px": [64, 64], "calibration": {"temperature": 1.0}}
    save_checkpoint(tmp_path / "c", weights=model.state_dict(), model={k: v for k, v in config.items() if k != "files"})
    assert hyfi_here("export-model", "c", "--to", "torch", "--out", "away").returncode == 0
    script = (tmp_path / "away" / "predict.py").read_text()
    assert "from their_network import network" in script and "network(classes=2, width=5)" in script
    printed = run_script(tmp_path / "away", picture, tmp_path)
    found = expected(tmp_path / "c", np.asarray(Image.open(picture)))
    np.testing.assert_allclose(list(printed.values()), found, atol=1e-4)


def test_files_of_pytorch(hyfi_here: Hyfi, checkpoint: Path, picture: Path, tmp_path: Path) -> None:
    pixels = np.asarray(Image.open(picture))
    image, wanted = torch.from_numpy(pixels.transpose(2, 0, 1)[None].copy()), expected(checkpoint, pixels)
    assert hyfi_here("export-model", checkpoint, "--to", "pt2", "--out", "program").returncode == 0
    program = torch.export.load(tmp_path / "program" / "model.pt2").module()
    said = hyfi_here("export-model", checkpoint, "--to", "torchscript", "--out", "script")
    assert said.returncode == 0 and "deprecated TorchScript; --to pt2" in said.stderr
    script = torch.jit.load(str(tmp_path / "script" / "model.pt"))
    for compute in (program, script):
        with torch.no_grad():
            np.testing.assert_allclose(compute(image)[1][0].numpy(), wanted, atol=1e-5)
    assert "`torch.export.load(FILE).module()`" in (tmp_path / "program" / "README.md").read_text()


def test_a_slide_has_the_numbers_of_predict(hyfi_here: Hyfi, tmp_path: Path) -> None:
    """By onnxruntime, on the image of a stored slide that predict shows to the model."""
    onnxruntime = pytest.importorskip("onnxruntime")
    store, checkpoint = make_store(tmp_path), save(tmp_path / "step-00000012")
    assert hyfi_here("predict", checkpoint, store / "slide-00.zarr", "--out", "out").returncode == 0
    row = rows_of(tmp_path / "out")["slide-00"]
    dataset = dataset_of(json.loads((checkpoint / "model.json").read_text()), store, [SlideRef("slide-00")])
    [view] = dataset.whole_views(0, several=False)
    pixels = dataset.read_view(0, view, Box(0, view.size_px[0], 0, view.size_px[1]))
    said = hyfi_here("export-model", checkpoint, "--to", "onnx", "--out", "onnx")
    assert said.returncode == 0 and "model.onnx, README.md; outputs differ from PyTorch's by" in said.stdout
    session = onnxruntime.InferenceSession(tmp_path / "onnx" / "model.onnx")
    (probabilities,) = session.run(["probabilities"], {"pixels": pixels[None]})
    np.testing.assert_allclose(probabilities[0], [float(row["p_pale"]), float(row["p_dark"])], atol=2e-6)


def test_stain_normalisation_is_said_wherever_a_user_looks(hyfi_here: Hyfi, checkpoint: Path, tmp_path: Path) -> None:
    """It measures whole slides, so it is in no exported file; numbers without it are others."""
    shutil.copytree(checkpoint, tmp_path / "step-00000012")
    path = tmp_path / "step-00000012" / "model.json"
    stain = StainNormalisation.of("macenko")
    assert stain is not None
    path.write_text(json.dumps(json.loads(path.read_text()) | {"stain_normalisation": stain.to_json()}))
    said = hyfi_here("export-model", "step-00000012", "--out", "away")
    assert said.returncode == 0 and "takes pixels after stain normalisation (macenko)" in said.stderr
    assert "must be stain-normalised (macenko)" in (tmp_path / "away" / "predict.py").read_text()
    assert "| stain normalisation | macenko to" in (tmp_path / "away" / "README.md").read_text()


def test_a_file_that_computes_something_else_is_not_kept(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    from hyfi_core.errors import RequestError
    from workflows.commands import export_model
    from workflows.export_model import checked

    monkeypatch.setattr(checked, "TOLERANCE", -1.0)
    with pytest.raises(RequestError, match="computes other outputs than PyTorch on an image of 64 × 64 px"):
        export_model.run(checkpoint, "onnx", tmp_path / "away", (64, 64), False)
    assert not any(tmp_path.iterdir())


def test_requests_that_cannot_be_met(hyfi_here: Hyfi, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for words, cause in (
        ((checkpoint, "--to", "tflite", "--out", "a"), "--to tflite: expected one of torch, onnx, pt2, torchscript"),
        ((checkpoint, "--out", "full"), "full exists; choose another --out"),
        ((checkpoint, "--out", "a", "--size-px", "64"), "--size-px is for --to onnx"),
        ((checkpoint, "--out", "a", "--to", "onnx", "--size-px", "x"), "--size-px x: use height and width"),
        (("nowhere", "--out", "a"), "nowhere"),
    ):
        said = hyfi_here("export-model", *words)
        assert said.returncode == 2, said.stderr
        assert cause in said.stderr
    assert not (tmp_path / "a").exists()
