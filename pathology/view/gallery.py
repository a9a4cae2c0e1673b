"""The slides that a viewer shows: those of the given stores, files and predictions, and no others.

```
slide file, folder of slides, manifest   found as by `hyfi predict`
STORE, STORE/<slide_id>.zarr             found as by `hyfi predict`
folder with a predictions.csv            the slides of the table: a given store or file with the same slide_id if there
                                         is one, else the path in the table
```
"""

from __future__ import annotations

import csv
import itertools
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from data.csv_table import read_own
from data.files import in_utf8
from data.location import is_remote, location
from data.store.slide_store import StoreError
from hyfi_core.errors import RequestError
from pathology.errors import SlideError
from pathology.predict.inputs import SlideInput, find_inputs
from pathology.predict.table import FILE_NAME, PREDICTION_FILE, SOURCE_FILE
from pathology.readers.facts.pictures import Pick
from pathology.readers.ngff.groups import is_own_slide
from pathology.readers.sources import SLIDE_SUFFIXES
from pathology.view.pixels import FilePixels, ShownSlide, StoredPixels

MAX_OPEN = 24
MAX_CHECKED_AT_START = 64
EXPECTED_PATHS = (
    "give a store, a slide of a store (.zarr), slide files, a folder of slides, or a folder of predictions "
    "(with a predictions.csv)"
)


@dataclass(frozen=True)
class GallerySlide:
    """One slide of the list.

    Attributes:
        key: Identifies it in addresses: its slide_id; if several have the same, with their folder of predictions.
        slide_id: Its name.
        path: The file, or ``STORE/<slide_id>.zarr``.
        stored: Whether it is in a store.
        manifest_mpp: The manifest's ``source_mpp``; may be empty.
        prediction: The predicted class; empty if there is none.
        predictions: Its folder of predictions; None if it has none.
        annotations: File of its annotations; None if they cannot be saved.
        reason: Why it cannot be shown, if this is known; else empty.
        scene: Number of the scene of its file, from the manifest; may be empty.
    """

    key: str
    slide_id: str
    path: Path
    stored: bool
    manifest_mpp: str = ""
    prediction: str = ""
    predictions: Path | None = None
    annotations: Path | None = None
    reason: str = ""
    scene: str = ""

    def open(self, slide_mpp: float | None) -> ShownSlide:
        """Open the slide; the caller closes it.

        Args:
            slide_mpp: Micrometres per pixel of a file if neither file nor manifest states them.

        Raises:
            SlideError, StoreError: The slide cannot be opened; the message says why.
        """
        if self.reason:
            raise SlideError(self.reason)
        predicted = self._prediction()
        if self.stored:
            slide: ShownSlide = StoredPixels(self.path)
        else:
            scene = Pick(int(self.scene) if self.scene.isdecimal() else 0)
            slide = FilePixels(self.path, self.manifest_mpp, slide_mpp, _used_mpp(predicted), scene)
        if _is_another(slide, predicted):
            slide.close()
            raise SlideError(
                "it is not the slide of this name that was predicted: its file has other content; give that slide's "
                f"store or folder as another PATH, or this one without {self.predictions}"
            )
        return slide

    def _prediction(self) -> dict[str, Any]:
        """Return the slide's ``prediction.json``; empty if it has none that can be read."""
        return {} if self.predictions is None else prediction_of(self.predictions, self.slide_id)


def prediction_of(folder: Path, slide_id: str) -> dict[str, Any]:
    """Return the ``prediction.json`` of a slide in a folder of predictions; empty if it cannot be read."""
    with suppress(OSError, ValueError):  # incomplete
        prediction = json.loads((folder / slide_id / PREDICTION_FILE).read_text(encoding="utf-8"))
        return prediction if isinstance(prediction, dict) else {}
    return {}


def _used_mpp(prediction: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the micrometres per pixel, (y, x), with which a slide was predicted; None if they are not known."""
    with suppress(ValueError, TypeError, KeyError):  # written by an earlier version, or incomplete
        y, x = prediction["source_mpp"]
        return float(y), float(x)
    return None


def _is_another(slide: ShownSlide, prediction: Mapping[str, Any]) -> bool:
    """Whether a slide's file is known to differ from the one that was predicted: slides may have the same name."""
    predicted = prediction.get("source_file") or {}
    if not predicted:
        return False
    source_file = slide.source_file()
    pairs = [(source_file.get(name), predicted.get(name)) for name in SOURCE_FILE]
    return any(now != before for now, before in pairs if now is not None and before is not None)


def find_slides(paths: Sequence[Path], annotations: Path | None = None) -> tuple[list[GallerySlide], list[Path]]:
    """Return the slides in ``paths``, and the folders of predictions among them.

    Args:
        paths: Slide files, folders, manifests, stores and folders of predictions.
        annotations: Folder for annotations; default: ``annotations`` in the folder of predictions.

    Raises:
        RequestError: A path cannot be shown.
    """
    predictions = [path for path in paths if not is_remote(path) and (path / FILE_NAME).is_file()]
    slide_paths = [path for path in paths if path not in predictions]
    for path in slide_paths:
        _require_slide(path)
    inputs_by_id = {item.slide_id: item for item in (find_inputs(slide_paths) if slide_paths else [])}
    slides: dict[str, GallerySlide] = {}
    for folder in predictions:
        annotation_folder = annotations or folder / "annotations"
        for row in _rows(folder):
            slide = _predicted(folder, row, inputs_by_id, annotation_folder / f"{row['slide_id']}.geojson")
            key = _free_key(slide.slide_id, folder, slides)
            slides[key] = replace(slide, key=key)
    shown = {slide.slide_id for slide in slides.values()}
    for item in inputs_by_id.values():
        if item.slide_id not in shown:
            file = annotations / f"{item.slide_id}.geojson" if annotations else None
            slides[item.slide_id] = replace(_of_input(item), annotations=file)
    return list(slides.values()), predictions


def _free_key(slide_id: str, folder: Path, slides: Mapping[str, GallerySlide]) -> str:
    """Return a key that no slide has yet; it has no slashes, because it is a part of addresses.

    The first of these that is free: the slide_id, the slide_id with the name of the folder of predictions, both with a
    number.
    """
    numbered = (f"{slide_id} ({folder.name} {number})" for number in itertools.count(2))
    names = itertools.chain((slide_id, f"{slide_id} ({folder.name})"), numbered)
    return next(name for name in names if name not in slides)


def _require_slide(path: Path) -> None:
    """Refuse a file that has not the extension of a slide, and that no reader opens.

    Files with such an extension pass: if they are damaged, the gallery lists them with the reason.

    Raises:
        RequestError: The file is not a slide.
    """
    if is_remote(path) or not path.is_file() or path.suffix.lower() in SLIDE_SUFFIXES | {".csv", ".tsv"}:
        return
    try:
        FilePixels(path).close()
    except SlideError as error:
        raise RequestError(f"{path}: cannot be shown ({error}); {EXPECTED_PATHS}") from error


def _of_input(item: SlideInput) -> GallerySlide:
    """Return the entry of a slide that was given by its path or store, without a prediction."""
    return GallerySlide(
        key=item.slide_id,
        slide_id=item.slide_id,
        path=item.path,
        stored=item.stored,
        manifest_mpp=item.row.get("source_mpp", ""),
        reason=item.failure,
        scene=item.row.get("scene", ""),
    )


def _rows(folder: Path) -> list[dict[str, str]]:
    """Return the rows of a prediction's table; refuse other tables, and ids that cannot name a file."""
    try:
        _, rows = read_own((folder / FILE_NAME).read_bytes())
    except (OSError, ValueError, csv.Error) as error:
        raise RequestError(f"{folder / FILE_NAME}: cannot be read ({error})") from error
    if not rows or not {"slide_id", "path", "prediction"} <= rows[0].keys():
        raise RequestError(f"{folder / FILE_NAME}: is not the table of a prediction; {EXPECTED_PATHS}")
    for row in rows:
        if not row["slide_id"] or row["slide_id"].startswith(".") or "/" in row["slide_id"] or "\\" in row["slide_id"]:
            raise RequestError(f"{folder / FILE_NAME}: slide_id {row['slide_id']!r} is not valid as a name")
    return rows


def _predicted(
    folder: Path, row: dict[str, str], inputs_by_id: dict[str, SlideInput], annotations: Path
) -> GallerySlide:
    """Return the slide of a row of a table of predictions."""
    slide_id = row["slide_id"]
    own_input = inputs_by_id.get(slide_id)
    if own_input is not None:
        slide = _of_input(own_input)
    else:
        path = location(row["path"])
        # Tables have paths as they were given, relative to where the prediction ran: usually the folder above.
        if not is_remote(path) and not path.is_absolute() and not path.exists() and (folder.parent / path).exists():
            path = folder.parent / path
        advice = "is not there now; give its store or folder as another PATH"
        missing = "" if path.exists() else f"{path}, where it was predicted, {advice}"
        # Each scene of a file is a slide of its own, and the table has the same path for all of them.
        scene = str((prediction_of(folder, slide_id).get("key") or {}).get("scene", ""))
        is_stored = is_own_slide(path)
        slide = GallerySlide(slide_id, slide_id, path, stored=is_stored, reason=missing, scene=scene)
    return replace(slide, prediction=row["prediction"], predictions=folder, annotations=annotations)


@dataclass
class _OpenSlide:
    """A slide that is open or being opened, the number of its users, and whether to close it after the last."""

    users: int = 0
    closing: bool = False
    slide: ShownSlide | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def close(self) -> None:
        """Close the slide, now or after its last user."""
        self.closing = True
        if self.slide is not None and not self.users:
            self.slide.close()
            self.slide = None


@dataclass
class Gallery:
    """The slides of a viewer, opened on demand. Safe to use from several threads.

    Attributes:
        slides: The slides by key, in order.
        predictions: Folders of predictions, whose tables are shown.
        slide_mpp: Micrometres per pixel of files that do not state them.
        reasons: By key, why a slide cannot be opened; only of slides for which this was tried.
    """

    slides: dict[str, GallerySlide]
    predictions: tuple[Path, ...] = ()
    slide_mpp: float | None = None
    reasons: dict[str, str] = field(default_factory=dict)
    _open: dict[str, _OpenSlide] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @classmethod
    def of(cls, paths: Sequence[Path], annotations: Path | None = None, slide_mpp: float | None = None) -> Gallery:
        """Return the gallery of the slides in ``paths``; see `find_slides`.

        Raises:
            RequestError: A path cannot be shown.
        """
        slides, predictions = find_slides(paths, annotations)
        # Addresses are UTF-8: for a name that is not, a browser would send back other bytes.
        slides = [replace(slide, key=in_utf8(slide.key)) for slide in slides]
        gallery = cls({slide.key: slide for slide in slides}, tuple(predictions), slide_mpp)
        gallery.reasons.update({slide.key: slide.reason for slide in slides if slide.reason})
        return gallery

    def try_all(self) -> dict[str, str]:
        """Open each of the first slides once, and return the reasons of those that fail, by key."""
        for key in list(self.slides)[:MAX_CHECKED_AT_START]:
            try:
                with self.opened(key):
                    pass
            except (SlideError, StoreError):
                pass  # `opened` has recorded the reason
        return self.reasons

    @contextmanager
    def opened(self, key: str) -> Iterator[ShownSlide]:
        """Context that yields an open slide; if many are open, the least recently used is closed.

        Raises:
            KeyError: There is no such slide.
            SlideError, StoreError: The slide cannot be opened.
        """
        with self._lock:
            # Popped and set again, so that it becomes the last in the order of use.
            entry = self._open.pop(key, None) or _OpenSlide()
            self._open[key] = entry
            entry.users += 1
            self._close_least_recent()
        try:
            # Opened without the gallery's lock, so that other slides need not wait for a slow one.
            with entry.lock:
                slide = entry.slide = entry.slide or self._open_slide(key, entry)
            yield slide
        finally:
            with self._lock:
                entry.users -= 1
                if entry.closing:
                    entry.close()

    def close(self) -> None:
        """Close all slides; one in use is closed by its last user."""
        with self._lock:
            for entry in self._open.values():
                entry.close()
            self._open.clear()

    def _open_slide(self, key: str, entry: _OpenSlide) -> ShownSlide:
        try:
            return self.slides[key].open(self.slide_mpp)
        except BaseException as error:
            if isinstance(error, (SlideError, StoreError)):
                self.reasons[key] = str(error)
            with self._lock:
                # It no longer counts as open. Threads that wait for it try to open it themselves.
                entry.closing = True
                if self._open.get(key) is entry:
                    del self._open[key]
            raise

    def _close_least_recent(self) -> None:
        """Close the least recently used slides, until at most `MAX_OPEN` are open."""
        while len(self._open) > MAX_OPEN:
            self._open.pop(next(iter(self._open))).close()
