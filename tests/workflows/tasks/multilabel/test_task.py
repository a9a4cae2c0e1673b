"""Multilabel from the YAML to the page: probabilities, thresholds, masked labels, and the same on any plan."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn import metrics as reference

from hyfi_core.errors import RequestError
from hyfi_core.runtime.checkpoint import read_model_json
from tests.workflows.archive import SPLITS, make_config, make_store
from tests.workflows.runs import REPLICAS, STAGES, assert_plans_agree, run_here
from workflows.commands import validate
from workflows.config.load import load_config
from workflows.tasks.bootstrap import draw_cases
from workflows.tasks.multilabel.metrics import best_thresholds, label_metrics
from workflows.tasks.multilabel.task import Multilabel
from workflows.training.job import prepare
from workflows.training.metrics_log import read_metrics

pytestmark = pytest.mark.usefixtures("in_process")
STRIPED = (2, 3, 6, 7, 10, 11)
LEARNS = (
    "run.precision=float32",
    "data.batch_size=6",
    "model.options.width=8",
    "lr_schedule.name=constant",
    "validation.every_steps=12",
)
TASK = Multilabel(("dots", "striped"), ("dots", "striped"))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Slides with few or many dots, with or without stripes, independently."""
    return make_store(tmp_path_factory.mktemp("archive"), striped=STRIPED)


def labels(folder: Path) -> Path:
    """Both labels of each slide; one is unknown."""
    path = folder / "labels.csv"
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("slide_id", "dots", "striped", "both", "split"))
        for k, split in enumerate(SPLITS):
            named = ";".join(name for name, has in (("dots", k % 2), ("striped", k in STRIPED)) if has) or ";"
            rows.writerow((f"slide-{k:02d}", k % 2, "NA" if k == 4 else "ny"[k in STRIPED], named, split))
    return path


def config_of(folder: Path, store: Path, steps: int) -> Path:
    data = {"labels": str(labels(folder)), "target": ["dots", "striped"], "task": "multilabel"}
    data |= {"class_weights": "none", "augment": False}
    model = {"name": "resnet6", "norm": "group", "options": {"width": 4}}
    run = {"steps": steps, "precision": "float64"}
    return make_config(folder, store, data=data, model=model, optimizer={"name": "adamw", "lr": 0.01}, run=run)


def test_labels_are_learnt_and_validated(tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_here(config_of(tmp_path, store, 24), *LEARNS) == 0
    out = capfd.readouterr().out
    assert "class dots                     6" in out and "1 of 24 labels are unknown" in out
    best = tmp_path / "run/checkpoints/best"
    model = read_model_json(best)
    assert (model["task"], model["class_names"], model["model"]["classes"]) == ("multilabel", ["dots", "striped"], 2)
    assert set(model["calibration"]["thresholds"]) == {"dots", "striped"}
    last = [one for one in read_metrics(tmp_path / "run/metrics.jsonl") if one["kind"] == "validation"][-1]
    assert (last["auroc"], last["auroc_dots"], last["auroc_striped"]) == (1, 1, 1)
    request = validate.EvaluationRequest(best, store, tmp_path / "labels.csv", split="all", out=tmp_path / "page")
    assert validate.run(request) == 0
    rows = list(csv.DictReader((tmp_path / "page/predictions.csv").open()))
    names = ["none", "dots", "striped", "dots;striped"] * 3
    assert [row["prediction"] for row in rows] == names
    assert [row["label"] for row in rows] == [*names[:4], "striped?", *names[5:]]
    page = (tmp_path / "page/index.html").read_text()
    assert "auroc, mean of the labels" in page and "Worst errors" not in page


def test_losses_are_those_of_one_process(tmp_path: Path, store: Path) -> None:
    overrides = ["data.target=both", "data.class_weights=balanced"]
    assert_plans_agree(config_of(tmp_path, store, 3), [STAGES, REPLICAS], *overrides)


def test_metrics_are_those_of_scikit_learn_on_draws() -> None:
    rng = np.random.default_rng(2)
    targets = rng.choice([-1, 0, 1], (50, 2)).astype(float)
    scores = np.round(targets + rng.normal(0, 1, (50, 2)), 1)
    counts = rng.multinomial(50, np.full(50, 1 / 50), size=3)
    called = scores >= 0.2
    tensors = map(torch.from_numpy, (scores, called, targets, counts.astype(float)))
    drawn = label_metrics(*tensors)
    for d, row in enumerate(counts):
        for k in range(2):
            s, c, y = (np.repeat(one[:, k], row) for one in (scores, called, targets))
            s, c, y = s[y >= 0], c[y >= 0], y[y >= 0]
            assert float(drawn["auroc"][d, k]) == pytest.approx(reference.roc_auc_score(y, s))
            assert float(drawn["average_precision"][d, k]) == pytest.approx(reference.average_precision_score(y, s))
            assert float(drawn["balanced_accuracy"][d, k]) == pytest.approx(reference.balanced_accuracy_score(y, c))
            assert float(drawn["f1"][d, k]) == pytest.approx(reference.f1_score(y, c))


def test_unknown_labels_count_nowhere() -> None:
    outputs = torch.tensor([[1.0, 2.0], [-1.0, 0.5]], dtype=torch.float64, requires_grad=True)
    targets = TASK.tensor([(1.0, -1.0), (0.0, 1.0)])
    loss = TASK.loss(outputs, targets)
    loss.backward()
    assert outputs.grad is not None and float(outputs.grad[0, 1]) == 0
    known = torch.nn.functional.softplus(torch.tensor([-1.0, -1.0, -0.5], dtype=torch.float64)).sum() / 4
    assert float(loss.detach()) == pytest.approx(float(known))
    metrics = TASK.metrics(outputs.detach(), targets)
    assert (metrics["auroc_dots"], metrics["auroc_striped"], metrics["auroc"]) == (1.0, None, 1.0)


def test_thresholds_are_those_of_the_highest_balanced_accuracy() -> None:
    probabilities = torch.tensor([[0.1, 0.4], [0.2, 0.5], [0.3, 0.6], [0.9, 0.7]], dtype=torch.float64)
    targets = torch.tensor([[0, 1], [0, 1], [1, 1], [1, -1]], dtype=torch.float64)
    assert best_thresholds(probabilities, targets) == [pytest.approx(0.25), None]
    fitted = TASK.calibration(probabilities.logit(), targets, torch.arange(4))
    assert fitted is not None and fitted["thresholds"]["striped"] == 0.5 and fitted["not_chosen"] == ["striped"]
    readout = TASK.readout(fitted)
    values = readout.values(np.log(np.array([0.3 / 0.7, 0.45 / 0.55])))
    assert (readout.prediction(values), readout.channel(values)) == ("dots", 0)
    assert readout.bars(values)[0].text == "30.0 %" and "dots 25.0 %, striped 50.0 %" in readout.note(1, [])
    half = TASK.readout(None)
    assert half.prediction(values) == "none" and readout.joined([readout, half]).thresholds[0] == pytest.approx(0.375)
    assert TASK.of_json({"target": ["dots", "striped"], **TASK.to_json()}) == TASK


def test_labels_as_text() -> None:
    for target in ((1.0, 0.0), (0.0, 0.0), (-1.0, 1.0)):
        assert TASK.target_of(TASK.text(target)) == target
    assert TASK.target_of("yes;NA") == (1.0, -1.0)
    assert [TASK.target_of(text) for text in ("", "NA;", "spots")] == [None] * 3
    assert TASK.is_wrong("dots", (1.0, 1.0)) and not TASK.is_wrong("dots", (1.0, -1.0))


def test_a_case_has_the_labels_of_any_of_its_slides() -> None:
    outputs = torch.tensor([[40.0, 0.0], [-40.0, 1.0], [3.0, 2.0]], dtype=torch.float64)
    targets = TASK.tensor([(1.0, -1.0), (0.0, 0.0), (0.0, 1.0)])
    mean, of_case = TASK.by_case(outputs, targets, torch.tensor([0, 0, 1]), "mean")
    assert mean[0, 0] == pytest.approx(0, abs=1e-9) and mean[1].tolist() == pytest.approx([3, 2])
    assert of_case.tolist() == [[1.0, 0.0], [0.0, 1.0]]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.target=split", "no cell has several labels"),
        ("data.target=[dots, split]", "split: 'train' .line 2"),
        ("data.target=[dots, dots]", "each column only once"),
        ("data.loss=huber", "allowed for task multilabel: bce"),
        ("data.sampling=balanced", "no classes to balance"),
        ("model.classes=3", "model.classes: given 3; .* has 2"),
        ("validation.metric=mae", "allowed for task multilabel: auroc"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, store: Path, override: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        prepare(load_config(config_of(tmp_path, store, 1), [override]))


def test_the_auroc_of_each_label_of_few_slides_has_an_interval_where_nothing_is_wrong() -> None:
    outputs = torch.tensor([[2.0, -1.0], [1.0, 1.0], [-1.0, -2.0], [-2.0, 2.0]], dtype=torch.float64)
    targets = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, -1.0], [0.0, 1.0]], dtype=torch.float64)
    counts = torch.from_numpy(np.random.default_rng(0).multinomial(4, [0.25] * 4, size=50)).double()
    found = TASK.intervals(outputs, targets, counts)["auroc_dots"]
    assert found is not None and found[0] < 0.9 and found[1] == pytest.approx(1)


def test_page_and_validation_have_the_same_intervals_of_few_slides() -> None:
    """The page said that the interval of a perfect AUROC is undefined, where the metrics had one."""
    targets = [(1.0, 0.0), (0.0, 1.0), (1.0, -1.0), (0.0, 1.0), (1.0, 0.0)]
    outputs = torch.tensor([[2.0, -1.0], [-2.0, 1.0], [1.0, 0.0], [-1.0, 2.0], [3.0, -2.0]], dtype=torch.float64)
    draws = draw_cases(len(targets))
    page = TASK.page(outputs.sigmoid().numpy(), targets, draws.numpy(), TASK.readout(None))
    bounds = TASK.intervals(outputs, TASK.tensor(targets), draws)
    for name in ("auroc_dots", "auroc_striped"):
        interval = page.numbers[name].interval
        assert page.numbers[name].value == 1 and interval is not None and list(interval) == bounds[name]
