"""``hyfi synth``: an archive of synthetic slides."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hyfi_core.errors import RequestError
from workflows import console


def run(out: Path, slides: int, size_px: int, seed: int, pen: bool, blur: bool, as_json: bool) -> int:
    """Draw ``slides`` slides of ``size_px`` pixels into ``out`` and write ``manifest.csv`` there; returns 0.

    Raises:
        RequestError: the numbers cannot be drawn, or ``out`` cannot be written.
    """
    from pathology.synthetic.archive import make_archive, plan_archive

    planned = plan_archive(slides, size_px, seed, pen=pen, blur=blur)
    _check_folder(out)
    with console.progress(len(planned), "drawing slides") as progress:
        manifest = make_archive(
            planned,
            out,
            workers=min(8, _cores()),
            done=lambda path: progress.advance(1, path.name),
        )
    cases = len({slide.spec.case for slide in planned})
    console.say(f"{len(planned)} slides of {cases} cases, {size_px} × {size_px} pixels at 0.5 µm: {manifest}")
    if as_json:
        console.emit_json(
            {"manifest": str(manifest), "slides": len(planned), "cases": cases, "size_px": size_px, "seed": seed}
        )
    return 0


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_folder(out: Path) -> None:
    """Raise RequestError unless files can be created in ``out``, or it can be made; leaves nothing behind."""
    if out.exists() and not out.is_dir():
        raise RequestError(f"{out} is a file; name a folder for the slides")
    parent = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise RequestError(f"cannot write to {parent} ({error.strerror}); name a folder that you may write") from error
