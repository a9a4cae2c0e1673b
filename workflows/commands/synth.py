"""``hyfi synth``: makes an archive of synthetic slides."""

from __future__ import annotations

from pathlib import Path

from workflows import console
from workflows.paths import require_folder, require_replaceable


def run(out: Path, slides: int, size_px: int, seed: int, pen: bool, blur: bool, as_json: bool) -> int:
    """Write ``slides`` slides of ``size_px`` × ``size_px`` pixels and their ``manifest.csv`` into ``out``; return 0.

    Raises:
        RequestError: The number or size of slides is not possible, or ``out`` is a file, or has another manifest.
    """
    from data.cores import usable_cores
    from pathology.synthetic.archive import COLUMNS, lay_out_archive, make_archive

    planned = lay_out_archive(slides, size_px, seed, pen=pen, blur=blur)
    require_folder(out, "the slides")
    first = ",".join(COLUMNS).encode()
    # A manifest with other columns is of a user's own slides: its labels would be lost.
    require_replaceable(out / "manifest.csv", lambda start: start.startswith(first), "a manifest of synthetic slides")
    with console.progress(len(planned), "drawing slides") as progress:
        manifest = make_archive(
            planned,
            out,
            workers=min(8, usable_cores()),
            finished=lambda path: progress.advance(1, path.name),
        )
    cases = len({slide.spec.case for slide in planned})
    console.say(f"{len(planned)} slides of {cases} cases, {size_px} × {size_px} pixels at 0.5 µm: {manifest}")
    if as_json:
        console.emit_json(
            {"manifest": str(manifest), "slides": len(planned), "cases": cases, "size_px": size_px, "seed": seed}
        )
    return 0
