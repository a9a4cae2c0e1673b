"""All tissue of a slide is seen, whatever size the network was trained on; or it is said that it was not."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from torch import nn

import hyfi_core
from data.samples.dataset import SlideDataset, SlideRef
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.comm.base import Communicator
from hyfi_core.comm.threads import run_ranks
from hyfi_core.errors import RequestError
from hyfi_core.models.resnet import resnet10
from pathology.ingest.options import IngestOptions
from pathology.ingest.slide import ingest_slide
from pathology.predict import whole_tissue
from pathology.predict.cohort import predict_slides
from pathology.predict.inputs import find_inputs
from pathology.predict.members import Member
from pathology.predict.options import PredictOptions
from pathology.predict.table import PredictionReport
from pathology.predict.whole_tissue import image_weights
from tests.pathology.slides import Darkness, draw_slide, member_of, write_slide

SMALL = {"size_px": [256, 256]}
"""An image that holds about a fifth of the slide's tissue."""


class FixedSize(nn.Module):
    """A network that takes images of 256 × 256 px only: its head has a weight for each place."""

    def __init__(self, pool: str) -> None:
        super().__init__()
        self.cells = nn.Conv2d(3, 2, 32, 32)
        self.rows = nn.Linear(8 * 8, 8 * 8, bias=False)
        self.fc = nn.Linear(2, 2)
        self.pool = pool
        with torch.no_grad():
            self.rows.weight.copy_(torch.eye(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.cells(x))
        x = self.rows(x.reshape(x.shape[0], 2, 64)).reshape(x.shape[0], 2, 8, 8)
        return self.fc(x.mean((2, 3)) if self.pool == "avg" else x.amax((2, 3)))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    slide = write_slide(tmp_path_factory.mktemp("slides") / "one.tiff", draw_slide())
    assert ingest_slide(slide, folder, IngestOptions(mpp=1.0)).status == "done"
    return folder


def predict(
    store: Path, out: Path, *members: Member, comm: Communicator | None = None, **options: object
) -> PredictionReport:
    chosen = PredictOptions(**options)  # type: ignore[arg-type]
    return predict_slides(members, find_inputs([store]), out, comm or AloneCommunicator(), chosen)


def row_of(out: Path) -> dict[str, str]:
    with (out / "predictions.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    return row


def test_the_image_grows_with_the_tissue_and_the_answer_is_one_processes(store: Path, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = resnet10(2, width=8).eval()
    (one,) = predict(store, tmp_path, member_of(model, **SMALL)).done
    assert one.coverage == 1.0 and one.flags == ()
    (size,) = json.loads((tmp_path / "one" / "prediction.json").read_text())["images"]
    assert size[0] > 256
    dataset = SlideDataset(store, [SlideRef("one")], size_px=tuple(size), mpp=1.0)
    assert dataset.view(0).coverage == 1.0
    image = torch.from_numpy(dataset.read(0, dataset.view(0).box))[None].float() / 255 - 0.9
    expected = torch.softmax(model(image)[0].detach().double(), 0)
    np.testing.assert_allclose(one.values, expected.numpy(), atol=2e-6)
    assert "trained with 256 × 256 px" in (tmp_path / "one" / "report.html").read_text()


def test_cells_and_ranks_give_what_one_piece_gives(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(3)
    models = [resnet10(2, width=8).eval() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    whole = predict(store, tmp_path / "1", member_of(models[0], **SMALL)).done[0]

    def body(comm: Communicator) -> PredictionReport:
        return predict(store, tmp_path / "2", member_of(models[comm.rank], **SMALL), comm=comm)

    ranks = run_ranks(2, body)[0].done[0]
    monkeypatch.setattr(whole_tissue, "CELL_PX", 300)
    made: list[tuple[int, int]] = []
    plan = hyfi_core.ParallelPlan

    def counted(**fields: Any) -> hyfi_core.ParallelPlan:
        if fields.get("cells") is not None:
            made.append(fields["cells"])
        return plan(**fields)

    monkeypatch.setattr(hyfi_core, "ParallelPlan", counted)
    cells = predict(store, tmp_path / "3", member_of(models[0], **SMALL)).done[0]
    assert made and min(made[0]) > 1
    both = run_ranks(2, lambda comm: predict(store, tmp_path / "4", member_of(models[comm.rank], **SMALL), comm=comm))
    assert made[-1][0] == made[0][0] and made[-1][1] < made[0][1], "the columns are divided among the ranks"
    for other in (ranks, cells, both[0].done[0]):
        np.testing.assert_allclose(other.values, whole.values, atol=1e-6)


@pytest.mark.parametrize("pool", ["avg", "max"])
def test_a_network_of_one_size_is_shown_several_images(store: Path, tmp_path: Path, pool: str) -> None:
    torch.manual_seed(4)
    model = FixedSize(pool).eval()
    member = member_of(model, **SMALL, model={"name": "fixed", "pool": pool})
    (one,) = predict(store, tmp_path, member).done
    assert one.coverage == 1.0 and one.flags == ("several_images",)
    dataset = SlideDataset(store, [SlideRef("one")], size_px=256, mpp=1.0)
    views = dataset.whole_views(0, several=True)
    assert len(views) > 2
    images = [torch.from_numpy(dataset.read_view(0, v, v.box))[None].float() / 255 - 0.9 for v in views]
    logits = torch.cat([model(image).detach().double() for image in images])
    shares = torch.tensor([view.coverage for view in views], dtype=torch.float64)
    assert float(shares.sum()) == pytest.approx(1.0)
    expected = (shares[:, None] * logits).sum(0) if pool == "avg" else logits.amax(0)
    np.testing.assert_allclose(one.values, torch.softmax(expected, 0).numpy(), atol=2e-6)
    words = "mean of the logits" if pool == "avg" else "largest logit of each class"
    assert words in (tmp_path / "one" / "report.html").read_text()
    with tifffile.TiffFile(tmp_path / "one" / "heatmap.tiff") as file:
        values = file.series[0].asarray()
        facts = file.ome_metadata or ""
    (bias,) = [json.loads(part.split("<")[0]) for part in facts.split('K="bias">')[1:]]
    np.testing.assert_allclose(np.nansum(values[-2:].astype(np.float64), axis=(1, 2)) + bias, expected, atol=1e-4)


def test_no_class_is_given_below_the_checkpoints_coverage(store: Path, tmp_path: Path) -> None:
    member = member_of(Darkness(), **SMALL)
    report = predict(store, tmp_path, member, image="trained")
    (one,) = report.incomplete
    row = row_of(tmp_path)
    assert not report.done and not report.failed and one.coverage is not None and one.coverage < 0.5
    assert (row["status"], row["prediction"], row["p_dark"]) == ("incomplete", "", "")
    assert row["flags"].split(";") == ["cropped", "incomplete"] and "of the tissue was seen" in row["reason"]
    page = (tmp_path / "one" / "report.html").read_text()
    assert "Incomplete: no prediction" in page
    features = json.loads((tmp_path / "one" / "regions.geojson").read_text())["features"]
    assert {feature["properties"]["classification"]["name"] for feature in features} == {"Tissue"}
    assert not (tmp_path / "one" / "scores.tiff").exists()
    assert predict(store, tmp_path, member, image="trained").skipped == ("one",)
    (shown,) = predict(store, tmp_path, member, image="trained", allow_partial=True).incomplete
    row = row_of(tmp_path)
    assert shown.prediction == row["prediction"] != "" and row["status"] == "incomplete"
    assert "of the tissue only" in (tmp_path / "one" / "report.html").read_text()


def test_what_lacks_a_little_tissue_is_done_and_flagged(store: Path, tmp_path: Path) -> None:
    (one,) = predict(store, tmp_path, member_of(Darkness(), **SMALL, min_coverage=0.01), image="trained").done
    assert one.prediction and one.flags == ("cropped",)


def test_an_image_is_whole_or_trained() -> None:
    with pytest.raises(RequestError, match="--image half: expected whole or trained"):
        PredictOptions(image="half")  # type: ignore[arg-type]


def test_evidence_is_a_mean_by_tissue_or_a_maximum_by_class(store: Path) -> None:
    views = SlideDataset(store, [SlideRef("one")], size_px=256, mpp=1.0).whole_views(0, several=True)[:2]
    logits = np.array([[1.0, -2.0], [0.5, 3.0]])
    np.testing.assert_array_equal(image_weights(logits, views, "max"), [[1, 0], [0, 1]])
    shares = np.array([view.coverage for view in views])
    np.testing.assert_allclose(image_weights(logits, views, "mean")[:, 1], shares / shares.sum())
