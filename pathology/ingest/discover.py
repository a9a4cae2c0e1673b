"""Discovery of slides, and their names in the store."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from data.location import is_address, is_remote, location
from data.missing import is_missing
from data.spelling import joined_note, one_spelling
from data.store.manifest import record_path
from hyfi_core.errors import RequestError
from pathology.readers.dicom.files import DicomHeader, series_in
from pathology.readers.ngff.groups import is_own_slide, name_of_store
from pathology.readers.sources import SLIDE_SUFFIXES, largest_scene, scene_count
from pathology.search import header_or_none, is_gone, slides_at

_LONGEST_NAME_BYTES = 160
SceneKey = tuple[Path, str]
"""(file of a slide, number of its scene; empty if the file has only one scene)."""


@dataclass(frozen=True, slots=True)
class SlideJob:
    """One slide to ingest.

    Attributes:
        source: The slide's file.
        slide_id: Its name in the store.
        row: Its row of the user's manifest; empty if there is none.
        secret: Not empty: the name is a pseudonym, and name, path and time of the file are not stored.
        seen: State of the slide's record when the job was planned, see `data.store.manifest.record_state`.
    """

    source: Path
    slide_id: str
    row: dict[str, str] = field(default_factory=dict)
    secret: str = ""
    seen: str = ""

    @property
    def place(self) -> SceneKey:
        """The slide's file, and its scene there: a key of manifest rows."""
        return self.source, self.row.get("scene", "")

    def to_json(self) -> dict[str, Any]:
        """Return the job in JSON's types."""
        return asdict(self) | {"source": str(self.source)}

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> SlideJob:
        """Return a job from `to_json`."""
        return cls(**values | {"source": location(values["source"])})


def find_jobs(
    paths: Sequence[Path], files_by_name: Mapping[str, str], scene: str = "all", store: Path | None = None
) -> list[SlideJob]:
    """Return the slides in ``paths``, without duplicates, with unique names.

    A slide has the name of its file without suffix; with suffix, if the folder has another slide of that name; and with
    a digest of the folder, if a slide of another folder has this name. The order of ``paths`` does not matter.

    Args:
        paths: Slides, folders (searched; each link to a folder is followed once) and manifest CSVs.
        files_by_name: slide_id -> file of the slides in the store, empty if unknown; these slides keep their names, and
            others do not get these names while the file exists.
        scene: Which scenes of a file with several become slides: ``all``, ``largest`` or a number.
        store: The store to write, in which no slides are searched; None: there is none.

    Raises:
        RequestError: A path does not exist, a folder has no slide, a manifest is invalid, a name is used twice, or two
            rows contradict each other.
    """
    rows: dict[SceneKey, dict[str, str]] = {}
    for path in paths:
        for source, row in slides_at(location(path), store):
            # A slide may come from a folder and from a manifest: merge its rows.
            key = (source, row.get("scene", ""))
            rows[key] = _merged(path, source, rows.get(key, {}), row)
    return _jobs_with_names(_each_scene(_one_of_each_series(rows), scene), files_by_name)


def _each_scene(rows: Mapping[SceneKey, dict[str, str]], scene: str) -> dict[SceneKey, dict[str, str]]:
    """Return a row for each scene to ingest; if its file has several scenes, with a column ``scene``."""
    scenes: dict[SceneKey, dict[str, str]] = {}
    for (source, stated_scene), row in rows.items():
        count = 1 if stated_scene else scene_count(source)
        if count == 1 and not stated_scene and scene.isdecimal() and int(scene) > 1:
            scenes[source, scene] = {**row, "scene": scene}  # its reader will report that there is no such scene
        elif count == 1:
            scenes[source, stated_scene] = row
        else:
            for number in _scene_numbers(source, count, scene):
                scenes[source, number] = {**row, "scene": number}
                # Several scenes need different names: add the number to the manifest's name.
                if row.get("slide_id") and scene == "all":
                    scenes[source, number]["slide_id"] = row["slide_id"] + _suffix(number)
    return scenes


def _scene_numbers(source: Path, count: int, scene: str) -> list[str]:
    """Return the numbers of the scenes to ingest of a file with ``count`` scenes; see `find_jobs`."""
    if scene == "all":
        return [str(number) for number in range(1, count + 1)]
    return [str(largest_scene(source)) if scene == "largest" else str(int(scene))]


def _suffix(scene: str) -> str:
    """Return the ending of a slide's name if the slide is one of several scenes; else empty."""
    return f"_scene{scene}" if scene not in ("", "0") else ""


def written_in_one_way(
    jobs: Sequence[SlideJob], names: Iterable[str], cases: Iterable[str], *, merge: bool
) -> tuple[list[SlideJob], str]:
    """Return (jobs with one spelling of each case, note about cases or ``""``).

    Args:
        jobs: The result of `find_jobs`.
        names: Names of the store's slides.
        cases: Cases of the store, in their spellings.
        merge: Whether several spellings of one case are joined, see `data.spelling`.

    Raises:
        RequestError: Names of slides in manifests differ only in spelling; or names of cases do, and ``merge`` is off.
    """
    names_given = [job.row.get("slide_id", "") for job in jobs]
    advice = "slides need names that differ in more than spelling: change slide_id"
    one_spelling(names_given, "name", "manifest: slide_id", merge=False, known_names=names, advice=advice)
    cases_given = ["" if is_missing(case) else case for case in (job.row.get("case_id", "") for job in jobs)]
    spelled = one_spelling(cases_given, "name", "manifest: case_id", merge=merge, known_names=cases)
    notes = [joined_note("manifest: case_id", spelled.joined)] if spelled.joined else []
    without = sum(not case for job, case in zip(jobs, cases_given, strict=True) if "case_id" in job.row)
    if without:
        notes.append(f"{without} of {len(jobs)} slides have no case_id: each counts as a case of its own")
    changed = [
        replace(job, row={**job.row, "case_id": spelled.spelling[case]}) if case else job
        for job, case in zip(jobs, cases_given, strict=True)
    ]
    return changed, "; ".join(notes)


def refuse_store_among_slides(store: Path, paths: Sequence[Path], jobs: Sequence[SlideJob]) -> None:
    """Check that a new store would not be written among its own sources, where files would be mixed or replaced.

    Args:
        store: The folder of the store; a store that has slides already may be anywhere.
        paths: The user's slides, folders and manifest CSVs.
        jobs: The slides of these paths.

    Raises:
        RequestError: ``store`` is, or is in, one of the folders; or has slides in it at any depth, or a manifest
            directly in it.
    """
    folder = store if is_remote(store) else store.resolve()
    stored = [job.source for job in jobs if not is_remote(job.source) and is_own_slide(job.source)]
    if own_slides := [source for source in stored if source.parent.resolve() == folder]:
        raise RequestError(f"--out {store}: {own_slides[0]} is one of its slides; choose another --out")
    if is_remote(store) or record_path(store, "").parent.is_dir():
        return
    target, advice = store.resolve(), "choose an --out outside of the slides' folders"
    for path in paths:
        source = path.resolve()
        if is_address(path):
            continue
        if path.is_dir() and target.is_relative_to(source):
            where = "is" if target == source else "is inside"
            raise RequestError(f"--out {store}: it {where} the folder of slides {path}; {advice}")
        if not path.is_dir() and source.parent == target:
            raise RequestError(f"--out {store}: {path} is in this folder; {advice}")
    for slide_folder in {job.source.parent for job in jobs if not is_remote(job.source)}:
        if slide_folder.resolve().is_relative_to(target):
            below = "" if slide_folder.resolve() == target else f" ({slide_folder})"
            raise RequestError(f"--out {store}: slides are in this folder{below}; {advice}")


def user_columns(row: Mapping[str, str]) -> dict[str, str]:
    """Return a manifest row without the path columns."""
    return {k: v for k, v in row.items() if k not in ("path", "source_path")}


def _merged(path: Path, source: Path, a: Mapping[str, str], b: Mapping[str, str]) -> dict[str, str]:
    """Return two rows of one slide as one; refuse rows that contradict each other."""
    # Except the path of its file, which may be written in several ways.
    for column in sorted(a.keys() & b.keys() - {"source_path"}):
        if a[column] != b[column]:
            raise RequestError(
                f"{path}: {source} occurs in two rows that differ in the column {column!r}: "
                f"{a[column]!r} and {b[column]!r}; keep one of them"
            )
    return {**a, **b}


def _one_of_each_series(rows: Mapping[SceneKey, dict[str, str]]) -> dict[SceneKey, dict[str, str]]:
    """Keep one file of each DICOM series, because each opens the whole slide; keep all files of manifests."""
    series = {key: _series_of(key[0]) for key in rows}
    # A file of a manifest represents its series, even if another file comes first. Files of folders have empty rows.
    kept_rows, represented = {}, {series[key] for key, row in rows.items() if row}
    for key, row in rows.items():
        if row or series[key] is None or series[key] not in represented:
            kept_rows[key] = row
            represented.add(series[key])
    return kept_rows


def _series_of(source: Path) -> tuple[Path, str] | None:
    header = header_or_none(source)
    return (source.parent, header.series) if header is not None and header.series else None


def _jobs_with_names(rows: Mapping[SceneKey, dict[str, str]], files_by_name: Mapping[str, str]) -> list[SlideJob]:
    """Return a job for each row, named by its slide_id, else as in the store, else after its file.

    Args:
        rows: (file, scene) -> row of the manifest.
        files_by_name: Name of a slide in the store -> its file.
    """
    # (file, ending of the scene) -> name of a slide in the store.
    stored_names = {
        (location(source), suffix): name
        for name, source in files_by_name.items()
        if source
        for suffix in _suffixes_of(name)
    }
    given_names = {key: _checked(row["slide_id"]) for key, row in rows.items() if row.get("slide_id")}
    twice = [name for name, count in Counter(given_names.values()).items() if count > 1]
    if twice:
        raise RequestError(f"slide_id {twice[0]!r} is used for two slides; it must be unique")
    folders = _Folders()
    plain_names = {key: _plain_name(*key, folders) for key in rows if key not in given_names}
    # Names of the manifest count, too: if another slide has the same name, that one gets a longer name.
    uses = Counter([*plain_names.values(), *given_names.values()])
    jobs = []
    for key, row in rows.items():
        source, scene = key
        name = given_names.get(key) or stored_names.get((source, _suffix(scene)))
        if name is None:
            name = plain_names[key]
            if uses[name] > 1 or _is_taken(name, files_by_name):
                name = name_with_place(name, source)
        jobs.append(SlideJob(source, name, row))
    # Names with a digest of the folder may still be equal: then add a digest of the path.
    same = Counter(job.slide_id for job in jobs)
    return [job if same[job.slide_id] == 1 or job.place in given_names else _named_by_path(job) for job in jobs]


def name_with_place(name: str, source: Path) -> str:
    """Return a name that is unique among slides with the same file name in other folders."""
    return f"{name}-{_short_digest(str(source.parent))}"


def _suffixes_of(name: str) -> tuple[str, ...]:
    """Return the endings under which a slide that has a name already is looked up: that of its scene, and none."""
    match = re.search(r"_scene\d+$", name)
    return ("",) if match is None else (match[0], "")


def _named_by_path(job: SlideJob) -> SlideJob:
    """Return a job with a name that no other path has."""
    return replace(job, slide_id=f"{job.slide_id}-{_short_digest(str(job.source))}")


def _is_taken(name: str, files_by_name: Mapping[str, str]) -> bool:
    """Whether the name belongs to a slide at another path that still exists; otherwise it was moved."""
    return name in files_by_name and (not files_by_name[name] or not is_gone(location(files_by_name[name])))


class _Folders:
    """What the folders of slides contain; each is listed once, since it may have thousands."""

    def __init__(self) -> None:
        self.series_in: Callable[[Path], Mapping[DicomHeader, Path]] = cache(series_in)
        self._stems: Callable[[Path], Counter[str]] = cache(_stems_in)

    def has_twin(self, source: Path) -> bool:
        """Whether another slide of the folder has the same name with another suffix, as ``x.tif`` and ``x.tiff``."""
        return self._stems(source.parent)[_stem(source)] > 1


def _stems_in(folder: Path) -> Counter[str]:
    with suppress(OSError):
        # macOS leaves `._x.tif` beside x.tif.
        visible = (path for path in folder.iterdir() if not path.name.startswith("."))
        return Counter(_stem(path) for path in visible if path.suffix.lower() in SLIDE_SUFFIXES - {".dcm"} | {".zarr"})
    return Counter()


def _stem(source: Path) -> str:
    if source.suffix.lower() == ".zarr":
        return name_of_store(source)
    return re.sub(r"\.ome$", "", source.stem, flags=re.IGNORECASE)


def _checked(name: str) -> str:
    """Return a slide_id; refuse one that cannot be a file name."""
    if re.search(r"[/\\\x00-\x1f]", name) or name.startswith(".") or len(name.encode()) > _LONGEST_NAME_BYTES:
        raise RequestError(
            f"slide_id {name!r} cannot be a file name; use no slashes or control characters, no leading dot, at most "
            f"{_LONGEST_NAME_BYTES} bytes"
        )
    return name


def _plain_name(source: Path, scene: str, folders: _Folders) -> str:
    """Return the name of a slide: a valid file name, followed by its scene, if there is one.

    It is the name of its file, with the suffix only if two files would have the same name. For a DICOM series it is the
    folder's name, or the series' UID if the folder has several.
    """
    stem, header = _stem(source), header_or_none(source)
    if header is not None and header.whole_slide and header.series:
        with suppress(OSError):
            stem = source.parent.name if len(folders.series_in(source.parent)) == 1 else header.series
    elif folders.has_twin(source):
        stem = source.name
    # NFC: macOS writes é as e and an accent, but a copy of the slide on Linux must have the same name.
    name = re.sub(r"[\\\x00-\x1f]", "_", unicodedata.normalize("NFC", stem))
    # No dot in front: it would hide the store. No white space: cells of tables are stripped, so no row could name "x ".
    name = re.sub(r"^[\s.]+|\s+$", "", name) or "slide"
    if len(name.encode("utf-8", "replace")) > _LONGEST_NAME_BYTES:
        # File systems allow 255 bytes, and temporary names have suffixes.
        name = f"{name[:30]}-{_short_digest(name)}"
    return name + _suffix(scene)


def _short_digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:8]


def part_of_names(names: Iterable[str], number: int, parts: int) -> set[str]:
    """Return the names of one of several parts, whose sizes differ by at most one.

    Sorted names, including those of finished slides, go to the parts in turn: processes agree on the parts, whenever
    they start.

    Args:
        names: Names of all slides.
        number: Number of the part, from 1.
        parts: Number of parts.
    """
    return set(sorted(names)[number - 1 :: parts])
