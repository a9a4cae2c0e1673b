"""OME-Zarr stores as other programs write them; what bioformats2raw writes is written here, by its documentation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from xml.sax.saxutils import quoteattr

import numpy as np
import zarr

from tests.pathology.tiffs import RGB, halved

MICROMETER = "micrometer"
PROGRAMS = ("ome-zarr-py 0.4", "ome-zarr-py 0.5", "ngff-zarr 0.4", "ngff-zarr 0.5", "bioformats2raw 0.4", "plain 0.5")


def pyramid(image: RGB, levels: int) -> list[RGB]:
    found = [image]
    while len(found) < levels:
        found.append(halved(found[-1]))
    return found


def write_by(program: str, path: Path, image: RGB, mpp: float = 0.5, levels: int = 3) -> Path:
    """Write a store as one of `PROGRAMS` does, with micrometres."""
    name, version = program.split()
    if name == "ome-zarr-py":
        _ome_zarr_py(path, image, mpp, levels, version)
    elif name == "ngff-zarr":
        _ngff_zarr(path, image, mpp, levels, version)
    elif name == "bioformats2raw":
        write_series(path, [(image, "")], mpp, levels)
    else:
        write_plain(path, pyramid(image, levels), "yxc", mpp)
    return path


def _ome_zarr_py(path: Path, image: RGB, mpp: float, levels: int, version: str) -> None:
    from ome_zarr.format import FormatV04, FormatV05
    from ome_zarr.writer import write_multiscale

    form = FormatV05() if version == "0.5" else FormatV04()
    axes = [{"name": "c", "type": "channel"}, *({"name": a, "type": "space", "unit": MICROMETER} for a in "yx")]
    steps = [[{"type": "scale", "scale": [1.0, mpp * 2**k, mpp * 2**k]}] for k in range(levels)]
    write_multiscale(
        [np.moveaxis(level, -1, 0) for level in pyramid(image, levels)],
        zarr.open_group(str(path), mode="w", zarr_format=form.zarr_format),
        fmt=form,
        axes=axes,
        coordinate_transformations=steps,
        storage_options={"chunks": (3, 128, 128)},
    )


def _ngff_zarr(path: Path, image: RGB, mpp: float, levels: int, version: str) -> None:
    import ngff_zarr

    units = {"y": MICROMETER, "x": MICROMETER}
    one = ngff_zarr.to_ngff_image(image, dims=["y", "x", "c"], scale={"y": mpp, "x": mpp}, axes_units=units)
    factors = [2**k for k in range(1, levels)]
    ngff_zarr.to_ngff_zarr(str(path), ngff_zarr.to_multiscales(one, scale_factors=factors, chunks=128), version=version)


def multiscale(axes: str, scales: Sequence[float], unit: str = MICROMETER, name: str = "") -> dict[str, Any]:
    kinds = {"c": {"type": "channel"}, "t": {"type": "time"}, **{axis: {"type": "space"} for axis in "zyx"}}
    units = {axis: {"unit": unit} for axis in "zyx" if unit}
    return {
        "name": name,
        "axes": [{"name": axis, **kinds[axis], **units.get(axis, {})} for axis in axes],
        "datasets": [
            {
                "path": str(k),
                "coordinateTransformations": [
                    {"type": "scale", "scale": [scale if axis in "yx" else 1.0 for axis in axes]}
                ],
            }
            for k, scale in enumerate(scales)
        ],
    }


def write_plain(path: Path, levels: Sequence[RGB], axes: str, mpp: float = 0.5, **how: Any) -> Path:
    """Write levels, ``(h, w, 3)`` each, with these axes; see `write_arrays`."""
    scales = how.pop("scales", None) or [mpp * round(levels[0].shape[0] / level.shape[0]) for level in levels]
    return write_arrays(path, [in_axes(level, axes) for level in levels], axes, scales, **how)


def write_arrays(
    path: Path,
    levels: Sequence[np.ndarray[Any, Any]],
    axes: str,
    scales: Sequence[float],
    *,
    zarr_format: Literal[2, 3] = 3,
    unit: str = MICROMETER,
    chunk_px: int = 128,
    shard_px: int = 0,
    channels: Sequence[Mapping[str, str]] = (),
    **attributes: Any,
) -> Path:
    """Write levels with these axes as one image, finest first."""
    group = zarr.open_group(str(path), mode="w", zarr_format=zarr_format)
    for k, pixels in enumerate(levels):
        chunks = tuple(
            (chunk_px if shard_px else min(chunk_px, size)) if axis in "yx" else 1
            for axis, size in zip(axes, pixels.shape, strict=True)
        )
        shards = tuple(shard_px if axis in "yx" else 1 for axis in axes) if shard_px else None
        group.create_array(str(k), data=np.ascontiguousarray(pixels), chunks=chunks, shards=shards)
    found: dict[str, Any] = {"multiscales": [multiscale(axes, scales, unit)], **attributes}
    if channels:
        found["omero"] = {"channels": list(channels)}
    group.attrs.update({"ome": {"version": "0.5", **found}} if zarr_format == 3 else found)
    return path


def in_axes(image: RGB, axes: str) -> RGB:
    """Return ``(h, w, 3)`` with these axes, of which the others have one element."""
    there = [axis for axis in axes if axis in "yxc"]
    moved = image.transpose(["yxc".index(axis) for axis in there])
    return moved.reshape([moved.shape[there.index(axis)] if axis in there else 1 for axis in axes])


def write_series(
    path: Path,
    series: Sequence[tuple[RGB, str]],
    mpp: float = 0.5,
    levels: int = 2,
    stated_mpp: float | None = None,
    xml: bool = True,
) -> Path:
    """Write images with their names as bioformats2raw does: one group each, planes of one channel, OME-XML beside."""
    root = zarr.open_group(str(path), mode="w", zarr_format=2)
    root.attrs["bioformats2raw.layout"] = 3
    for number, (image, name) in enumerate(series):
        write_plain(
            path / str(number),
            pyramid(image, levels),
            "tczyx",
            zarr_format=2,
            scales=[mpp * 2**k for k in range(levels)],
            channels=[{"label": f"Channel {k}", "color": "808080"} for k in range(3)],
        )
        attributes = path / str(number) / ".zattrs"
        found = json.loads(attributes.read_text())
        found["multiscales"][0]["name"] = name
        attributes.write_text(json.dumps(found))
    if xml:
        (path / "OME").mkdir()
        (path / "OME" / "METADATA.ome.xml").write_text(_xml(series, stated_mpp or mpp))
    return path


def _xml(series: Sequence[tuple[RGB, str]], mpp: float) -> str:
    channels = "".join(f'<Channel ID="Channel:0:{k}" SamplesPerPixel="1"/>' for k in range(3))
    images = "".join(
        f'<Image ID="Image:{k}" Name={quoteattr(name)}><Pixels ID="Pixels:{k}" Type="uint8" SizeX="{image.shape[1]}" '
        f'SizeY="{image.shape[0]}" SizeC="3" SizeZ="1" SizeT="1" PhysicalSizeX="{mpp}" PhysicalSizeY="{mpp}">'
        f"{channels}</Pixels></Image>"
        for k, (image, name) in enumerate(series)
    )
    return f'<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06">{images}</OME>'
