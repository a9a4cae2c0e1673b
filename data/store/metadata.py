"""JSON metadata of a stored slide: zarr 3 groups with their OME-Zarr 0.5 attributes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

Mpp = tuple[float, float]


def group_json(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the ``zarr.json`` of a group."""
    return {"zarr_format": 3, "node_type": "group", "attributes": attributes}


def digest_of_group(group: dict[str, Any]) -> str:
    """Return the SHA-256 of a slide's ``zarr.json`` without this digest; it does not depend on the JSON's format."""
    attributes = dict(group.get("attributes", {}))
    attributes["hyfi"] = {k: v for k, v in attributes.get("hyfi", {}).items() if k != "metadata_sha256"}
    # Sorted keys and fixed white space: tools that rewrite the JSON do not change the digest.
    text = json.dumps({**group, "attributes": attributes}, ensure_ascii=False, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def image_attributes(mpp: Sequence[Mpp]) -> dict[str, Any]:
    """Return the `ome` attributes of an RGB image; ``mpp``: microns per pixel (y, x) of its levels, finest first."""
    # The type "mean": each pixel is the mean of 2 × 2 pixels of the finer level. Levels of a scanner may not be.
    halves = all(abs(b[i] / a[i] - 2) < 1e-6 for a, b in pairwise(mpp) for i in (0, 1))
    multiscale = _multiscale("image", ("c", "y", "x"), mpp, mpp[0])
    return {
        "version": "0.5",
        "multiscales": [multiscale | ({"type": "mean"} if halves else {})],
        "omero": omero(),
    }


def label_attributes(mpp: Sequence[Mpp], image_mpp: Mpp) -> dict[str, Any]:
    """Return the `ome` attributes of a tissue label.

    Args:
        mpp: Microns per pixel (y, x) of the label's levels, finest first.
        image_mpp: Microns per pixel of the finest level of the image that is labelled.
    """
    colours = [{"label-value": 1, "rgba": [0, 160, 80, 128]}]
    return {
        "version": "0.5",
        "image-label": {"colors": colours, "source": {"image": "../../"}},
        "multiscales": [_multiscale("tissue", ("y", "x"), mpp, image_mpp) | {"type": "mean"}],
    }


def labels_attributes() -> dict[str, Any]:
    """Return the `ome` attributes of the ``labels`` group."""
    return {"version": "0.5", "labels": ["tissue"]}


def omero() -> dict[str, Any]:
    """Return the `omero` attributes: how viewers display the three channels."""
    window = {"min": 0, "max": 255, "start": 0, "end": 255}
    colours = {"R": "FF0000", "G": "00FF00", "B": "0000FF"}
    channels = [{"label": k, "color": v, "active": True, "window": window} for k, v in colours.items()]
    return {"channels": channels, "rdefs": {"model": "color"}}


def _multiscale(name: str, axes: tuple[str, ...], mpp: Sequence[Mpp], origin: Mpp) -> dict[str, Any]:
    """Return one entry of NGFF's ``multiscales``, with the scale and translation of each level.

    All levels begin at the slide's corner, so a level's first pixel centre lies (s − s₀) / 2 from that of the
    image's finest level, which is the origin::

        s₀   |·|·|·|·|        · pixel centres
        s₂   |   ·   |
             ↑ the slide's corner
    """
    channels = len(axes) - 2
    datasets = []
    for k, scale in enumerate(mpp):
        shift = [(s - s0) / 2 for s, s0 in zip(scale, origin, strict=True)]
        steps = [
            {"type": "scale", "scale": [*[1.0] * channels, *scale]},
            {"type": "translation", "translation": [*[0.0] * channels, *shift]},
        ]
        datasets.append({"path": str(k), "coordinateTransformations": steps})
    named = [
        {"name": a, "type": "channel"} if a == "c" else {"name": a, "type": "space", "unit": "micrometer"} for a in axes
    ]
    return {"name": name, "axes": named, "datasets": datasets}
