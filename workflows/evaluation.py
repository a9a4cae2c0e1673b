"""Judging weights on slides: the same sums whether trainers, validator ranks or ``hyfi validate`` do it.

Slides are looked at one by one, without augmentation, so that a slide's logits depend on nothing but the weights and
the grid of ranks that computed them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from data.feed import Readable
from data.normalise import Normalisation
from hyfi_core.comm.base import Communicator
from hyfi_core.plan.box import Box
from workflows.metrics import metrics_of_logits
from workflows.training.optimisation import sample_losses

Logits = dict[int, list[float]]
"""Outputs by index of the slide."""


class Predictor(Protocol):
    """An engine for batches of one image; its ranks call it together."""

    def predict(self, images: Any) -> torch.Tensor:
        """Return logits (1, K), the same on every rank."""
        ...

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take over weights, on every rank."""
        ...


class Images:
    """How a slide's stored pixels become what the engine eats.

    Args:
        dataset: the slides.
        normalisation: of the run.
        dtype: of the images.
        memory_format: of the images.
    """

    def __init__(
        self, dataset: Readable, normalisation: Normalisation, dtype: torch.dtype, memory_format: torch.memory_format
    ) -> None:
        self._dataset, self._normalisation = dataset, normalisation
        self._dtype, self._memory_format = dtype, memory_format

    def of(self, index: int) -> Callable[[Box], torch.Tensor]:
        """Return a reader of one slide's training image: box → (1, 3, h, w)."""

        def read(box: Box) -> torch.Tensor:
            pixels = torch.from_numpy(self._dataset.read(index, box)).unsqueeze(0)
            return self._normalisation(pixels, self._dtype, self._memory_format)

        return read


@dataclass(frozen=True)
class Exam:
    """What weights are judged by.

    Attributes:
        images: of the slides.
        targets: the slides' classes.
        class_weights: one for each class, as in training.
    """

    images: Images
    targets: tuple[int, ...]
    class_weights: tuple[float, ...]

    def judge(self, logits: Logits) -> dict[str, float | None]:
        """Return the loss Σ w_y · ℓ / N, normalised as in training, and the metrics; undefined ones are None."""
        outputs = torch.tensor([logits[index] for index in range(len(self.targets))], dtype=torch.float64)
        labels = torch.tensor(self.targets)
        loss = float(sample_losses(outputs, labels, self.class_weights).mean())
        return {"loss": loss, **metrics_of_logits(outputs, labels)}


class Interrupted(Exception):  # noqa: N818 (not an error: somebody asked for it)
    """The judging was given up before its end; nothing is known about these weights."""


def predict_slides(
    engine: Predictor, images: Images, slides: int, share: tuple[int, int], interrupted: Callable[[], bool]
) -> Logits:
    """Return the logits of this replica's share of the slides.

    Args:
        engine: of this replica.
        images: of all slides.
        slides: how many there are.
        share: (replica, replicas): this one takes replica, replica + replicas, …
        interrupted: asked before each slide, by all ranks of all replicas alike; the same answer on all of them.

    Raises:
        Interrupted: ``interrupted`` said so.
    """
    replica, replicas = share
    logits: Logits = {}
    for first in range(0, slides, replicas):
        if interrupted():
            raise Interrupted
        index = first + replica
        if index < slides:
            logits[index] = engine.predict(images.of(index))[0].double().tolist()
    return logits


def gather_logits(comm: Communicator, mine: Logits | None) -> Logits | None:
    """Return all logits on rank 0, None elsewhere (collective); one rank of each replica gives its own."""
    parts = comm.gather_objects([] if mine is None else [[index, values] for index, values in mine.items()])
    if parts is None:
        return None
    return {int(index): values for part in parts for index, values in part}


def judge_weights(
    exam: Exam,
    engine: Predictor,
    group: Communicator,
    weights: Mapping[str, torch.Tensor],
    interrupted: Callable[[], bool] = lambda: False,
) -> dict[str, float | None] | None:
    """Return what weights are worth, judged by all ranks of ``group``; on its rank 0, None elsewhere.

    Raises:
        Interrupted: ``interrupted`` said so, on all ranks.
    """
    engine.load_state_dict(dict(weights))
    logits = predict_slides(engine, exam.images, len(exam.targets), (0, 1), interrupted)
    return exam.judge(logits) if group.rank == 0 else None
