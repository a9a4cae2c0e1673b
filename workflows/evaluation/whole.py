"""Evaluation on all tissue of each slide, including slides that do not fit the size used in training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from data.samples.dataset import SlideDataset
from data.samples.view import View
from hyfi_core.comm.base import Communicator
from pathology.predict.whole_tissue import Pooling, SizedEngines, image_weights, views_of
from workflows.evaluation.evaluate import DatasetImages, OneImage

T = TypeVar("T")


@dataclass
class WholeSlides:
    """Images and engine for ``predict_slides``: the "images" are indices of slides. Collective over ``comm``.

    Attributes:
        dataset: The slides, with images of the trained size.
        images: Converts pixels to engine inputs.
        engines: Engines of the model for several image sizes, with the same weights.
        comm: The ranks that compute every slide together.
        pooling: How the logits of several images of a slide are combined.
        enlarged: Indices of slides that were shown in one larger image.
        several: Indices of slides that were shown in several images.
    """

    dataset: SlideDataset
    images: DatasetImages
    engines: SizedEngines
    comm: Communicator
    pooling: Pooling
    enlarged: set[int] = field(default_factory=set)
    several: set[int] = field(default_factory=set)

    def of(self, index: int) -> int:
        """Return the argument of :meth:`predict` for a slide: its index."""
        return index

    def predict(self, index: int) -> torch.Tensor:
        """Return logits (1, K) of a slide, the same on every rank.

        Raises:
            StoreError: A shard is missing or damaged.
        """
        # The image or images that show all tissue of the slide.
        views = views_of(self.dataset, index, [self.engines], self._run)
        if len(views) > 1:
            self.several.add(index)
        elif views[0].size_px != self.dataset.size_px:
            self.enlarged.add(index)
        logits = np.stack([self._logits_of(index, view) for view in views])
        # Several images of a slide: combined as the model pools positions, as if it were one.
        return torch.from_numpy((image_weights(logits, views, self.pooling) * logits).sum(axis=0))[None]

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Load weights, on every rank; all engines share one module."""
        engine = self.engines.at(self.dataset.size_px)
        assert engine is not None
        engine.load_state_dict(state)

    def _logits_of(self, index: int, view: View) -> np.ndarray:
        engine = self.engines.at(view.size_px)
        assert engine is not None, "every view has the size of an engine"
        read = partial(self.dataset.read_view, index, view)
        logits: np.ndarray = engine.predict(OneImage(partial(self.images.prepared, read)))[0].double().cpu().numpy()
        return logits

    @staticmethod
    def _run(action: Callable[[], T]) -> T:
        """Run ``action`` without agreement: the store is the same on every rank, so it fails on all or none."""
        return action()
