"""``hyfi ingest``: slides become a store."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from workflows import console

if TYPE_CHECKING:
    from pathology.ingest import IngestReport, Plan

_SHOWN = 20


def run(
    paths: list[Path],
    out: Path,
    mpp: float,
    workers: int,
    overwrite: bool,
    slide_mpp: float | None,
    codec: str,
    max_bad: float,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Ingest ``paths`` into the store ``out``; returns 0, or 1 when slides failed.

    Raises:
        RequestError: A path, a value or the store is wrong; nothing was written.
        KeyboardInterrupt: Stopped by SIGINT, SIGTERM or SIGUSR1; the same command goes on.
    """
    from pathology.ingest import IngestOptions, ingest, make_plan

    options = IngestOptions(mpp=mpp, slide_mpp=slide_mpp, codec=codec, max_bad=max_bad)
    plan = make_plan(paths, out, options, overwrite)
    if dry_run:
        return _dry_run(plan, options.mpp, options.slide_mpp, as_json)
    with _stop_on_signals(), console.progress(len(plan.jobs), "ingest") as bar:
        report = ingest(
            paths, out, options, workers=workers, progress=lambda record: bar.advance(1, record.slide_id), plan=plan
        )
    return _tell(report, out, as_json)


def _tell(report: IngestReport, out: Path, as_json: bool) -> int:
    for record in report.failed:
        console.warn(f"failed: {record.source_path}: {record.reason}")
    for record in report.done:
        if record.flags:
            console.warn(f"note: {record.slide_id}: {', '.join(record.flags)}")
    if report.stopped:
        console.warn(f"stopped: {report.stopped}. What is finished is kept; the same command goes on")
    counts = f"{len(report.done)} done, {len(report.failed)} failed, {len(report.skipped)} finished before"
    console.say(f"{counts}: {out / 'manifest.csv'}")
    if as_json:
        console.emit_json(
            {
                "store": str(out),
                "manifest": str(out / "manifest.csv"),
                "done": [record.slide_id for record in report.done],
                "failed": [
                    {"slide_id": r.slide_id, "source_path": r.source_path, "reason": r.reason} for r in report.failed
                ],
                "skipped": report.skipped,
                "stopped": report.stopped or None,
            }
        )
    return 1 if report.failed or report.stopped else 0


def _dry_run(plan: Plan, mpp: float, slide_mpp: float | None, as_json: bool) -> int:
    from pathology.forecast import forecast

    with console.progress(len(plan.jobs), "looking") as bar:
        total = forecast(plan.jobs, mpp, slide_mpp, lambda name: bar.advance(1, name))
    for path, reason in total.refused[:_SHOWN]:
        console.warn(f"would fail: {path}: {reason}")
    console.say(
        f"{total.slides} slides to do, {len(total.refused)} would fail, {len(plan.finished)} finished before; "
        f"{total.source_px / 1e6:.0f} megapixels to decode, about {total.store_bytes / 1e9:.1f} GB to write, "
        f"about {total.core_hours:.2f} core hours"
    )
    if as_json:
        refused = [{"source_path": str(path), "reason": reason} for path, reason in total.refused]
        numbers = {"source_px": total.source_px, "store_bytes": total.store_bytes, "core_hours": total.core_hours}
        console.emit_json(
            {"dry_run": True, "slides": total.slides, "refused": refused, "skipped": list(plan.finished), **numbers}
        )
    return 1 if total.refused else 0


@contextmanager
def _stop_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGUSR1 stop the work like Ctrl-C, so that workers end and half-written slides go."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
