"""A folder of predictions made for a test: one slide, its maps, regions, report and table."""

from __future__ import annotations

from pathlib import Path

from hyfi_core.comm.alone import AloneCommunicator
from pathology.ingest.options import IngestOptions
from pathology.ingest.slide import ingest_slide
from pathology.predict.cohort import predict_slides
from pathology.predict.inputs import find_inputs
from tests.pathology.slides import Darkness, draw_slide, member_of, write_slide
from workflows.evaluation.cohort_page import predicted_slides, write_cohort_page
from workflows.tasks.multiclass import Multiclass

CLASSES = ("pale", "dark")
SLIDE_ID = "one"


def make_predictions(folder: Path) -> Path:
    """Draw a slide, ingest it to ``folder/store``, predict the file, and return the folder of predictions."""
    slide = write_slide(folder / f"{SLIDE_ID}.tiff", draw_slide())
    (folder / "store").mkdir()
    assert ingest_slide(slide, folder / "store", IngestOptions(mpp=1.0), {}).status == "done"
    out = folder / "results"
    report = predict_slides([member_of(Darkness())], find_inputs([slide]), out, AloneCommunicator())
    assert [one.slide_id for one in report.done] == [SLIDE_ID]
    task = Multiclass(("label",), tuple(CLASSES))
    readout = task.readout(None)
    write_cohort_page(out, predicted_slides(out, task, readout.columns), task, readout, "Predictions")
    return out
