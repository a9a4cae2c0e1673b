"""What the truth allows is measured as scikit-learn and scikit-survival measure it, and follows from what is drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import cohen_kappa_score, r2_score
from sksurv.metrics import concordance_index_censored

from data.csv_table import read_table
from workflows.benchmarks.learnt_tasks.drawing import NUMBER, DrawnLabels, draw_archive
from workflows.benchmarks.learnt_tasks.truth import concordance, metrics_of_truth, quadratic_kappa


def test_metrics_are_those_of_others() -> None:
    rng = np.random.default_rng(0)
    labels = DrawnLabels.of(rng.random((400, 2)), rng)
    predicted = np.clip(labels.grade + rng.integers(-1, 2, 400), 0, 3)
    theirs = cohen_kappa_score(predicted, labels.grade, weights="quadratic")
    assert quadratic_kappa(predicted, labels.grade) == pytest.approx(theirs)
    risk = rng.integers(0, 30, 400).astype(float)
    (theirs, *_) = concordance_index_censored(labels.died, labels.months, risk)
    assert concordance(risk, labels.months, labels.died) == pytest.approx(theirs)
    truth = metrics_of_truth(labels, np.arange(400))
    mean, slope, noise = NUMBER
    assert truth["r2"] == pytest.approx(r2_score(labels.number, mean + slope * labels.areas[:, 1]))
    assert truth["mae"] == pytest.approx(noise * np.sqrt(2 / np.pi), rel=0.1)
    assert 0.8 < truth["auroc"] < 0.97 and 0.7 < truth["quadratic_kappa"] < 0.95 and 0.65 < truth["concordance"] < 0.85


def test_the_manifest_has_what_was_drawn(tmp_path: Path) -> None:
    labels, splits = draw_archive(tmp_path, {"train": 3, "test": 2}, 0)
    rows = read_table(tmp_path / "manifest.csv", "manifest").rows
    assert [row["split"] for row in rows] == splits == ["train"] * 3 + ["test"] * 2
    assert [float(row["number"]) for row in rows] == pytest.approx(labels.number, abs=1e-4)
    assert [row["died"] == "1" for row in rows] == labels.died.tolist()
    assert all((tmp_path / row["path"]).is_file() for row in rows)
