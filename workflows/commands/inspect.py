"""``hyfi inspect``: shows the contents of a store, a stored slide, or a slide file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyfi_core.errors import RequestError
from workflows import console
from workflows.paths import require_readable, require_replaceable

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from pathology.ingest.thumbnail import Thumbnail
    from pathology.readers.mpp import SourceMpp
    from pathology.readers.slide_source import SlideSource

_MAX_PICTURES = 120
_IN_DOUBT = "µm/px in doubt"
_SILENT_PX = 2_000_000_000
"""Reading more pixels than this takes so long that the user is warned."""


def run(
    path: Path, png: Path | None, as_json: bool, slide_mpp: float | None = None, geojson: Path | None = None
) -> int:
    """Print levels, microns per pixel, tissue fraction and provenance.

    Args:
        path: A store, a slide of a store, a slide file, or an OME-Zarr store of another program.
        png: File for a thumbnail with the tissue outline, or for a store's contact sheet; None: none.
        as_json: Print everything as one JSON object.
        slide_mpp: Microns per pixel of a slide file that does not state them.
        geojson: File for the tissue outlines of a stored slide, or folder for those of a store; None: none.

    Returns:
        0, or 1 if the slide cannot be read or slides of the store are damaged.

    Raises:
        RequestError: There is nothing at ``path``, ``png`` or ``geojson`` cannot be written, or ``geojson`` is given
            for a slide file.
    """
    from data.files import as_on_disk
    from data.location import is_remote, location

    path = location(path)
    path = path if is_remote(path) else as_on_disk(path)
    _require_readable(path)
    if png is not None:
        if not png.absolute().parent.is_dir():
            raise RequestError(f"{png}: no such folder: {png.absolute().parent}")
        require_replaceable(png, lambda start: start.startswith(b"\x89PNG"), "a PNG")
    all_exported = geojson is None or _export_tissue(path, geojson)
    # The object that --json prints, with two more keys: the "lines" to print, and "drawn": False without a picture.
    if _is_stored_slide(path):
        inspected = _slide_of_store(path, png)
    elif path.is_dir() and not _is_slide(path):
        inspected = _store(path, png)
    else:
        inspected = _file(path, png, slide_mpp)
    for line in inspected.pop("lines"):
        console.say(line)
    if inspected.get("reason"):
        console.warn(f"failed: {path}: {inspected['reason']}")
    drawn = inspected.pop("drawn", True)
    if png is not None and drawn:
        inspected["png"] = str(png)
        console.say(f"picture: {png}")
    if as_json:
        console.emit_json(inspected)
    return 0 if inspected["status"] == "done" and all_exported else 1


def _export_tissue(path: Path, geojson: Path) -> bool:
    """Write the tissue outlines of a stored slide, or of each slide of a store; damaged slides are named and left out.

    Returns:
        Whether the outlines of all slides are written.

    Raises:
        RequestError: ``path`` is a slide file, or the outlines cannot be written, or would replace others.
    """
    from data.errors import StoreError
    from data.files import write_atomically
    from data.store.manifest import DONE, load_manifest
    from data.store.slide_store import slide_path

    if not path.is_dir() or (_is_slide(path) and not _is_stored_slide(path)):
        raise RequestError(f"--tissue {geojson}: {path} is a slide file; ingest it, and inspect the ingested slide")
    single = _is_stored_slide(path)
    files = {path: geojson}
    if not single:
        names = [row["slide_id"] for row in load_manifest(path) if row["status"] == DONE]
        files = {slide_path(path, name): geojson / f"{name}.geojson" for name in names}
    damaged = 0
    # Those that exist come first: nothing is written if one of them was edited.
    for folder, target in sorted(files.items(), key=lambda pair: not pair[1].exists()):
        try:
            outlines = _outlines(folder)
        except StoreError as error:
            console.warn(f"failed: {folder}: no tissue outlines: {error}")
            damaged += 1
            continue
        try:
            if target.exists() and target.read_bytes() == outlines:
                continue
            if target.exists():
                raise RequestError(
                    f"--tissue {geojson}: {target} exists and has other contents, such as outlines that were edited, "
                    "which would be lost; choose another path"
                )
            target.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(target, outlines)
        except OSError as error:
            reason = error.strerror or error
            raise RequestError(f"{geojson}: cannot be written ({reason}); choose another path") from error
    if not single or not damaged:
        console.say(f"tissue: {geojson}")
    return not damaged


def _outlines(folder: Path) -> bytes:
    """Return the tissue outlines of a stored slide as GeoJSON."""
    import json

    from data.store.slide_store import SlideStore
    from pathology.tissue.outlines import SlideGrid, mask_to_geojson

    slide = SlideStore.open(folder)
    mask, mpp = slide.tissue()
    collection = mask_to_geojson(mask, SlideGrid.of(slide.attributes, slide.levels[0].mpp, mpp), slide.slide_id)
    return (json.dumps(collection, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def _is_stored_slide(path: Path) -> bool:
    """Whether a folder is a slide of a store; by its name if its metadata are damaged."""
    from pathology.readers.ngff.groups import is_ome_zarr, is_own_slide

    return is_own_slide(path) or (path.suffix == ".zarr" and path.is_dir() and not is_ome_zarr(path))


def _is_slide(folder: Path) -> bool:
    """Whether a folder is read as one slide: an OME-Zarr store, or a folder of DICOM files (of several: an error)."""
    from data.location import is_remote
    from pathology.readers.dicom.files import series_in
    from pathology.readers.ngff.groups import is_ome_zarr

    if is_ome_zarr(folder):
        return True
    return not is_remote(folder) and not (folder / "manifest.csv").exists() and bool(series_in(folder))


def _require_readable(path: Path) -> None:
    """Refuse a path where nothing can be read."""
    from data.location import is_remote

    remedy = "give a store, a slide of a store (.zarr) or a slide file"
    if not is_remote(path):
        require_readable(path, remedy)
        return
    try:
        _require_stored(path)
    except FileNotFoundError as error:
        raise RequestError(f"{path}: no such file or folder; {remedy}") from error
    except OSError as error:
        raise RequestError(f"{path}: cannot be read ({error.strerror or error})") from error


def _require_stored(path: Path) -> None:
    """Check that a path on object storage is a store or an OME-Zarr slide; slide files are not read from there.

    Raises:
        FileNotFoundError: It is neither.
        OSError: The server cannot be reached.
    """
    from pathology.readers.ngff.groups import is_ome_zarr

    if not path.is_dir() and not is_ome_zarr(path):
        (path / "zarr.json").read_bytes()  # its error names a missing bucket, too


def _save(picture: npt.NDArray[np.uint8], png: Path) -> None:
    """Write a picture as PNG; refuse a path that cannot be written."""
    from pathology.ingest.thumbnail import save_png

    try:
        save_png(picture, png)
    except OSError as error:
        raise RequestError(f"{png}: cannot be written ({error.strerror or error}); choose another path") from error


def _slide_of_store(path: Path, png: Path | None) -> dict[str, Any]:
    """Return the facts about a stored slide and the lines to print, and write its picture."""
    from data.store.slide_store import SlideStore, StoreError
    from pathology.ingest.thumbnail import thumbnail_of_store
    from pathology.readers.mpp import mpp_text

    try:
        slide = SlideStore.open(path)
        if png is not None:
            _save(thumbnail_of_store(slide).drawn(), png)
    except StoreError as error:
        return {"kind_of_path": "slide", "status": "damaged", "reason": str(error), "lines": [], "drawn": False}
    facts = dict(slide.attributes)
    shards = facts.pop("shards")
    # A profile is thousands of bytes of text.
    facts["source"] = {k: v for k, v in facts["source"].items() if k != "icc_profile"}
    facts["stored_bytes"] = sum(entry.get("size", 0) for entry in shards.values())
    levels = [{"height_px": v.height_px, "width_px": v.width_px, "mpp": list(v.mpp)} for v in slide.levels]
    source = facts["source"]
    lines = [
        f"{slide.slide_id}: {facts['kind']}, {len(levels)} levels, {len(shards)} shards, "
        f"{facts['stored_bytes'] / 1e6:.1f} MB",
        *_level_lines(levels),
        f"  tissue    {facts['tissue']['fraction']:.1%} of the slide{_given_text(facts['parameters'])}",
        f"  source    {source['vendor']}, {_power(source['objective_power'])}{mpp_text(source['mpp'])} "
        f"({source['mpp_from']}), level {source['level_used']} used",
        f"  sha256    {facts['sha256']}",
        f"  flags     {', '.join(facts['flags']) or 'none'}; {facts['bad_tiles']} of {facts['tiles']} tiles bad",
        f"  codec     {facts['parameters'].get('codec', 'JPEG of the scanner')}; hyfi {facts['versions']['hyfi']}",
        *(f"  note      {note}" for note in source.get("facts", {}).get("notes", ())),  # older stores have none
    ]
    return {"kind_of_path": "slide", "status": "done", "slide_id": slide.slide_id, "levels": levels, **facts} | {
        "lines": lines
    }


def _file(path: Path, png: Path | None, slide_mpp: float | None) -> dict[str, Any]:
    """Return the facts about a slide file and the lines to print, and write its picture."""
    from pathology.errors import SlideError
    from pathology.ingest.thumbnail import overview_px, thumbnail_of_source
    from pathology.readers.sources import open_source
    from pathology.readers.tiff_metadata import is_truncated

    try:
        source = open_source(path)
        try:
            used, no_mpp_reason = _resolved(source, slide_mpp)
            mpp = None if used is None else used.um
            pixels = overview_px(source, mpp)
            if pixels > _SILENT_PX:
                console.warn(
                    f"hyfi: {path}: no small level; {pixels / 1e9:.3g} gigapixels are read for the picture and the "
                    "tissue, which may take minutes"
                )
            thumbnail, tissue = thumbnail_of_source(source, mpp)
        finally:
            source.close()
    except SlideError as error:
        return {"kind_of_path": "file", "status": "failed", "reason": str(error), "lines": [], "drawn": False}
    if png is not None:
        _save(thumbnail.drawn(), png)
    facts = _facts_of_file(source, mpp, tissue)
    lines = [
        f"{path.name}: {source.vendor}, {_power(source.objective_power)}{_used_mpp_text(source, used)}",
        *_level_lines(facts["levels"], doubted=bool(source.facts.mpp_doubt)),
        f"  tissue    {'unknown' if tissue is None else f'{tissue:.1%} of the slide'}",
    ]
    lines += [f"  note      {text}" for text in (no_mpp_reason, *(note.text for note in source.facts.notes)) if text]
    flags = ["truncated"] if is_truncated(path) else []
    if flags:
        lines.append(
            "  flags     truncated: the file is truncated in its last directories; the levels above are complete"
        )
    return facts | {"flags": flags, "lines": lines}


def _resolved(source: SlideSource, slide_mpp: float | None) -> tuple[SourceMpp | None, str]:
    """Return (the microns per pixel to use, ""), or (None, the reason) if they are unknown."""
    from pathology.errors import SlideError
    from pathology.ingest.options import IngestOptions

    try:
        return IngestOptions(slide_mpp=slide_mpp).mpp_of(source, row={}), ""  # there is no manifest
    except SlideError as error:
        return None, str(error)


def _facts_of_file(source: SlideSource, mpp: tuple[float, float] | None, tissue: float | None) -> dict[str, Any]:
    """Return what ``--json`` prints about a slide file.

    Args:
        source: The opened file.
        mpp: Microns per pixel that are used: the file's, or those that the user gives instead; None: unknown.
        tissue: Fraction of the slide that is tissue; None: not computed.
    """
    levels = []
    for level in source.levels:
        level_mpp = None if mpp is None else [m * d for m, d in zip(mpp, level.downsample, strict=True)]
        levels.append({"height_px": level.height_px, "width_px": level.width_px, "mpp": level_mpp})
    return {
        "kind_of_path": "file",
        "status": "done",
        "vendor": source.vendor,
        "mpp": None if source.mpp is None else list(source.mpp),
        "objective_power": source.objective_power,
        "levels": levels,
        "tissue": {"fraction": tissue},
        "facts": source.facts.to_json(),
    }


def _store(path: Path, png: Path | None) -> dict[str, Any]:
    """Return the facts about a store and the lines to print, and write its contact sheet."""
    from data.store.manifest import DONE, load_manifest
    from data.store.slide_store import SlideStore, StoreError, slide_path
    from data.store.unfinished import unfinished_note
    from pathology.ingest.thumbnail import contact_sheet, thumbnail_of_store

    rows = load_manifest(path)
    lines: list[str] = []
    slides: list[dict[str, str]] = []
    pictures: list[tuple[str, Thumbnail]] = []
    for row in rows:
        entry: dict[str, Any] = {"slide_id": row["slide_id"], "status": row["status"], "reason": row["reason"]}
        if row["status"] == DONE:
            try:
                slide = SlideStore.open(slide_path(path, row["slide_id"]))
                if png is not None and len(pictures) < _MAX_PICTURES:
                    pictures.append((slide.slide_id, thumbnail_of_store(slide, 300)))
            except StoreError as error:
                entry |= {"status": "damaged", "reason": str(error)}
        slides.append(entry | {k: row[k] for k in ("height_px", "width_px", "store_mpp", "tissue_fraction", "flags")})
        lines.append(_row_line(slides[-1]))
    if png is not None:
        _save(contact_sheet(pictures), png)
    bad = [s for s in slides if s["status"] != DONE]
    lines.insert(0, f"{path}: {console.counted(len(slides), 'slide')}, {len(slides) - len(bad)} usable, {len(bad)} not")
    if note := unfinished_note(path):
        lines.append(note)
    # A failed slide was reported when it was ingested; a damaged one is news, and decides the exit code.
    status = "damaged" if any(s["status"] == "damaged" for s in slides) else "done"
    return {"kind_of_path": "store", "status": status, "store": str(path), "slides": slides, "lines": lines}


def _row_line(slide: dict[str, str]) -> str:
    """Return the line of a slide in the list of a store."""
    if slide["status"] != "done":
        return f"  {slide['slide_id']}: {slide['status']}: {slide['reason']}"
    flags = f", {slide['flags']}" if slide["flags"] else ""
    return (
        f"  {slide['slide_id']}: {slide['height_px']} × {slide['width_px']} px at {slide['store_mpp']} µm, "
        f"tissue {float(slide['tissue_fraction']):.1%}{flags}"
    )


def _level_lines(levels: list[dict[str, Any]], doubted: bool = False) -> list[str]:
    """Return a line for each level; ``doubted``: the file states contradictory microns per pixel."""
    from pathology.readers.mpp import mpp_text

    sizes = [f"  level {k}   {v['height_px']} × {v['width_px']} px (rows × columns), " for k, v in enumerate(levels)]
    texts = (_IN_DOUBT if doubted and v["mpp"] is None else mpp_text(v["mpp"]) for v in levels)
    return [size + text for size, text in zip(sizes, texts, strict=True)]


def _used_mpp_text(source: SlideSource, used: SourceMpp | None) -> str:
    """Return the microns per pixel that are used, and what the file says if that is something else."""
    from pathology.readers.mpp import mpp_text

    if used is None and source.facts.mpp_doubt:
        return _IN_DOUBT
    if used is None or used.origin == "file":
        return mpp_text(source.mpp)
    stated = "the file states none" if source.mpp is None else f"the file says {mpp_text(source.mpp)}"
    return f"{mpp_text(used.um)} as given ({stated})"


def _given_text(parameters: dict[str, Any]) -> str:
    tissue = parameters.get("given_tissue")
    if tissue is None:
        return ""
    return ", as given: " + ("all of it" if tissue == "off" else f"outlines with SHA-256 {tissue}")


def _power(power: float | None) -> str:
    return "" if power is None else f"{power:g}×, "
