"""A heatmap as a file: pyramidal OME-TIFF, in register with the slide."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pathology.predict.heatmap import Heatmap, pyramid

NAMESPACE = "hyfi/heatmap/1"
TILE_PX = 256
FLOATING_POINT_PREDICTOR = 3

EXPLANATION = (
    "Contribution of each place on the slide to the logit of each class (one channel a class). "
    "The sum over a channel at full resolution, NaN left out, plus the class's bias is its logit; coarser levels hold "
    "means. NaN: the model did not look there. What the background between the pieces of tissue contributed is shared "
    "equally among all places that were looked at."
)
BY_CENTRES = " The network's cells do not divide the pieces of tissue, so each was put where its centre lies."


def write_heatmap(
    path: Path,
    heatmap: Heatmap,
    name: str,
    provenance: Mapping[str, Any],
    origin_um: tuple[float, float] = (0.0, 0.0),
) -> None:
    """Write ``heatmap`` as a pyramidal OME-TIFF: float32, one named channel a class, deflate, levels as SubIFDs.

    The upper left corner is ``origin_um`` away from the slide's (as PositionX and PositionY); one pixel is one cell,
    whose size in micrometres is in the metadata (as PhysicalSizeX and PhysicalSizeY). Bias, logits and what else is
    needed to read it are in a map annotation.
    Follows the OME-TIFF specification 6.3, section "Sub-resolutions".

    Args:
        path: the file; what is there is replaced at once, when the new one is whole.
        heatmap: what to write.
        name: name of the image, the slide's.
        provenance: further keys of the annotation; values are written as JSON unless they are text.
        origin_um: (y, x) of the heatmap's corner on the slide.

    Raises:
        OSError: the file cannot be written.
    """
    import tifffile

    levels = pyramid(heatmap.values)
    metadata = ome_metadata(heatmap, name, provenance, origin_um)
    beside = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    options: dict[str, Any] = {
        "photometric": "minisblack",
        "software": "hyfi",
        "tile": (TILE_PX, TILE_PX),
        "compression": "adobe_deflate",
        "predictor": FLOATING_POINT_PREDICTOR,
    }
    try:
        with tifffile.TiffWriter(beside, bigtiff=True, ome=True) as file:
            file.write(levels[0], subifds=len(levels) - 1, metadata=metadata, **options)
            for level in levels[1:]:
                file.write(level, subfiletype=1, metadata=None, **options)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def ome_metadata(
    heatmap: Heatmap, name: str, provenance: Mapping[str, Any], origin_um: tuple[float, float] = (0.0, 0.0)
) -> dict[str, Any]:
    """Return the metadata in the form that tifffile turns into OME-XML."""
    explanation = EXPLANATION if heatmap.exact else EXPLANATION + BY_CENTRES
    facts: dict[str, Any] = {
        "class_names": list(heatmap.class_names),
        "logits": list(heatmap.logits),
        "bias": list(heatmap.bias),
        "background_share_per_pixel": list(heatmap.shared),
        "cell_px": heatmap.cell_px,
        "model_mpp": list(heatmap.mpp),
        "slide_size_px": list(heatmap.slide_size_px),
        "cells_mapped": "one to one" if heatmap.exact else "by their centres",
        **provenance,
    }
    planes = len(heatmap.class_names)
    return {
        "axes": "CYX",
        "Name": name,
        "Description": explanation,
        "PhysicalSizeX": heatmap.cell_um[1],
        "PhysicalSizeXUnit": "µm",
        "PhysicalSizeY": heatmap.cell_um[0],
        "PhysicalSizeYUnit": "µm",
        "Channel": {"Name": list(heatmap.class_names)},
        "Plane": {
            "PositionX": [origin_um[1]] * planes,
            "PositionXUnit": ["µm"] * planes,
            "PositionY": [origin_um[0]] * planes,
            "PositionYUnit": ["µm"] * planes,
        },
        "MapAnnotation": {
            "Namespace": NAMESPACE,
            **{key: value if isinstance(value, str) else json.dumps(value) for key, value in facts.items()},
        },
    }
