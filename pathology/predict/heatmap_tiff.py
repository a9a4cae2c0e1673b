"""Heatmaps as pyramidal OME-TIFF files, in register with the slide."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.files import in_utf8, replacing
from pathology.predict.colors import class_color
from pathology.predict.heatmap import Heatmap, pyramid

NAMESPACE = "hyfi/heatmap/1"
TILE_PX = 256

EXPLANATION = (
    "Two channels for each class. Score: the output of the model's head at each position before pooling, 0 to 1, "
    "smoothed over neighbouring squares.{sums} Contribution: to the class's logit; the sum "
    "over a channel at full resolution, without NaN, plus the class's bias is the logit. Coarser levels hold means. "
    "NaN: not seen by the model; scores also where there is no tissue. The contribution of the background between the "
    "pieces of tissue is divided equally among all positions that were seen."
)
OF_TILES = (
    "Two channels for each class. Score: what the model says of a slide that has this tile only, 0 to 1.{sums} "
    "Contribution: to the class's logit, attention times the tile's own logit; the sum over a channel at full "
    "resolution, without NaN, plus the class's bias is the logit. Attention, if there is such a channel: the weight of "
    "a tile in the aggregator, relative to the average tile. Coarser levels hold means. NaN: in no tile; scores also "
    "where there is no tissue. Where tiles overlap, a square has the mean of its tiles."
)
BY_CENTRES = " Squares and pieces of tissue are not aligned, so each square is placed by its centre."


def write_heatmap(
    path: Path,
    heatmap: Heatmap,
    name: str,
    provenance: Mapping[str, Any],
    origin_um: tuple[float, float] = (0.0, 0.0),
) -> None:
    """Write ``heatmap`` as a pyramidal OME-TIFF: float32, two named channels for each class, levels as SubIFDs.

    Channels are all scores, then all contributions, and attention if there is any. One pixel is one square, whose
    size in micrometres is stated as PhysicalSizeX and PhysicalSizeY; ``origin_um`` is stated as PositionX and
    PositionY. Bias, logits and other metadata are in a map annotation. Format: OME-TIFF specification 6.3, section
    "Sub-resolutions".

    Args:
        path: the file; an existing one is replaced atomically.
        heatmap: the heatmap.
        name: name of the image, the slide's.
        provenance: further keys of the annotation; values are written as JSON unless they are text.
        origin_um: (y, x) of the heatmap's upper left corner, from the slide's, in micrometres.

    Raises:
        OSError: the file cannot be written.
    """
    attention = [] if heatmap.attention is None else [heatmap.attention[None]]
    values = np.concatenate([heatmap.scores, heatmap.values, *attention])
    write_channels(path, values, ome_metadata(heatmap, name, provenance, origin_um), heatmap.square_um)


def write_channels(
    path: Path, values: NDArray[np.float32], metadata: dict[str, Any], square_um: tuple[float, float]
) -> None:
    """Write channels as a pyramidal OME-TIFF.

    Args:
        path: the file; an existing one is replaced atomically.
        values: (channels, rows, columns).
        metadata: from `channel_metadata`.
        square_um: (y, x) micrometres per pixel.

    Raises:
        OSError: the file cannot be written.
    """
    import tifffile

    levels = pyramid(values)
    options: dict[str, Any] = {
        "photometric": "minisblack",
        "software": "hyfi",
        "tile": (TILE_PX, TILE_PX),
        "compression": "adobe_deflate",  # no predictor, because Bio-Formats (QuPath) supports none for floats
    }
    with replacing(path) as temporary, tifffile.TiffWriter(temporary, bigtiff=True, ome=True) as file:
        for k, level in enumerate(levels):
            resolution = _resolution(square_um, k)
            if k == 0:
                file.write(level, subifds=len(levels) - 1, metadata=metadata, **resolution, **options)
            else:
                # tifffile takes the next pages as SubIFDs: write them immediately, in order.
                file.write(level, subfiletype=1, metadata=None, **resolution, **options)


def ome_metadata(
    heatmap: Heatmap, name: str, provenance: Mapping[str, Any], origin_um: tuple[float, float] = (0.0, 0.0)
) -> dict[str, Any]:
    """Return the metadata in the form that tifffile turns into OME-XML."""
    sums = " Scores of all classes sum to 1." if heatmap.exclusive else ""
    words = OF_TILES if heatmap.of_tiles else EXPLANATION
    explanation = words.format(sums=sums) + ("" if heatmap.one_to_one else BY_CENTRES)
    facts: dict[str, Any] = {
        "class_names": list(heatmap.class_names),
        "logits": list(heatmap.logits),
        "bias": list(heatmap.bias),
        "background_share_per_pixel": list(heatmap.shared),
        "cell_px": heatmap.square_px,
        "model_mpp": list(heatmap.mpp),
        "slide_size_px": list(heatmap.slide_size_px),
        "cells_mapped": "one to one" if heatmap.one_to_one else "by their centres",
        **provenance,
    }
    channels = [f"{kind} {name}" for kind in ("score", "contribution") for name in heatmap.class_names]
    channels += [] if heatmap.attention is None else ["attention"]
    return channel_metadata(name, explanation, channels, heatmap.square_um, facts, origin_um)


def channel_metadata(
    name: str,
    explanation: str,
    channels: Sequence[str],
    square_um: tuple[float, float],
    facts: Mapping[str, Any],
    origin_um: tuple[float, float],
) -> dict[str, Any]:
    """Return the metadata of channels in the form that tifffile turns into OME-XML.

    Args:
        name: name of the image.
        explanation: text that explains the channels.
        channels: names of the channels.
        square_um: (y, x) micrometres per pixel.
        facts: the map annotation; values are written as JSON unless they are text.
        origin_um: (y, x) of the upper left corner, from the slide's, in micrometres.
    """
    planes = len(channels)
    return {
        "axes": "CYX",
        "Name": in_utf8(name),
        "Description": explanation,
        "PhysicalSizeX": square_um[1],
        "PhysicalSizeXUnit": "µm",
        "PhysicalSizeY": square_um[0],
        "PhysicalSizeYUnit": "µm",
        "Channel": {"Name": list(channels)},
        "Plane": {
            "PositionX": [origin_um[1]] * planes,
            "PositionXUnit": ["µm"] * planes,
            "PositionY": [origin_um[0]] * planes,
            "PositionYUnit": ["µm"] * planes,
        },
        "MapAnnotation": {
            "Namespace": NAMESPACE,
            **{key: in_utf8(value) if isinstance(value, str) else json.dumps(value) for key, value in facts.items()},
        },
    }


def write_score_picture(path: Path, heatmap: Heatmap) -> None:
    """Write the scores in the classes' colours as a pyramidal RGB TIFF that OpenSlide and QuPath open as a slide.

    Levels are separate directories, as OpenSlide expects, with resolution tags. Squares that were not seen are white;
    the more similar the scores of a square, the paler its colour.

    Args:
        path: the file; an existing one is replaced atomically.
        heatmap: the heatmap; one pixel is one square.

    Raises:
        OSError: the file cannot be written.
    """
    import tifffile

    colors = np.array([class_color(index) for index in range(len(heatmap.class_names))], dtype=np.float64)
    mixed = np.einsum("khw,kc->hwc", heatmap.color_weights, colors)
    drawn = 255 + (mixed - 255) * heatmap.certainty[..., None]
    levels = pyramid(drawn.transpose(2, 0, 1).astype(np.float32))
    with replacing(path) as temporary, tifffile.TiffWriter(temporary, bigtiff=True) as file:
        for k, level in enumerate(levels):
            pixels = np.ascontiguousarray(level.round().clip(0, 255).astype(np.uint8).transpose(1, 2, 0))
            file.write(
                pixels,
                photometric="rgb",
                software="hyfi",
                tile=(TILE_PX, TILE_PX),
                compression="adobe_deflate",
                subfiletype=int(k > 0),
                metadata=None,
                **_resolution(heatmap.square_um, k),
            )


def _resolution(square_um: tuple[float, float], level: int) -> dict[str, Any]:
    """Return the resolution tags of a level, in pixels per centimetre."""
    y_um, x_um = square_um
    return {"resolution": (1e4 / (x_um * 2**level), 1e4 / (y_um * 2**level)), "resolutionunit": "CENTIMETER"}
