"""Gradient × input: an estimate, from gradients, of how much each output drops when a block is covered.

The estimate for a block is Σ gradient · (pixels − white), over its pixels and colours. After Shrikumar et al., Not just
a black box: learning important features through propagating activation differences (2016, arXiv:1605.01713), who use
zero for white. It is the first-order estimate of occlusion, exact for linear models, from one forward and a backward
for each output:

::

    f(x) - f(block white)  ≈  Σ  ∂f/∂x · (x - white)
                           block
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from data.samples.dataset import SlideDataset
from data.samples.view import View
from data.store.layout import BACKGROUND
from data.store.tissue_grid import TissueGrid
from hyfi_core.cells.budget import free_bytes
from hyfi_core.cost.memory.forecast import enough_gb
from hyfi_core.runtime.calls.input_gradients import InputGradient
from hyfi_core.runtime.engine import Engine
from pathology.errors import SlideError
from pathology.predict.ensemble import Ensemble, Sight, on_every_rank
from pathology.predict.evidence.block_evidence import BlockEvidence
from pathology.predict.evidence.blocks import OcclusionBlocks
from pathology.predict.whole_tissue import image_weights

_NO_LIMIT = 2**62
"""No limit of forwards for `OcclusionBlocks.of`, so that it returns the smallest blocks."""


def gradient_evidence(ensemble: Ensemble, dataset: SlideDataset, sight: Sight, align_px: int) -> BlockEvidence:
    """Return the evidence of the dataset's slide, for its smallest blocks. Collective over the ensemble's ranks.

    Where several images show a slide, their weights in its outputs are taken as constant, as for contributions.
    Memory: that of a training step of one image, without gradients of weights.

    Args:
        ensemble: The models.
        dataset: Dataset of the slide.
        sight: The images of the slide.
        align_px: Alignment of the images' pieces: the side of a block, unless a row would have more than 4096 blocks.

    Raises:
        SlideError: Pixels cannot be read, memory does not suffice, or an output is not finite.
    """
    level = dataset.slide(0).levels[sight.level]

    def divided() -> OcclusionBlocks:
        mask, mask_mpp = dataset.slide(0).tissue()
        tissue = TissueGrid.under(mask, mask_mpp, (level.height_px, level.width_px), level.mpp)
        # Without a limit of forwards, which grow with the blocks elsewhere: here it is one for each image.
        return OcclusionBlocks.of(tissue, sight.views, align_px, most=_NO_LIMIT)

    blocks = on_every_rank(ensemble.comm, divided)
    members = range(len(ensemble.members))
    drops = np.mean([_of_member(ensemble, member, dataset, sight.views, blocks) for member in members], axis=0)
    names = tuple(ensemble.members[0].readout.channels)
    has_tissue = np.zeros(blocks.shape, bool)
    for block in blocks.covered:  # those with tissue that an image shows
        has_tissue[block.row, block.column] = True
    drops[:, ~has_tissue] = np.nan
    drops = drops.astype(np.float32)
    return BlockEvidence("gradient", drops, blocks.block_px, level.mpp, names, forwards=len(sight.views))


def _of_member(
    ensemble: Ensemble, member: int, dataset: SlideDataset, views: Sequence[View], blocks: OcclusionBlocks
) -> NDArray[np.float64]:
    """Return one model's estimate of each output's drop when a block is covered, (outputs, rows, columns) of blocks."""
    model = ensemble.members[member]
    # Normalised, because the products are those of normalised pixels.
    white = model.normalisation(torch.full((1, 3, 1, 1), BACKGROUND, dtype=torch.uint8))
    logits, sums = [], []  # of each image
    for view in views:
        image = ensemble.image(member, dataset, view)
        _check_room(ensemble, image.engine)
        # Adds up gradient · (pixels − white) in each block, while the engine passes it one gradient after the other.
        of_blocks = _BlockSums(view, blocks, len(model.readout.channels), white)
        outputs = image.run(partial(image.engine.input_gradients, use=of_blocks.add))
        if not bool(outputs.isfinite().all()):
            raise SlideError(f"the network's output is not finite: {outputs[0].tolist()}")
        if ensemble.comm.size > 1:
            # Each rank has sums over its part of the image; a block may lie in the parts of several ranks.
            ensemble.comm.all_reduce(of_blocks.sums)
        logits.append(outputs[0].double().cpu().numpy())
        sums.append(of_blocks.sums.numpy())
    weights = image_weights(np.stack(logits), views, model.pooling)
    drops: NDArray[np.float64] = (weights[:, :, None, None] * np.stack(sums)).sum(axis=0)
    return drops


def _check_room(ensemble: Ensemble, engine: Engine) -> None:
    """Check that the maps that backward needs fit into memory, unless they may be spilled. Collective.

    Raises:
        SlideError: They do not fit on a rank.
    """
    needed = engine.gradient_bytes()
    free = free_bytes(engine.device)

    def check() -> None:
        if needed is not None and needed > free:
            raise SlideError(
                f"--evidence gradient keeps the maps of an image for backward, {needed / 1e9:.3g} GB on a rank, but "
                f"{free / 1e9:.3g} GB are free; use --cells auto with --memory {enough_gb(free)} and --spill FOLDER "
                f"(or memory, on GPUs), more --ranks, or --evidence occlusion, which keeps none"
            )

    on_every_rank(ensemble.comm, check)


class _BlockSums:
    """Sums of gradient × (pixels − white) over each block of the slide.

    Args:
        view: The image of the slide.
        blocks: The blocks of the slide.
        outputs: Number of outputs.
        white: (1, 3, 1, 1): the background, as the model takes it.

    Attributes:
        sums: (outputs, rows, columns) float64: sums over this rank's parts of the image so far.
    """

    def __init__(self, view: View, blocks: OcclusionBlocks, outputs: int, white: torch.Tensor) -> None:
        self._view, self._block_px, self._white = view, blocks.block_px, white
        self.sums = torch.zeros(outputs, *blocks.shape, dtype=torch.float64)

    def add(self, gradient: InputGradient) -> None:
        """Add gradient · (pixels − white), of one part of the image and one output, to the sums of its blocks."""
        # Multiply on the device of the pixels; only the sum over channels is copied to the host.
        differences = gradient.pixels - self._white.to(gradient.pixels)
        products = (differences * gradient.values)[0].double().sum(0).cpu()
        height = self.sums.shape[1]
        for piece in self._view.pieces:
            inside = piece.target.intersect(gradient.box)
            if inside.empty:
                continue
            dy, dx = piece.offset
            rows = torch.arange(inside.y0 + dy, inside.y1 + dy) // self._block_px
            columns = torch.arange(inside.x0 + dx, inside.x1 + dx) // self._block_px
            part = products[inside.relative_to(gradient.box).slices()]
            # Add along rows, then along columns: this needs no index for each pixel.
            of_rows = torch.zeros(height, part.shape[1], dtype=torch.float64).index_add_(0, rows, part)
            self.sums[gradient.output].index_add_(1, columns, of_rows)
