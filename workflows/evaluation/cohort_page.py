"""An HTML page of all slides of a prediction or validation: a sortable table, and plots if there are labels.

The page is one self-contained file. Only the visible rows are rendered, so that thousands of slides scroll well.
"""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from PIL import Image

from data.csv_table import read_own, write_table
from data.files import json_in_utf8, write_atomically
from data.samples.dataset import SlideDataset
from data.samples.labels import Target
from data.samples.trained.trained_notes import TrainedNotes
from data.store.slide_store import SlideStore, slide_path
from data.tiles.bags import Bags
from pathology.ingest.thumbnail import thumbnail_of_store
from pathology.pages import FLAG_MEANINGS, jpeg_uri, render
from pathology.predict.colors import class_color
from pathology.predict.readout import Readout
from pathology.predict.results import THUMBNAIL_FILE, THUMBNAIL_PX
from pathology.predict.table import FILE_NAME, PREDICTION_FILE, Prediction, columns
from workflows.tasks.page_section import PageSection
from workflows.tasks.task import Task

PAGE_FILE = "index.html"
MAX_WORST = 12


@dataclass(frozen=True, eq=False)
class CohortSlide:
    """One row of the page.

    Attributes:
        slide_id, case_id: The slide and its case.
        status: ``done``, ``incomplete`` or ``failed``.
        prediction: What is predicted, as text; empty without a prediction.
        values: Columns of the readout, NaN: none; empty without a prediction.
        label: True label as text; empty if unknown.
        wrong: Whether the prediction is known to be wrong.
        coverage: Fraction of the tissue that was shown to the model; None if unknown.
        flags: Flags of the slide.
        reason: Why it failed or is incomplete.
        thumbnail: JPEG; empty if there is none.
        link: Relative URL of its report; empty if there is none.
        uncalibrated: Values before calibration; empty if there is no calibration, or if it does not change them.
    """

    slide_id: str
    case_id: str
    status: str
    prediction: str
    values: tuple[float, ...]
    label: str
    coverage: float | None
    flags: tuple[str, ...]
    reason: str = ""
    thumbnail: bytes = b""
    link: str = ""
    uncalibrated: tuple[float, ...] = ()
    wrong: bool = False


def predicted_slides(
    out: Path, task: Task, names: Sequence[str], labels: Mapping[str, str] | None = None
) -> list[CohortSlide]:
    """Return the slides of a folder of predictions, from its table and the slides' folders.

    Args:
        out: The folder.
        task: What is predicted.
        names: Columns of the readout.
        labels: Slide -> label as text, if other than when the slide was predicted.

    Raises:
        OSError: The table cannot be read.
    """
    # All slides of the folder, also those that earlier commands predicted, or others with another ``--part``.
    _, rows = read_own((out / FILE_NAME).read_bytes())
    label_texts = labels or {}
    return [_predicted_slide(out, row, task, names, label_texts.get(row["slide_id"])) for row in rows]


def _predicted_slide(
    out: Path, row: Mapping[str, str], task: Task, names: Sequence[str], label: str | None
) -> CohortSlide:
    """Return a slide of the page from its row of predictions, and the files in its folder.

    Args:
        out: The folder of all predictions.
        row: The slide's row of ``predictions.csv``.
        task: What is predicted.
        names: Columns of the row with the predicted numbers.
        label: The slide's label as text; None: the one that its files have.
    """
    folder = out / row["slide_id"]
    try:
        details: dict[str, Any] = json.loads((folder / PREDICTION_FILE).read_text(encoding="utf-8"))
        thumbnail = (folder / THUMBNAIL_FILE).read_bytes()
    except (OSError, ValueError):
        details, thumbnail = {}, b""
    target = task.target_of(str(details.get("label", "")) if label is None else label)
    shown = row["status"] != "failed" and bool(details)
    return CohortSlide(
        slide_id=row["slide_id"],
        case_id=row["case_id"],
        status=row["status"],
        prediction=row["prediction"],
        values=tuple(float(row[name] or "nan") for name in names) if row["prediction"] else (),
        label="" if target is None else task.text(target),
        coverage=float(row["coverage"]) if row["coverage"] else None,
        flags=tuple(flag for flag in row["flags"].split(";") if flag),
        reason=row["reason"],
        thumbnail=thumbnail if shown else b"",
        # The bytes of the name, because those that are not UTF-8 have no other URL.
        link=f"{quote(os.fsencode(row['slide_id']))}/report.html" if shown else "",
        uncalibrated=_uncalibrated(details) if row["prediction"] else (),
        wrong=bool(row["prediction"]) and target is not None and task.is_wrong(row["prediction"], target),
    )


def _uncalibrated(details: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the probabilities before calibration, from a ``prediction.json``; empty if nothing was calibrated."""
    fitted = any(temperature != 1 for temperature in details.get("temperatures", ()))
    return tuple(details["probabilities_uncalibrated"]) if fitted else ()


def _seen_of(dataset: SlideDataset, index: int, all_tissue: bool) -> tuple[float | None, tuple[str, ...]]:
    """Return (coverage, flags) of a slide's image; ``all_tissue``: all tissue was shown, even if it does not fit."""
    view = dataset.view(index)
    # The flag is that of an image of the trained size; if all tissue was shown, nothing was cropped.
    flags = tuple(flag for flag in view.flags if not (all_tissue and flag == "cropped"))
    return (1.0 if all_tissue and view.pieces else view.coverage), flags


def evaluated_slides(
    dataset: SlideDataset,
    logits: Mapping[int, Sequence[float]],
    task: Task,
    readout: Readout,
    least: float,
    *,
    all_tissue: bool,
    bags: Bags | None = None,
    notes: TrainedNotes | None = None,
) -> list[CohortSlide]:
    """Return the slides of a dataset with their predictions, and thumbnails from the store.

    Args:
        dataset: The slides.
        logits: Logits by index of the slide.
        task: What is predicted.
        readout: How logits are read.
        least: Smallest coverage; slides with less are ``incomplete``.
        all_tissue: Whether all tissue was shown, even if it does not fit the dataset's images.
        bags: The slides as bags, if the model takes tiles or their features.
        notes: Which slides the model was trained on, and which are far from those; None: unknown.
    """
    slides, notes = [], notes or TrainedNotes()
    for index, sample in enumerate(dataset.samples):
        outputs = np.asarray(logits[index], dtype=np.float64)
        coverage, flags = _seen_of(dataset, index, all_tissue) if bags is None else (bags.coverage(index), ())
        slide = dataset.slide(index)
        assert isinstance(slide, SlideStore)
        values, uncalibrated = readout.values(outputs), readout.uncalibrated(outputs)
        is_unchanged = np.array_equal(values, uncalibrated, equal_nan=True)
        prediction = readout.prediction(values)
        slides.append(
            CohortSlide(
                slide_id=sample.slide_id,
                case_id=sample.case_id,
                status="done" if coverage is None or coverage >= least else "incomplete",
                prediction=prediction,
                values=tuple(values.tolist()),
                label="" if sample.label is None else task.text(sample.label),
                coverage=coverage,
                flags=(*flags, *notes.flags(sample.slide_id)),
                reason=notes.reason(sample.slide_id),
                thumbnail=stored_thumbnail(slide),
                uncalibrated=() if is_unchanged else tuple(uncalibrated.tolist()),
                wrong=sample.label is not None and task.is_wrong(prediction, sample.label),
            )
        )
    return slides


def stored_thumbnail(slide: SlideStore) -> bytes:
    """Return the thumbnail of a stored slide, a JPEG."""
    buffer = io.BytesIO()
    Image.fromarray(thumbnail_of_store(slide, THUMBNAIL_PX).image).save(buffer, "JPEG", quality=80)
    return buffer.getvalue()


def write_predictions(folder: Path, slides: Sequence[CohortSlide], names: Sequence[str], store: Path) -> None:
    """Write ``predictions.csv`` like ``hyfi predict``, with the label as an additional column.

    Raises:
        OSError: The file cannot be written.
    """
    rows = []
    for slide in slides:
        prediction = Prediction(
            slide_id=slide.slide_id,
            case_id=slide.case_id,
            path=str(slide_path(store, slide.slide_id)),
            status=slide.status,
            prediction=slide.prediction,
            values=slide.values,
            coverage=slide.coverage,
            flags=slide.flags,
            reason=slide.reason,
        )
        rows.append(prediction.row(names, with_spread=False) | {"label": slide.label})
    write_table(folder / FILE_NAME, [*columns(names, with_spread=False), "label"], rows)


def write_cohort_page(
    folder: Path,
    slides: Sequence[CohortSlide],
    task: Task,
    readout: Readout,
    title: str,
    section: PageSection | None = None,
    note: str = "",
    by_case: bool = False,
) -> Path:
    """Write ``folder/index.html`` and return its path.

    Args:
        folder: Folder for the page.
        slides: The rows of its table.
        task: What is predicted.
        readout: How values are read.
        title: Title of the page.
        section: Plots and tables of labelled slides; None: computed here.
        note: Text above the numbers of labelled slides; empty: none.
        by_case: Whether the slides of a case are one sample, which counts once.

    Raises:
        OSError: The file cannot be written.
    """
    all_labelled = [slide for slide in slides if slide.label and slide.prediction]
    labelled = one_of_each_case(all_labelled) if by_case else all_labelled
    if section is None and labelled:
        section = section_of(labelled, task, readout)
    # The sort is stable: of equal errors, the first slides.
    worst = sorted(section.errors, key=lambda index: -section.errors[index])[:MAX_WORST] if section else []
    shown = _shown_columns(slides, len(readout.columns))
    content = {
        "columns": [
            {"name": column.name, "color": "" if column.channel is None else _css(column.channel)}
            for k, column in enumerate(readout.page_columns())
            if k in shown
        ],
        "predictions": list(task.names) if task.facts.samples_classes else [],
        "flags": {name: FLAG_MEANINGS.get(name, "") for slide in slides for name in slide.flags},
        "slides": [_row(slide, shown) for slide in slides],
    }
    page = render(
        "cohort.html",
        title=title,
        # JSON inside of a <script>: a name with "</script>" would end it, so "<" is escaped.
        content=json_in_utf8(content).replace("<", "\\u003c"),
        counts=_counts(slides),
        evaluation=section,
        note=note,
        labelled=len(all_labelled),
        trained_on=sum("trained_on" in slide.flags for slide in all_labelled),
        cases=len({slide.case_id or slide.slide_id for slide in labelled}),
        worst=[_worst(labelled[index], readout) for index in worst],
        made_at=f"{datetime.now(UTC):%d %B %Y, %H:%M} UTC".lstrip("0"),
        version=importlib.metadata.version("hyfi"),
    )
    path = folder / PAGE_FILE
    write_atomically(path, page.encode("utf-8", "backslashreplace"))  # names of files need not be UTF-8
    return path


def one_of_each_case(slides: Sequence[CohortSlide]) -> list[CohortSlide]:
    """Return the first slide of each case; for models with one prediction for each case."""
    first: dict[str, CohortSlide] = {}
    for slide in slides:
        first.setdefault(slide.case_id or slide.slide_id, slide)
    return list(first.values())


def _css(channel: int) -> str:
    return "rgb({}, {}, {})".format(*class_color(channel))


def section_of(labelled: Sequence[CohortSlide], task: Task, readout: Readout) -> PageSection:
    """Return plots and tables of slides that all have a label and a prediction."""
    from workflows.tasks.bootstrap import draw_cases
    from workflows.tasks.cases import case_indices

    values = np.array([slide.values for slide in labelled], dtype=np.float64)
    targets: list[Target] = [target for slide in labelled if (target := task.target_of(slide.label)) is not None]
    of_case = case_indices([slide.case_id or slide.slide_id for slide in labelled])  # the case of each slide
    # (draws, slides) of the bootstrap: cases are drawn, because slides of one case are not independent.
    draws = draw_cases(int(of_case.max()) + 1, _draws(len(labelled)))[:, of_case].numpy()
    uncalibrated = None
    if any(slide.uncalibrated for slide in labelled):
        # Empty for a slide that the calibration does not change.
        uncalibrated = np.array([slide.uncalibrated or slide.values for slide in labelled], dtype=np.float64)
    return task.page(values, targets, draws, readout, uncalibrated)


def _draws(slides: int) -> int:
    """Return the number of bootstrap draws: 1000, fewer beyond 1000 slides."""
    return max(200, min(1000, 1_000_000 // max(1, slides)))


def _shown_columns(slides: Sequence[CohortSlide], columns: int) -> list[int]:
    """Return the indices of columns in which some slide has a number; all of them if no slide has any."""
    rows = [slide.values for slide in slides if slide.values]
    return [k for k in range(columns) if any(not np.isnan(row[k]) for row in rows)] or list(range(columns))


def _row(slide: CohortSlide, shown: Sequence[int]) -> list[Any]:
    """Return a row of the table as the page's script reads it, with the values of the columns ``shown``."""
    return [
        slide.slide_id,
        slide.case_id,
        slide.status,
        slide.prediction,
        # JSON has no infinity, which a diverged regression may predict.
        [round(slide.values[k], 4) if np.isfinite(slide.values[k]) else None for k in shown] if slide.values else [],
        slide.label,
        slide.coverage,
        list(slide.flags),
        slide.reason,
        jpeg_uri(slide.thumbnail) if slide.thumbnail else "",
        slide.link,
        slide.wrong,
    ]


def _worst(slide: CohortSlide, readout: Readout) -> dict[str, Any]:
    """Return what the page shows of a slide under "Worst errors"."""
    return {
        "slide": slide,
        "picture": jpeg_uri(slide.thumbnail) if slide.thumbnail else "",
        "verdict": readout.verdict(np.array(slide.values)),
    }


def _counts(slides: Sequence[CohortSlide]) -> list[tuple[str, int]]:
    """Return (word, number of slides) of the line above the table: all, of each status, and wrong ones if any are."""
    counts = [("slide" if len(slides) == 1 else "slides", len(slides))]
    counts += [(status, sum(slide.status == status for slide in slides)) for status in ("done", "incomplete", "failed")]
    wrong = sum(slide.wrong for slide in slides)
    return [*counts, ("wrong", wrong)] if wrong else counts
