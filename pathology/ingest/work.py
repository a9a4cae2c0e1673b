"""One job of an ingest: claim the slide, compare it with other runs, ingest it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from data.location import remove_tree
from data.object_path import ObjectPath
from data.store.manifest import DONE, FAILED, SlideRecord, record_path, record_state
from data.store.slide_store import StoreError
from hyfi_core.errors import RequestError
from pathology.claims import Claim, ClaimLostError, sweep
from pathology.ingest.contact import write_picture
from pathology.ingest.discover import SlideJob, name_with_place
from pathology.ingest.identity import differences
from pathology.ingest.options import IngestOptions
from pathology.ingest.slide import ingest_slide
from pathology.search import is_gone

CLAIMS = ".claims"
"""Folder of the store with the claims."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a job.

    Attributes:
        record: The record of its slide.
        job: The job as executed; its name may have changed.
        ours: Whether this run ingested the slide, not another one in the meantime.
    """

    record: SlideRecord
    job: SlideJob
    ours: bool = True


def sweep_claims(store: Path) -> None:
    """Remove claims of killed runs."""
    sweep(store / CLAIMS)


def sweep_unfinished(store: Path) -> None:
    """Remove interrupted uploads from object storage: slides without their last file that no process claims."""
    if not isinstance(store, ObjectPath):
        return
    # On object storage, a slide counts as a folder only with its last file, ``zarr.json``.
    for path in [path for path in store.glob("*.zarr") if not path.is_dir()]:
        claim = Claim.take(store / CLAIMS, path.name.removesuffix(".zarr"))
        if claim is not None:
            with claim:
                # Check again under the claim: another run may have finished its upload in between.
                if not path.is_dir():
                    remove_tree(path)


def do_job(
    job: SlideJob, store: Path, options: IngestOptions, threads: int, progress: Callable[[float], None]
) -> Outcome | None:
    """Ingest a slide, unless another process works on it.

    Args:
        job: The slide to ingest.
        store: The store's folder.
        options: How to ingest; see `IngestOptions`.
        threads: Number of chunks encoded at a time; 0: one for each core.
        progress: Called with the completed fraction.

    Returns:
        The result; None while another process works on it.

    Raises:
        OSError: The store cannot be written.
    """
    claim = Claim.take(store / CLAIMS, job.slide_id)
    if claim is None:
        return None
    with claim:
        # True if another run has saved a record with this name since the job was planned.
        if record_state(store, job.slide_id) != job.seen:
            stored = SlideRecord.load(record_path(store, job.slide_id))
            if is_of_another(stored, job):
                return _another_name(job, stored, store, options, threads, progress)
            return Outcome(_with_checked_parameters(stored, options), job, ours=False)

        def checked_progress(fraction: float) -> None:
            claim.check()
            progress(fraction)

        try:
            record = ingest_slide(
                job.source,
                store,
                options,
                job.row,
                job.slide_id,
                secret=job.secret,
                threads=threads,
                progress=checked_progress,
            )
        except ClaimLostError:
            return None
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror or error} (at {job.slide_id})") from error
        if record.status == DONE:
            with suppress(StoreError):
                write_picture(store, job.slide_id)
        return Outcome(record, job)


def is_of_another(record: SlideRecord, job: SlideJob) -> bool:
    """Whether a record with the job's name is of another file."""
    origin = (record.source_path, record.extra.get("scene", ""))
    return not job.secret and origin != (str(job.source), job.row.get("scene", ""))


def refuse_another_file(record: SlideRecord, job: SlideJob) -> None:
    """Refuse a slide whose name the store already has for a file with another path and other content.

    Scanners and hospitals number slides from 1: labels of one slide would be joined to pixels of the other. A missing
    file is not refused here; its ingest reports it.

    Raises:
        RequestError: The name belongs to another file.
    """
    if is_of_another(record, job) and not is_gone(job.source):
        raise RequestError(
            f"slide_id {job.slide_id!r} is {record.source_path} in the store, and {job.source} has other content: give "
            "one of them another slide_id in a manifest, choose another --out, or replace slides with --overwrite"
        )


def _another_name(
    job: SlideJob,
    stored: SlideRecord,
    store: Path,
    options: IngestOptions,
    threads: int,
    progress: Callable[[float], None],
) -> Outcome | None:
    """Run a job under a longer name, because its name now belongs to a slide of the same file name in another folder.

    The job fails if the user's manifest gives the name.
    """
    if job.row.get("slide_id"):
        reason = f"slide_id {job.slide_id!r} is used for {stored.source_path} by another run; it must be unique"
        return Outcome(SlideRecord(job.slide_id, str(job.source), FAILED, reason=reason), job)
    name = name_with_place(job.slide_id, job.source)
    return do_job(replace(job, slide_id=name, seen=record_state(store, name)), store, options, threads, progress)


def _with_checked_parameters(record: SlideRecord, options: IngestOptions) -> SlideRecord:
    """Return the record of another run, as failed if that run used other parameters."""
    used = {k: v for k, v in record.identity.get("parameters", {}).items() if k != "given_mpp"}
    changed = differences(used, options.parameters(record.slide_id)) if record.status == DONE else []
    if not changed:
        return record
    return replace(record, status=FAILED, reason=f"another run ingested it with other parameters: {', '.join(changed)}")
