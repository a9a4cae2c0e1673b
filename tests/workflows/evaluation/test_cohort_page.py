"""The page about a cohort: one file, every slide in it, nothing asked of a network, texts escaped."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np

from workflows.evaluation.cohort_page import CohortSlide, predicted_slides, write_cohort_page
from workflows.tasks.multiclass import Multiclass
from workflows.tasks.regression import Regression

NAMES = ("benign", "malignant")
TASK = Multiclass(("label",), NAMES)
READOUT = TASK.readout(None)


def slide_of(name: str, malignant: float, label: str = "", **changes: object) -> CohortSlide:
    given = {
        "slide_id": name,
        "case_id": f"case of {name}",
        "status": "done",
        "prediction": NAMES[int(malignant >= 0.5)],
        "values": (1 - malignant, malignant),
        "label": label,
        "wrong": bool(label) and label != NAMES[int(malignant >= 0.5)],
        "coverage": 1.0,
        "flags": (),
        **changes,
    }
    return CohortSlide(**given)  # type: ignore[arg-type]


def content_of(page: str) -> dict[str, list[list[object]]]:
    (text,) = re.findall(r'<script type="application/json" id="content">(.*?)</script>', page, re.DOTALL)
    found: dict[str, list[list[object]]] = json.loads(text)
    return found


def test_a_page_has_every_slide_and_asks_no_network(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    slides = [
        slide_of(f"s{k}", float(p), NAMES[int(p + rng.normal(0, 0.3) > 0.5)]) for k, p in enumerate(rng.random(60))
    ]
    slides.append(slide_of('</script><img src="http://x">', 0.9, "benign", flags=("blur",), thumbnail=b"jpeg"))
    slides.append(slide_of("broken", 0.0, prediction="", values=(), status="failed", reason="0 bytes <b>"))
    path = write_cohort_page(tmp_path, slides, TASK, READOUT, "A & B")
    page = path.read_text()
    rows = content_of(page)["slides"]
    assert [row[0] for row in rows] == [slide.slide_id for slide in slides]
    assert page.count("<script") == 2 and "A &amp; B" in page
    assert not re.search(r'(?:src|href)="(?:https?:)?//', page)
    assert "default-src 'none'" in page
    assert page.count("<svg") == 4 and "area under the curve" in page and "Worst errors" in page
    assert [path.name for path in tmp_path.iterdir()] == ["index.html"]


def test_a_prediction_that_is_not_finite_is_a_row_without_the_number(tmp_path: Path) -> None:
    slides = [slide_of("a", 0.2, values=(math.inf, -math.inf)), slide_of("b", 0.2, values=(0.8, math.nan))]
    page = write_cohort_page(tmp_path, slides, TASK, READOUT, "t").read_text()
    assert [row[4] for row in content_of(page)["slides"]] == [[None, None], [0.8, None]]


def test_a_page_without_labels_has_no_curves(tmp_path: Path) -> None:
    page = write_cohort_page(tmp_path, [slide_of("a", 0.2), slide_of("b", 0.7)], TASK, READOUT, "t").read_text()
    assert "<svg" not in page and "Against the labels" not in page and "Worst errors" not in page


def test_the_worst_errors_come_first(tmp_path: Path) -> None:
    slides = [slide_of("a", 0.6, "benign"), slide_of("b", 0.99, "benign"), slide_of("c", 0.3, "malignant")]
    slides.append(slide_of("right", 0.9, "malignant"))
    page = write_cohort_page(tmp_path, slides, TASK, READOUT, "t").read_text()
    assert re.findall(r"<figcaption>(\w)<br>", page[page.index("Worst errors") :]) == ["b", "c", "a"]


def test_slides_of_a_folder_carry_what_their_folders_say(tmp_path: Path) -> None:
    header = "slide_id,case_id,path,prediction,p_benign,p_malignant,coverage,flags,status,reason"
    lines = [
        header,
        "a b,C1,/x/a.svs,malignant,0.25,0.75,0.9990,cropped;blur,done,",
        "c,,/x/c.svs,,,,0.0200,cropped;incomplete,incomplete,only 2.0 %",
        "d,,/x/d.svs,,,,,,failed,0 bytes",
    ]
    (tmp_path / "predictions.csv").write_text("\n".join(lines) + "\n")
    for name in ("a b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "prediction.json").write_text(json.dumps({"label": "benign"}))
        (tmp_path / name / "thumbnail.jpg").write_bytes(b"jpeg")
    first, second, third = predicted_slides(tmp_path, TASK, READOUT.columns)
    assert (first.link, first.label, first.wrong, first.thumbnail) == ("a%20b/report.html", "benign", True, b"jpeg")
    assert first.values == (0.25, 0.75) and first.flags == ("cropped", "blur")
    assert (second.prediction, second.values, second.wrong) == ("", (), False)
    assert (third.link, third.coverage, third.reason) == ("", None, "0 bytes")


def test_columns_without_any_number_are_left_out(tmp_path: Path) -> None:
    task = Regression(("age",), 50.0, 10.0)
    values = [(41.0, math.nan, math.nan), (52.0, math.nan, math.nan)]
    slides = [slide_of(f"s{k}", 0.5, values=one, prediction="x") for k, one in enumerate(values)]
    page = write_cohort_page(tmp_path, slides, task, task.readout(None), "Two slides").read_text()
    content = content_of(page)
    assert [column["name"] for column in content["columns"]] == ["value"]  # type: ignore[call-overload]
    assert [row[4] for row in content["slides"]] == [[41.0], [52.0]]
