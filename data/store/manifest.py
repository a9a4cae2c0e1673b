"""The contents of a store: one authoritative record per slide, and the manifest compiled from the records.

```
STORE/.records/<slide_id>.json     one slide, done or failed; replaced atomically
STORE/manifest.csv                 all slides, one row each, sorted by slide_id
```
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from data.csv_table import parse_table, read_table, write_table
from data.errors import StoreError
from data.files import write_json_atomically
from data.location import address_of, each, is_remote, version_of, versions_in
from data.missing import is_missing
from data.store.sharded_array import read_json
from hyfi_core.errors import RequestError

COLUMNS = (
    "slide_id",
    "source_path",
    "source_mpp",
    "store_mpp",
    "height_px",
    "width_px",
    "tissue_fraction",
    "bad_tiles",
    "status",
    "reason",
    "flags",
    "sharpness",
    "blurred_share",
    "pen_fraction",
    "tissue_mm2",
    "tiles",
    "bad_share",
    "stain_h",
    "stain_e",
    "source_sha256",
)
"""Columns of ``manifest.csv`` that this project writes; columns of the user's manifest follow."""

_REQUIRED = COLUMNS[: COLUMNS.index("flags")]
"""Columns that the manifest of every store has, whatever version wrote it."""
_USER_COLUMNS = ("slide_id", "source_path", "source_mpp")
"""Columns of `COLUMNS` that a user's manifest may have, too."""

DONE = "done"
FAILED = "failed"


@dataclass(frozen=True)
class SlideRecord:
    """The result of ingesting one slide: one JSON file in the store.

    Attributes:
        slide_id: Its name in the store.
        source_path: The file it was read from; empty if slides are pseudonymised.
        status: ``done`` or ``failed``.
        reason: Why the slide failed; of a done slide, why a later attempt to ingest it again failed; else empty.
        source_mpp: Microns per pixel of the source's finest level (mean of both axes).
        store_mpp: Microns per pixel of the store's finest level.
        height_px, width_px: Size of the store's finest level.
        tissue_fraction: Share of the slide's area that is tissue.
        bad_tiles: Number of source tiles that could not be decoded and are white in the store.
        flags: Warnings, e.g. ``pen``, ``blur``, ``upsampled``.
        sharpness: Median sharpness of the tissue, see `pathology.tissue.blur`.
        blurred_share: Share of the tissue that is out of focus.
        pen_fraction: Share of the slide's area covered by pen ink.
        tissue_mm2: Area of the tissue in mm².
        tiles: Number of source tiles that were read.
        bad_share: ``bad_tiles / tiles``.
        stain_h, stain_e: Optical density of haematoxylin and eosin in (red, green, blue), of length 1.
        file_notes: Contradictions in the file, and which statement was believed.
        identity: Parameters, and the source's size, mtime and digest, for which this record is valid.
        extra: The other columns of the user's manifest.
    """

    slide_id: str
    source_path: str
    status: str
    reason: str = ""
    source_mpp: float | None = None
    store_mpp: float | None = None
    height_px: int | None = None
    width_px: int | None = None
    tissue_fraction: float | None = None
    bad_tiles: int | None = None
    flags: tuple[str, ...] = ()
    sharpness: float | None = None
    blurred_share: float | None = None
    pen_fraction: float | None = None
    tissue_mm2: float | None = None
    tiles: int | None = None
    bad_share: float | None = None
    stain_h: tuple[float, ...] = ()
    stain_e: tuple[float, ...] = ()
    file_notes: tuple[str, ...] = ()
    identity: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, str] = field(default_factory=dict)

    def row(self) -> dict[str, str]:
        """Return the record as a row of ``manifest.csv``; unknown values are empty."""
        values = asdict(self)
        values["source_sha256"] = self.identity.get("sha256")
        own = {name: _text(values[name]) for name in COLUMNS}
        return own | {k: v for k, v in self.extra.items() if k not in own}

    def save(self, store: Path) -> None:
        """Replace this slide's record in ``store``."""
        path = record_path(store, self.slide_id)
        path.parent.mkdir(exist_ok=True)
        write_json_atomically(path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> SlideRecord:
        """Read a record.

        Raises:
            StoreError: The file is unreadable or not a record.
        """
        value = read_json(path)
        names = {f.name for f in fields(cls)}
        # Refuse unknown names: a later version may use them for something that must not be ignored.
        if not {"slide_id", "source_path", "status"} <= value.keys() <= names:
            raise StoreError(f"{path}: not a slide record of this version; remove it to ingest the slide again")
        return cls.of_json(value)

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> SlideRecord:
        """Return a record from a JSON object of its attributes, in which tuples are lists."""
        lists = ("flags", "stain_h", "stain_e", "file_notes")
        return cls(**values | {name: tuple(values.get(name, ())) for name in lists})


def record_path(store: Path, slide_id: str) -> Path:
    """Return the path of a slide's record."""
    return store / ".records" / f"{slide_id}.json"


def record_state(store: Path, slide_id: str) -> str:
    """Return a version string of a slide's record: it differs after each save; empty while there is no record."""
    return version_of(record_path(store, slide_id))


def record_states(store: Path) -> dict[str, str]:
    """Return the version string of every record by slide id, see `record_state`."""
    return versions_in(store / ".records", ".json")


def load_records(store: Path) -> dict[str, SlideRecord]:
    """Return all records of ``store`` by slide id, sorted; empty if there is no store yet."""
    records = each(SlideRecord.load, [record_path(store, name) for name in record_states(store)], store)
    return {r.slide_id: r for r in records}


def merge_manifest(store: Path) -> Path:
    """Write ``manifest.csv`` from the records, atomically, and return its path.

    Many processes may call this at the same time: each writes again if records changed while it wrote, so the process
    that ends last has written every record.
    """
    path = store / "manifest.csv"
    written = None
    # Read the states before the records: a record that is saved meanwhile causes another round.
    while written != (current := record_states(store)):
        written = current
        rows = [record.row() for record in load_records(store).values()]
        extra = sorted({name for row in rows for name in row} - set(COLUMNS))
        write_table(path, [*COLUMNS, *extra], rows)
    return path


def load_manifest(store: Path) -> list[dict[str, str]]:
    """Return one row for each slide, done or failed: from the records, or from ``manifest.csv`` if there are none.

    On object storage ``manifest.csv`` is read, in one request.

    Raises:
        StoreError: There is no store in this folder, or its records cannot be read.
    """
    try:
        # On a disk, read the records: during an ingest, ``manifest.csv`` is older than they are.
        records = {} if is_remote(store) else load_records(store)
    except OSError as error:
        raise StoreError(f"{store}: cannot be read ({error.strerror or error})") from error
    if records:
        return [record.row() for record in records.values()]
    try:
        return list(parse_table(store / "manifest.csv", "store").rows)
    except RequestError as error:
        if not isinstance(error.__cause__, (FileNotFoundError, NotADirectoryError, IsADirectoryError)):
            raise
        raise StoreError(
            f"{store}: not a store (it has no manifest.csv); give a folder that `hyfi ingest --out` wrote"
        ) from error


@dataclass(frozen=True, slots=True)
class SameContent:
    """Stored slides of source files that are equal byte by byte.

    Attributes:
        slides: Their names, in the manifest's order.
        scenes: Whether they are different scenes of one file: different pictures of the same glass slide.
    """

    slides: tuple[str, ...]
    scenes: bool

    @property
    def text(self) -> str:
        """What they have in common."""
        return "scenes of one file" if self.scenes else "the same content (source files that are equal byte by byte)"


def same_content(rows: Iterable[Mapping[str, str]]) -> list[SameContent]:
    """Return the groups of stored slides whose source files are equal byte by byte, in the manifest's order."""
    groups: dict[str, list[Mapping[str, str]]] = {}
    for row in rows:
        if row.get("source_sha256") and row.get("status", DONE) == DONE:
            groups.setdefault(row["source_sha256"], []).append(row)
    duplicates = []
    for group in groups.values():
        # Scenes of one file share its digest, but not their pixels.
        scenes = [row.get("scene", "") for row in group]
        if len(group) > 1:
            names = tuple(row["slide_id"] for row in group)
            duplicates.append(SameContent(names, all(scenes) and len(set(scenes)) == len(scenes)))
    return duplicates


def read_user_manifest(path: Path) -> list[dict[str, str]]:
    """Return the rows of a user's manifest, each with ``source_path`` resolved against the CSV's own folder.

    The file is read as by `read_table`; missing slide ids and pixel sizes, such as ``nan``, are left out. The manifest
    of a store is accepted, too; its columns that describe the stored slides are dropped.

    Raises:
        RequestError: The file is not a readable CSV, has no path column, no rows, an empty path, a slide id twice, or
            a column that is reserved for the manifest of a store.
    """
    table = read_table(path, "manifest")
    columns = table.columns
    column = next((c for c in ("source_path", "path") if c in columns), None)
    if column is None:
        raise RequestError(
            f"{path}: the manifest needs a column `path` (or `source_path`); it has {', '.join(columns)}"
        )
    reserved = _reserved(path, columns)
    rows = [dict(row) for row in table.rows]
    for line, row in zip(table.lines, rows, strict=True):
        if not row[column]:
            raise RequestError(f"{path}: line {line} has no {column}")
        located = Path(row.pop(column))
        for name in ("path", *reserved):
            row.pop(name, None)
        for name in ("slide_id", "source_mpp"):
            if is_missing(row.get(name, "")):
                row.pop(name, None)
        row["source_path"] = address_of(located) or str(
            located if located.is_absolute() else path.absolute().parent / located
        )
    _refuse_twice(path, (row.get("slide_id", "") for row in rows))
    return rows


def _reserved(path: Path, columns: tuple[str, ...]) -> list[str]:
    """Return the columns that only the manifest of a store may have; refuse them in any other table."""
    reserved = [name for name in columns if name in COLUMNS and name not in _USER_COLUMNS]
    if reserved and not set(_REQUIRED) <= set(columns):
        raise RequestError(
            f"{path}: the column name {', '.join(map(repr, reserved))} is reserved for the store's own manifest; "
            f"rename the column"
        )
    return reserved


def _refuse_twice(path: Path, names: Iterable[str]) -> None:
    """Refuse a slide id that occurs twice; empty ones may."""
    earlier: set[str] = set()
    for name in names:
        if name and name in earlier:
            raise RequestError(f"{path}: slide_id {name!r} occurs in two rows; it must be unique")
        earlier.add(name)


def _text(value: Any) -> str:
    """Return a value as a cell of the manifest."""
    if value is None:
        return ""
    if isinstance(value, (list, tuple)):
        return ";".join(str(v) for v in value)
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)
