"""Prediction with an encoder of tiles: all files, in register with the slide, the same on any ranks."""

from __future__ import annotations

import copy
import csv
import json
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
import tifffile
import torch
from torch import nn

from data.tiles.features.folder import feature_files
from data.tiles.tiling import TilePlane
from data.tiles.tissue_tiles import TissueTiles
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.comm.base import Communicator
from hyfi_core.comm.threads import run_ranks
from hyfi_core.models.aggregators.gated_attention import GatedAttention
from hyfi_core.tiles.model import TileModel
from pathology.predict.cohort import predict_slides
from pathology.predict.heatmap import average
from pathology.predict.inputs import find_inputs
from pathology.predict.members import Member
from pathology.predict.options import PredictOptions
from pathology.predict.table import PredictionReport
from pathology.predict.tiles.feature_ensemble import FeatureEnsemble, features_identity
from pathology.predict.tiles.tile_ensemble import TileEnsemble
from pathology.predict.tiles.tile_heatmap import TileValues, at_tiles, contributions_of, place_tiles
from pathology.view.layers import HeatmapFile
from tests.pathology.slides import FOCUS, draw_slide, member_of, write_slide

TILE_PX = 32


class TileDarkness(nn.Module):
    """(n, 3, T, T) to (n, 2): how dark a tile is, and one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, tiles: torch.Tensor) -> torch.Tensor:
        dark = self.weight * (1 - tiles.mean((1, 2, 3)))
        return torch.stack([dark, torch.ones_like(dark)], 1)


def tile_member(stride_px: int = TILE_PX, min_tissue: float = 0.25) -> Member:
    """A model that attends to dark tiles."""
    torch.manual_seed(1)
    aggregator = GatedAttention(2, 2, 4)
    with torch.no_grad():
        aggregator.score.v.weight.copy_(torch.tensor([[6.0, -3.0]] * 4))
        aggregator.score.u.weight.zero_()
        aggregator.score.w.weight.fill_(2.0)
        aggregator.classifier.weight.copy_(torch.tensor([[-8.0, 2.5], [8.0, -2.5]]))
    tiles = {"size_px": TILE_PX, "stride_px": stride_px, "min_tissue": min_tissue}
    changes: dict[str, Any] = {"tiles": tiles, "size_px": [TILE_PX, TILE_PX], "min_coverage": 0.0}
    return member_of(TileModel(TileDarkness(), aggregator), **changes)


def predict(out: Path, slide: Path, member: Member, comm: Communicator | None = None, **how: Any) -> PredictionReport:
    return predict_slides([member], find_inputs([slide]), out, comm or AloneCommunicator(), PredictOptions(**how))


@pytest.fixture(scope="module")
def slide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_slide(tmp_path_factory.mktemp("slides") / "one.tiff", draw_slide())


def channels(out: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    path = out / "one" / "heatmap.tiff"
    with tifffile.TiffFile(path) as file:
        values = file.series[0].levels[0].asarray()
    names = [channel.name for channel in HeatmapFile(path).channels]
    return dict(zip(names, values, strict=True)), json.loads((out / "one" / "prediction.json").read_text())


def test_a_slide_is_predicted_from_all_of_its_tissue_tiles(slide: Path, tmp_path: Path) -> None:
    report = predict(tmp_path, slide, tile_member())
    assert [(one.slide_id, one.prediction, one.status) for one in report.done] == [("one", "dark", "done")]
    with (tmp_path / "predictions.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert float(row["coverage"]) > 0.9
    assert float(row["p_pale"]) + float(row["p_dark"]) == pytest.approx(1, abs=1e-5)
    found, said = channels(tmp_path)
    assert [*found] == ["score pale", "score dark", "contribution pale", "contribution dark", "attention"]
    logits = np.log(said["probabilities_uncalibrated"])
    sums = [np.nansum(found[f"contribution {name}"]) for name in ("pale", "dark")]
    assert sums[1] - sums[0] == pytest.approx(logits[1] - logits[0], abs=1e-4)
    tiles = np.isfinite(found["attention"])
    assert found["attention"][tiles].mean() == pytest.approx(1, abs=1e-5)
    page = (tmp_path / "one" / "report.html").read_text()
    assert "Tiles with most attention" in page
    assert f"of {TILE_PX} × {TILE_PX} px at 1 µm per pixel" in page


@pytest.mark.parametrize("stride_px", [32, 16])
def test_attention_is_in_register_with_the_slide(slide: Path, tmp_path: Path, stride_px: int) -> None:
    predict(tmp_path, slide, tile_member(stride_px))
    found, _ = channels(tmp_path)
    at = HeatmapFile(tmp_path / "one" / "heatmap.tiff").grid.affine
    rows, columns = np.nonzero(found["attention"] > 0.9 * np.nanmax(found["attention"]))
    y, x = at @ np.stack([rows + 0.5, columns + 0.5, np.ones(len(rows))])
    assert (y >= FOCUS[0]).all() and (y < FOCUS[1]).all()
    assert (x >= FOCUS[2]).all() and (x < FOCUS[3]).all()


def test_two_ranks_say_what_one_says(slide: Path, tmp_path: Path) -> None:
    predict(tmp_path / "one", slide, tile_member())
    members = [copy.deepcopy(tile_member()) for _ in range(2)]
    run_ranks(2, lambda comm: predict(tmp_path / "two", slide, members[comm.rank], comm))
    (one, _), (two, _) = (channels(tmp_path / name) for name in ("one", "two"))
    assert all(np.allclose(one[name], two[name], 1e-5, 1e-6, equal_nan=True) for name in one)


def test_a_slide_without_tiles_fails_alone(slide: Path, tmp_path: Path) -> None:
    (failed,) = predict(tmp_path, slide, tile_member(min_tissue=1.0, stride_px=997)).failed
    assert "none of its" in failed.reason


def tiles_at(corners: list[tuple[int, int]], size_px: int, stride_px: int, plane_px: tuple[int, int]) -> TissueTiles:
    plane = TilePlane(0, (Fraction(1), Fraction(1)), (1.0, 1.0), plane_px)
    whole = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0))
    return TissueTiles("a", size_px, stride_px, plane, np.array(corners), np.ones(len(corners)), whole)


def test_overlapping_tiles_share_squares() -> None:
    tiles = tiles_at([(0, 0), (0, 2), (4, 4)], 4, 2, (8, 6))
    attention = np.array([0.2, 0.3, 0.5])
    contributions, scores = np.array([[4.0, 8.0, 2.0]]), np.array([[0.0, 1.0, 0.25]])
    heatmap = place_tiles(tiles, TileValues(np.array([15.0]), scores, contributions, attention), ["a"], False)
    nan = np.nan
    assert heatmap.square_px == 2
    assert np.array_equal(
        heatmap.scores[0], [[0, 0.5, 1], [0, 0.5, 1], [nan, nan, 0.25], [nan, nan, 0.25]], equal_nan=True
    )
    assert np.array_equal(
        heatmap.values[0], [[1, 3, 2], [1, 3, 2], [nan, nan, 1], [nan, nan, 1]], equal_nan=True
    )  # the last tile has two squares on the slide
    assert heatmap.attention is not None
    assert np.allclose(heatmap.attention[0], [0.6, 0.75, 0.9])
    assert np.nansum(heatmap.values) + heatmap.bias[0] == pytest.approx(15)
    assert np.allclose(at_tiles(tiles, heatmap.scores[0], 2), [0.25, 0.75, 0.25])
    # The last tile, alone in its squares, has what it contributes; the first two share a column of squares.
    assert np.allclose(contributions_of(tiles, heatmap.values[0], 2), [5, 7, 2])
    both = average([heatmap, heatmap])
    assert both.attention is not None
    assert np.allclose(both.attention, heatmap.attention, equal_nan=True)


@pytest.mark.parametrize("later", [16, 24])
def test_features_written_anew_between_two_predictions_are_the_new_ones(
    tmp_path: Path, later: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TileEnsemble, "__init__", lambda self, *args: None)
    member = SimpleNamespace(config={"features": {"tile_um": None}})
    slide = SimpleNamespace(slide_id="a")
    seen = []
    for count, fill in ((16, 1.0), (later, 2.0)):
        with h5py.File(tmp_path / "a.h5", "w") as file:
            file["features"] = np.full((count, 6), fill, np.float32)
        ensemble = FeatureEnsemble([member], None, None, PredictOptions(features=tmp_path))  # type: ignore[arg-type, list-item]
        seen.append(ensemble._stored(slide).vectors())  # type: ignore[arg-type]
    assert [vectors.shape for vectors in seen] == [(16, 6), (later, 6)] and (seen[1] == 2).all()
    identity = features_identity(feature_files(tmp_path), "a")
    assert identity["bytes"] == (tmp_path / "a.h5").stat().st_size and not features_identity({}, "a")
