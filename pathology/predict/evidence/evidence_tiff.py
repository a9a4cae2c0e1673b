"""The evidence of blocks as a pyramidal OME-TIFF, in register with the slide."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pathology.predict.evidence.block_evidence import BlockEvidence
from pathology.predict.heatmap_tiff import channel_metadata, write_channels

_CHANNEL = {"occlusion": "drop", "gradient": "gradient"}
_MEANING = {
    "occlusion": "One channel for each output of the model: the slide's output minus that with this block covered by "
    "white. Positive: the block speaks for it. Blocks act together, so drops do not add up to the output. NaN: not "
    "covered, as the block has no tissue that the model has seen. Coarser levels hold means.",
    "gradient": "One channel for each output of the model: the sum of gradient x (pixels - white) over this block, the "
    "first-order estimate of how much the output drops when the block is covered by white. Positive: the block "
    "speaks for it. NaN: the block has no tissue that the model has seen. Coarser levels hold means.",
}


def write_evidence(
    path: Path,
    evidence: BlockEvidence,
    name: str,
    provenance: Mapping[str, Any],
    origin_um: tuple[float, float] = (0.0, 0.0),
) -> None:
    """Write the evidence as a pyramidal OME-TIFF: one pixel for each block, one channel for each output.

    Args:
        path: The file; an existing one is replaced atomically.
        evidence: The evidence.
        name: Name of the image, the slide's.
        provenance: Further keys of the map annotation.
        origin_um: (y, x) of the first block's corner, from the slide's, in micrometres.

    Raises:
        OSError: The file cannot be written.
    """
    facts = {
        "class_names": list(evidence.names),
        "block_px": evidence.block_px,
        "forwards": evidence.forwards,
        "model_mpp": list(evidence.mpp),
        **provenance,
    }
    channels = [f"{_CHANNEL[evidence.kind]} {output}" for output in evidence.names]
    metadata = channel_metadata(name, _MEANING[evidence.kind], channels, evidence.block_um, facts, origin_um)
    write_channels(path, evidence.drops, metadata, evidence.block_um)
