"""Provenance attributes of a stored slide, and its record for the manifest."""

from __future__ import annotations

import base64
import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from data.store.manifest import DONE, SlideRecord
from pathology.ingest.frame import Frame, affine_to_source
from pathology.readers.mpp import SourceMpp
from pathology.readers.slide_source import SlideSource

_LARGEST_ICC_BYTES = 2**20
IDENTITY = ("parameters", "size_bytes", "mtime_ns", "sha256")
"""Attributes by which a later run recognises that a slide is finished and unchanged."""


def provenance(slide: SlideSource, mpp: SourceMpp, frame: Frame) -> dict[str, Any]:
    """Return the metadata of a slide to store: an allow-list without names of persons, dates and paths."""
    bounds, choice = slide.bounds, frame.choice
    # Store no huge ICC profile (usual ones take kilobytes), because every opening of the slide reads these attributes.
    icc = slide.icc if slide.icc and len(slide.icc) <= _LARGEST_ICC_BYTES else None
    metadata: dict[str, Any] = {
        "mpp": list(frame.mpp),
        "size_px": [frame.box.height, frame.box.width],
        "source": {
            "vendor": slide.vendor,
            "mpp": list(mpp.um),
            "mpp_from": mpp.origin,
            "objective_power": slide.objective_power,
            "facts": slide.facts.to_json(),
            "levels": [
                {"height_px": v.height_px, "width_px": v.width_px, "downsample": list(v.downsample)}
                for v in slide.levels
            ],
            "bounds": {"y0": bounds.y0, "y1": bounds.y1, "x0": bounds.x0, "x1": bounds.x1},
            "level_used": choice.level,
            "level_used_mpp": list(choice.mpp),
            "icc_profile": None if icc is None else base64.b64encode(icc).decode(),
        },
        "affine": affine_to_source(slide, mpp, frame.mpp, frame.box.y0, frame.box.x0),
    }
    if frame.cropped:
        full_size = {"height_px": choice.height_px, "width_px": choice.width_px}
        metadata["crop"] = {
            "y0": frame.box.y0,
            "y1": frame.box.y1,
            "x0": frame.box.x0,
            "x1": frame.box.x1,
            "of": full_size,
        }
    return metadata


def facts_of(attributes: dict[str, Any], name: str, source_path: str) -> SlideRecord:
    """Return the record of a finished slide from its `hyfi` attributes.

    Args:
        attributes: The ``hyfi`` attributes of the slide's group.
        name: The slide's name.
        source_path: Path of its file; empty with pseudonyms.
    """
    stains = attributes.get("stains") or {}
    return SlideRecord(
        slide_id=name,
        source_path=source_path,
        status=DONE,
        source_mpp=sum(attributes["source"]["mpp"]) / 2,
        store_mpp=attributes["mpp"][0],
        height_px=attributes["size_px"][0],
        width_px=attributes["size_px"][1],
        tissue_fraction=attributes["tissue"]["fraction"],
        bad_tiles=attributes["bad_tiles"],
        flags=tuple(attributes["flags"]),
        file_notes=tuple(attributes["source"].get("facts", {}).get("notes", ())),
        sharpness=attributes["sharpness"],
        tiles=attributes["tiles"],
        bad_share=attributes["bad_tiles"] / max(1, attributes["tiles"]),
        pen_fraction=attributes["tissue"]["pen_fraction"],
        blurred_share=attributes["blurred_share"],
        tissue_mm2=attributes["tissue"].get("area_mm2"),
        stain_h=tuple(stains.get("haematoxylin", ())),
        stain_e=tuple(stains.get("eosin", ())),
        identity={key: attributes[key] for key in IDENTITY},
    )


@cache
def versions() -> dict[str, str]:
    """Return the versions of the libraries that determine a slide's pixels."""
    readers = ("openslide-python", "openslide-bin", "tifffile", "imagecodecs", "pydicom", "simplejpeg")
    packages = ("hyfi", *readers, "zarr", "scikit-image", "scipy", "numpy")
    return {"python": platform.python_version(), **{name: _version(name) for name in packages}}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed as a package"
