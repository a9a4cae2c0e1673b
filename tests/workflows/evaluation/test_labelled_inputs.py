"""Labels of slides that are predicted: as exact as the table, and of as many columns as the model has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data.store.manifest import SlideRecord, merge_manifest
from hyfi_core.errors import RequestError
from pathology.predict.inputs import SlideInput, find_inputs
from workflows.evaluation.labelled_inputs import InputLabels
from workflows.tasks.by_name import task_of
from workflows.tasks.multilabel.task import Multilabel
from workflows.tasks.regression import Regression
from workflows.tasks.survival.task import Survival
from workflows.tasks.task import Task

SLIDES = [SlideInput(name, "", Path(f"{name}.tiff"), stored=False) for name in "abc"]
GENES = Multilabel(("TP53", "KRAS"), ("TP53", "KRAS"))
AGE = Regression(("age",), 60.0, 10.0)
LIVES = Survival(("days", "died"), "cox", (1.0,), (), 8, 4)


def model_of(task: Task) -> dict[str, Any]:
    return {"task": task.facts.name, "target": list(task.columns), **task.to_json()}


def labelled(folder: Path, task: Task, head: str, *rows: str, target: str | None = None) -> list[SlideInput]:
    path = folder / "labels.csv"
    path.write_text("\n".join((f"slide_id,{head}", *(f"{name},{row}" for name, row in zip("abc", rows, strict=False)))))
    return InputLabels(path, target).of(SLIDES, (), model_of(task))[0]


@pytest.mark.parametrize(
    ("task", "head", "rows", "targets"),
    [
        (GENES, "TP53,KRAS", ("1,", "0,1", ","), [(1.0, -1.0), (0.0, 1.0), None]),
        (AGE, "age", ("61.2345678", "1234567.5", "NA"), [(61.2345678,), (1234567.5,), None]),
        (LIVES, "days,died", ("1234.5678,1", "3,0", ",1"), [(1234.5678, 1.0), (3.0, 0.0), None]),
    ],
)
def test_a_label_says_what_the_table_says(
    tmp_path: Path, task: Task, head: str, rows: tuple[str, ...], targets: list[tuple[float, ...] | None]
) -> None:
    """An unknown label of a slide is not one that it lacks, and a number has all of its digits."""
    read = task_of(model_of(task))
    slides = labelled(tmp_path, task, head, *rows)
    assert [read.target_of(one.label or "") for one in slides] == targets


@pytest.mark.parametrize(
    ("task", "head", "row"), [(AGE, "age", "61"), (LIVES, "days,died", "10,0"), (LIVES, "days,died", "10,1")]
)
def test_slides_that_are_alike_can_be_evaluated(tmp_path: Path, task: Task, head: str, row: str) -> None:
    slides = labelled(tmp_path, task, head, row, row)
    assert [bool(one.label) for one in slides] == [True, True, False]


def test_another_target_has_as_many_columns(tmp_path: Path) -> None:
    for target in ("age, grade", ""):
        with pytest.raises(RequestError, match=r"the model has 1 columns: age|no column"):
            labelled(tmp_path, AGE, "age,grade", "61,2", "70,3", target=target)
    slides = labelled(tmp_path, LIVES, "time,death", "10,0", "20,1", target="time, death")
    assert slides[0].label == "10 (censored)"


def test_cases_are_read_as_in_training_and_a_contradiction_names_the_slides_table(tmp_path: Path) -> None:
    """A word for "unknown" is no case; the other table is not called a store's where the slides are in a CSV."""
    table, manifest = tmp_path / "labels.csv", tmp_path / "slides.csv"
    table.write_text("slide_id,case_id,age\na,P1,61\nb,P2,70\nc,P3,75\n")

    def cases(*own: str) -> list[str]:
        slides = [replace(slide, case_id=case) for slide, case in zip(SLIDES, own, strict=True)]
        return [slide.case_id for slide in InputLabels(table).of(slides, [manifest], model_of(AGE))[0]]

    assert cases("unknown", "Unknown", "P3") == ["P1", "P2", "P3"]
    with pytest.raises(RequestError, match=r"labels.csv: case_id contradicts .*slides.csv: a and b .*the one that is"):
        cases("P1", "P1", "P3")


def test_slides_whose_cases_are_unknown_are_not_of_one_case(tmp_path: Path) -> None:
    """Also without labels: a model of cases would take them for one bag."""
    for name, case in zip("abc", ("unknown", "unknown", "P3"), strict=True):
        SlideRecord(name, "", "done", extra={"case_id": case}).save(tmp_path)
    merge_manifest(tmp_path)
    assert [slide.case_id for slide in find_inputs([tmp_path])] == ["", "", "P3"]
    assert [slide.case_id for slide in find_inputs([tmp_path], missing=["P3"])] == ["unknown", "unknown", ""]


@pytest.mark.parametrize(("words", "option"), [({"id_column": "name"}, "--id-column"), ({"split": "test"}, "--split")])
def test_an_option_that_needs_a_table_is_named(words: dict[str, str], option: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=f"^{option}: the slides have no manifest"):
        InputLabels(**words).of(SLIDES, [tmp_path / "a.tiff"], model_of(AGE))  # type: ignore[arg-type]
