"""Ingest of many slides: finished slides are skipped, changed ones are ingested again or refused, failures isolated."""

from __future__ import annotations

import errno
import math
import secrets
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from data.files import reason_of, restore_replaced
from data.location import each, is_remote
from data.object_path import ObjectPath
from data.store.manifest import DONE, SlideRecord, load_records, merge_manifest, record_path, record_states
from data.store.slide_store import SlideStore, StoreError, slide_path
from hyfi_core.errors import RequestError
from pathology.errors import SlideError
from pathology.ingest.contact import write_contact
from pathology.ingest.discover import (
    SlideJob,
    find_jobs,
    part_of_names,
    refuse_store_among_slides,
    user_columns,
    written_in_one_way,
)
from pathology.ingest.identity import SourceStamp, differences, source_digest
from pathology.ingest.options import IngestOptions
from pathology.ingest.pool import SlidePool
from pathology.ingest.pseudonyms import KeyFile
from pathology.ingest.slide import ingest_slide
from pathology.ingest.work import Outcome, is_of_another, refuse_another_file, sweep_claims, sweep_unfinished
from pathology.memory import worker_count
from pathology.readers.file_check import UNREADABLE_FOLDER, folder_error
from pathology.readers.mpp import AGREE_TOLERANCE, parse_number
from pathology.tissue.given import GivenTissue

__all__ = ["IngestOptions", "IngestReport", "IngestWork", "Request", "compare_with_store", "ingest", "ingest_slide"]

_MOST_NAMED = 5


@dataclass(slots=True)
class IngestReport:
    """Result of an ingest.

    Attributes:
        done: Records of the slides that were ingested now.
        failed: Records of those that failed now, each with its reason.
        skipped: Names of those finished earlier, or by another run in the meantime.
        stopped: Why the store could no longer be written; empty otherwise.
        interrupted: Whether it ended early on request.
    """

    done: list[SlideRecord] = field(default_factory=list)
    failed: list[SlideRecord] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    stopped: str = ""
    interrupted: bool = False

    def add(self, outcome: Outcome) -> None:
        """Add the result of one slide."""
        if outcome.record.status != DONE:
            self.failed.append(outcome.record)
        elif outcome.ours:
            self.done.append(outcome.record)
        else:
            self.skipped.append(outcome.record.slide_id)


@dataclass(frozen=True, slots=True)
class IngestWork:
    """What an ingest has to do.

    Attributes:
        jobs: Slides to ingest.
        finished: Name of a finished slide -> its updated record.
        key: The pseudonyms, not saved yet; None if slides keep their names.
        note: Cases that are missing or were joined, slides without given tissue outlines, and outlines without a slide;
            empty if there are none.
    """

    jobs: tuple[SlideJob, ...]
    finished: dict[str, SlideRecord]
    key: KeyFile | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    """The slides to ingest and their names.

    Attributes:
        paths: Slides, folders, manifest CSVs.
        store: The store's folder; created if it does not exist.
        options: How to ingest; see `IngestOptions`.
        overwrite: Ingest finished slides again, also with other parameters.
        part: (i, n): ingest only the i-th (from 1) of n parts, whose sizes differ by at most one slide.
        pseudonyms: ``KEY.csv`` with random names for slides, see `pathology.ingest.pseudonyms`; None: no pseudonyms.
        merge_alike: Whether several spellings of one case are joined, see `data.spelling`.
    """

    paths: Sequence[Path]
    store: Path
    options: IngestOptions
    overwrite: bool = False
    part: tuple[int, int] = (1, 1)
    pseudonyms: Path | None = None
    merge_alike: bool = False


def ingest(
    request: Request,
    *,
    workers: int = 0,
    memory_bytes: int | None = None,
    finished: Callable[[Outcome], None] = lambda outcome: None,
    progress: Callable[[Sequence[float]], None] = lambda fractions: None,
    work: IngestWork | None = None,
) -> IngestReport:
    """Ingest slides into the store and compile its ``manifest.csv`` and contact sheet.

    Args:
        request: What to ingest; see `Request`.
        workers: Number of processes; 0: as many as cores and memory allow; 1: only this process.
        memory_bytes: Memory of all processes together; None: the free memory.
        finished: Called with the result of each slide.
        progress: Called periodically with the completed fraction of each job.
        work: The result of `compare_with_store`, if it has been called; None: it is called here.

    Raises:
        RequestError: A path is wrong, or the store cannot be written or has slides with other parameters.
    """
    store = request.store
    work = begin(request, work or compare_with_store(request))
    processes = min(worker_count(workers, memory_bytes), len(work.jobs))
    report = IngestReport(skipped=list(work.finished))

    def note(outcome: Outcome) -> None:
        report.add(outcome)
        finished(outcome)

    try:
        with store_errors(report, store):
            # First, so that the records of skipped slides are up to date even if the run is stopped later.
            refresh(work.finished, store)
            SlidePool(store, request.options, processes, note, progress).run(work.jobs)
    finally:
        end(store)
    return report


def begin(request: Request, work: IngestWork) -> IngestWork:
    """Create the store and save its pseudonyms; return the work, updated if another run has changed the pseudonyms.

    Raises:
        RequestError: The store cannot be written.
    """
    _make_store(request.store)
    while work.key is not None and not work.key.commit():
        work = compare_with_store(request)  # another run has created the key in the meantime
    return work


@contextmanager
def store_errors(report: IngestReport, store: Path) -> Iterator[None]:
    """Context that an error of the store ends; the error goes into ``report.stopped``."""
    try:
        yield
    except OSError as error:
        fewer = ", or use --workers 1, which needs fewer" if error.errno == errno.EMFILE else ""
        report.stopped = f"cannot write to the store {store}: {reason_of(error)}{fewer}"


def end(store: Path) -> None:
    """Compile the store's manifest and contact sheet, and remove what killed runs left."""
    # Each step by itself: even if the manifest cannot be written, claims of killed runs are removed.
    for step in (merge_manifest, write_contact, sweep_unfinished, sweep_claims):
        with suppress(OSError):  # such as a full disk; the next run does it
            step(store)


def compare_with_store(request: Request) -> IngestWork:
    """Return the slides to ingest and those that are finished, by comparing the request with the store; write nothing.

    Raises:
        RequestError: A path is wrong, the store would be among its own slides, slides with and without pseudonyms would
            be mixed, or (without ``overwrite``) finished slides were made with other parameters or from another file.
    """
    store = request.store
    if not is_remote(store) and store.exists() and not store.is_dir():
        raise RequestError(f"{store} is a file; choose a folder for the store")
    # States before records: if another run saves a record in between, `do_job` notices that its state has changed.
    try:
        states = record_states(store)
        records = load_records(store)
    except OSError as error:
        raise RequestError(f"{store}: cannot be read ({error.strerror})") from error
    jobs, key, note = _jobs(request, records)
    earlier = [None if request.overwrite else records.get(job.slide_id) for job in jobs]
    finished_records = each(lambda record: _finished_record(record, store), earlier, store)
    to_do, finished, changed, renewed = [], {}, [], []
    for job, record in zip(jobs, finished_records, strict=True):
        if record is None:
            to_do.append(replace(job, seen=states.get(job.slide_id, "")))
            continue
        differing = _other_parameters(record, job, request.options)
        if differing:
            changed.append(f"{job.slide_id} ({', '.join(differing)})")
            continue
        updated = _unchanged_source(record, job)
        if updated is None:
            refuse_another_file(record, job)
            if key is not None:
                key.refuse_another_file(job)
            to_do.append(replace(job, seen=states.get(job.slide_id, "")))
            # A file at another path gets here only if it is missing, which its ingest reports.
            if not is_of_another(record, job):
                renewed.append(job.slide_id)
        else:
            finished[job.slide_id] = updated
    _refuse_changed(changed, store)
    notes = [note] if note else []
    if renewed:
        more = f" and {len(renewed) - _MOST_NAMED} more" if len(renewed) > _MOST_NAMED else ""
        names = ", ".join(renewed[:_MOST_NAMED])
        notes.append(f"ingested again, because their files are not those of the store's slides any more: {names}{more}")
    return IngestWork(tuple(to_do), finished, key, "; ".join(notes))


def _jobs(request: Request, records: dict[str, SlideRecord]) -> tuple[list[SlideJob], KeyFile | None, str]:
    """Return (jobs of the request's part, key of pseudonyms or None, note or ``""``)."""
    _refuse_mixed_names(request, records)
    store = request.store
    if request.pseudonyms is None:
        key = None
        cases_by_name = {name: record.extra.get("case_id", "") for name, record in records.items()}
        files_by_name = {name: record.source_path for name, record in records.items()}
    else:
        key = KeyFile(request.pseudonyms, store)
        # The key has the real names; those in the store are pseudonyms, which say nothing about files.
        cases_by_name, files_by_name = key.cases, {}
    unchecked = find_jobs(request.paths, files_by_name, request.options.scene, store)
    jobs, note = written_in_one_way(unchecked, cases_by_name, cases_by_name.values(), merge=request.merge_alike)
    if key is not None:
        jobs = key.pseudonymise(jobs)
    refuse_store_among_slides(request.store, request.paths, jobs)
    names = [job.slide_id for job in jobs]
    if request.options.given_tissue is not None:
        outlines = GivenTissue(request.options.given_tissue).check(names)
        note = "; ".join(text for text in (note, outlines) if text)
    names_of_part = part_of_names(names, *request.part)
    return [job for job in jobs if job.slide_id in names_of_part], key, note


def _refuse_mixed_names(request: Request, records: dict[str, SlideRecord]) -> None:
    """Refuse a store in which some slides would have pseudonyms and others their own names."""
    named = [record.slide_id for record in records.values() if record.source_path]  # no path: it has a pseudonym
    if request.pseudonyms is not None and named:
        raise RequestError(
            f"{request.store} has slides under their own names ({named[0]}); choose another --out, or leave "
            f"--pseudonyms out"
        )
    if request.pseudonyms is None and len(named) < len(records):
        raise RequestError(
            f"{request.store} has slides under pseudonyms; give its key with --pseudonyms KEY.csv, or choose another "
            f"--out"
        )


def _finished_record(record: SlideRecord | None, store: Path) -> SlideRecord | None:
    """Return the record if its slide is finished and not damaged, else None."""
    if record is None or record.status != DONE:
        return None
    try:
        SlideStore.open(slide_path(store, record.slide_id))
    except StoreError:
        return None
    return record


def _other_parameters(record: SlideRecord, job: SlideJob, options: IngestOptions) -> list[str]:
    """Return the parameters in which the options differ from a finished slide, as ``name: old → new``."""
    stored = dict(record.identity.get("parameters", {}))
    requested: dict[str, Any] = options.parameters(job.slide_id)
    for values in (stored, requested):
        # 12 characters, which are enough of the outlines' digest for a message.
        values["tissue outlines"] = str(values.pop("given_tissue", "detected"))[:12]
    stored_mpp, requested_mpp = stored.pop("given_mpp", None), _given_mpp(job, options)
    # A slide ingested without a given mpp has that of its file, which `--force-mpp` would replace.
    compared_mpp = record.source_mpp if stored_mpp is None and options.force_mpp else stored_mpp
    if compared_mpp is not None:
        if requested_mpp is not None and not math.isclose(requested_mpp, compared_mpp, rel_tol=1e-6):
            stored["slide_mpp"], requested["slide_mpp"] = compared_mpp, requested_mpp
    elif _contradicts(job, record.source_mpp):
        stored["source_mpp"], requested["source_mpp"] = record.source_mpp, parse_number(job.row["source_mpp"])
    if (record.bad_share or 0.0) > options.max_bad:
        stored["bad tiles"], requested["bad tiles"] = f"{record.bad_share:.4g} of all", f"--max-bad {options.max_bad:g}"
    return differences(stored, requested)


def _contradicts(job: SlideJob, file_mpp: float | None) -> bool:
    """Whether the manifest's mpp contradicts the one that the slide was ingested with."""
    with suppress(ValueError):
        requested = parse_number(job.row.get("source_mpp", ""))
        return file_mpp is not None and abs(requested / file_mpp - 1) > AGREE_TOLERANCE
    return False


def _given_mpp(job: SlideJob, options: IngestOptions) -> float | None:
    """Return the microns per pixel from the manifest, else from the options; None if neither has them."""
    with suppress(ValueError):
        return parse_number(job.row.get("source_mpp", ""))
    return options.slide_mpp


def _unchanged_source(record: SlideRecord, job: SlideJob) -> SlideRecord | None:
    """Return the record, with the job's path and columns, if the source file is unchanged; None to ingest it again."""
    extra = user_columns(job.row) or record.extra
    updated = replace(record, extra=extra, reason="")
    try:
        stamp = SourceStamp.of(job.source)
    except SlideError:
        # The file was removed, but its slide is in the store. If the record is that of another path, the path is wrong.
        return None if is_of_another(record, job) else updated
    stored = record.identity
    # The size first, because the digest reads the whole file.
    current = stamp.to_json(job.secret)
    if current["size_bytes"] != stored.get("size_bytes"):
        return None
    if current["mtime_ns"] != stored.get("mtime_ns"):
        # Copied or touched: compare the digest of the whole file.
        if source_digest(job.source) != stored.get("sha256"):
            return None
        updated = replace(updated, identity={**stored, **current})
    return updated if job.secret else replace(updated, source_path=str(job.source))


def _refuse_changed(changed: Sequence[str], store: Path) -> None:
    """Refuse slides that were ingested with other parameters."""
    if not changed:
        return
    shown = "; ".join(changed[:3]) + (f"; and {len(changed) - 3} more" if len(changed) > 3 else "")
    raise RequestError(
        f"{store} has slides that were ingested with other parameters: {shown}. Ingest them again with --overwrite, "
        f"or choose another --out"
    )


def refresh(finished: dict[str, SlideRecord], store: Path) -> None:
    """Save the records of skipped slides whose file moved or whose manifest row changed; remove outdated ones."""
    records = load_records(store)
    for record in records.values():
        # A folder that could not be read has a record of its own. Once it can, the records of its slides replace it.
        was_unreadable = record.reason.startswith(UNREADABLE_FOLDER) and record.source_path
        if was_unreadable and not folder_error(Path(record.source_path)):
            record_path(store, record.slide_id).unlink(missing_ok=True)
    for name, record in finished.items():
        if records.get(name) != record:
            record.save(store)


def require_can_be_written(store: Path) -> None:
    """Check that a store of other processes could be written at this place.

    Raises:
        RequestError: It is a web server, or the memory of this process.
    """
    if isinstance(store, ObjectPath) and store.scheme not in ("s3", "gs"):
        raise RequestError(f"--out {store}: {store.scheme}:// cannot be written; use s3://, gs:// or a local folder")


def _make_store(store: Path) -> None:
    """Create the store if it is missing, and check that it can be written."""
    try:
        if isinstance(store, ObjectPath):
            probe = store / f".probe-{secrets.token_hex(8)}"
            # Only writing shows whether one may write.
            probe.write_bytes(b"")
            probe.unlink()
            return
        store.mkdir(parents=True, exist_ok=True)
        # Write a file: access rights do not show quotas, read-only mounts and restrictions of a file server.
        with tempfile.TemporaryFile(dir=store):
            pass
        restore_replaced(store)  # slides that a killed run had renamed, to put others in their place
    except OSError as error:
        raise RequestError(
            f"cannot write to {store} ({error.strerror}); choose a place with write permission"
        ) from error
