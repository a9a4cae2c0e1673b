"""Many slides into a store: what is finished is skipped, what changed is redone or refused, what fails fails alone."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from data.manifest import DONE, SlideRecord, compile_manifest, load_records
from data.store import SlideStore, StoreError, slide_path
from hyfi_core.errors import RequestError
from pathology.discover import SlideJob, find_jobs, user_columns
from pathology.errors import SlideError
from pathology.identity import SourceStamp, differences, source_digest
from pathology.ingest_options import IngestOptions
from pathology.ingest_slide import ingest_slide
from pathology.mpp import parse_mpp
from pathology.slide_pool import default_workers, ingest_all

__all__ = ["IngestOptions", "IngestReport", "Plan", "ingest", "ingest_slide", "make_plan"]


@dataclass(slots=True)
class IngestReport:
    """What an ingest did.

    Attributes:
        done: Records of the slides that were ingested now.
        failed: Records of those that failed now, each with its reason.
        skipped: Names of those that were finished before.
        stopped: Why the store could not be written any more; empty otherwise.
    """

    done: list[SlideRecord] = field(default_factory=list)
    failed: list[SlideRecord] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    stopped: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """What an ingest would do: jobs to do, and finished slides by name with the record they are to have."""

    jobs: tuple[SlideJob, ...]
    finished: dict[str, SlideRecord]


def ingest(
    paths: Sequence[Path],
    store: Path,
    options: IngestOptions,
    *,
    workers: int = 0,
    overwrite: bool = False,
    progress: Callable[[SlideRecord], None] | None = None,
    plan: Plan | None = None,
) -> IngestReport:
    """Ingest slides, folders of slides and manifests into ``store`` and compile its ``manifest.csv``.

    Args:
        paths: Slides, folders, manifest CSVs.
        store: The store's folder; made where it does not exist.
        options: See there.
        workers: Processes; 0: one for each core, 1: this process.
        overwrite: Do finished slides again, with other parameters too.
        progress: Called with the record of each slide as it comes.
        plan: From `make_plan`, where it was made already.

    Raises:
        RequestError: A path is wrong, the store cannot be written, or holds slides of other parameters.
    """
    plan = plan or make_plan(paths, store, options, overwrite)
    _make_store(store)
    report = IngestReport(skipped=list(plan.finished))

    def finished(record: SlideRecord) -> None:
        (report.done if record.status == DONE else report.failed).append(record)
        if progress is not None:
            progress(record)

    try:
        _refresh(plan.finished, store)
        ingest_all(plan.jobs, store, options, min(workers or default_workers(), len(plan.jobs)), finished)
    except OSError as error:
        report.stopped = f"the store {store} cannot be written: {error.strerror or error}"
    finally:
        with suppress(OSError):
            compile_manifest(store)
    return report


def make_plan(paths: Sequence[Path], store: Path, options: IngestOptions, overwrite: bool) -> Plan:
    """Compare what is asked with what the store holds; writes nothing.

    Raises:
        RequestError: A path is wrong, or finished slides were made with other parameters and ``overwrite`` is off.
    """
    if store.exists() and not store.is_dir():
        raise RequestError(f"{store} is a file; name a folder for the store")
    records = load_records(store)
    jobs = find_jobs(paths, records)
    to_do, finished, changed = [], {}, []
    for job in jobs:
        record = None if overwrite else _finished_record(records.get(job.slide_id), store)
        if record is None:
            to_do.append(job)
            continue
        other = _other_parameters(record, job, options)
        if other:
            changed.append(f"{job.slide_id} ({', '.join(other)})")
            continue
        kept = _unchanged_source(record, job)
        if kept is None:
            to_do.append(job)
        else:
            finished[job.slide_id] = kept
    _refuse_changed(changed, store)
    return Plan(tuple(to_do), finished)


def _finished_record(record: SlideRecord | None, store: Path) -> SlideRecord | None:
    """Return the record if its slide is finished and whole; a damaged one is done again."""
    if record is None or record.status != DONE:
        return None
    try:
        SlideStore.open(slide_path(store, record.slide_id))
    except StoreError:
        return None
    return record


def _other_parameters(record: SlideRecord, job: SlideJob, options: IngestOptions) -> list[str]:
    old = dict(record.identity.get("parameters", {}))
    new: dict[str, Any] = options.parameters()
    given = old.pop("given_mpp", None)
    if given is not None:
        now = _given_mpp(job, options)
        if now is not None and now != given:
            old["slide_mpp"], new["slide_mpp"] = given, now
    return differences(old, new)


def _given_mpp(job: SlideJob, options: IngestOptions) -> float | None:
    with suppress(ValueError):
        return parse_mpp(job.row.get("source_mpp", ""))
    return options.slide_mpp


def _unchanged_source(record: SlideRecord, job: SlideJob) -> SlideRecord | None:
    """Return the record, brought up to date, if the file is the one it was made from; None to do it again."""
    extra = user_columns(job.row) or record.extra
    kept = replace(record, extra=extra)
    try:
        stamp = SourceStamp.of(job.source)
    except SlideError:
        return kept  # the file is gone, its slide is in the store
    old = record.identity
    if stamp.size_bytes != old.get("size_bytes"):
        return None
    if stamp.mtime_ns != old.get("mtime_ns"):
        # Copied, or touched: only now is it worth reading the whole file.
        if source_digest(job.source) != old.get("sha256"):
            return None
        kept = replace(kept, identity={**old, **stamp.to_json()})
    return replace(kept, source_path=str(job.source))


def _refuse_changed(changed: Sequence[str], store: Path) -> None:
    if not changed:
        return
    shown = "; ".join(changed[:3]) + (f"; and {len(changed) - 3} more" if len(changed) > 3 else "")
    raise RequestError(
        f"{store} holds slides that were made with other parameters: {shown}. "
        "Do them again with --overwrite, or name another folder with --out"
    )


def _refresh(finished: dict[str, SlideRecord], store: Path) -> None:
    """Save the records of skipped slides whose file moved or whose manifest row changed."""
    records = load_records(store)
    for name, record in finished.items():
        if records.get(name) != record:
            record.save(store)


def _make_store(store: Path) -> None:
    try:
        store.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=store):
            pass
    except OSError as error:
        raise RequestError(f"cannot write to {store} ({error.strerror}); name a folder that you may write") from error


def reasons(records: Iterable[SlideRecord]) -> list[str]:
    """Return one line for each failed slide: its file and its reason."""
    return [f"{record.source_path}: {record.reason}" for record in records]
