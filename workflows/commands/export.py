"""``hyfi export``: copies slides of a store into an older format, for viewers that need it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hyfi_core.errors import RequestError
from workflows import console
from workflows.paths import require_folder, require_writable

_FORMATS = ("0.4",)
_LIST = "export.csv"
_DONE, _BEFORE, _FAILED = "done", "before", "failed"


def run(store: Path, ngff: str, out: Path, as_json: bool) -> int:
    """Copy the slides of a store, or one slide of it, into ``out``; existing copies are kept.

    Returns:
        0, or 1 if slides could not be copied; they are named on standard error and in ``DIR/export.csv``.

    Raises:
        RequestError: There is no store, the format is unknown, or ``out`` cannot be used.
    """
    from data.location import location
    from data.store.export import pixels_of

    store = location(store)
    if ngff not in _FORMATS:
        raise RequestError(f"--ngff {ngff}: allowed: {', '.join(_FORMATS)} (stores themselves are 0.5)")
    slides = _slides(store)
    # Copies have the names of the slides.
    if out.absolute() in (store.absolute(), slides[0].absolute().parent):
        raise RequestError(f"--out {out}: the copies would overwrite the slides; choose another folder")
    require_folder(out, "the copies")
    require_writable(out / _LIST)
    out.mkdir(parents=True, exist_ok=True)
    with console.progress(sum(map(pixels_of, slides)) / 1e6, "export (MP)") as bar:
        rows = [_export(slide, out, lambda pixels: bar.advance(pixels / 1e6)) for slide in slides]
    list_written = _write_list(out, rows)
    counts = {status: sum(row["status"] == status for row in rows) for status in (_DONE, _FAILED, _BEFORE)}
    console.say(f"{counts[_DONE]} done, {counts[_FAILED]} failed, {counts[_BEFORE]} copied before: {out}")
    if as_json:
        console.emit_json({"out": str(out), "ngff": ngff, **counts, "slides": rows})
    return 1 if counts[_FAILED] or not list_written else 0


def _slides(store: Path) -> list[Path]:
    """Return the folders of the slides to export."""
    from data.store.verify import slides_in

    try:
        is_folder = store.is_dir()
    except OSError as error:
        raise RequestError(f"{store}: cannot be read ({error.strerror})") from error
    if not is_folder:
        raise RequestError(f"{store}: no such folder; give a store, or a slide of a store (.zarr)")
    slides = [store] if (store / "zarr.json").exists() else slides_in(store)
    if not slides:
        raise RequestError(f"{store}: no ingested slide in this folder; run `hyfi ingest … --out {store}` first")
    return slides


def _export(slide: Path, out: Path, progress: Callable[[int], None]) -> dict[str, str]:
    """Export one slide; return its row of ``export.csv``."""
    from data.cores import usable_cores
    from data.errors import StoreError
    from data.store.export import export_ngff04

    slide_id = slide.name.removesuffix(".zarr")
    threads = usable_cores()
    try:
        is_new = export_ngff04(slide, out, threads, progress)
        row = {"status": _DONE if is_new else _BEFORE, "reason": ""}
    except (StoreError, RequestError) as error:
        row = {"status": _FAILED, "reason": str(error)}
    except OSError as error:
        row = {"status": _FAILED, "reason": f"{error.filename or out}: {error.strerror or error}"}
    if row["reason"]:
        console.warn(f"failed: {slide_id}: {row['reason']}")
    return {"slide_id": slide_id, "path": str(out / slide.name), **row}


def _write_list(out: Path, rows: list[dict[str, str]]) -> bool:
    """Write the list of exported slides; return whether that was possible."""
    from data.csv_table import write_table

    try:
        write_table(out / _LIST, ["slide_id", "path", "status", "reason"], rows)
    except OSError as error:
        console.warn(f"{out / _LIST} cannot be written: {error.strerror or error}")
        return False
    return True
