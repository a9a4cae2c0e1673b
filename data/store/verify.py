"""Verification of a store: every byte is checked against the sizes, digests and checksums recorded when written.

```
zarr.json of the slide   its own digest, and two lists:
  metadata               JSON of groups and arrays   size, sha256
  shards                 pixel files                 size, sha256; inside: crc32c of the index and of each chunk
any other file           a fault
```
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.errors import StoreError
from data.location import OpenFile, each, files_below, opened
from data.object_path import ObjectPath
from data.store.codec import without_checksum
from data.store.layout import ArrayLayout
from data.store.manifest import DONE, SlideRecord, load_manifest, record_path, record_states
from data.store.metadata import digest_of_group
from data.store.shard import FileEntry
from data.store.sharded_array import ABSENT, Index, read_index, read_json
from data.store.slide_store import group_attributes, listed_files, slide_path

_PIECE_BYTES = 2**22

Progress = Callable[[int, str], None]
"""Called with the number of bytes read and the slide's id."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One difference from what was written: slide, path and reason."""

    slide_id: str
    path: Path
    reason: str


@dataclass(slots=True)
class VerifyReport:
    """Result of a verification.

    Attributes:
        slides: Number of slides checked, damaged ones included.
        files: Number of files read.
        size_bytes: Their total size.
        faults: All faults, slide by slide.
    """

    slides: int = 0
    files: int = 0
    size_bytes: int = 0
    faults: list[Fault] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _File:
    """A pixel file to check: its (row, column) in the array and its entry in the file list."""

    path: Path
    layout: ArrayLayout
    position: tuple[int, int]
    entry: FileEntry


def verify_store(store: Path, threads: int, progress: Progress | None = None) -> VerifyReport:
    """Verify every slide of a store, and that each slide has a record and each record of a done slide has its slide.

    Memory: one chunk or a few MB for each thread.

    Args:
        store: The store's folder.
        threads: Files read at a time.
        progress: Called after each file; see `Progress`.

    Raises:
        StoreError: There is no store in this folder.
    """
    records, faults = _records(store)
    slides = {path.name.removesuffix(".zarr"): path for path in slides_in(store)}
    if not slides and not records and not (store / "manifest.csv").exists():
        raise StoreError(f"{store}: not a store (no slide, no record, no manifest.csv); `hyfi ingest` creates one")
    report = VerifyReport(faults=faults)
    for name, path in slides.items():
        verify_slide(path, threads, progress, report)
        if records and name not in records:
            report.faults.append(Fault(name, path, "the store has no record of this slide; ingest it again"))
    for name, record in records.items():
        if record.status == DONE:
            report.faults += _against_record(record, slide_path(store, name))
    return report


def slides_in(store: Path) -> list[Path]:
    """Return the paths of a store's slides, sorted; from the manifest on web servers, which cannot list folders.

    Raises:
        StoreError: There is no store.
    """
    if not isinstance(store, ObjectPath):
        return sorted(store.glob("*.zarr"))
    if not store.can_list:
        return [slide_path(store, row["slide_id"]) for row in load_manifest(store) if row["status"] == DONE]
    paths = sorted(store.glob("*.zarr"))
    # `glob` also finds interrupted uploads; `is_dir` looks for `zarr.json`, which is uploaded last.
    are_folders = each(ObjectPath.is_dir, paths, store)
    return [path for path, is_slide in zip(paths, are_folders, strict=True) if is_slide]


def verify_slide(
    path: Path, threads: int, progress: Progress | None = None, report: VerifyReport | None = None
) -> VerifyReport:
    """Verify one slide; see `verify_store`.

    Args:
        path: ``STORE/<slide_id>.zarr``.
        threads: Files read at a time.
        progress: Called after each file; see `Progress`.
        report: The report to add to; default: a new one.
    """
    report = report if report is not None else VerifyReport()
    slide_id = path.name.removesuffix(".zarr")
    report.slides += 1

    def fault(where: Path, reason: str) -> None:
        report.faults.append(Fault(slide_id, where, reason))

    try:
        attributes, _ = group_attributes(path)
        entries = listed_files(path, attributes)
        arrays = _known_metadata(path, attributes, fault)
        files = list(_files(path, entries, arrays, fault))
    except StoreError as error:
        fault(path, str(error))
        return report
    for foreign in _foreign(path, {"zarr.json", *arrays, *entries}):
        fault(foreign, "this file was not written with the slide")
    with ThreadPoolExecutor(max(1, threads), "verify") as pool:
        for file, reasons in zip(files, pool.map(_reasons, files), strict=True):
            report.files += 1
            report.size_bytes += file.entry.size or 0
            for reason in reasons:
                fault(file.path, reason)
            if progress is not None:
                progress(file.entry.size or 0, slide_id)
    return report


def size_of_store(paths: Iterable[Path]) -> int:
    """Return the bytes of all pixel files of these slides, from their file lists; damaged slides count as 0."""
    total = 0
    for path in paths:
        try:
            entries = listed_files(path, group_attributes(path)[0])
        except StoreError:
            continue
        total += sum(entry.size or 0 for entry in entries.values())
    return total


def _known_metadata(path: Path, attributes: dict[str, Any], fault: Callable[[Path, str], None]) -> set[str]:
    """Check the slide's metadata files and return their names."""
    stated = attributes.get("metadata_sha256")
    listed = attributes.get("metadata")
    if stated is None or not isinstance(listed, dict):
        fault(path / "zarr.json", "it has no digests of its metadata (written by an earlier version); ingest it again")
        return {name for name in files_below(path) if name.endswith("/zarr.json")}
    if digest_of_group(read_json(path / "zarr.json")) != stated:
        fault(path / "zarr.json", "the slide's metadata was altered (its digest differs)")
    for name, entry in listed.items():
        # A damaged list may have anything here; a file without size and digest is then a fault.
        facts = entry if isinstance(entry, dict) else {}
        reason = _metadata_fault(path / name, facts.get("size"), facts.get("sha256"))
        if reason:
            fault(path / name, reason)
    return set(listed)


def _metadata_fault(path: Path, size: int | None, sha256: str | None) -> str:
    """Return what is wrong with a file of metadata; empty if nothing is."""
    try:
        data = path.read_bytes()
        if len(data) != size:
            return f"it has {len(data)} bytes; expected {size}"
        return "" if hashlib.sha256(data).hexdigest() == sha256 else "it was altered (its digest differs)"
    except OSError as error:
        return f"it cannot be read ({error.strerror})"


def _files(
    path: Path, entries: dict[str, FileEntry], arrays: set[str], fault: Callable[[Path, str], None]
) -> Iterator[_File]:
    """Yield the pixel files of the slide's arrays; report files that are missing in the file list or in all arrays."""
    listed: set[str] = set()
    for name in sorted(arrays):
        folder = Path(name).parent
        try:
            meta = read_json(path / name)
            if meta.get("node_type") == "group":
                continue
            layout = ArrayLayout.from_json(meta)
        except (StoreError, KeyError, TypeError, ValueError, IndexError, AttributeError):
            # Its digest was reported already. The files that it should have are unknown: accept all listed ones.
            listed.update(file for file in entries if file.startswith(f"{folder.as_posix()}/c/"))
            continue
        for position in layout.files():
            file = (folder / layout.file_name(position)).as_posix()
            listed.add(file)
            if file in entries:
                yield _File(path / file, layout, position, entries[file])
            else:
                fault(path / file, "this file is missing in the slide's file list")
    for name in sorted(entries.keys() - listed):
        fault(path / name, "the slide's file list has this file, but none of its arrays does")


def _foreign(path: Path, names: set[str]) -> list[Path]:
    """Return the files below a slide's folder that are none of ``names``."""
    return [path / name for name in files_below(path) if name not in names]


def _reasons(file: _File) -> list[str]:
    """Return the faults of one file of pixels."""
    if file.entry.size is None:
        return ["it exists, but was omitted when the slide was written"] if file.path.is_file() else []
    try:
        with opened(file.path) as handle:
            _, size = handle.tail(1)
            if size != file.entry.size:
                return [f"the shard has {size} bytes; expected {file.entry.size}"]
            return _reasons_inside(handle, file)
    except OSError as error:
        return [f"the shard is missing or cannot be read ({error.strerror})"]


def _reasons_inside(handle: OpenFile, file: _File) -> list[str]:
    """Return what is wrong with an open shard: its index, each chunk, and its digest."""
    reasons, chunks = [], []
    try:
        index = read_index(handle, file.path, file.layout)
        reasons += _reasons_of_index(index, file)
        chunks = [(int(o), int(o + n), slot) for slot, (o, n) in enumerate(index) if o != ABSENT and n != ABSENT]
    except StoreError as error:
        reasons.append(str(error).removeprefix(f"{file.path}: "))
    digest = hashlib.sha256()
    # One pass in the order of the file, because the digest needs every byte once.
    for start, end, slot in _pieces(sorted(chunks), file.entry.size or 0):
        data = handle.read(start, end - start)
        digest.update(data)
        if slot is not None:
            reasons += _reasons_of_chunk(data, slot, file.layout)
    if digest.hexdigest() != file.entry.sha256:
        reasons.append("the shard was altered (its digest differs)")
    return reasons


def _reasons_of_chunk(data: bytes | memoryview, slot: int, layout: ArrayLayout) -> list[str]:
    """Return what is wrong with a chunk: its checksum, or, for a copied JPEG tile, its pixels."""
    try:
        body = without_checksum(data)
    except ValueError as error:
        return [f"{error} in chunk {slot}"]
    # A chunk that this project has encoded can be decoded if its checksum is right.
    if layout.codec.exact or layout.codec.level is not None:
        return []
    try:
        # A JPEG tile that was copied from the slide's file without being decoded.
        layout.codec.decode(body, layout.chunk_shape)
    except (ValueError, RuntimeError) as error:
        return [
            f"chunk {slot} cannot be decoded ({error}): its tile is damaged in the slide's file, too; ingest it with "
            f"--max-bad and without --lossless"
        ]
    return []


def _reasons_of_index(index: Index, file: _File) -> list[str]:
    """Return the differences between the chunks that are absent in an index and those that are listed as blank."""
    used = file.layout.used_slots(file.position)
    absent = {slot for slot in used if index[slot, 0] == ABSENT}
    blank = set(file.entry.blank)
    missing, unexpected = sorted(absent - blank), sorted(blank - absent)
    reasons = [f"chunks {_some(missing)} are missing in their shard"] if missing else []
    if unexpected:
        reasons.append(f"chunks {_some(unexpected)} exist, but were omitted when the slide was written")
    return reasons


def _pieces(chunks: Sequence[tuple[int, int, int]], size: int) -> Iterator[tuple[int, int, int | None]]:
    """Yield (start, end, slot) that cover a file once, in order: its chunks, and the gaps between them (slot None).

    Overlapping chunks or chunks beyond the file's end, which a damaged index may list, are read as gaps.
    """
    at = 0
    # At last an empty chunk at the end of the file, for the gap in front of it.
    for start, end, slot in [*chunks, (size, size, -1)]:
        for begin in range(at, min(start, size), _PIECE_BYTES):
            yield begin, min(begin + _PIECE_BYTES, start, size), None
        # Never go back: skip a chunk that overlaps the one before; its bytes are read as a gap.
        at = max(at, min(start, size))
        if slot >= 0 and start >= at and end <= size:
            yield start, end, slot
            at = end


def _some(slots: Sequence[int]) -> str:
    return ", ".join(map(str, slots[:5])) + (" …" if len(slots) > 5 else "")


def _records(store: Path) -> tuple[dict[str, SlideRecord], list[Fault]]:
    """Return (slide -> record, a fault for each record that cannot be read) of a store."""
    records: dict[str, SlideRecord] = {}
    faults: list[Fault] = []

    def load(path: Path) -> SlideRecord | StoreError:
        try:
            return SlideRecord.load(path)
        except StoreError as error:
            return error

    paths = [record_path(store, name) for name in record_states(store)]
    for path, record in zip(paths, each(load, paths, store), strict=True):
        if isinstance(record, StoreError):
            faults.append(Fault(path.stem, path, str(record)))
        else:
            records[record.slide_id] = record
    return records, faults


def _against_record(record: SlideRecord, path: Path) -> list[Fault]:
    """Return the differences between a slide and its record, which says that it is done."""
    if not path.is_dir():
        return [Fault(record.slide_id, path, "the slide is missing, although its record says it is done")]
    try:
        attributes, _ = group_attributes(path)
    except StoreError:
        return []  # reported already
    if record.identity.get("sha256") not in (None, attributes.get("sha256")):
        return [Fault(record.slide_id, path, "the slide was made from a different file than its record says")]
    return []
