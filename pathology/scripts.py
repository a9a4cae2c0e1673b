"""Ingest and prediction for scripts; what they need is imported when they are called.

They are not called ``ingest`` and ``predict``: these are packages, and Python sets a package as an attribute of its
parent when anything in it is imported, which would replace a function of that name.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Union

from hyfi_core.errors import RequestError

if TYPE_CHECKING:
    from torch import nn

    from data.store.slide_store import SlideStore
    from pathology.ingest.archive import IngestReport
    from pathology.predict.table import PredictionReport

StrPath = str | os.PathLike[str]
Slides = Union[StrPath, "SlideStore", Sequence[Union[StrPath, "SlideStore"]]]
"""Paths of slides, or opened slides of a store."""
Options = TypeVar("Options")


def ingest_slides(
    paths: StrPath | Sequence[StrPath],
    store: StrPath,
    *,
    workers: int = 1,
    overwrite: bool = False,
    **options: Any,
) -> IngestReport:
    """Ingest slides into a store, as ``hyfi ingest`` does. Safe to run again: finished slides are skipped.

    Args:
        paths: Slide files, folders, or manifest CSVs; one or several.
        store: The store's folder; created if it does not exist.
        workers: Number of processes; 0: as many as cores and memory allow; 1: only this process.
        overwrite: Ingest finished slides again.
        options: Fields of `pathology.ingest.options.IngestOptions`: ``mpp=1.0``, ``slide_mpp=0.25``,
            ``codec="zstd:3"`` …

    Returns:
        The records of the slides that are done and of those that failed, each of these with its reason.

    Raises:
        RequestError: A path or an option is wrong, or the store has slides with other options; nothing is written.
    """
    from pathology.ingest.archive import Request, ingest
    from pathology.ingest.options import IngestOptions

    chosen = checked_options(IngestOptions, options)
    return ingest(Request(several(paths), Path(store), chosen, overwrite), workers=workers)


def predict_slides(
    checkpoints: StrPath | Sequence[StrPath],
    slides: Slides,
    out: StrPath,
    *,
    model: nn.Module | None = None,
    **options: Any,
) -> PredictionReport:
    """Predict slides with a checkpoint, as ``hyfi predict`` does, in this process (or all started ranks).

    Writes ``predictions.csv`` and a folder for each slide into ``out``. It knows models of classes; for those of other
    tasks, of tiles and of features there is `workflows.predict_slides`.

    Args:
        checkpoints: The folder that a run wrote, as in ``runs/first/checkpoints/best``; several form an ensemble.
        slides: Slide files, folders, manifest CSVs, stores, or opened slides; one or several.
        out: The folder of results; created if it does not exist.
        model: A module of the checkpoint's architecture, which is copied; None: build it by the name in the
            checkpoint.
        options: Fields of `pathology.predict.options.PredictOptions`: ``overwrite=True``, ``cells=(4, 4)`` …

    Returns:
        The predictions that are done, those that are incomplete, and those that failed, each with its reason.

    Raises:
        RequestError: A checkpoint does not match the model, or an input, an option or ``out`` cannot be used.
    """
    import hyfi_core
    from pathology.predict.cohort import predict_slides as predict_inputs
    from pathology.predict.inputs import find_inputs
    from pathology.predict.members import Member
    from pathology.predict.options import PredictOptions

    chosen = checked_options(PredictOptions, options)
    members = [Member.load(path, copy.deepcopy(model)) for path in several(checkpoints)]
    return predict_inputs(members, find_inputs(several(slides)), Path(out), hyfi_core.init(), chosen)


def several(paths: Slides) -> list[Path]:
    """Return one path or opened slide, or a sequence of them, as a list of paths.

    Raises:
        RequestError: There is none.
    """
    from data.store.slide_store import SlideStore

    items = [paths] if isinstance(paths, (str, os.PathLike, SlideStore)) else list(paths)
    as_paths = [Path(item.path if isinstance(item, SlideStore) else item) for item in items]
    if not as_paths:
        raise RequestError("no paths were given; give at least one")
    return as_paths


def checked_options(kind: type[Options], arguments: Mapping[str, Any]) -> Options:
    """Return the options made of keyword arguments; paths may be strings.

    Raises:
        RequestError: There is no option of a name, or its value is not allowed.
    """
    types = {field.name: str(field.type) for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    values = dict(arguments)
    for name, value in arguments.items():
        if name not in types:
            raise RequestError(f"there is no option {name!r}; the options are {', '.join(types)}")
        if "Path" in types[name] and isinstance(value, str):
            values[name] = Path(value)
    return kind(**values)
