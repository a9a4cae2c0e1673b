"""Evaluation of weights on slides: the same computation for trainers, validators and ``hyfi validate``.

Slides are evaluated one by one, without augmentation, so that the logits of a slide depend only on the weights and on
the grid of ranks that computes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
from data.samples.labels import Target
from hyfi_core.comm.base import Communicator
from hyfi_core.plan.box import Box
from workflows.tasks.bootstrap import draw_cases
from workflows.tasks.cases import Aggregate, case_indices
from workflows.tasks.task import Task

Logits = dict[int, list[float]]
"""Logits by index of the slide."""

EvaluatedMetrics = dict[str, Any]
"""Metrics of weights, in JSON's types: loss and metrics by slide, ``intervals``, ``slides`` (their number), and
``case``: the same by case, with ``cases`` instead of ``slides`` (None: no aggregation). Undefined numbers are None.
``calibration`` is the effect of a temperature fitted on the slides (see `workflows.tasks.calibration`)."""


class InferenceEngine(Protocol):
    """An engine for batches of one image; all its ranks call it together."""

    def predict(self, images: Any) -> torch.Tensor:
        """Return logits (1, K), the same on every rank."""
        ...

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Load weights, on every rank."""
        ...


class DatasetImages:
    """Conversion of a slide's stored pixels to engine inputs.

    Args:
        dataset: The slides.
        normalisation: The run's normalisation.
        dtype: Dtype of the images.
        memory_format: Memory format of the images.
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
        """Return a box of an image as engine input (1, 3, h, w); ``read`` returns it as (3, h, w) uint8."""
        pixels = torch.from_numpy(read(box)).unsqueeze(0)
        return self._normalisation(pixels, self._dtype, self._memory_format)


@dataclass(frozen=True)
class OneImage:
    """A batch of one image, read box by box, for an engine of any batch size.

    Attributes:
        of_box: Returns a box of the image, (1, 3, h, w).
        samples: Number of images in the batch; read by engines.
    """

    of_box: Callable[[Box], torch.Tensor]
    samples: int = 1

    def read(self, box: Box, first: int, stop: int) -> torch.Tensor:
        """Return a box of the samples ``[first, stop)``: (1, 3, h, w) of the image, or (0, 3, h, w)."""
        # An engine asks for samples of its whole batch: [1:2] of one image is none.
        return self.of_box(box)[first:stop]


@dataclass(frozen=True)
class EvaluationSet:
    """Slides on which weights are evaluated.

    Attributes:
        images: The engine's input for each slide.
        targets: The slides' labels.
        cases: The slides' cases.
        task: What is predicted.
        aggregate: How the predictions of a case's slides are combined.
        slides: Number of slides, if each sample is a case; None: each is a slide.
    """

    images: SlideImages
    targets: tuple[Target, ...]
    cases: tuple[str, ...]
    task: Task
    aggregate: Aggregate = "mean"
    slides: int | None = None

    @classmethod
    def of(
        cls,
        images: SlideImages,
        slides: Sequence[SlideRef],
        task: Task,
        aggregate: Aggregate,
        count: int | None = None,
    ) -> EvaluationSet:
        """Return the evaluation set of labelled slides; a slide without a case is a case of its own.

        Args:
            images: The engine's input for each sample.
            slides: The slides; the first slide of each case, if each sample is a case.
            task: What is predicted.
            aggregate: How the predictions of a case's slides are combined.
            count: Number of slides, if each sample is a case; None: as many as ``slides``.
        """
        targets = tuple(slide.label for slide in slides if slide.label is not None)
        if len(targets) != len(slides):
            raise ValueError("every slide of an evaluation set must have a label")
        return cls(images, targets, tuple(s.case_id or s.slide_id for s in slides), task, aggregate, count)

    @property
    def of_cases(self) -> bool:
        """Whether each sample is a case of several slides."""
        return self.slides is not None

    def counted(self, calibration: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Return a copy of a calibration; if each sample is a case, its ``slides`` are called ``cases``."""
        if calibration is None or not self.of_cases:
            return None if calibration is None else dict(calibration)
        renamed = {"cases" if name == "slides" else name: value for name, value in calibration.items()}
        if "targets" in renamed:
            renamed["targets"] = {name: self.counted(own) for name, own in renamed["targets"].items()}
        return renamed

    def metrics_of(self, logits: Logits) -> EvaluatedMetrics:
        """Return the loss, normalised as in training, and the metrics, by slide and by case.

        Intervals are bootstrapped over cases, with the same draws in every call, so that only weights change them.
        """
        outputs = torch.tensor([logits[index] for index in range(len(self.targets))], dtype=torch.float64)
        labels = self.task.tensor(self.targets)
        of_case = case_indices(self.cases)  # the case of each sample
        # (draws, cases): how often each case is drawn, the same in every call; its samples are drawn with it.
        draws = draw_cases(int(of_case.max()) + 1)
        by_slide = {
            **self._metrics(outputs, labels, draws[:, of_case]),
            "slides": len(self.targets) if self.slides is None else self.slides,
            "calibration": self.counted(self.task.calibration(outputs, labels, of_case)),
        }
        if self.aggregate == "none":
            return {**by_slide, "case": None}
        case_outputs, case_labels = self.task.by_case(outputs, labels, of_case, self.aggregate)
        return {**by_slide, "case": {**self._metrics(case_outputs, case_labels, draws), "cases": len(case_labels)}}

    def _metrics(self, outputs: torch.Tensor, labels: torch.Tensor, counts: torch.Tensor) -> EvaluatedMetrics:
        """Return metrics with their intervals; ``counts`` (draws, n): how often each bootstrap draw has each sample."""
        return {
            **self.task.metrics(outputs, labels),
            "intervals": {
                **self.task.intervals(outputs, labels, counts),
                # None for the user's own metrics: a function of theirs returns one number, without an interval.
                **dict.fromkeys(self.task.own_names),
            },
        }


class Interrupted(Exception):  # noqa: N818 (a request, not an error)
    """The evaluation was interrupted; it has no result."""


class SlideImages(Protocol):
    """The engine's input for each slide."""

    def of(self, index: int) -> Any:
        """Return a slide's images in the form that the engine accepts."""
        ...


def predict_slides(
    engine: InferenceEngine,
    images: SlideImages,
    slides: int,
    share: tuple[int, int],
    interrupted: Callable[[], bool],
    shares: Sequence[int] | None = None,
) -> Logits:
    """Return the logits of the slides that this replica evaluates.

    Args:
        engine: This replica's engine.
        images: Images of all slides.
        slides: Number of slides.
        share: (replica, replicas): this replica evaluates the slides replica, replica + replicas, …
        interrupted: Called by all ranks of all replicas before each round of slides (without ``shares``, one for each
            replica); must return the same on all of them.
        shares: Slides that each replica takes in a round, in proportion to its speed; None: one each.

    Raises:
        Interrupted: ``interrupted`` returned True.
    """
    replica, replicas = share
    logits: Logits = {}
    # Divided by the common divisor: the smallest rounds, between which an interruption is noticed.
    rounds = BatchLayout(tuple(count // math.gcd(*shares) for count in shares) if shares else (1,) * replicas)
    for turn in range(math.ceil(slides / rounds.turn_samples)):
        if interrupted():
            raise Interrupted
        for index in rounds.numbers(turn, replica):
            if index < slides:
                logits[index] = engine.predict(images.of(index))[0].double().tolist()
    return logits


def gather_logits(comm: Communicator, mine: Logits | None) -> Logits | None:
    """Return the logits of all replicas on rank 0, None elsewhere (collective).

    Args:
        comm: The ranks of all replicas.
        mine: Logits of this rank's replica, from one of its ranks; None on its other ranks.
    """
    parts = comm.gather_objects([] if mine is None else [[index, values] for index, values in mine.items()])
    if parts is None:
        return None
    return {int(index): values for part in parts for index, values in part}
