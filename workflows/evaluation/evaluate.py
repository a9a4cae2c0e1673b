"""Judging weights on slides: the same sums whether trainers, validator ranks or ``hyfi validate`` do it.

Slides are looked at one by one, without augmentation, so that a slide's logits depend on nothing but the weights and
the grid of ranks that computed them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from data.loading.batches import BatchLayout
from data.loading.feed import Readable
from data.loading.normalise import Normalisation
from data.samples.dataset import SlideRef
from hyfi_core.comm.base import Communicator
from hyfi_core.plan.box import Box
from workflows.evaluation.bootstrap import draw_cases, intervals
from workflows.evaluation.calibration import fit_temperature
from workflows.evaluation.cases import Aggregate, by_case, places_of
from workflows.evaluation.loss import sample_losses
from workflows.evaluation.metrics import metrics_of_logits

Logits = dict[int, list[float]]
"""Outputs by index of the slide."""

Metrics = dict[str, Any]
"""Metrics of weights, in JSON's types: loss and metrics by slide, ``intervals``, ``slides``, and ``case``: the same
numbers by case, with ``cases`` in place of ``slides`` (None: not asked for). Undefined numbers are None.
``calibration`` is what a temperature fitted on the slides would do (see `workflows.evaluation.calibration`)."""


class InferenceEngine(Protocol):
    """An engine for batches of one image; its ranks call it together."""

    def predict(self, images: Any) -> torch.Tensor:
        """Return logits (1, K), the same on every rank."""
        ...

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take over weights, on every rank."""
        ...


class DatasetImages:
    """Conversion of a slide's stored pixels to engine inputs.

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

    def of(self, index: int) -> OneImage:
        """Return one slide's training image as a batch of one."""
        return OneImage(partial(self._read, index))

    def _read(self, index: int, box: Box) -> torch.Tensor:
        return self.prepared(partial(self._dataset.read, index), box)

    def prepared(self, read: Callable[[Box], NDArray[np.uint8]], box: Box) -> torch.Tensor:
        """Return a box of an image as engine input, (1, 3, h, w), from (3, h, w) uint8."""
        pixels = torch.from_numpy(read(box)).unsqueeze(0)
        return self._normalisation(pixels, self._dtype, self._memory_format)


@dataclass(frozen=True)
class OneImage:
    """A batch of one image, read box by box, for an engine of any batch size.

    Attributes:
        of_box: box → (1, 3, h, w).
        samples: how many images the batch has; engines ask.
    """

    of_box: Callable[[Box], torch.Tensor]
    samples: int = 1

    def read(self, box: Box, first: int, stop: int) -> torch.Tensor:
        """Return (1, 3, h, w)."""
        return self.of_box(box)[first:stop]


@dataclass(frozen=True)
class EvaluationSet:
    """Slides that weights are evaluated on.

    Attributes:
        images: of the slides.
        targets: the slides' classes.
        cases: the slides' cases.
        class_weights: one for each class, as in training.
        aggregate: how slides speak for their case.
    """

    images: DatasetImages
    targets: tuple[int, ...]
    cases: tuple[str, ...]
    class_weights: tuple[float, ...]
    aggregate: Aggregate = "mean"

    @classmethod
    def of(
        cls, images: DatasetImages, slides: Sequence[SlideRef], class_weights: tuple[float, ...], aggregate: Aggregate
    ) -> EvaluationSet:
        """Return the evaluation set of slides, which are all labelled; one without a case is a case of its own."""
        targets = tuple(slide.label for slide in slides if slide.label is not None)
        if len(targets) != len(slides):
            raise ValueError("every slide of an evaluation set must have a label")
        return cls(images, targets, tuple(s.case_id or s.slide_id for s in slides), class_weights, aggregate)

    def metrics_of(self, logits: Logits) -> Metrics:
        """Return the loss Σ w_y · ℓ / N, normalised as in training, and the metrics, by slide and by case.

        Intervals are bootstrapped over cases with the same draws in every call, so that changes are due to the weights.
        """
        outputs = torch.tensor([logits[index] for index in range(len(self.targets))], dtype=torch.float64)
        labels, of_case = torch.tensor(self.targets), places_of(self.cases)
        draws = draw_cases(int(of_case.max()) + 1)
        fitted = fit_temperature(outputs, labels)
        by_slide = {
            **self._numbers(outputs, labels, draws[:, of_case]),
            "slides": len(self.targets),
            "calibration": None if fitted is None else fitted.to_json(),
        }
        if self.aggregate == "none":
            return {**by_slide, "case": None}
        cases = by_case(outputs, labels, self.cases, self.aggregate)
        return {**by_slide, "case": {**self._numbers(cases.logits, cases.targets, draws), "cases": len(cases)}}

    def _numbers(self, outputs: torch.Tensor, labels: torch.Tensor, counts: torch.Tensor) -> Metrics:
        losses = sample_losses(outputs, labels, self.class_weights)
        loss = float(losses.mean())
        return {
            "loss": loss if math.isfinite(loss) else None,
            **metrics_of_logits(outputs, labels),
            "intervals": intervals(outputs, labels, losses, counts),
        }


class Interrupted(Exception):  # noqa: N818 (a request, not an error)
    """The evaluation was interrupted before its end; nothing is known about these weights."""


class SlideImages(Protocol):
    """The engine's input for each slide."""

    def of(self, index: int) -> Any:
        """Return a slide's images, in whatever form the engine takes."""
        ...


def predict_slides(
    engine: InferenceEngine,
    images: SlideImages,
    slides: int,
    share: tuple[int, int],
    interrupted: Callable[[], bool],
    shares: Sequence[int] | None = None,
) -> Logits:
    """Return the logits of this replica's share of the slides.

    Args:
        engine: of this replica.
        images: of all slides.
        slides: how many there are.
        share: (replica, replicas): this one takes replica, replica + replicas, …
        interrupted: asked before each slide, by all ranks of all replicas alike; the same answer on all of them.
        shares: in what proportion replicas of unequal speed take slides; then it is asked before each round of them.

    Raises:
        Interrupted: ``interrupted`` returned True.
    """
    replica, replicas = share
    logits: Logits = {}
    rounds = BatchLayout(tuple(share // math.gcd(*shares) for share in shares) if shares else (1,) * replicas)
    for turn in range(math.ceil(slides / rounds.turn_samples)):
        if interrupted():
            raise Interrupted
        for index in rounds.numbers(turn, replica):
            if index < slides:
                logits[index] = engine.predict(images.of(index))[0].double().tolist()
    return logits


def gather_logits(comm: Communicator, mine: Logits | None) -> Logits | None:
    """Return all logits on rank 0, None elsewhere (collective); one rank of each replica contributes."""
    parts = comm.gather_objects([] if mine is None else [[index, values] for index, values in mine.items()])
    if parts is None:
        return None
    return {int(index): values for part in parts for index, values in part}
