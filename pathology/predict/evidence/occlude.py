"""Covers the blocks of a slide one after the other, and evaluates the models without each.

After Zeiler and Fergus, Visualizing and Understanding Convolutional Networks (2014), section 4.2, who cover parts of
photographs by a grey square. Here blocks become white, 255: in all images of training this is what surrounds tissue,
whereas a square of the mean colour looks like stained tissue.

If the output of a slide is combined from several images, only the images that show a covered block are evaluated again.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from data.samples.dataset import SlideDataset
from data.samples.view import View
from data.store.tissue_grid import TissueGrid
from hyfi_core.errors import RequestError
from pathology.predict.ensemble import Ensemble, Sight, on_every_rank
from pathology.predict.evidence.block_evidence import BlockEvidence
from pathology.predict.evidence.blocks import OcclusionBlocks
from pathology.predict.members import InputSpec, Member
from pathology.predict.options import Evidence
from pathology.predict.whole_tissue import image_weights

Outputs = NDArray[np.float64]


def check_evidence(evidence: Evidence, spec: InputSpec, checkpoint: str) -> None:
    """Check that a checkpoint's slides can have the evidence.

    Raises:
        RequestError: ``occlusion`` or ``gradient`` is requested of a model of tiles or features.
    """
    if evidence != "map" and (spec.features is not None or spec.tiles is not None):
        what = "an aggregator of features" if spec.features is not None else "an encoder of tiles"
        raise RequestError(
            f"--evidence {evidence}: checkpoint {checkpoint} has {what}, whose heatmap already has the score, the "
            f"contribution and the attention of every tile; leave --evidence out"
        )


class OcclusionStoppedError(Exception):
    """A stop was requested between two forwards."""


def occlude(
    ensemble: Ensemble,
    dataset: SlideDataset,
    sight: Sight,
    align_px: int,
    most: int,
    say: Callable[[str], None] = lambda note: None,
    stops: Callable[[int, int], bool] = lambda done, forwards: False,
) -> BlockEvidence:
    """Return the occlusion of the dataset's slide. Collective over the ensemble's ranks.

    Memory: what one forward of one image needs, and this rank's pixels of it, uint8.

    Args:
        ensemble: The models.
        dataset: Dataset of the slide.
        sight: The images of the slide.
        align_px: Alignment of the images' pieces.
        most: Largest number of forwards of each model; see `OcclusionBlocks.of`.
        say: Called on every rank after the first forward, with the number of forwards and their estimated time.
        stops: Called on every rank before each forward with a covered block, with (number of such forwards before it,
            number of all); returns whether to stop, the same on all ranks.

    Raises:
        OcclusionStoppedError: ``stops`` returned True.
        SlideError: Pixels cannot be read, or an output is not finite.
    """
    level = dataset.slide(0).levels[sight.level]

    def divided() -> OcclusionBlocks:
        mask, mask_mpp = dataset.slide(0).tissue()
        tissue = TissueGrid.under(mask, mask_mpp, (level.height_px, level.width_px), level.mpp)
        return OcclusionBlocks.of(tissue, sight.views, align_px, most)

    blocks = on_every_rank(ensemble.comm, divided)
    forwards = len(blocks.covered)
    done = itertools.count()

    def go_on() -> None:
        if stops(next(done), forwards * len(ensemble.members)):
            raise OcclusionStoppedError

    def announce(seconds: float) -> None:
        models = len(ensemble.members)
        of_models = f" of each of {models} models" if models > 1 else ""
        say(
            f"{dataset.samples[0].slide_id}: occlusion covers blocks of {blocks.block_px} px "
            f"({blocks.block_px * level.mpp[1]:.3g} µm) one after the other: {forwards} "
            f"forward{'s' * (forwards != 1)}{of_models}, about {_duration(seconds * forwards * models)}"
        )

    drops = np.mean(
        [
            _of_member(ensemble, member, dataset, sight.views, blocks, go_on, announce if member == 0 else None)
            for member in range(len(ensemble.members))
        ],
        axis=0,
    )
    names = ensemble.members[0].readout.channels
    return BlockEvidence("occlusion", drops.astype(np.float32), blocks.block_px, level.mpp, tuple(names), forwards)


def _of_member(
    ensemble: Ensemble,
    member: int,
    dataset: SlideDataset,
    views: Sequence[View],
    blocks: OcclusionBlocks,
    go_on: Callable[[], None],
    announce: Callable[[float], None] | None,
) -> Outputs:
    """Return one model's drops, (outputs, rows, columns); NaN for blocks that were not covered.

    Args:
        ensemble: The models.
        member: Index of the model.
        dataset: Dataset of the slide.
        views: The images of the slide.
        blocks: Its blocks.
        go_on: Called before each forward with a covered block; raises `OcclusionStoppedError` to stop.
        announce: Called with the seconds of the first forward; None: not called.
    """
    whole: list[Outputs] = []
    # (row, column) of a block -> index of an image that shows it -> outputs of this image with the block covered.
    without: dict[tuple[int, int], dict[int, Outputs]] = {}
    for k, view in enumerate(views):
        image = ensemble.image(member, dataset, view)
        start = time.perf_counter()
        whole.append(image.logits())
        if k == 0 and announce is not None:
            announce(time.perf_counter() - start)
        for block in blocks.covered:
            if block.image == k:
                go_on()
                without.setdefault((block.row, block.column), {})[k] = image.logits(block.boxes)
    model = ensemble.members[member]
    of_slide = _combined(whole, views, model)
    drops = np.full((len(of_slide), *blocks.shape), np.nan)
    for (row, column), changed in without.items():
        # Images that do not show the block keep their outputs.
        images = [changed.get(k, logits) for k, logits in enumerate(whole)]
        drops[:, row, column] = of_slide - _combined(images, views, model)
    return drops


def _combined(logits: Sequence[Outputs], views: Sequence[View], member: Member) -> Outputs:
    """Return the outputs of a slide, (outputs,), from those of its images."""
    stacked = np.stack(logits)
    combined: Outputs = (image_weights(stacked, views, member.pooling) * stacked).sum(axis=0)
    return combined


def _duration(seconds: float) -> str:
    return f"{max(1, round(seconds))} s" if seconds < 120 else f"{seconds / 60:.0f} min"
