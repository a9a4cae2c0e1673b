"""Evaluation on all tissue of each slide, however large the images are that the network was trained on."""

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
from pathology.predict.whole_tissue import Pooling, SizedEngines, evidence, views_of
from workflows.evaluation.evaluate import DatasetImages, OneImage

T = TypeVar("T")


@dataclass
class WholeSlides:
    """Slides by their indices, and their logits, as ``evaluate`` takes them. Collective over ``comm``.

    Attributes:
        dataset: the slides, of the trained size.
        images: how pixels become what engines take.
        engines: of the network; they share its weights.
        comm: the ranks that compute every slide together.
        pooling: how the logits of several images of a slide are combined.
        enlarged: slides that were shown in one larger image.
        several: slides that were shown in several images.
    """

    dataset: SlideDataset
    images: DatasetImages
    engines: SizedEngines
    comm: Communicator
    pooling: Pooling
    enlarged: set[int] = field(default_factory=set)
    several: set[int] = field(default_factory=set)

    def of(self, index: int) -> int:
        """Return what :meth:`predict` takes for a slide."""
        return index

    def predict(self, index: int) -> torch.Tensor:
        """Return logits (1, K) of a slide, the same on every rank.

        Raises:
            StoreError: a shard is missing or damaged.
        """
        views = views_of(self.dataset, index, [self.engines], self._agreed)
        if len(views) > 1:
            self.several.add(index)
        elif views[0].size_px != self.dataset.size_px:
            self.enlarged.add(index)
        logits = np.stack([self._of_image(index, view) for view in views])
        return torch.from_numpy((evidence(logits, views, self.pooling) * logits).sum(axis=0))[None]

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take over weights, on every rank; the engines have the same module."""
        engine = self.engines.at(self.dataset.size_px)
        assert engine is not None
        engine.load_state_dict(state)

    def _of_image(self, index: int, view: View) -> np.ndarray:
        engine = self.engines.at(view.size_px)
        assert engine is not None, "every view has the size of an engine"
        read = partial(self.dataset.read_view, index, view)
        logits: np.ndarray = engine.predict(OneImage(partial(self.images.prepared, read)))[0].double().cpu().numpy()
        return logits

    @staticmethod
    def _agreed(action: Callable[[], T]) -> T:
        """Run ``action``; the store is the same on every rank, so it fails on all or none."""
        return action()
