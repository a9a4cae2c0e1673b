"""Slides: reading, ingest into a store, prediction.

These functions are for scripts; the commands of ``hyfi`` use the same code:

>>> import pathology
>>> slide = pathology.open_slide("SLIDES/slide-0000.tiff")
>>> slide.mpp, slide.levels[0].height_px, slide.levels[0].width_px
((0.5, 0.5), 1024, 1024)
>>> report = pathology.ingest_slides(["SLIDES/slide-0000.tiff"], "another-store", mpp=1.0)
>>> [record.slide_id for record in report.done], report.failed
(['slide-0000'], [])
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from pathology.ingest.archive import IngestReport
    from pathology.predict.cohort import PredictionReport
    from pathology.readers.slide_source import SlideSource

__all__ = ["ingest_slides", "open_slide", "predict_slides"]

StrPath = str | os.PathLike[str]


def open_slide(path: StrPath) -> SlideSource:
    """Open a slide file of any supported format.

    Returns:
        The slide: ``levels`` (finest first), ``mpp`` as (y, x) or None, and ``read(box, level)``, which returns a new
        ``(h, w, 3)`` uint8 array. The caller closes it; see `pathology.readers.slide_source.SlideSource`.

    Raises:
        SlideError: No reader supports the file, or it is damaged; the message says why.
    """
    from pathology.readers.sources import open_source

    return open_source(Path(path))


def ingest_slides(
    paths: Sequence[StrPath], store: StrPath, *, workers: int = 1, overwrite: bool = False, **options: Any
) -> IngestReport:
    """Ingest slides into a store, as ``hyfi ingest`` does. Safe to run again: finished slides are skipped.

    Args:
        paths: Slide files, folders, or manifest CSVs.
        store: The store's folder; created if it does not exist.
        workers: Processes; 0: as many as cores and memory allow, 1: this process.
        overwrite: Ingest finished slides again.
        options: Fields of `pathology.ingest.options.IngestOptions`: ``mpp=1.0``, ``slide_mpp=0.25``,
            ``codec="zstd:3"`` …

    Returns:
        The records of the slides that are done and of those that failed, each of these with its reason.

    Raises:
        RequestError: A path or an option is wrong, or the store has slides with other options; nothing is written.
    """
    from pathology.ingest.archive import IngestOptions, Request, ingest

    request = Request([Path(path) for path in paths], Path(store), IngestOptions(**options), overwrite)
    return ingest(request, workers=workers)


def predict_slides(
    model: nn.Module, checkpoint: StrPath, slides: Sequence[StrPath], out: StrPath, **options: Any
) -> PredictionReport:
    """Predict slides with a checkpoint, as ``hyfi predict`` does, in this process (or all started ranks).

    Args:
        model: A module of the checkpoint's architecture; its weights are replaced by the checkpoint's.
        checkpoint: The folder that a run wrote, as in ``runs/first/checkpoints/best``.
        slides: Slide files, folders, manifest CSVs or stores.
        out: The folder of results; created if it does not exist.
        options: Fields of `pathology.predict.options.PredictOptions`: ``overwrite=True``, ``cells=(4, 4)`` …

    Returns:
        The predictions that are done, and those that failed, each of these with its reason.

    Raises:
        RequestError: The checkpoint does not match the model, or an input or ``out`` cannot be used.
    """
    import hyfi_core
    from hyfi_core.errors import RequestError
    from hyfi_core.runtime.checkpoint import load_checkpoint
    from pathology.predict.cohort import predict_slides as predict
    from pathology.predict.inputs import find_inputs
    from pathology.predict.members import Member
    from pathology.predict.options import PredictOptions

    loaded = load_checkpoint(Path(checkpoint))
    try:
        model.load_state_dict(loaded.inference_weights)
    except RuntimeError as error:
        raise RequestError(f"checkpoint {checkpoint}: its weights do not match the model: {error}") from error
    member = Member(str(checkpoint), model.eval(), loaded.model)
    inputs = find_inputs([Path(path) for path in slides])
    return predict([member], inputs, Path(out), hyfi_core.init(), PredictOptions(**options))
