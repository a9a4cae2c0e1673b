from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from workflows.training.curves import curves_page, write_curves


def records(steps: int) -> list[dict[str, Any]]:
    train = [
        {"kind": "train", "step": k, "loss": 1 / k, "lr": 0.1, "images_per_second": 2.0, "seconds": 36.0}
        for k in range(1, steps + 1)
    ]
    return [*train, {"kind": "validation", "step": steps, "loss": 0.5, "auroc": 0.75, "f1": None, "slides": 4}]


def figures(page: str) -> dict[str, ElementTree.Element]:
    found = re.findall(r"<figure>.*?</figure>", page)
    trees = [ElementTree.fromstring(figure) for figure in found]
    return {str(tree.findtext("h2")): tree for tree in trees}


def test_every_defined_number_has_its_curve(tmp_path: Path) -> None:
    write_curves(tmp_path / "curves.html", "runs/<first>", records(100))
    page = (tmp_path / "curves.html").read_text()
    assert "runs/&lt;first&gt;" in page and "100 steps in 1.00 h of training, 1 validations" in page
    drawn = figures(page)
    assert list(drawn) == ["loss", "learning rate", "images per second", "auroc"]
    assert len(drawn["loss"].findall(".//polyline")) == 2
    assert "http" not in page


def test_the_axis_of_a_metric_ends_at_its_best_value() -> None:
    perfect = [{"kind": "validation", "step": k, "auroc": 1.0, "calibration_error": 1e-4} for k in (1, 2)]
    drawn = figures(curves_page("run", [*records(2), *perfect]))
    assert drawn["auroc"].find(".//text").text == "1"  # type: ignore[union-attr]
    flat = figures(curves_page("run", perfect))["auroc"]
    assert [text.text for text in flat.findall(".//text")][:2] == ["1", "0.5"]  # not 1.5
    assert "2 steps in 1.2 min of training" in curves_page("run", records(2))


def test_the_largest_value_is_at_the_top_and_the_last_step_at_the_right() -> None:
    (training, _) = figures(curves_page("run", records(3)))["loss"].findall(".//polyline")
    points = [tuple(map(float, point.split(","))) for point in training.attrib["points"].split()]
    assert [x for x, _ in points] == sorted(x for x, _ in points) and points[0][1] == 8
    assert [y for _, y in points] == sorted(y for _, y in points)


def test_long_runs_are_thinned_and_empty_ones_say_so() -> None:
    (training, _) = figures(curves_page("run", records(5000)))["loss"].findall(".//polyline")
    assert 500 <= len(training.attrib["points"].split()) <= 1000
    page = curves_page("run", [])
    assert "no step yet" in page and not figures(page)


def test_undefined_numbers_are_left_out() -> None:
    lost = [{"kind": "train", "step": 1, "loss": None, "lr": float("nan"), "images_per_second": 1.0}]
    assert list(figures(curves_page("run", lost))) == ["images per second"]


def test_one_number_of_any_size_is_drawn() -> None:
    huge = [{"kind": "train", "step": 1, "loss": 1e30, "lr": 1e38, "images_per_second": 1.0}]
    assert "learning rate" in figures(curves_page("run", huge))


def test_a_metric_that_is_rounded_beyond_its_largest_value_does_not_end_the_run() -> None:
    values = [1.0, math.nextafter(1.0, 2.0)]
    validations = [{"kind": "validation", "step": step, "auroc": value} for step, value in enumerate(values, 1)]
    assert "<h2>auroc" in curves_page("run", validations)
