"""Several targets from the YAML to the page: each as it is alone; one that is missing loses no other; on any plan."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from data.samples.labels import Target
from hyfi_core.errors import RequestError
from hyfi_core.runtime.checkpoint import read_model_json
from pathology.predict.colors import CLASS_COLORS, NO_CHANNEL, class_color
from pathology.predict.readout import ClassReadout
from pathology.predict.slide_report import _spread
from tests.workflows.archive import SPLITS, make_config, make_store
from tests.workflows.runs import PARTS, REPLICAS, assert_plans_agree, run_here
from workflows.commands import validate
from workflows.config.load import load_config
from workflows.tasks.bootstrap import draw_cases
from workflows.tasks.by_name import task_of
from workflows.tasks.multiclass import Multiclass
from workflows.tasks.multilabel.readout import LabelsReadout
from workflows.tasks.ordinal.readout import GradeReadout
from workflows.tasks.regression import Regression
from workflows.tasks.several.part import parts_of
from workflows.tasks.several.readout import SeveralReadout
from workflows.tasks.several.task import Several
from workflows.tasks.survival.task import Survival
from workflows.training.job import prepare
from workflows.training.metrics_log import read_metrics

pytestmark = pytest.mark.usefixtures("in_process")
GRADE = Multiclass(("grade",), ("low", "high"), (1.0, 1.0))
AGE = Regression(("age",), 50.0, 10.0)
TIMES = Survival(("months", "died"), times=(5.0, 9.0), slides=8, events=4)
NAN = math.nan


def several(*labelled: float) -> Several:
    shares = labelled or (1.0, 1.0, 1.0)
    tasks = zip(("grade", "age", "os"), (GRADE, AGE, TIMES), (1.0, 2.0, 0.5), shares, strict=True)
    return Several(("grade", "age", "months", "died"), parts_of(list(tasks)))


def samples() -> tuple[torch.Tensor, list[Target]]:
    """Return outputs (8, 4) and labels, some of which lack targets."""
    outputs = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows: list[Target] = [(k % 2.0, 40.0 + 3 * k, 3.0 + k, k % 2.0) for k in range(8)]
    rows[2], rows[5], rows[6] = (NAN, 46.0, 5.0, 0.0), (1.0, NAN, 8.0, 1.0), (0.0, 58.0, NAN, NAN)
    return outputs, rows


def test_each_target_has_the_metrics_it_has_alone_on_the_slides_that_have_it() -> None:
    (outputs, rows), task = samples(), several()
    targets = task.tensor(rows)
    found = task.metrics(outputs, targets)
    grades = [int(row[0]) for row in rows if row[0] == row[0]]  # type: ignore[index]
    keep = [k for k in range(8) if k != 2]
    alone = GRADE.metrics(outputs[keep][:, :2], GRADE.tensor(grades))
    assert {name: found[f"grade.{name}"] for name in alone} == alone
    keep = [k for k in range(8) if k != 6]
    alone = TIMES.metrics(outputs[keep][:, 3:], TIMES.tensor([rows[k][2:] for k in keep]))  # type: ignore[index]
    assert {name: found[f"os.{name}"] for name in alone} == alone
    each = [found[f"{name}.loss"] for name in ("grade", "age", "os")]
    assert found["loss"] == pytest.approx(sum(w * loss for w, loss in zip((1, 2, 0.5), each, strict=True) if loss))


def test_the_loss_does_not_depend_on_how_a_batch_is_divided_where_no_target_compares_slides() -> None:
    outputs, rows = samples()
    parts = parts_of([("grade", GRADE, 1.0, 7 / 8), ("age", AGE, 2.0, 7 / 8)])
    task = Several(("grade", "age"), parts)
    targets = task.tensor([row[:2] for row in rows])  # type: ignore[index]
    whole = task.loss(outputs[:, :3], targets)
    halves = [task.loss(outputs[k : k + 1, :3], targets[k : k + 1]) for k in range(8)]
    assert float(torch.stack(halves).mean()) == pytest.approx(float(whole), rel=1e-12)
    assert task.loss_over == "microbatch" and several().loss_over == "batch"


def test_cases_take_each_target_from_the_slides_that_have_it() -> None:
    (outputs, rows), task = samples(), several()
    of_case = torch.tensor([0, 0, 1, 1, 2, 3, 4, 4])
    merged, labels = task.by_case(outputs, task.tensor(rows), of_case, "mean")
    assert merged.shape == (5, 4) and labels.shape == (5, 4)
    assert bool(labels[3, 1].isnan()) and not bool(labels[4, 2].isnan())
    assert float(labels[1, 0]) == 1 and torch.equal(merged[1, :2], outputs[3, :2].log_softmax(0))


def test_labels_are_read_back_from_text_and_from_cells() -> None:
    task = several()
    _, rows = samples()
    for row in rows:
        again = task.target_of(task.text(row))
        assert isinstance(again, tuple) and str(again) == str(row)
    assert task.target_of("high;61;7;1") == (1.0, 61.0, 7.0, 1.0)
    assert task.target_of(";;;") is None and task.target_of("benign") is None
    assert task.is_wrong("grade: low | age: 3 | os: high risk", rows[1])
    assert not task.is_wrong("grade: high | age: 3 | os: high risk", rows[2])


def test_a_model_json_describes_all_targets() -> None:
    task = several(0.5, 1.0, 1.0)
    model = {"task": "several", "target": list(task.columns), **task.to_json()}
    assert task_of(model) == task
    assert model["class_names"] == ["grade.low", "grade.high", "age", "os.risk"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("archive"), size_px=96, dots=(2, 40) * 6)


def config_of(folder: Path, store: Path, steps: int, **data: Any) -> Path:
    path = folder / "labels.csv"
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("slide_id", "case_id", "grade", "age", "months", "died", "split"))
        for k, split in enumerate(SPLITS):
            grade, age = ("low", "high")[k % 2], 40 + 20 * (k % 2)
            cells = [grade if k != 1 else "", age if k != 2 else "NA", 3 + k * 5 % 11 if k != 7 else "", k % 2]
            rows.writerow((f"slide-{k:02d}", f"case-{k:02d}", *cells, split))
    targets = [
        {"target": "grade"},
        {"target": "age", "task": "regression", "weight": 0.5},
        {"target": ["months", "died"], "task": "survival", "name": "os"},
    ]
    keys = {"labels": str(path), "targets": targets, "augment": False, "batch_size": 6, "size_px": 96, **data}
    model = {"name": "resnet6", "norm": "group", "options": {"width": 4}}
    run = {"steps": steps, "precision": "float64"}
    optimizer = {"name": "adamw", "lr": 0.02}
    keys["class_weights"] = "none"
    return make_config(folder, store, data=keys, model=model, optimizer=optimizer, run=run)


def test_several_targets_are_learnt_together(tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str]) -> None:
    learns = ("lr_schedule.name=constant", "validation.every_steps=16", "validation.metric=age.mae")
    assert run_here(config_of(tmp_path, store, 16), *learns) == 0
    said = capfd.readouterr().out
    assert "best is the checkpoint with the best age.mae" in said and "83% of the training slides labelled" in said
    last = [one for one in read_metrics(tmp_path / "run/metrics.jsonl") if one["kind"] == "validation"][-1]
    assert last["grade.auroc"] == 1 and last["age.mae"] < 6 and last["os.concordance"] is not None
    best = tmp_path / "run/checkpoints/best"
    assert read_model_json(best)["model"]["classes"] == 4
    request = validate.EvaluationRequest(best, store, tmp_path / "labels.csv", split="all", out=tmp_path / "page")
    assert validate.run(request) == 0
    rows = list(csv.DictReader((tmp_path / "page/predictions.csv").open()))
    assert [row["prediction"].split(" | ")[0] for row in rows] == ["grade: low", "grade: high"] * 6
    assert {"grade.p_high", "age.value", "os.risk"} <= rows[0].keys()
    assert rows[1]["label"].startswith("age: 60 | os: 8")  # its grade is missing, the others are not
    page = (tmp_path / "page/index.html").read_text()
    assert "grade: ROC" in page and "os: Kaplan" in page and "age: Predicted and true" in page


def test_losses_are_those_of_one_process(tmp_path: Path, store: Path) -> None:
    stages = ("grids=[[1, 1], [1, 1]]", "microbatches=3")
    assert_plans_agree(config_of(tmp_path, store, 3), [PARTS, stages, REPLICAS])


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        ([{"target": "grade"}, {"target": "size", "task": "regression"}], "size"),
        ([{"target": "grade"}, {"target": "grade", "task": "regression", "name": "x"}], "grade"),
        ([{"target": "grade"}, {"target": ["months"], "task": "survival"}], "data.targets.1: target"),
        ([{"target": "grade"}, {"target": "age", "task": "regresion"}], "data.targets.1.task"),
        ([{"target": "grade"}, {"target": "age", "weigth": 2}], "did you mean data.targets.1.weight"),
        ([{"target": "grade"}, {"target": "grade"}], "name 'grade'"),
        ([{"target": "grade"}], "two or more"),
        ([{"target": "grade", "task": "ordinal"}, {"target": "age"}], "data.targets, grade: .* list them as classes, "),
    ],
)
def test_wrong_targets_are_answered_by_name(
    tmp_path: Path, store: Path, targets: list[dict[str, Any]], said: str
) -> None:
    with pytest.raises(RequestError, match=said):
        prepare(load_config(config_of(tmp_path, store, 1, targets=targets)))


def test_other_columns_can_be_named_for_an_external_table(tmp_path: Path) -> None:
    table = tmp_path / "other.csv"
    table.write_text("slide_id,age\na,41\nb,52\n")
    rows = [{"slide_id": name, "case_id": ""} for name in "ab"]
    labels = several().read_again(table, rows, False, ("",))
    assert several().text(labels.of("a") or ()) == "age: 41"
    assert any("no column of grade, os" in note for note in labels.notes)


def test_the_surest_wrong_class_is_the_worst_error() -> None:
    """Divided by the largest of numbers below 0, the mildest error came first."""
    task = several()
    targets: list[Target] = [(0.0, 50.0, NAN, NAN), (0.0, 50.0, NAN, NAN), (1.0, 50.0, NAN, NAN)]
    values = np.array([[1 - high, high, 50.0, NAN, NAN, 0.0, 0.5, 0.5] for high in (0.99, 0.55, 0.9)])
    errors = task.page(values, targets, draw_cases(3).numpy(), task.readout(None)).errors
    assert errors[0] == 1 and errors[1] == pytest.approx(0.55 / 0.99) and errors[2] == 0


def test_the_bar_of_the_predicted_grade_is_emphasised() -> None:
    """Found by its channel, that of the lowest grade was the bar of the next one: both show the channel above it."""
    readout = SeveralReadout(("grade", "kind"), (GradeReadout(("low", "mid", "high")), ClassReadout(("a", "b"), 1.0)))
    for grade, values in enumerate(([0.9, 0.08, 0.02], [0.1, 0.8, 0.1], [0.0, 0.1, 0.9])):
        numbers = np.array([*values, 0.5, 0.5])
        bar = readout.bars(numbers)[readout.main_bar(numbers)]
        assert bar.name == f"grade: {('low', 'mid', 'high')[grade]}" == readout.prediction(numbers).split(" | ")[0]


def test_bars_have_the_spread_of_their_own_numbers() -> None:
    """In the report of an ensemble, survival at the first time had the spread of the risk, and so on."""
    survives = TIMES.readout({"baseline": [0.1, 0.4]})
    several_readout = SeveralReadout(("age", "os"), (AGE.readout({"half_width": 4.0}), survives))
    for readout, outputs, columns in (
        (survives, [0.5], ["survival_5", "survival_9"]),
        (several_readout, [0.5, 0.5], ["age.value", "os.survival_5", "os.survival_9"]),
    ):
        values = readout.values(np.array(outputs))
        spread = (np.arange(len(readout.columns)) + 1.0) / 100
        result: Any = SimpleNamespace(spread=spread, readout=readout)
        bars = readout.bars(values)
        texts = [_spread(result, bar, place) for place, bar in enumerate(bars)]
        own = [float(spread[readout.columns.index(name)]) for name in columns]
        assert texts == [
            f"{100 * one:.1f}" if "survival" in name else f"{one:.3g}" for one, name in zip(own, columns, strict=True)
        ]


def test_the_spread_of_each_target_is_written_in_its_own_unit() -> None:
    """Three years of age were 300 percentage points, as the first target has classes."""
    kind, age = ClassReadout(("a", "b"), 1.0), AGE.readout({"half_width": 4.0})
    for names, parts, texts in (
        (("kind", "age"), (kind, age), ["10.0", "10.0", "3"]),
        (("age", "kind"), (age, kind), ["3", "10.0", "10.0"]),
    ):
        readout = SeveralReadout(names, parts)
        spread = np.array([3.0 if column == "age.value" else 0.1 for column in readout.columns])
        result: Any = SimpleNamespace(spread=spread, readout=readout)
        bars = readout.bars(readout.values(np.zeros(3)))
        assert [_spread(result, bar, place) for place, bar in enumerate(bars)] == texts


def test_the_spread_of_a_bar_in_percent_is_in_percentage_points() -> None:
    """A spread of 0.1 beside 45.0 % was 100 times too small to the eye."""
    labels = LabelsReadout(("a", "b"), (0.5, 0.5))
    for readout, numbers in (
        (GradeReadout(("low", "mid", "high")), [0.45, 0.35, 0.2]),
        (labels, [0.45, 0.2]),
        (TIMES.readout({"baseline": [0.1, 0.4]}), [0.2, 0.45, 0.4]),
    ):
        result: Any = SimpleNamespace(spread=np.full(len(numbers), 0.1), readout=readout)
        bars = readout.bars(np.array(numbers))
        assert all(bar.text.endswith(" %") for bar in bars)
        assert [_spread(result, bar, place) for place, bar in enumerate(bars)] == ["10.0"] * len(bars)
        assert "percentage points" in readout.note(2, []) and "points" not in readout.note(1, [])


def test_the_lowest_grade_has_no_colour_of_another_target() -> None:
    """It had that of the next target's first channel, or of a channel that the map does not have."""
    grades, kind = GradeReadout(("low", "mid", "high")), ClassReadout(("a", "b"), 1.0)
    readout = SeveralReadout(("grade", "kind"), (grades, kind))
    for one, channels in ((grades, [NO_CHANNEL, 0, 1]), (readout, [NO_CHANNEL, 0, 1, 2, 3])):
        bars = one.bars(np.full(len(one.columns), 0.2))
        assert [bar.channel for bar in bars] == channels == [column.channel for column in one.page_columns()]
    assert class_color(NO_CHANNEL) not in CLASS_COLORS


def test_a_target_that_was_never_calibrated_has_no_plot_before_calibration() -> None:
    other = Multiclass(("other",), ("a", "b"), (1.0, 1.0))
    task = Several(("grade", "other"), parts_of([("grade", GRADE, 1.0, 1.0), ("other", other, 1.0, 1.0)]))
    readout = task.readout({"targets": {"grade": {"temperature": 2.0}}})
    logits = np.random.default_rng(0).normal(size=(8, 4))
    values, before = (np.stack([read(row) for row in logits]) for read in (readout.values, readout.uncalibrated))
    section = task.page(values, [(k % 2.0, k % 2.0) for k in range(8)], draw_cases(8).numpy(), readout, before)
    earlier = [text for text in (*dict(section.metrics), *(plot.title for plot in section.plots)) if "before" in text]
    assert earlier and all(text.startswith("grade: ") for text in earlier)
