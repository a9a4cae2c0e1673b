"""Which slides are meant, and what each is called in the store."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from data.store.manifest import SlideRecord, read_user_manifest
from hyfi_core.errors import RequestError
from pathology.readers.dicom_files import DicomHead, dicom_head, file_of_slide, series_in
from pathology.readers.sources import SLIDE_SUFFIXES

_LONGEST_NAME_BYTES = 160


@dataclass(frozen=True, slots=True)
class SlideJob:
    """One slide to ingest.

    Attributes:
        source: Its file.
        slide_id: Its name in the store.
        row: Of the user's manifest.
        secret: Not empty: the name is a pseudonym, and the store is not to know name, place or time of the file.
        seen: Which state of the slide's record the job was planned on, see `data.store.manifest.record_state`.
    """

    source: Path
    slide_id: str
    row: dict[str, str] = field(default_factory=dict)
    secret: str = ""
    seen: str = ""


def find_jobs(paths: Sequence[Path], records: Mapping[str, SlideRecord]) -> list[SlideJob]:
    """Return the slides that ``paths`` mean, each once, each with its own name.

    Args:
        paths: Slides, folders (searched, links to folders followed once) and manifest CSVs.
        records: What the store holds already: a slide keeps the name that it has there.

    Raises:
        RequestError: A path does not exist, a folder holds no slide, a manifest is wrong, a name is given twice, or
            two rows say different things of one slide.
    """
    rows: dict[Path, dict[str, str]] = {}
    for path in paths:
        for source, row in _expand(path):
            rows[source] = _merged(path, source, rows.get(source, {}), row)
    return _named(_one_of_each_series(rows), records)


def user_columns(row: Mapping[str, str]) -> dict[str, str]:
    """Return what a manifest row says beyond where the slide lies."""
    return {k: v for k, v in row.items() if k not in ("path", "source_path")}


def is_gone(path: Path) -> bool:
    """Whether there is no longer a file in this place; one that cannot be looked at may be there still."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def _merged(path: Path, source: Path, one: Mapping[str, str], other: Mapping[str, str]) -> dict[str, str]:
    """Return what two rows say of one slide, if they do not contradict each other."""
    for column in sorted(one.keys() & other.keys() - {"source_path"}):
        if one[column] != other[column]:
            raise RequestError(
                f"{path}: {source} occurs in two rows that differ in the column {column!r}: "
                f"{one[column]!r} and {other[column]!r}; keep one of them"
            )
    return {**one, **other}


def _expand(path: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
        if is_folder:
            os.scandir(path).close()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise RequestError(f"{path}: no such file or folder") from error
    except OSError as error:
        raise RequestError(f"{path}: cannot be read ({error.strerror or error})") from error
    if is_folder:
        found = sorted(_search(path))
        if not found:
            looked_for = ", ".join(sorted(SLIDE_SUFFIXES))
            raise RequestError(f"{path}: no slide in this folder or below; slides are files ending in {looked_for}")
        yield from ((source, {}) for source in found)
    elif path.suffix.lower() in {".csv", ".tsv"}:
        for row in read_user_manifest(path):
            yield file_of_slide(_tidy(Path(row["source_path"]))), row
    else:
        yield _tidy(path), {}


def _one_of_each_series(rows: Mapping[Path, dict[str, str]]) -> dict[Path, dict[str, str]]:
    """Leave out DICOM files that a manifest says nothing of and whose slide is meant by another file already."""
    series = {source: _series_of(source) for source in rows}
    kept, meant = {}, {series[source] for source, row in rows.items() if row}
    for source, row in rows.items():
        if row or series[source] is None or series[source] not in meant:
            kept[source] = row
            meant.add(series[source])
    return kept


def _series_of(source: Path) -> tuple[Path, str] | None:
    head = _dicom_head(source)
    return (source.parent, head.series) if head is not None and head.series else None


def _dicom_head(source: Path) -> DicomHead | None:
    if source.suffix.lower() != ".dcm":
        return None
    with suppress(OSError):
        return dicom_head(source)
    return None  # what is wrong with it, its reader will say


def _is_slide(source: Path) -> bool:
    head = _dicom_head(source)
    return source.suffix.lower() in SLIDE_SUFFIXES and (head is None or head.whole_slide)


def _tidy(path: Path) -> Path:
    """Return the absolute path without ``.`` and ``..``, links kept: one file, one text."""
    tidy = Path(os.path.normpath(path.absolute()))
    # Behind a link to a folder, `..` is not what the text says.
    try:
        return tidy if tidy.samefile(path) else path.absolute()
    except OSError:  # what is wrong with it, its reader will say
        return tidy if is_gone(path) else path.absolute()


def _search(folder: Path) -> Iterator[Path]:
    """Yield the slides, and the folders that cannot be searched: these fail like a slide that cannot be read."""
    visited: set[str] = set()
    closed: list[Path] = []

    def note(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # one that was removed meanwhile
            closed.append(Path(error.filename))

    for here, folders, files in os.walk(_tidy(folder), onerror=note, followlinks=True):
        real = os.path.realpath(here)
        if real in visited:
            folders.clear()
            continue
        visited.add(real)
        folders[:] = sorted(f for f in folders if not f.startswith(".") and not f.endswith(".zarr"))
        for name in files:
            if not name.startswith(".") and _is_slide(Path(here, name)):
                yield Path(here, name)
    yield from closed


def _named(rows: Mapping[Path, dict[str, str]], records: Mapping[str, SlideRecord]) -> list[SlideJob]:
    known = {record.source_path: name for name, record in records.items() if record.source_path}
    given = {source: _checked(row["slide_id"]) for source, row in rows.items() if row.get("slide_id")}
    twice = [name for name, count in Counter(given.values()).items() if count > 1]
    if twice:
        raise RequestError(f"slide_id {twice[0]!r} is used for two slides; it must be unique")
    others = cache(series_in)  # a folder may hold thousands
    plain = {source: _plain_name(source, others) for source in rows if source not in given}
    shared = Counter([*plain.values(), *given.values()])
    jobs = []
    for source, row in rows.items():
        name = given.get(source) or known.get(str(source))
        if name is None:
            name = plain[source]
            if shared[name] > 1 or _is_anothers(records.get(name)):
                name = name_with_place(name, source)
        jobs.append(SlideJob(source, name, row))
    return jobs


def name_with_place(name: str, source: Path) -> str:
    """Return a name that slides of the same file name in other folders do not have."""
    return f"{name}-{_short_digest(str(source.parent))}"


def _is_anothers(record: SlideRecord | None) -> bool:
    """Whether the name belongs to a slide in another place; one that is no longer there has been moved here."""
    return record is not None and (not record.source_path or not is_gone(Path(record.source_path)))


def _checked(name: str) -> str:
    if re.search(r"[/\\\x00-\x1f]", name) or name.startswith(".") or len(name.encode()) > _LONGEST_NAME_BYTES:
        raise RequestError(
            f"slide_id {name!r} cannot be a file name; use no slashes or control characters, no leading dot, at most "
            f"{_LONGEST_NAME_BYTES} bytes"
        )
    return name


def _plain_name(source: Path, series_in: Callable[[Path], Mapping[DicomHead, Path]]) -> str:
    """Return what a slide is called by its file; a DICOM series by its folder, or where others lie there by its UID."""
    stem, head = re.sub(r"\.ome$", "", source.stem, flags=re.IGNORECASE), _dicom_head(source)
    if head is not None and head.whole_slide and head.series:
        with suppress(OSError):
            stem = source.parent.name if len(series_in(source.parent)) == 1 else head.series
    name = re.sub(r"[\\\x00-\x1f]", "_", stem).lstrip(".") or "slide"
    if len(name.encode("utf-8", "replace")) > _LONGEST_NAME_BYTES:
        name = f"{name[:30]}-{_short_digest(name)}"
    return name


def _short_digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:8]


def part_of_names(names: Iterable[str], number: int, parts: int) -> set[str]:
    """Return the names of one of several parts, which are equally large to one.

    They are dealt in order, finished ones too, so processes that see the same slides agree whenever they begin.

    Args:
        names: of all slides.
        number: which part, from 1.
        parts: how many there are.
    """
    return set(sorted(names)[number - 1 :: parts])
