"""One slide into a store: all of it or nothing."""

from __future__ import annotations

import base64
import math
import platform
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from data.manifest import DONE, FAILED, SlideRecord, record_path
from data.store import SlideStore, StoreError, slide_path
from data.store_codec import PixelCodec
from data.store_writer import LevelSize, SlideWriter, pyramid_levels
from pathology.discover import user_columns
from pathology.errors import SlideError
from pathology.identity import SourceStamp, source_digest
from pathology.ingest_options import IngestOptions
from pathology.level_reader import LevelChoice, LevelReader, choose_level
from pathology.mpp import SourceMpp, resolve_mpp
from pathology.pyramid import PyramidBuilder, level_sizes
from pathology.quality import BLURRED_SHARE, SharpnessMeter
from pathology.resample import Planes
from pathology.sources import SlideSource, open_source
from pathology.tissue import find_tissue

_PEN_FRACTION = 0.002
_LARGEST_ICC_BYTES = 2**20


def ingest_slide(
    source: Path,
    store: Path,
    options: IngestOptions,
    manifest_row: dict[str, str] | None = None,
    slide_id: str | None = None,
) -> SlideRecord:
    """Ingest one slide and write its record; a slide that fails leaves nothing but the record with the reason.

    Memory: one shard (48 MiB) of each level, a few decoded cells, and the slide at about 8 µm per pixel.

    Args:
        source: The slide's file.
        store: The store's folder; made where it does not exist.
        options: See there.
        manifest_row: The slide's row of the user's manifest; its own columns are kept.
        slide_id: The slide's name; default the row's, else the file's name without its suffix.

    Returns:
        The record, ``done`` or ``failed``. An earlier, finished form of the slide survives a failure.

    Raises:
        OSError: The store cannot be written (full disk, no permission): the others could not be either.
    """
    row = dict(manifest_row or {})
    name = slide_id or row.get("slide_id") or source.stem
    extra = user_columns(row)
    store.mkdir(parents=True, exist_ok=True)
    (store / ".records").mkdir(exist_ok=True)
    try:
        record = _ingest(source, store, options, row.get("source_mpp", ""), name)
    except SlideError as error:
        record = SlideRecord(name, str(source.absolute()), FAILED, reason=str(error))
    except OSError:
        raise
    except Exception as error:
        # A reader met a file that its authors did not think of. The slide fails, the archive goes on.
        record = SlideRecord(name, str(source.absolute()), FAILED, reason=f"{type(error).__name__}: {error}")
    record = replace(record, extra=extra)
    if record.status == DONE or not record_path(store, name).exists() or not slide_path(store, name).exists():
        record.save(store)
    return record


def _ingest(source: Path, store: Path, options: IngestOptions, manifest_mpp: str, name: str) -> SlideRecord:
    stamp = SourceStamp.of(source)
    slide = open_source(source)
    try:
        mpp = resolve_mpp(slide.mpp, manifest_mpp, options.slide_mpp)
        choice = choose_level(slide, mpp.um, options.mpp)
        parameters = options.parameters() | {"given_mpp": None if mpp.origin == "file" else mpp.um[0]}
        identity = {"parameters": parameters, **stamp.to_json()}
        finished = _published_before(store, name, source, identity)
        if finished is not None:
            return finished
        mask_level = max(0, round(math.log2(options.tissue.mpp_um / options.mpp)))
        sizes = level_sizes(choice.height_px, choice.width_px, at_least=mask_level + 1)
        levels = pyramid_levels(sizes, options.mpp, PixelCodec.parse(options.codec))
        with SlideWriter(store, name, levels, identity=identity) as writer:
            content = _write_content(writer, LevelReader(slide, choice, options.max_bad), sizes, mask_level, options)
            attributes = {
                "kind": "resampled",
                "mpp": [options.mpp, options.mpp],
                "size_px": [choice.height_px, choice.width_px],
                **_provenance(slide, mpp, choice, options.mpp),
                **content,
                **identity,
                "sha256": _digest_unchanged(source, stamp),
                "versions": _versions(),
            }
            attributes["flags"] = _flags(attributes, mpp, choice)
            writer.publish(attributes)
    finally:
        slide.close()
    return record_of(attributes, name, source)


def _write_content(
    writer: SlideWriter, reader: LevelReader, sizes: Sequence[LevelSize], mask_level: int, options: IngestOptions
) -> dict[str, Any]:
    """Write pyramid and tissue label; return what was found out on the way."""
    small = sizes[mask_level]
    overview: Planes = np.empty((3, small.height_px, small.width_px), np.uint8)
    sharpness = SharpnessMeter()

    def write(level: int, y0: int, x0: int, block: Planes) -> None:
        writer.write(level, y0, x0, block)
        if level == mask_level:
            overview[:, y0 : y0 + block.shape[1], x0 : x0 + block.shape[2]] = block
        if level == 0:
            sharpness.add(block)

    PyramidBuilder(sizes, reader.read, write).build()
    mask_mpp = options.mpp * 2**mask_level
    masks = find_tissue(overview, mask_mpp, options.tissue)
    writer.write_tissue(masks.tissue, mask_mpp)
    return {
        "tissue": {"fraction": float(masks.tissue.mean()), "mpp": mask_mpp, "pen_fraction": float(masks.pen.mean())},
        "sharpness": sharpness.median,
        "blurred_share": sharpness.blurred_share,
        "bad_tiles": reader.bad_tiles,
        "tiles": reader.tiles,
    }


def _provenance(slide: SlideSource, mpp: SourceMpp, choice: LevelChoice, store_mpp: float) -> dict[str, Any]:
    """Return what is kept of the slide's own metadata: an allow-list, nothing that names a person, a day or a path."""
    bounds = slide.bounds
    scale = [store_mpp / v for v in mpp.um]
    icc = slide.icc if slide.icc and len(slide.icc) <= _LARGEST_ICC_BYTES else None
    return {
        "source": {
            "vendor": slide.vendor,
            "mpp": list(mpp.um),
            "mpp_from": mpp.origin,
            "objective_power": slide.objective_power,
            "levels": [
                {"height_px": v.height_px, "width_px": v.width_px, "downsample": list(v.downsample)}
                for v in slide.levels
            ],
            "bounds": {"y0": bounds.y0, "y1": bounds.y1, "x0": bounds.x0, "x1": bounds.x1},
            "level_used": choice.level,
            "level_used_mpp": list(choice.mpp),
            "icc_profile": None if icc is None else base64.b64encode(icc).decode(),
        },
        # (y, x, 1) of the store's level 0 to (y, x) of the source's, both measured from the corner of pixel 0.
        "affine": [[scale[0], 0.0, float(bounds.y0)], [0.0, scale[1], float(bounds.x0)]],
    }


def _flags(attributes: dict[str, Any], mpp: SourceMpp, choice: LevelChoice) -> list[str]:
    found = {
        "no_tissue": attributes["tissue"]["fraction"] == 0,
        "mpp_assumed": mpp.origin == "flag",
        "upsampled": choice.upsampled,
        "pen": attributes["tissue"]["pen_fraction"] > _PEN_FRACTION,
        "blur": attributes["blurred_share"] > BLURRED_SHARE,
        "bad_tiles": attributes["bad_tiles"] > 0,
    }
    return [name for name, is_so in found.items() if is_so]


def _digest_unchanged(source: Path, stamp: SourceStamp) -> str:
    try:
        digest = source_digest(source)
    except OSError as error:
        raise SlideError(f"the file cannot be read: {error.strerror}") from error
    if SourceStamp.of(source) != stamp:
        raise SlideError("the file changed while it was read; ingest it again")
    return digest


def _published_before(store: Path, name: str, source: Path, identity: dict[str, Any]) -> SlideRecord | None:
    """Return the record of a slide that was published just before a crash kept its record from being written."""
    if record_path(store, name).exists() or not slide_path(store, name).exists():
        return None
    try:
        attributes = SlideStore.open(slide_path(store, name)).attributes
    except StoreError:
        return None
    same = all(attributes.get(key) == value for key, value in identity.items())
    return record_of(attributes, name, source) if same else None


def record_of(attributes: dict[str, Any], name: str, source: Path) -> SlideRecord:
    """Return the record of a finished slide from its `hyfi` attributes."""
    return SlideRecord(
        slide_id=name,
        source_path=str(source.absolute()),
        status=DONE,
        source_mpp=sum(attributes["source"]["mpp"]) / 2,
        store_mpp=attributes["mpp"][0],
        height_px=attributes["size_px"][0],
        width_px=attributes["size_px"][1],
        tissue_fraction=attributes["tissue"]["fraction"],
        bad_tiles=attributes["bad_tiles"],
        flags=tuple(attributes["flags"]),
        sharpness=attributes["sharpness"],
        identity={key: attributes[key] for key in ("parameters", "size_bytes", "mtime_ns", "sha256")},
    )


@cache
def _versions() -> dict[str, str]:
    packages = ("hyfi", "openslide-python", "openslide-bin", "tifffile", "imagecodecs", "zarr", "scikit-image", "numpy")
    return {"python": platform.python_version(), **{name: _version(name) for name in packages}}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed as a package"
