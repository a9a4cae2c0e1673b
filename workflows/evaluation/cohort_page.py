"""An HTML page of all slides of a prediction or validation: a sortable table, and curves if there are labels.

The page is one self-contained file. Only the visible rows are rendered, so that thousands of slides scroll well.
"""

from __future__ import annotations

import importlib.metadata
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from data.csv_table import read_own, write_table
from data.files import write_atomically
from data.samples.dataset import SlideDataset
from data.store.slide_store import SlideStore, slide_path
from pathology.ingest.thumbnail import thumbnail_of_store
from pathology.pages import FLAG_MEANINGS, jpeg_uri, render
from pathology.predict.colors import class_color
from pathology.predict.ensemble import softmax
from pathology.predict.results import THUMBNAIL_FILE, THUMBNAIL_PX
from pathology.predict.table import FILE_NAME, PREDICTION_FILE, Prediction, columns

PAGE_FILE = "index.html"
MAX_WORST = 12


@dataclass(frozen=True, eq=False)
class CohortSlide:
    """One row of the page.

    Attributes:
        slide_id, case_id: The slide and its case.
        status: ``done``, ``incomplete`` or ``failed``.
        prediction: Predicted class; empty without a prediction.
        probabilities: Probability of each class; empty without a prediction.
        label: True class; empty if unknown.
        coverage: Fraction of the tissue that was shown to the model; None if unknown.
        flags: Flags of the slide.
        reason: Why it failed or is incomplete.
        thumbnail: JPEG; empty if there is none.
        link: Relative URL of its report; empty if there is none.
        uncalibrated: Probabilities before calibration; empty if there is no calibration.
    """

    slide_id: str
    case_id: str
    status: str
    prediction: str
    probabilities: tuple[float, ...]
    label: str
    coverage: float | None
    flags: tuple[str, ...]
    reason: str = ""
    thumbnail: bytes = b""
    link: str = ""
    uncalibrated: tuple[float, ...] = ()

    @property
    def wrong(self) -> bool:
        """Whether the prediction is known to be wrong."""
        return bool(self.label and self.prediction and self.label != self.prediction)


def predicted_slides(out: Path, class_names: Sequence[str]) -> list[CohortSlide]:
    """Return the slides of a folder of predictions, from its table and the slides' folders.

    Raises:
        OSError: The table cannot be read.
    """
    _, rows = read_own((out / FILE_NAME).read_bytes())
    return [_predicted_slide(out, row, class_names) for row in rows]


def _predicted_slide(out: Path, row: Mapping[str, str], class_names: Sequence[str]) -> CohortSlide:
    folder = out / row["slide_id"]
    try:
        details: dict[str, Any] = json.loads((folder / PREDICTION_FILE).read_text(encoding="utf-8"))
        thumbnail = (folder / THUMBNAIL_FILE).read_bytes()
    except (OSError, ValueError):
        details, thumbnail = {}, b""
    label = str(details.get("label", ""))
    shown = row["status"] != "failed" and bool(details)
    return CohortSlide(
        slide_id=row["slide_id"],
        case_id=row["case_id"],
        status=row["status"],
        prediction=row["prediction"],
        probabilities=tuple(float(row[f"p_{name}"]) for name in class_names) if row["prediction"] else (),
        label=label if label in class_names else "",
        coverage=float(row["coverage"]) if row["coverage"] else None,
        flags=tuple(flag for flag in row["flags"].split(";") if flag),
        reason=row["reason"],
        thumbnail=thumbnail if shown else b"",
        link=f"{quote(row['slide_id'])}/report.html" if shown else "",
        uncalibrated=_uncalibrated(details) if row["prediction"] else (),
    )


def _uncalibrated(details: Mapping[str, Any]) -> tuple[float, ...]:
    fitted = any(temperature != 1 for temperature in details.get("temperatures", ()))
    return tuple(details["probabilities_uncalibrated"]) if fitted else ()


def evaluated_slides(
    dataset: SlideDataset,
    logits: Mapping[int, Sequence[float]],
    class_names: Sequence[str],
    least: float,
    *,
    whole: bool,
    temperature: float = 1.0,
) -> list[CohortSlide]:
    """Return the slides of a dataset with their predictions, and thumbnails from the store.

    Args:
        dataset: The slides.
        logits: Logits by index of the slide.
        class_names: Class names in the order of the logits.
        least: Smallest coverage; slides with less are ``incomplete``.
        whole: Whether all tissue was shown, even if it does not fit the dataset's images.
        temperature: The checkpoint's temperature, by which logits are divided.
    """
    found = []
    for index, sample in enumerate(dataset.samples):
        outputs = np.asarray(logits[index], dtype=np.float64)
        view = dataset.view(index)
        coverage = 1.0 if whole and view.pieces else view.coverage
        flags = tuple(flag for flag in view.flags if not (whole and flag == "cropped"))
        slide = dataset.slide(index)
        assert isinstance(slide, SlideStore)
        found.append(
            CohortSlide(
                slide_id=sample.slide_id,
                case_id=sample.case_id,
                status="done" if coverage >= least else "incomplete",
                prediction=class_names[int(outputs.argmax())],
                probabilities=tuple(softmax(outputs / temperature).tolist()),
                label="" if sample.label is None else class_names[sample.label],
                coverage=coverage,
                flags=flags,
                thumbnail=_thumbnail(slide),
                uncalibrated=tuple(softmax(outputs).tolist()) if temperature != 1 else (),
            )
        )
    return found


def _thumbnail(slide: SlideStore) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(thumbnail_of_store(slide, THUMBNAIL_PX).image).save(buffer, "JPEG", quality=80)
    return buffer.getvalue()


def write_predictions(folder: Path, slides: Sequence[CohortSlide], class_names: Sequence[str], store: Path) -> None:
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
            probabilities=slide.probabilities,
            coverage=slide.coverage,
            flags=slide.flags,
        )
        rows.append(prediction.row(class_names, with_spread=False) | {"label": slide.label})
    write_table(folder / FILE_NAME, [*columns(class_names, with_spread=False), "label"], rows)


def write_cohort_page(folder: Path, slides: Sequence[CohortSlide], class_names: Sequence[str], title: str) -> Path:
    """Write ``folder/index.html`` and return its path.

    Raises:
        OSError: The file cannot be written.
    """
    labelled = [slide for slide in slides if slide.label and slide.prediction]
    colors = ["rgb({}, {}, {})".format(*class_color(index)) for index in range(len(class_names))]
    content = {
        "classes": [{"name": name, "color": color} for name, color in zip(class_names, colors, strict=True)],
        "flags": {name: FLAG_MEANINGS.get(name, "") for slide in slides for name in slide.flags},
        "slides": [_row(slide) for slide in slides],
    }
    page = render(
        "cohort.html",
        title=title,
        content=json.dumps(content, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c"),
        counts=_counts(slides),
        evaluation=_evaluation(labelled, class_names) if labelled else None,
        worst=[_worst(slide) for slide in worst_errors(labelled, class_names)],
        made_at=f"{datetime.now(UTC):%d %B %Y, %H:%M} UTC".lstrip("0"),
        version=importlib.metadata.version("hyfi"),
    )
    path = folder / PAGE_FILE
    write_atomically(path, page.encode("utf-8"))
    return path


def worst_errors(labelled: Sequence[CohortSlide], class_names: Sequence[str]) -> list[CohortSlide]:
    """Return the worst errors: wrongly predicted slides by the probability of their true class, lowest first."""
    index_of = {name: index for index, name in enumerate(class_names)}
    wrong = [slide for slide in labelled if slide.wrong]
    return sorted(wrong, key=lambda slide: slide.probabilities[index_of[slide.label]])[:MAX_WORST]


def _row(slide: CohortSlide) -> list[Any]:
    """Return a row in the compact form that the page's script reads."""
    return [
        slide.slide_id,
        slide.case_id,
        slide.status,
        slide.prediction,
        [round(p, 4) for p in slide.probabilities],
        slide.label,
        slide.coverage,
        list(slide.flags),
        slide.reason,
        jpeg_uri(slide.thumbnail) if slide.thumbnail else "",
        slide.link,
    ]


def _worst(slide: CohortSlide) -> dict[str, Any]:
    return {
        "slide": slide,
        "picture": jpeg_uri(slide.thumbnail) if slide.thumbnail else "",
        "probability": max(slide.probabilities),
    }


def _counts(slides: Sequence[CohortSlide]) -> list[tuple[str, int]]:
    found = [("slide" if len(slides) == 1 else "slides", len(slides))]
    found += [(status, sum(slide.status == status for slide in slides)) for status in ("done", "incomplete", "failed")]
    return [*found, ("wrong", sum(slide.wrong for slide in slides))] if any(s.label for s in slides) else found


def _evaluation(labelled: Sequence[CohortSlide], class_names: Sequence[str]) -> dict[str, Any]:
    """Return plots (SVG) and tables of the labelled slides."""
    from workflows.evaluation.bootstrap import draw_cases
    from workflows.evaluation.cases import case_indices
    from workflows.evaluation.curves import threshold_rows
    from workflows.evaluation.plots import confusion_plot, curve_plots, reliability_plots

    probabilities = np.array([slide.probabilities for slide in labelled], dtype=np.float64)
    targets = np.array([class_names.index(slide.label) for slide in labelled], dtype=np.int64)
    of_case = case_indices([slide.case_id or slide.slide_id for slide in labelled])
    cases = int(of_case.max()) + 1
    draws = draw_cases(cases, _draws(len(labelled)))[:, of_case].numpy()
    shown = [1] if len(class_names) == 2 else range(len(class_names))
    roc, precision_recall = curve_plots(probabilities, targets, draws, class_names, shown)
    before = [slide.uncalibrated or slide.probabilities for slide in labelled]
    raw = np.array(before, dtype=np.float64) if any(slide.uncalibrated for slide in labelled) else None
    metrics = _metrics(probabilities, targets, draws)
    if raw is not None:
        earlier = dict(_metrics(raw, targets, draws))["calibration error"]
        metrics.append(("calibration error before calibration", earlier))
    return {
        "slides": len(labelled),
        "cases": cases,
        "metrics": metrics,
        "plots": [
            roc,
            precision_recall,
            confusion_plot(probabilities, targets, class_names),
            *reliability_plots(probabilities, targets, raw),
        ],
        "thresholds": [(class_names[k], threshold_rows(probabilities[:, k], targets == k)) for k in shown],
    }


def _draws(slides: int) -> int:
    """Return the number of bootstrap draws: 1000, fewer beyond 1000 slides."""
    return max(200, min(1000, 1_000_000 // max(1, slides)))


def _metrics(probabilities: NDArray[np.float64], targets: NDArray[np.int64], draws: Any) -> list[tuple[str, str]]:
    """Return (name, formatted value with interval) of each metric."""
    import torch

    from workflows.evaluation.bootstrap import intervals
    from workflows.evaluation.metrics import METRICS, metrics_of_probabilities

    p, y = torch.from_numpy(probabilities), torch.from_numpy(targets)
    values = metrics_of_probabilities(p, y)
    logits = p.clamp(min=1e-12).log()
    bounds = intervals(logits, y, torch.zeros(len(y), dtype=torch.float64), torch.from_numpy(draws))
    rows = []
    for name in METRICS:
        value, bound = values[name], bounds[name]
        text = "not defined" if value is None else f"{value:.3f}"
        rows.append((name.replace("_", " "), text + (f" ({bound[0]:.3f} – {bound[1]:.3f})" if bound else "")))
    return rows
