"""``hyfi verify``: checks every digest, size and checksum of a store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hyfi_core.errors import RequestError
from workflows import console

if TYPE_CHECKING:
    from data.store.verify import Fault

_LIST = "verify.csv"


def run(store: Path, as_json: bool) -> int:
    """Verify a store, or one slide of it (``STORE/<slide_id>.zarr``).

    Faults are listed on standard error and, for a whole store, in ``STORE/verify.csv``.

    Returns:
        0, or 1 if there are faults.

    Raises:
        RequestError: There is no store.
    """
    from data.cores import usable_cores
    from data.location import is_remote, location
    from data.store.manifest import load_manifest
    from data.store.unfinished import unfinished_note, unfinished_slides
    from data.store.verify import size_of_store, slides_in, verify_slide, verify_store

    store = location(store)
    if not is_remote(store) and not store.is_dir():
        raise RequestError(f"{store}: no such folder; give a store, or a slide of a store (.zarr)")
    threads = usable_cores()
    try:
        # A slide is a zarr group; a store is a plain folder of them.
        single = (store / "zarr.json").exists()
        slides = [store] if single else slides_in(store)
        with console.progress(size_of_store(slides) / 1e6, "verify (MB)") as bar:
            verify = verify_slide if single else verify_store
            report = verify(store, threads, lambda size, name: bar.advance(size / 1e6, name))
    except OSError as error:
        raise RequestError(f"{error.filename or store}: cannot be read ({error.strerror or error})") from error
    for fault in report.faults:
        console.warn(f"failed: {fault.slide_id}: {fault.path}: {fault.reason}")
    if not single:
        _write_list(store, report.faults)
    if not report.slides and not report.faults:
        # Without rows, as if the disk was full at the first slide, the note below says what is known.
        why = "; manifest.csv says why" if load_manifest(store) else ""
        console.warn(f"{store}: no slide is finished, so nothing was checked{why}")
    unfinished = [] if single else unfinished_slides(store)
    if unfinished:
        console.warn(unfinished_note(store))
    damaged = len({fault.slide_id for fault in report.faults})
    console.say(
        f"{console.counted(report.slides, 'slide')}, {console.counted(report.files, 'file')}, "
        f"{report.size_bytes / 1e6:.1f} MB: "
        + (
            f"{console.counted(len(report.faults), 'fault')} in {console.counted(damaged, 'slide')}"
            if report.faults
            else "no faults"
        )
    )
    if as_json:
        faults = [{"slide_id": f.slide_id, "path": str(f.path), "reason": f.reason} for f in report.faults]
        counts = {"slides": report.slides, "files": report.files, "bytes": report.size_bytes}
        console.emit_json({"store": str(store), **counts, "faults": faults, "unfinished": unfinished})
    return 1 if report.faults else 0


def _write_list(store: Path, faults: list[Fault]) -> None:
    """Write the list of faults."""
    from data.csv_table import write_table

    rows = [{"slide_id": fault.slide_id, "path": fault.path, "reason": fault.reason} for fault in faults]
    try:
        write_table(store / _LIST, ["slide_id", "path", "reason"], rows)
    except OSError as error:
        console.warn(f"{store / _LIST} cannot be written ({error.strerror}); the faults are listed above only")
