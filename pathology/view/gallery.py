"""Which slides a viewer shows: those of stores, files and predictions that it was given, and nothing else.

```
slide file, folder of slides, manifest   as `hyfi predict` finds them
STORE, STORE/<slide_id>.zarr             likewise
predictions (a predictions.csv)          the slides of its table; from a store or file that was given too, where one
                                         has their name, else from where the prediction read them
```
"""

from __future__ import annotations

import csv
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from data.store.slide_store import StoreError
from hyfi_core.errors import RequestError
from pathology.errors import SlideError
from pathology.predict.inputs import SlideInput, find_inputs
from pathology.predict.table import FILE_NAME
from pathology.readers.sources import SLIDE_SUFFIXES
from pathology.view.pixels import FilePixels, ShownSlide, StoredPixels

MOST_OPEN = 24
MOST_TRIED_AT_START = 64
WHAT_WOULD_WORK = (
    "give a store, a slide of a store (.zarr), slide files, a folder of slides, or a folder of predictions "
    "(with a predictions.csv)"
)


@dataclass(frozen=True)
class GallerySlide:
    """One slide of the list.

    Attributes:
        key: names it in addresses; its slide_id, with its folder where two have one.
        slide_id: its name.
        path: the file, or ``STORE/<slide_id>.zarr``.
        stored: whether it lies in a store.
        manifest_mpp: what a manifest says of its file's pixels; may be empty.
        prediction: the class that it was given; empty where none.
        predictions: the folder of predictions that it is from; None where from none.
        annotations: where its annotations lie; None: nowhere.
        reason: why it cannot be shown; empty where nothing is known against it.
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

    def open(self, slide_mpp: float | None) -> ShownSlide:
        """Open it.

        Raises:
            SlideError, StoreError: it cannot be; the message says why.
        """
        if self.reason:
            raise SlideError(self.reason)
        if self.stored:
            return StoredPixels(self.path)
        return FilePixels(self.path, self.manifest_mpp, slide_mpp)


def find_slides(paths: Sequence[Path], annotations: Path | None = None) -> tuple[list[GallerySlide], list[Path]]:
    """Return the slides that are meant, and the folders of predictions among ``paths``.

    Args:
        paths: what the user gave.
        annotations: the folder that annotations go to; default: ``annotations`` in the folder of predictions.

    Raises:
        RequestError: a path is none of the kinds that can be shown.
    """
    predictions = [path for path in paths if (path / FILE_NAME).is_file()]
    others = [path for path in paths if path not in predictions]
    for path in others:
        _require_slide(path)
    given = {one.slide_id: one for one in (find_inputs(others) if others else [])}
    found: dict[str, GallerySlide] = {}
    for folder in predictions:
        place = annotations or folder / "annotations"
        for row in _rows(folder):
            slide = _predicted(folder, row, given, place / f"{row['slide_id']}.geojson")
            key = slide.slide_id if slide.slide_id not in found else f"{slide.slide_id} ({folder.name})"
            found[key] = replace(slide, key=key)
    shown = {slide.slide_id for slide in found.values()}
    for one in given.values():
        if one.slide_id not in shown:
            place_of_one = annotations / f"{one.slide_id}.geojson" if annotations else None
            found[one.slide_id] = replace(_of_input(one), annotations=place_of_one)
    return list(found.values()), predictions


def _require_slide(path: Path) -> None:
    """Refuse a file that nobody would call a slide; what is wrong with a slide is said beside it.

    Raises:
        RequestError: it is a file of another kind that no reader opens.
    """
    if not path.is_file() or path.suffix.lower() in SLIDE_SUFFIXES | {".csv", ".tsv"}:
        return
    try:
        FilePixels(path).close()
    except SlideError as error:
        raise RequestError(f"{path}: is nothing that can be shown ({error}); {WHAT_WOULD_WORK}") from error


def _of_input(one: SlideInput) -> GallerySlide:
    return GallerySlide(
        one.slide_id, one.slide_id, one.path, one.stored, one.row.get("source_mpp", ""), reason=one.reason
    )


def _rows(folder: Path) -> list[dict[str, str]]:
    try:
        with (folder / FILE_NAME).open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, ValueError, csv.Error) as error:
        raise RequestError(f"{folder / FILE_NAME}: cannot be read ({error})") from error
    if not rows or not {"slide_id", "path", "prediction"} <= rows[0].keys():
        raise RequestError(f"{folder / FILE_NAME}: is not the table of a prediction; {WHAT_WOULD_WORK}")
    for row in rows:
        if not row["slide_id"] or row["slide_id"].startswith(".") or "/" in row["slide_id"] or "\\" in row["slide_id"]:
            raise RequestError(f"{folder / FILE_NAME}: slide_id {row['slide_id']!r} cannot be a slide's name")
    return rows


def _predicted(folder: Path, row: dict[str, str], given: dict[str, SlideInput], annotations: Path) -> GallerySlide:
    slide_id = row["slide_id"]
    known = given.get(slide_id)
    if known is not None:
        slide = _of_input(known)
    else:
        path = Path(row["path"])
        if not path.is_absolute() and not path.exists() and (folder.parent / path).exists():
            path = folder.parent / path
        missing = "" if path.exists() else f"{path} is not there any more; give its store or folder as a further PATH"
        slide = GallerySlide(slide_id, slide_id, path, path.suffix == ".zarr", reason=missing)
    return replace(slide, prediction=row["prediction"], predictions=folder, annotations=annotations)


@dataclass
class _Opened:
    slide: ShownSlide
    users: int = 0
    leaving: bool = False


@dataclass
class Gallery:
    """The slides of a viewer, opened when they are asked for. Threads may share one.

    Attributes:
        slides: by key, in order.
        predictions: folders of predictions, whose tables are shown.
        slide_mpp: micrometres per pixel of files that do not say theirs.
        reasons: why slides that were tried cannot be opened, by key.
    """

    slides: dict[str, GallerySlide]
    predictions: tuple[Path, ...] = ()
    slide_mpp: float | None = None
    reasons: dict[str, str] = field(default_factory=dict)
    _open: dict[str, _Opened] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @classmethod
    def of(cls, paths: Sequence[Path], annotations: Path | None = None, slide_mpp: float | None = None) -> Gallery:
        """Return the gallery of what a user gave.

        Raises:
            RequestError: a path is none of the kinds that can be shown.
        """
        slides, predictions = find_slides(paths, annotations)
        made = cls({slide.key: slide for slide in slides}, tuple(predictions), slide_mpp)
        made.reasons.update({slide.key: slide.reason for slide in slides if slide.reason})
        return made

    def try_all(self) -> dict[str, str]:
        """Open each slide once, of many only the first; return why those that fail do, by key."""
        for key in list(self.slides)[:MOST_TRIED_AT_START]:
            try:
                with self.opened(key):
                    pass
            except (SlideError, StoreError):
                pass
        return self.reasons

    @contextmanager
    def opened(self, key: str) -> Iterator[ShownSlide]:
        """Give a slide, open; the ones used longest ago are closed when there are many.

        Raises:
            KeyError: there is no such slide.
            SlideError, StoreError: it cannot be opened.
        """
        with self._lock:
            held = self._open.pop(key, None) or self._opened(key)
            self._open[key] = held
            held.users += 1
            self._close_oldest()
        try:
            yield held.slide
        finally:
            with self._lock:
                held.users -= 1
                if held.leaving and not held.users:
                    held.slide.close()

    def close(self) -> None:
        """Close all slides."""
        with self._lock:
            for held in self._open.values():
                held.slide.close()
            self._open.clear()

    def _opened(self, key: str) -> _Opened:
        try:
            return _Opened(self.slides[key].open(self.slide_mpp))
        except (SlideError, StoreError) as error:
            self.reasons[key] = str(error)
            raise

    def _close_oldest(self) -> None:
        while len(self._open) > MOST_OPEN:
            oldest = self._open.pop(next(iter(self._open)))
            oldest.leaving = True
            if not oldest.users:
                oldest.slide.close()
