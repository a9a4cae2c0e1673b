"""Occlusion as a pyramidal OME-TIFF, in register with the slide."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pathology.predict.heatmap_tiff import channel_metadata, write_channels
from pathology.predict.occlusion.occlusion import Occlusion

EXPLANATION = (
    "One channel for each output of the model: the slide's output minus that with this block covered by white. "
    "Positive: the block speaks for it. Blocks act together, so drops do not add up to the output. NaN: not covered, "
    "as the block has no tissue that the model has seen. Coarser levels hold means."
)


def write_occlusion(
    path: Path,
    occlusion: Occlusion,
    name: str,
    provenance: Mapping[str, Any],
    origin_um: tuple[float, float] = (0.0, 0.0),
) -> None:
    """Write an occlusion as `write_heatmap` does a heatmap: one pixel is one block, one channel ``drop`` each output.

    Args:
        path: The file; an existing one is replaced atomically.
        occlusion: The occlusion.
        name: Name of the image, the slide's.
        provenance: Further keys of the map annotation.
        origin_um: (y, x) of the first block's corner, from the slide's, in micrometres.

    Raises:
        OSError: The file cannot be written.
    """
    facts = {
        "class_names": list(occlusion.names),
        "block_px": occlusion.block_px,
        "forwards": occlusion.forwards,
        "model_mpp": list(occlusion.mpp),
        **provenance,
    }
    channels = [f"drop {output}" for output in occlusion.names]
    metadata = channel_metadata(name, EXPLANATION, channels, occlusion.block_um, facts, origin_um)
    write_channels(path, occlusion.drops, metadata, occlusion.block_um)
