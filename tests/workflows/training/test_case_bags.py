"""Cases as bags: all tiles of all slides of a case together, in training, validation and prediction."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data.samples.dataset import SlideRef
from data.store.manifest import SlideRecord, merge_manifest
from data.tiles.case_bags import JoinedTiles
from data.tiles.grouping import Grouping
from hyfi_core.errors import RequestError
from hyfi_core.runtime.checkpoint import read_model_json
from hyfi_core.tiles.source import TensorTiles
from pathology.predict.inputs import SlideInput
from pathology.predict.tiles.case_slides import alone_note
from tests.workflows.archive import SPLITS, make_store, write_config
from tests.workflows.runs import losses, run_on
from tests.workflows.training.test_feature_runs import feature_config, write_features
from workflows.commands import predict, status, validate
from workflows.commands.validate import EvaluationRequest
from workflows.config.load import load_config
from workflows.training.inputs.features import FeatureInputs
from workflows.training.job import prepare

pytestmark = pytest.mark.usefixtures("in_process")


CASES = ("train-a", "train-b", "train-a", "train-b", "train-c", "train-d", "val-a", "val-b", "val-a", "val-c")
LABELS = tuple(("benign", "malignant")[k % 2] for k in range(12))


def labels_of(
    folder: Path, labels: Sequence[str] = LABELS, cases: Sequence[str] = (*CASES, "test-a", "test-b")
) -> Path:
    path = folder / "labels.csv"
    rows = zip([f"slide-{k:02d}" for k in range(12)], cases, labels, SPLITS, strict=True)
    lines = [",".join(row) for row in [("slide_id", "case_id", "label", "split"), *rows]]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small store; the manifest does not say the cases of slides."""
    store = make_store(tmp_path_factory.mktemp("archive"))
    for path in (store / ".records").iterdir():
        record = SlideRecord.load(path)
        replace(record, extra={**record.extra, "case_id": ""}).save(store)
    merge_manifest(store)
    return store


@pytest.fixture(scope="module")
def features(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_features(store, tmp_path_factory.mktemp("features") / "trident")


def config_of(folder: Path, store: Path, features: Path, labels: Path | None = None) -> Path:
    data = {"labels": str(labels or labels_of(folder)), "bag": "case"}
    model = {"aggregator": {"name": "gated_attention", "options": {"hidden": 8}}}
    return feature_config(folder, store, features, data=data, model=model)


@pytest.fixture(scope="module")
def run(store: Path, features: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cases")
    assert run_on(1, config_of(folder, store, features)) == [0]
    return folder


def test_ranks_train_the_same_run(
    run: Path, store: Path, features: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    roles = ("plan.tiles=2", "roles.loaders=1", "roles.validators=1", "data.workers=1")
    assert run_on(4, config_of(tmp_path, store, features), *roles) == [0] * 4
    assert losses(tmp_path / "run") == pytest.approx(losses(run / "run"), rel=1e-8)
    said = capsys.readouterr().out
    assert "4 cases of 6 slides to train on, 3 of 4 slides to validate on" in said and "steps of 2 cases" in said
    text = status.read_status(tmp_path / "run")["throughput"]
    assert " cases/s, " in text
    assert status.run(tmp_path / "run", as_json=False) == 0
    assert "images" not in capsys.readouterr().out


def test_a_case_has_all_tiles_of_its_slides_and_one_label(run: Path) -> None:
    job = prepare(load_config(run / "run/config.yaml"))
    assert [len(indices) for indices in job.train_samples.members] == [2, 2, 1, 1]
    assert job.steps_of(1) == 2  # 4 cases in batches of 2
    inputs = FeatureInputs(job)
    joined = inputs.train_bags.of(0)
    parts = [inputs.train.of(index) for index in job.train_samples.members[0]]
    tiles = torch.cat([part.read(range(len(part))) for part in parts])
    assert torch.equal(joined.read(range(len(joined))), tiles)
    assert torch.equal(joined.read([len(joined) - 1, 0]), tiles[[-1, 0]])
    assert inputs.counts[0] == len(tiles)


def table(path: Path, key: str) -> dict[str, dict[str, str]]:
    return {row[key]: row for row in csv.DictReader(path.open(encoding="utf-8-sig"))}


def test_validate_and_predict_tell_the_same_of_a_case(
    run: Path, store: Path, features: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = run / "run/checkpoints/best"
    labels = run / "labels.csv"
    request = EvaluationRequest(
        checkpoint, store, labels, split="val", out=tmp_path / "val", features=features, as_json=True
    )
    assert validate.run(request) == 0
    said = capsys.readouterr().out.splitlines()
    metrics = json.loads(said[-1])
    assert any("calibrated on val; on 3 cases here, temperature" in line for line in said)
    for calibration in (metrics["calibration"], read_model_json(checkpoint)["calibration"]):
        assert calibration["cases"] == 3 and "slides" not in calibration
    assert metrics["slides"] == 4 and metrics["case"]["cases"] == len(set(cases_of(labels)))
    assert metrics["loss"] == pytest.approx(metrics["case"]["loss"])
    arguments = predict.PredictArguments(
        checkpoints=[checkpoint],
        inputs=[store],
        out=tmp_path / "out",
        labels=labels,
        split="val",
        options={"features": features},
    )
    assert predict.run(arguments) == 0
    mine, theirs = (table(tmp_path / where / "cases.csv", "case_id") for where in ("out", "val"))
    assert mine.keys() == theirs.keys() == set(cases_of(labels))
    for case, row in mine.items():
        assert row["label"] == theirs[case]["label"]
        assert float(row["p_malignant"]) == pytest.approx(float(theirs[case]["p_malignant"]), abs=2e-6)
    slides = table(tmp_path / "out" / "predictions.csv", "slide_id")
    assert all(row["p_malignant"] == mine[row["case_id"]]["p_malignant"] for row in slides.values())


def test_a_slide_whose_case_is_unknown_is_said_to_be_alone() -> None:
    slides = [SlideInput(name, case, Path(name), True) for name, case in (("a", "c"), ("b", ""), ("c", "c"))]
    assert alone_note([slides[0], slides[2]]) == ""
    assert "the case of b is unknown" in alone_note(slides)


def cases_of(labels: Path) -> list[str]:
    return [row["case_id"] for row in table(labels, "slide_id").values() if row["split"] == "val"]


def test_what_cannot_be_a_case_is_refused(store: Path, features: Path, tmp_path: Path) -> None:
    other = ("malignant", *LABELS[1:])
    with pytest.raises(RequestError, match="case train-a: slide-00 has 1, slide-02 has 0"):
        prepare(load_config(config_of(tmp_path, store, features, labels_of(tmp_path, other))))
    config = config_of(tmp_path, store, features)
    with pytest.raises(RequestError, match="a case has one prediction"):
        load_config(config, ["data.case_aggregate=max"])
    images = {"data": {"store": str(store), "size_px": 64, "bag": "case"}, "run": {"dir": "run", "steps": 1}}
    with pytest.raises(RequestError, match="a model of whole images takes one slide"):
        load_config(write_config(tmp_path, images, {}))


def test_slides_of_a_case_are_apart() -> None:
    corners = torch.tensor([[0, 0], [0, 10]])
    parts = [TensorTiles(torch.full((2, 3, 1, 1), float(k)), corners) for k in range(2)]
    joined = JoinedTiles("case", parts)
    assert joined.coords is not None and joined.coords.tolist() == [[0, 0], [0, 10], [0, 100_010], [0, 100_020]]
    assert JoinedTiles("case", [parts[0], TensorTiles(torch.zeros(1, 3, 1, 1))]).coords is None
    assert joined.read([3, 0])[:, 0, 0, 0].tolist() == [1.0, 0.0] and joined.identity == ""


class KeepingTiles(TensorTiles):
    """Keeps something between reads."""

    def __init__(self, kept_bytes: int) -> None:
        super().__init__(torch.zeros(2, 3, 1, 1))
        self.kept_bytes, self.forgotten = kept_bytes, 0

    def forget(self) -> None:
        self.forgotten += 1


def test_only_one_slide_of_a_case_keeps_what_it_has_decoded() -> None:
    first, second = parts = [KeepingTiles(5), KeepingTiles(7)]
    joined = JoinedTiles("case", [*parts, TensorTiles(torch.zeros(1, 3, 1, 1))])
    assert joined.kept_bytes == 7
    for index in (0, 1):
        joined.read([index])
    assert (first.forgotten, second.forgotten) == (0, 0)
    joined.read([1, 2])
    assert (first.forgotten, second.forgotten) == (1, 0)
    joined.forget()
    joined.forget()
    joined.read([4])
    assert (first.forgotten, second.forgotten) == (1, 1)


def test_unknown_numbers_of_a_case_are_alike() -> None:
    nan = float("nan")
    same = [SlideRef("a", "c", (1.0, nan)), SlideRef("b", "c", (1.0, float("nan")))]
    assert Grouping.of(same, "case").members == ((0, 1),)
