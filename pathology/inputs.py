"""What a user asks to predict: slide files, folders, manifests, slides of a store, whole stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from data.manifest import FAILED, StoreManifest, load_records, read_user_manifest
from data.store import slide_path
from hyfi_core.errors import RequestError


@dataclass(frozen=True)
class SlideInput:
    """One slide to predict.

    Attributes:
        slide_id: names its results.
        case_id: the patient or block, empty where unknown.
        path: the slide file, or ``STORE/<slide_id>.zarr``.
        stored: whether it is already in a store.
        row: the user's or the store's manifest row.
        reason: why it cannot be predicted, known before it is tried; empty otherwise.
    """

    slide_id: str
    case_id: str
    path: Path
    stored: bool
    row: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""


def find_inputs(paths: Sequence[Path]) -> list[SlideInput]:
    """Return the slides that are meant, in the order given; what is found in folders is sorted by name.

    Raises:
        RequestError: a path is missing, a folder holds no slide, or two slides would have the same name.
    """
    found: list[SlideInput] = []
    for path in paths:
        found += _inputs_of(path)
    places: dict[str, Path] = {}
    for one in found:
        if places.setdefault(one.slide_id, one.path) != one.path:
            raise RequestError(
                f"two slides are named {one.slide_id}: {places[one.slide_id]} and {one.path}; their results would lie "
                "in one folder: predict them into different --out, or name them in a manifest's column slide_id"
            )
    return list({one.slide_id: one for one in found}.values())


def _inputs_of(path: Path) -> list[SlideInput]:
    if not path.exists():
        raise RequestError(f"{path}: there is no such file or folder; give slides, folders of slides, or a store")
    if path.name.endswith(".zarr") and path.is_dir():
        return [_stored(path)]
    if path.is_dir():
        found = _store_slides(path) if _is_store(path) else [_file(file) for file in find_slides(path)]
        if not found:
            raise RequestError(f"{path}: no slide in this folder or below it")
        return found
    if path.suffix.lower() == ".csv":
        return [_file(Path(row["source_path"]), row) for row in read_user_manifest(path)]
    return [_file(path)]


def _is_store(folder: Path) -> bool:
    return (folder / ".records").is_dir() or any(folder.glob("*.zarr"))


def _store_slides(store: Path) -> list[SlideInput]:
    """Return every slide of a store; those that its ingest failed on carry the reason."""
    rows = StoreManifest.load(store)
    found = []
    for row in sorted(rows, key=lambda row: row["slide_id"]):
        reason = f"not in the store: {row.get('reason', '')}" if row.get("status") == FAILED else ""
        path = slide_path(store, row["slide_id"])
        found.append(SlideInput(row["slide_id"], row.get("case_id", ""), path, True, row, reason))
    return found


def _stored(path: Path) -> SlideInput:
    slide_id = path.name.removesuffix(".zarr")
    record = load_records(path.parent).get(slide_id)
    row = record.row() if record else {}
    return SlideInput(slide_id, row.get("case_id", ""), path, True, row)


def _file(path: Path, row: Mapping[str, str] | None = None) -> SlideInput:
    row = row or {}
    return SlideInput(row.get("slide_id") or path.stem, row.get("case_id", ""), path, False, row)


def find_slides(folder: Path) -> list[Path]:
    """Return the slide files in a folder and below it, sorted; hidden ones and those in ``.zarr`` are left out."""
    from pathology.sources import SLIDE_SUFFIXES

    found = []
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder).parts
        hidden = any(part.startswith(".") or part.endswith(".zarr") for part in inside)
        if path.suffix.lower() in SLIDE_SUFFIXES and not hidden and path.is_file():
            found.append(path)
    return found
