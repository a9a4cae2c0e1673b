"""``hyfi ingest``: converts slides into a store."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyfi_core.errors import RequestError
from hyfi_core.size_text import size_text
from workflows import console, signals
from workflows.console import duration
from workflows.exit_codes import DONE, SOME_FAILED, STOPPED
from workflows.launch.launch import inside_launcher, run_as_rank
from workflows.launch.peer_watch import join
from workflows.option_values import parse_part
from workflows.paths import require_folder, require_writable

if TYPE_CHECKING:
    from data.store.manifest import SameContent, SlideRecord
    from pathology.ingest.archive import IngestReport, IngestWork, Request
    from pathology.ingest.discover import SlideJob

_MAX_SHOWN = 20


@dataclass(frozen=True)
class OpeningArguments:
    """How slide files are opened; see `IngestOptions`."""

    slide_mpp: float | None
    force_mpp: bool
    mpp_from_magnification: bool
    scene: str
    plane: int


@dataclass(frozen=True)
class IngestArguments:
    """The arguments of ``hyfi ingest``; see `hyfi ingest --help`, and `IngestOptions` for most."""

    paths: Sequence[Path]
    out: Path
    mpp: str
    workers: int
    overwrite: bool
    opening: OpeningArguments
    pen: str
    tissue_set: Sequence[str]
    tissue: str | None
    codec: str
    glass: str
    sharded: bool
    crop_tissue: bool
    lossless: bool
    icc: str
    cache: Path | None
    max_bad: float
    memory: str | None
    part: str
    pseudonyms: Path | None
    merge_alike: bool
    dry_run: bool
    as_json: bool

    def request(self) -> Request:
        """Return the arguments as a request, once they are valid and the store can be written.

        Raises:
            RequestError: A value is not valid.
        """
        from data.location import location
        from pathology.ingest.archive import IngestOptions, Request, require_can_be_written
        from pathology.tissue.tissue import TissueParameters

        options = IngestOptions(
            **_mpp_fields(self.mpp),
            **asdict(self.opening),
            tissue=TissueParameters(pen=self.pen).with_settings(self.tissue_set),
            given_tissue=self.tissue,
            codec=self.codec,
            max_bad=self.max_bad,
            glass=self.glass,
            sharded=self.sharded,
            crop_tissue=self.crop_tissue,
            lossless=self.lossless,
            icc=self.icc,
            cache=self.cache,
        )
        _check_cache(self.cache)
        store = location(self.out)
        # Checked now: otherwise the error would come after minutes of reading the first slide.
        require_can_be_written(store)
        part = parse_part(self.part)
        return Request(self.paths, store, options, self.overwrite, part, self.pseudonyms, self.merge_alike)

    @property
    def memory_bytes(self) -> int | None:
        """Memory of all workers together; None to use most of the free memory."""
        from pathology.memory import parse_bytes

        return None if self.memory is None else parse_bytes(self.memory)


def run(arguments: IngestArguments) -> int:
    """Ingest slides into a store; return 0, 1 if slides failed, or 3 if stopped. Ranks of a launcher share the slides.

    Raises:
        RequestError: A path, a value or the store is not valid; nothing was written.
    """
    from pathology.ingest.archive import IngestReport, ingest
    from pathology.memory import worker_count

    if inside_launcher():
        return run_as_rank(partial(_ingest_as_rank, arguments))
    request, memory_bytes = arguments.request(), arguments.memory_bytes
    processes, work = worker_count(arguments.workers, memory_bytes), _planned(request, arguments)
    if arguments.dry_run:
        return _dry_run(work, request, processes, arguments.as_json)
    run_ingest = partial(ingest, request, workers=processes, memory_bytes=memory_bytes, work=work)
    so_far = IngestReport(skipped=list(work.finished))  # what is reported after Ctrl-C
    try:
        with _progress(work.jobs) as shown:
            report = run_ingest(progress=shown.progress, finished=so_far.add)
    except KeyboardInterrupt:
        console.warn("hyfi: stopped on request")
        report, so_far.interrupted = so_far, True
    return _report(report, request, arguments.as_json)


def _ingest_as_rank(arguments: IngestArguments) -> int:
    """Ingest as one of several ranks; return the exit code, the same on every rank. Collective."""
    from hyfi_core.comm.agreement.agree import agree
    from pathology.ingest.together import ingest_together
    from pathology.memory import worker_count

    request, memory_bytes = arguments.request(), arguments.memory_bytes
    workers = worker_count(arguments.workers, memory_bytes)
    comm = join()
    # Rank 0 alone reads the store; the others have no `work`, and get their slides from it.
    work = agree(comm, lambda: _planned(request, arguments) if comm.rank == 0 else None)
    if arguments.dry_run:
        exit_code = None if work is None else _dry_run(work, request, workers * comm.size, arguments.as_json)
        return int(comm.broadcast_object(exit_code))
    run_ingest = partial(
        ingest_together,
        request,
        work,
        comm,
        workers=arguments.workers,
        memory_bytes=memory_bytes,
        stop_wanted=signals.requested,
    )
    if work is None:
        run_ingest()
        return int(comm.broadcast_object(None))  # the exit code of rank 0
    with _progress(work.jobs) as shown:
        report = run_ingest(progress=shown.progress)
    return int(comm.broadcast_object(_report(report, request, arguments.as_json)))


def _planned(request: Request, arguments: IngestArguments) -> IngestWork:
    """Return the slides that the store lacks, after a check of the disk's room; print notes about the request.

    Raises:
        RequestError: See `compare_with_store`; or the disk is too small.
    """
    from pathology.ingest.archive import compare_with_store
    from pathology.readers.mpp import not_used_note

    work = compare_with_store(request)
    for note in (work.note, *map(_unread_manifest_note, request.paths)):
        if note:
            console.warn(f"note: {note}")
    # Only of slides finished before: the report has the same note on the slides of this run.
    mpp_of = {} if request.options.force_mpp else {name: record.source_mpp for name, record in work.finished.items()}
    if note := not_used_note(request.options.slide_mpp, mpp_of):  # slides that state their mpp keep it
        console.warn(note)
    if not arguments.dry_run:
        _refuse_too_little_room(work, request)
    return work


def _unread_manifest_note(path: Path) -> str:
    """Return a note that the manifest in a folder of slides is not read; empty if the folder has none."""
    from data.location import is_remote

    manifest = path / "manifest.csv"
    # A folder with records is a store, whose manifest an ingest wrote.
    if path.suffix == ".csv" or is_remote(path) or not manifest.is_file() or (path / ".records").is_dir():
        return ""
    return (
        f"{manifest} is not read, as its folder was given: the store will not have its columns, such as labels and "
        f"cases; give the file itself to keep them"
    )


@contextmanager
def _progress(jobs: Sequence[SlideJob]) -> Iterator[_ByteProgress]:
    with console.progress(len(jobs), "ingest", estimate=False) as bar:
        yield _ByteProgress(bar, Pace(jobs))


def _mpp_fields(text: str) -> dict[str, Any]:
    """Return the fields of `IngestOptions` that ``--mpp`` sets."""
    from pathology.readers.mpp import parse_number

    if text == "native":
        return {"native": True}
    try:
        return {"mpp": parse_number(text)}
    except ValueError as error:
        raise RequestError(f"--mpp {text}: expected a number of microns per pixel, or native") from error


def _check_cache(cache: Path | None) -> None:
    if cache is not None:  # checked now, because otherwise each slide would fail with it
        require_folder(cache, "--cache, on a local disk")
        require_writable(cache)


class _ByteProgress:
    """Updates a progress bar by the bytes of the slides that are done."""

    def __init__(self, bar: console.Progress, pace: Pace) -> None:
        self._bar, self._pace = bar, pace
        self._steps = 0.0

    def progress(self, shares: Sequence[float]) -> None:
        """Advance the bar; ``shares``: the fraction that is done of each slide."""
        fraction = self._pace.done(shares)
        # The bar counts slides, but advances in proportion to their bytes.
        steps = round(fraction * len(self._pace.jobs), 2)
        # A slide that is started again would move the bar back.
        if steps > self._steps:
            note = ", ".join(text for text in (self._pace.text(fraction), self._pace.at_work(shares)) if text)
            self._bar.advance(steps - self._steps, note)
            self._steps = steps


@dataclass(slots=True)
class Pace:
    """Progress and rate by the bytes of slides, which predict their time better than their number.

    Attributes:
        jobs: All slides to ingest.
    """

    jobs: Sequence[SlideJob]
    _bytes: list[int] = field(init=False)
    _started_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._bytes = [_size(job) for job in self.jobs]
        self._started_s = time.monotonic()

    def done(self, shares: Sequence[float]) -> float:
        """Return the fraction done of all bytes, 0 to 1, given the fraction done of each job."""
        total = sum(self._bytes)
        return sum(size * share for size, share in zip(self._bytes, shares, strict=False)) / total if total else 1.0

    def at_work(self, shares: Sequence[float]) -> str:
        """Return the name of a slide in progress, with the number of others; empty if none is in progress."""
        names = [job.slide_id for job, share in zip(self.jobs, shares, strict=False) if 0 < share < 1]
        return "" if not names else names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")

    def text(self, fraction: float) -> str:
        """Return the rate and the remaining time as text, ``52.1 MB/s, 3 min left``; ``fraction``: what is done."""
        elapsed_s = time.monotonic() - self._started_s
        if fraction <= 0 or elapsed_s <= 0:
            return ""
        rate = sum(self._bytes) * fraction / elapsed_s / 1e6
        left = f", {duration(elapsed_s * (1 - fraction) / fraction)} left" if fraction < 1 else ""
        return f"{rate:.3g} MB/s{left}"


def _size(job: SlideJob) -> int:
    """Return the bytes of a slide's files; 1 if they cannot be read."""
    from pathology.errors import SlideError
    from pathology.ingest.identity import SourceStamp

    try:
        # At least 1, so that a total is never 0.
        return max(1, SourceStamp.of(job.source).size_bytes)
    except SlideError:
        return 1


def _refuse_too_little_room(work: IngestWork, request: Request) -> None:
    """Estimate from some slides whether the disk is large enough, before anything is written.

    Raises:
        RequestError: It has less room than a lower bound of what the slides need.
    """
    from pathology.ingest.forecast import free_bytes, lower_bound_bytes

    free = free_bytes(request.store)
    if free is not None and (needed_bytes := lower_bound_bytes(work.jobs, request.options)) > free:
        raise RequestError(
            f"{request.store}: its disk has {size_text(free)} free, but the slides need at least "
            f"{size_text(needed_bytes)}; choose another --out, or ingest a part of them with --part"
        )


def _report(report: IngestReport, request: Request, as_json: bool) -> int:
    """Print what was done and what failed; return the exit code."""
    from pathology.ingest.forecast import size_note
    from pathology.readers.mpp import not_used_note

    out = request.store
    for record in report.failed:
        console.warn(f"failed: {_name(record)}: {record.reason}")
    for record in report.done:
        surprising = [flag for flag in record.flags if flag != "tissue_given"]  # asked for with --tissue
        if surprising:
            console.warn(f"note: {record.slide_id}: {', '.join(surprising)}")
        for note in record.file_notes:
            console.warn(f"note: {record.slide_id}: {note}")
    mpp_of = {} if request.options.force_mpp else {record.slide_id: record.source_mpp for record in report.done}
    if note := not_used_note(request.options.slide_mpp, mpp_of):  # slides that state their mpp keep it
        console.warn(note)
    for same in _same_content(report, out):
        console.warn(f"note: {same.text}: {', '.join(same.slides)}")
    if note := size_note(out, [record.slide_id for record in report.done], request.options):
        console.say(note)
    if report.stopped:
        console.warn(f"stopped: {report.stopped}. Finished slides are kept; run the same command to continue")
    counts = f"{len(report.done)} done, {len(report.failed)} failed, {len(report.skipped)} finished before"
    ended = "; stopped on request, run the same command to continue" if report.interrupted else ""
    console.say(f"{counts}{ended}: {out / 'manifest.csv'}, {out / 'contact.html'}")
    if as_json:
        console.emit_json(
            {
                "store": str(out),
                "manifest": str(out / "manifest.csv"),
                "contact": str(out / "contact.html"),
                "done": [record.slide_id for record in report.done],
                "failed": [
                    {"slide_id": r.slide_id, "source_path": r.source_path, "reason": r.reason} for r in report.failed
                ],
                "skipped": report.skipped,
                "stopped": report.stopped or ("on request" if report.interrupted else None),
            }
        )
    if report.interrupted:
        return STOPPED
    return SOME_FAILED if report.failed or report.stopped else DONE


def _same_content(report: IngestReport, store: Path) -> list[SameContent]:
    """Return the groups of slides with the same content that include one of this run; scenes of a file do not count."""
    from data.errors import StoreError
    from data.store.manifest import load_manifest, same_content

    slides_of_run = {record.slide_id for record in report.done} | set(report.skipped)
    with suppress(StoreError, OSError):  # a store that cannot be read is reported elsewhere
        groups = [group for group in same_content(load_manifest(store)) if not group.scenes]
        return [group for group in groups if slides_of_run.intersection(group.slides)]
    return []


def _name(record: SlideRecord) -> str:
    """Return the file of a slide, or its pseudonym if the file must not be named."""
    return record.source_path or record.slide_id


def _dry_run(work: IngestWork, request: Request, workers: int, as_json: bool) -> int:
    """Print what an ingest would do and take; return the exit code."""
    from pathology.ingest.forecast import forecast, free_bytes

    with console.progress(len(work.jobs), "reading headers") as bar:
        total = forecast(work.jobs, request.options, lambda name: bar.advance(1, name))
    # A slide with a pseudonym must not be named by its path.
    refused = [(job.slide_id if job.secret else str(job.source), reason) for job, reason in total.refused]
    for name, reason in refused[:_MAX_SHOWN]:
        console.warn(f"would fail: {name}: {reason}")
    free, hours = free_bytes(request.store), total.core_hours / workers
    room = "" if free is None else f" ({free / 1e9:.1f} GB are free)"
    console.say(
        f"{total.slides} slides to do, {len(refused)} would fail, {len(work.finished)} finished before; "
        f"{total.source_px / 1e6:.0f} megapixels to decode, about {total.store_bytes / 1e9:.1f} GB to write{room}, "
        f"about {duration(hours * 3600)} with {workers} workers"
    )
    if as_json:
        numbers = {
            "source_px": total.source_px,
            "store_bytes": total.store_bytes,
            "free_bytes": free,
            "core_hours": total.core_hours,
            "hours": hours,
        }
        listed = [{"source_path": name, "reason": reason} for name, reason in refused]
        console.emit_json(
            {"dry_run": True, "slides": total.slides, "refused": listed, "skipped": list(work.finished), **numbers}
        )
    return 1 if refused else 0
