"""Gradient × input equals that of the plain module by autograd, on any ranks and cells; if linear, occlusion."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from torch import nn

from data.samples.dataset import SlideDataset, SlideRef
from hyfi_core.comm.base import Communicator
from hyfi_core.comm.threads import run_ranks
from hyfi_core.errors import RequestError
from pathology.predict.evidence import gradient
from pathology.predict.evidence.occlude import check_evidence
from pathology.predict.members import InputSpec
from tests.pathology.predict.evidence.test_occlusion import Patches, predict, store
from tests.pathology.slides import Darkness, member_of

__all__ = ["store"]


class Linear(nn.Module):
    """Outputs are sums of pixels, each with its own weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.conv = nn.Conv2d(3, 2, 16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).mean((2, 3))


def direct(store: Path, model: nn.Module, like: np.ndarray) -> np.ndarray:
    """The estimates of blocks of 64 px by autograd through the plain module."""
    dataset = SlideDataset(store, [SlideRef("one")], size_px=(512, 576), mpp=1.0)
    view = dataset.view(0)
    pixels = torch.from_numpy(dataset.read_view(0, view, view.box))[None].float() / 255 - 0.9
    image = pixels.clone().requires_grad_()
    outputs = model(image)[0]
    expected = np.full(like.shape, 0.0)
    for k, output in enumerate(outputs):
        (slope,) = torch.autograd.grad(output, image, retain_graph=True)
        products = ((pixels - 0.1) * slope)[0].sum(0).double().numpy()  # white is 1 - 0.9
        for piece in view.pieces:
            y, x = np.mgrid[piece.source.y0 : piece.source.y1, piece.source.x0 : piece.source.x1] // 64
            np.add.at(expected[k], (y, x), products[piece.target.slices()])
    return np.where(np.isfinite(like), expected, np.nan)


def read(out: Path, kind: str = "gradient") -> np.ndarray:
    with tifffile.TiffFile(out / "one" / f"{kind}.tiff") as file:
        values: np.ndarray = file.series[0].asarray()
    return values


@pytest.mark.parametrize(("ranks", "options"), [(1, {}), (2, {}), (2, {"cells": (1, 2)})])
@pytest.mark.parametrize("network", [Patches, Darkness])
def test_it_is_that_of_the_plain_module(
    store: Path, tmp_path: Path, network: type[nn.Module], ranks: int, options: dict[str, object]
) -> None:
    members = [member_of(network()) for _ in range(ranks)]

    def body(comm: Communicator) -> list[str]:
        return predict(tmp_path, store, members[comm.rank], comm=comm, evidence="gradient", **options)

    run_ranks(ranks, body)
    values = read(tmp_path)
    expected = direct(store, network(), values)
    assert np.nanmax(np.abs(expected)) > 1e-3 and np.isfinite(values[0]).any()
    np.testing.assert_allclose(values, expected, atol=2e-6 * float(np.nanmax(np.abs(expected))) + 1e-7)


def test_of_a_linear_model_it_is_occlusion_and_files_say_what_it_is(store: Path, tmp_path: Path) -> None:
    predict(tmp_path / "out", store, member_of(Linear()), evidence="gradient")
    predict(tmp_path / "covered", store, member_of(Linear()), evidence="occlusion", evidence_blocks=10_000)
    values = read(tmp_path / "out")
    np.testing.assert_allclose(values, read(tmp_path / "covered", "occlusion"), atol=1e-5)
    prediction = json.loads((tmp_path / "out" / "one" / "prediction.json").read_text())
    assert prediction["evidence"] == ["map", "gradient"] and "gradient" in prediction["flags"]
    assert "Evidence by gradients" in (tmp_path / "out" / "one" / "report.html").read_text()
    assert (tmp_path / "out" / "one" / "gradient.png").is_file()
    assert predict(tmp_path / "out", store, member_of(Linear()), evidence="map") == []


def test_what_it_cannot_do_is_refused(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = dict(member_of(Darkness()).config)
    tiles = InputSpec.of({**config, "tiles": {"size_px": 64, "stride_px": 64, "min_tissue": 0.1}})
    with pytest.raises(RequestError, match="--evidence gradient: checkpoint C has an encoder of tiles"):
        check_evidence("gradient", tiles, "C")
    monkeypatch.setattr(gradient, "free_bytes", lambda device: 1000)
    with pytest.raises(AssertionError):  # the slide fails
        predict(tmp_path, store, member_of(Patches()), evidence="gradient")
    said = (tmp_path / "predictions.csv").read_text()
    assert "keeps the maps of an image for backward" in said and "use --cells auto with --memory" in said
