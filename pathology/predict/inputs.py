"""Inputs of a prediction: slide files, folders, manifests, slides of a store, stores."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from data.errors import StoreError
from data.location import is_remote, location
from data.missing import MISSING, is_missing
from data.store.manifest import FAILED, SlideRecord, load_manifest, record_path
from data.store.slide_store import slide_path
from hyfi_core.errors import RequestError
from pathology.ingest.discover import find_jobs
from pathology.readers.ngff.groups import is_ome_zarr, is_own_slide


@dataclass(frozen=True)
class SlideInput:
    """One slide to predict.

    Attributes:
        slide_id: Name of the slide and of its folder of results.
        case_id: The patient or specimen; empty if unknown.
        path: The slide file, or ``STORE/<slide_id>.zarr``.
        stored: Whether it is in a store already.
        row: Its row of the user's or the store's manifest.
        failure: Why it cannot be predicted, if this is known in advance; else empty.
        label: Its label as text; empty: it has none; None: the label is in ``row``.
        case_slides: All slides of its case, for models that take cases as bags; else empty.
    """

    slide_id: str
    case_id: str
    path: Path
    stored: bool
    row: Mapping[str, str] = field(default_factory=dict)
    failure: str = ""
    label: str | None = None
    case_slides: tuple[Path, ...] = ()


def find_inputs(
    paths: Sequence[Path], files_by_name: Mapping[str, str] | None = None, missing: Iterable[str] = MISSING
) -> list[SlideInput]:
    """Return all slides of ``paths``: first those of stores, then files, folders and manifests in their order.

    Slide files get the same names as in an ingest; ``files_by_name`` is that of `find_jobs`. A case that is one of the
    words ``missing`` is unknown: slides with this word do not belong together.

    Raises:
        RequestError: a path is missing, a folder has no slide, a manifest is invalid, or two slides have the same name.
    """
    paths = [location(path) for path in paths]
    # `os.path`: unlike `Path`, it does not raise for inaccessible paths, which `find_jobs` reports.
    folders = [path for path in paths if is_remote(path) or os.path.isdir(path)]  # noqa: PTH112
    stored = [slide for path in folders for slide in _stored(path)]
    jobs = find_jobs([path for path in paths if not (path in folders and _is_stored(path))], files_by_name or {})
    files = [
        SlideInput(job.slide_id, job.row.get("case_id", ""), job.source, stored=False, row=job.row) for job in jobs
    ]
    # Names must be unique, because results are in folders with these names; a slide given twice counts once.
    by_name: dict[str, SlideInput] = {}
    for slide in (*stored, *files):
        namesake = by_name.setdefault(slide.slide_id, slide)
        if namesake.path != slide.path:
            raise RequestError(
                f"two slides are named {slide.slide_id}: {namesake.path} and {slide.path}; their results would be in "
                f"the same folder; use a different --out for each, or a manifest with a unique slide_id"
            )
    words = tuple(missing)
    return [replace(slide, case_id="") if is_missing(slide.case_id, words) else slide for slide in by_name.values()]


def _is_stored(folder: Path) -> bool:
    """Whether a folder is a store of `hyfi ingest` or one of its slides, not another OME-Zarr or a folder of files."""
    if is_own_slide(folder):
        return True
    if is_ome_zarr(folder):
        return False
    if is_remote(folder):
        # An address with neither a manifest nor stores is opened as a store, whose reader says what is missing.
        return (folder / "manifest.csv").is_file() or not _has_ome_zarr(folder)
    return (
        folder.name.endswith(".zarr") or (folder / ".records").is_dir() or any(map(is_own_slide, folder.glob("*.zarr")))
    )


def _has_ome_zarr(folder: Path) -> bool:
    """Whether an address has OME-Zarr stores directly below it."""
    try:
        return any(map(is_ome_zarr, folder.iterdir()))
    except OSError:
        return False  # the store's reader reports it


def _stored(folder: Path) -> list[SlideInput]:
    """Return the slides of a store, or the single stored slide; failed ones have a ``failure``; empty: not a store."""
    if not _is_stored(folder):
        return []
    if folder.name.endswith(".zarr"):
        slide_id = folder.name.removesuffix(".zarr")
        row: dict[str, str] = {}
        with suppress(StoreError):  # a slide outside of a store
            row = SlideRecord.load(record_path(folder.parent, slide_id)).row()
        return [SlideInput(slide_id, row.get("case_id", ""), folder, stored=True, row=row)]
    slides = []
    for row in sorted(load_manifest(folder), key=lambda row: row["slide_id"]):
        failure = f"not in the store: {row.get('reason', '')}" if row.get("status") == FAILED else ""
        path = slide_path(folder, row["slide_id"])
        slides.append(SlideInput(row["slide_id"], row.get("case_id", ""), path, stored=True, row=row, failure=failure))
    return slides
