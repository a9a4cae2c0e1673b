"""The row of a case: pooled as its metrics are, then calibrated."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.samples.dataset import SlideRef
from workflows.evaluation.case_table import CaseSlide, differing_note, write_cases
from workflows.tasks.multiclass import Multiclass

TASK = Multiclass(("grade",), ("low", "high"), (1.0, 1.0))
ONE, TWO = np.array([[0.0, 2.0]]), np.array([[1.0, -3.0]])


def high(*logits: float) -> float:
    return float(1 / (1 + np.exp(logits[0] - logits[1])))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({}, (high(0, 2) + high(1, -3)) / 2),
        ({"case_aggregate": "logits"}, high(0.5, -0.5)),
        ({"case_aggregate": "max"}, high(0, 2)),
        ({"case_aggregate": "max", "calibration": {"temperature": 2.0}}, high(0, 1)),
        ({"bag": "case"}, high(0, 2)),
    ],
)
def test_a_case_is_pooled_as_its_metrics_are(tmp_path: Path, model: dict[str, Any], expected: float) -> None:
    slides = [CaseSlide("s0", "a", ONE, 1), CaseSlide("s1", "a", TWO, 1), CaseSlide("s2", "a", None, 1)]
    write_cases(tmp_path, [*slides, CaseSlide("s3", "", None, 0)], TASK, [model])
    rows = list(csv.DictReader((tmp_path / "cases.csv").open(encoding="utf-8-sig")))
    assert [(row["case_id"], row["slides"], row["predicted"], row["label"]) for row in rows] == [
        ("a", "3", "2", "high"),
        ("s3", "1", "0", "low"),
    ]
    assert float(rows[0]["p_high"]) == pytest.approx(expected, abs=1e-6)
    assert rows[1]["prediction"] == rows[1]["p_high"] == ""


def test_a_note_says_what_cases_of_several_labels_are_in_metrics() -> None:
    """Of cancer and healthy, by the alphabet, a case with both is healthy: nothing said so."""
    slides = [SlideRef("s0", "a", 0), SlideRef("s1", "a", 1), SlideRef("s2", "b", 1), SlideRef("s3", "b", 1)]
    assert differing_note(TASK, slides) == (
        "slides of 1 case have different labels, as those of a: low, high; metrics by case use the last of these "
        "classes in the order of the model's outputs (model.classes)"
    )
    # Without a case, and without a label.
    assert differing_note(TASK, [*slides[1:], SlideRef("s4", "", 0), SlideRef("s5", "b", None)]) is None
    outputs, labels, cases = torch.zeros(2, 2), torch.tensor([1, 0]), torch.tensor([0, 0])
    assert TASK.by_case(outputs, labels, cases, "mean")[1].tolist() == [1]


def test_cases_of_several_labels_have_none_and_none_may_be_written(tmp_path: Path) -> None:
    slides = [CaseSlide("s0", "a", ONE, 0), CaseSlide("s1", "a", ONE, 1)]
    write_cases(tmp_path, slides, TASK, [{"case_aggregate": "none"}])
    assert not (tmp_path / "cases.csv").exists()
    write_cases(tmp_path, slides, TASK, [{}])
    (row,) = csv.DictReader((tmp_path / "cases.csv").open(encoding="utf-8-sig"))
    assert row["label"] == "" and row["prediction"] == "high"
