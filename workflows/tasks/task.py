"""A task: what a slide's label is, and all that follows from it.

::

    labels.csv ──read_labels──► Labels ──fitted──► Task        before the run; to_json ──► model.json ──of_json──► Task
                                                    │
    training     targets, loss, outputs  ◄──────────┤
    validation   metrics, intervals, by_case, calibration
    prediction   readout: columns of predictions.csv, channels of the heatmap, the words of reports
    cohort page  page
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray

from data.csv_table import Table
from data.missing import MISSING
from data.samples.labels import Labels, Target
from hyfi_core.errors import RequestError
from pathology.predict.readout import Readout
from workflows.config.targets import TargetConfig, TargetKeys
from workflows.config.tasks import TaskFacts
from workflows.tasks.bootstrap import Intervals, measured, resampled
from workflows.tasks.class_metrics import Metrics
from workflows.tasks.own import check_own, finite, load_loss, metric_name, own_numbers
from workflows.tasks.page_section import PageSection

Aggregation = Literal["mean", "max", "logits"]


@dataclass(frozen=True)
class LabelSource:
    """Where labels are read, and how.

    Attributes:
        path: The CSV.
        columns: Columns of the target.
        classes: The classes, in order, if they are known; else None.
        rows: Rows of the store's manifest.
        merge_alike: Whether several spellings of one name are joined.
        missing: Words that mean that a value is missing.
        targets: Each of several targets; empty: one target.
    """

    path: Path | Table
    columns: tuple[str, ...]
    classes: tuple[str, ...] | None = None
    rows: Sequence[Mapping[str, str]] = ()
    merge_alike: bool = False
    missing: tuple[str, ...] = MISSING
    targets: tuple[TargetConfig, ...] = ()


@dataclass(frozen=True)
class Task(ABC):
    """One task of a run, with what it has learnt from the labels of the training split.

    In all methods, ``outputs`` are those of the model, (N, number of outputs), and ``targets`` what ``tensor`` returns.

    Attributes:
        columns: Columns of the target.
        own_loss: ``package.module:function`` of the user's own loss; empty: the loss of the task.
        own_metrics: ``package.module:function`` of each of the user's own metrics.
    """

    facts: ClassVar[TaskFacts]
    columns: tuple[str, ...]
    own_loss: str = field(default="", kw_only=True)
    own_metrics: tuple[str, ...] = field(default=(), kw_only=True)

    @classmethod
    @abstractmethod
    def read_labels(cls, source: LabelSource) -> Labels:
        """Return the labels of a CSV.

        Raises:
            RequestError: It has no such columns, or values that the task cannot use; the message names them.
        """

    @classmethod
    @abstractmethod
    def fitted(cls, data: TargetKeys, labels: Labels, train: Sequence[Target]) -> Self:
        """Return the task with what it learns from the labels of the training slides.

        Raises:
            RequestError: They do not suffice.
        """

    @classmethod
    @abstractmethod
    def of_json(cls, model: Mapping[str, Any]) -> Self:
        """Return the task of a ``model.json``.

        Raises:
            RequestError: It does not describe the task.
        """

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Return the entries of the task in ``model.json``, ``class_names`` among them."""

    def read_again(
        self, path: Path | Table, rows: Sequence[Mapping[str, str]], merge_alike: bool, missing: tuple[str, ...]
    ) -> Labels:
        """Return the labels of a table for a trained model, whose classes and their order stay.

        The arguments are those of `LabelSource`.

        Raises:
            RequestError: As ``read_labels``.
        """
        return self.read_labels(LabelSource(path, self.columns, self.names, rows, merge_alike, missing))

    def with_target(self, text: str) -> Self:
        """Return the task with other columns of labels, from ``--target``.

        Args:
            text: One column; if the task has several, as many, with commas between them.

        Raises:
            RequestError: The number of columns differs from the task's.
        """
        several = len(self.columns) > 1
        columns = tuple(part.strip() for part in text.split(",")) if several else (text,)
        if len(columns) != len(self.columns) or not all(columns):
            names = ",".join(self.columns)
            raise RequestError(f"--target {text}: the model has {len(self.columns)} columns: {names}; name as many")
        return replace(self, columns=columns)

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The ``class_names`` of a ``model.json``."""

    @property
    @abstractmethod
    def outputs(self) -> int:
        """Number of the model's outputs."""

    @property
    def label_numbers(self) -> int:
        """How many numbers the label of a slide has; the index of a class is one."""
        return 1

    @property
    def loss_over(self) -> Literal["batch", "microbatch"]:
        """Over what the loss is computed, see `hyfi_core.parallelize`."""
        return "microbatch"

    @abstractmethod
    def tensor(self, targets: Iterable[Target]) -> torch.Tensor:
        """Return labels as a tensor (N,) or (N, columns)."""

    @abstractmethod
    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch, or of a micro-batch if ``loss_over`` says so: a scalar."""

    @abstractmethod
    def drawn(self, outputs: torch.Tensor, targets: torch.Tensor, counts: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return ``loss`` and all metrics of each bootstrap draw, (draws,) float64 each; NaN if undefined.

        Args:
            outputs: (N, outputs) float64, finite.
            targets: Their targets.
            counts: (draws, N) float64, how often each draw has each sample.
        """

    def metrics(self, outputs: torch.Tensor, targets: torch.Tensor) -> Metrics:
        """Return ``loss``, the task's metrics and the user's: None if undefined, all None if outputs are not finite."""
        names = self.metric_names
        if not len(targets) or not bool(outputs.isfinite().all()):
            return dict.fromkeys((*names, *self.own_names))
        values = measured(lambda counts: self.drawn(outputs, targets, counts), len(targets))
        own = own_numbers(self.own_loss, self.own_metrics, self.in_units(outputs), targets)
        # A class of the user may have another loss than the task that it extends, whose ``drawn`` it keeps.
        if self._overrides_loss and not self.own_loss:
            own["loss"] = finite(float(self.loss(outputs, targets)))
        # The user's numbers last: their loss replaces the task's.
        return {**{name: values[name] for name in names}, **own}

    def intervals(self, outputs: torch.Tensor, targets: torch.Tensor, counts: torch.Tensor) -> Intervals:
        """Return {metric: [low, high]}, 95 % intervals by bootstrap; None if undefined, see `resampled`.

        The arguments are those of `drawn`; slides of the same case have the same counts.
        """
        if not len(targets) or not bool(outputs.isfinite().all()):
            return dict.fromkeys(self.metric_names)
        return resampled(lambda block: self.drawn(outputs, targets, block), self.metric_names, counts)

    def with_labels(self, targets: Sequence[Target]) -> Sequence[tuple[Task, Sequence[Target]]]:
        """Return (task, its part of the labels of slides) of each target; this task alone if there is one."""
        return [(self, targets)]

    def try_own(self, batch: Sequence[Target], evaluated: Sequence[Target]) -> None:
        """Try the user's own functions on labels of one batch, and of all slides that will be evaluated.

        Raises:
            RequestError: One cannot be imported, fails, or returns something else, see `check_own`.
        """
        check_own(self.own_loss, self.own_metrics, self.outputs, self.tensor(batch), self.tensor(evaluated))

    def in_units(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return outputs as the user's own functions get them: unchanged, or in the units of the labels."""
        return outputs

    @property
    def loss_is_own(self) -> bool:
        """Whether the loss is the user's: a function, or a ``loss`` overridden without ``drawn`` or ``losses``."""
        return bool(self.own_loss) or self._overrides_loss

    @property
    def _overrides_loss(self) -> bool:
        """Whether a user's class has a ``loss`` of its own, but the ``drawn`` and ``losses`` of a base class."""
        kind = type(self)
        return _classes_before(kind, "loss") < min(_classes_before(kind, "drawn"), _classes_before(kind, "losses"))

    @property
    def own_names(self) -> tuple[str, ...]:
        """Names of the values of the user's own functions, which have no intervals."""
        return (*(["loss"] if self.loss_is_own else []), *map(metric_name, self.own_metrics))

    @property
    def metric_names(self) -> tuple[str, ...]:
        """``loss`` and the names of all metrics."""
        return ("loss", *self.facts.metrics)

    @abstractmethod
    def by_case(
        self, outputs: torch.Tensor, targets: torch.Tensor, of_case: torch.Tensor, how: Aggregation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return outputs and targets of M cases from those of N slides.

        Args:
            outputs: Of the slides.
            targets: Of the slides.
            of_case: (N,) the index of each slide's case, 0 to M − 1.
            how: How the outputs of a case's slides become one, see `workflows.tasks.cases`.
        """

    def calibration(self, outputs: torch.Tensor, targets: torch.Tensor, of_case: torch.Tensor) -> dict[str, Any] | None:
        """Return what is fitted on validation slides, for the ``calibration`` of a ``model.json``; None: nothing."""
        return None

    def describe_calibration(
        self, outputs: torch.Tensor, targets: torch.Tensor, fitted: Mapping[str, Any]
    ) -> tuple[str, dict[str, Any]] | None:
        """Return the effect of the calibration ``fitted`` on these slides, as text and as JSON; None: no effect."""
        return None

    @abstractmethod
    def describe(self) -> str:
        """Return what is predicted, as a phrase: ``classes benign, malignant``."""

    @abstractmethod
    def text(self, target: Target) -> str:
        """Return a label as text."""

    @abstractmethod
    def target_of(self, text: str) -> Target | None:
        """Return the label that ``text`` describes, the inverse of the method `text`; None if it describes none."""

    def warnings(self, train: Sequence[Target], val: Sequence[Target]) -> list[str]:
        """Return warnings about labels for the user."""
        return []

    def evaluation_warnings(self, targets: Sequence[Target], slides: str) -> list[str]:
        """Return warnings about metrics that the labels of evaluated slides leave out; ``slides``: which they are."""
        return []

    def check_batch(self, batch: int) -> None:  # noqa: B027 (most tasks take any)
        """Check that the loss works for batches of ``batch`` slides.

        Raises:
            RequestError: It does not.
        """

    def check_validation(self, val: Sequence[Target]) -> None:  # noqa: B027 (most tasks take any)
        """Check that the best checkpoint can be chosen on slides with these labels; without labels, any will do.

        Raises:
            RequestError: It cannot.
        """

    def batch_warnings(self, batch: int) -> list[str]:
        """Return warnings about batches of ``batch`` slides for the user."""
        return []

    def check_resumed(self, model: Mapping[str, Any]) -> None:
        """Check that a run with the ``model.json`` of its checkpoint may go on with this task.

        Raises:
            RequestError: Its labels have changed.
        """
        # Of `model.json` only the entries of the task: the rest may differ.
        before = {key: model.get(key) for key in self.to_json()}
        if before != _as_json(self.to_json()):
            raise RequestError(
                f"data.labels: the labels of {', '.join(self.columns)} differ from those with which the run began; "
                "restore them, or use another run.dir"
            )

    @abstractmethod
    def readout(self, calibration: Mapping[str, Any] | None) -> Readout:
        """Return how outputs of slides are read; ``calibration``: that of a ``model.json``."""

    def is_wrong(self, prediction: str, target: Target) -> bool:
        """Whether a prediction is wrong; False for tasks whose predictions are neither right nor wrong."""
        return False

    @abstractmethod
    def page(
        self,
        values: NDArray[np.float64],
        targets: Sequence[Target],
        draws: NDArray[np.float64],
        readout: Readout,
        before: NDArray[np.float64] | None = None,
    ) -> PageSection:
        """Return what a cohort page shows of N labelled slides.

        Args:
            values: (N, columns of the readout).
            targets: Their labels.
            draws: (draws, N) how often each bootstrap draw has each slide.
            readout: How the values were read; of an ensemble, all members together.
            before: The same values without calibration, if there is one.
        """


def make_loss(task: Task, accumulate: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the loss of a task for the engine, divided by ``accumulate``, the number of batches of one update."""
    own = load_loss(task.own_loss) if task.own_loss else None

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        value = task.loss(outputs, targets) if own is None else own(task.in_units(at_least_float32(outputs)), targets)
        return value / accumulate

    return loss


def loss_over(task: Task) -> Literal["batch", "microbatch"]:
    """Return whether the loss of a task is computed over the batch or over each micro-batch.

    A user's own loss may be any function of the batch. So may an overridden ``loss``, unless the same class, or one
    derived from it, also overrides ``loss_over``.
    """
    kind = type(task)
    # A ``loss_over`` of a base class of the one that defines ``loss`` was written for another loss.
    is_stated = _classes_before(kind, "loss_over") <= _classes_before(kind, "loss")
    return "batch" if task.own_loss or (task.loss_is_own and not is_stated) else task.loss_over


def at_least_float32(outputs: torch.Tensor) -> torch.Tensor:
    """Return outputs in float32, or as they are in float64."""
    return outputs if outputs.dtype == torch.float64 else outputs.float()


def target_columns(model: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the columns of the target of a ``model.json``."""
    target = model.get("target", "label")
    return (target,) if isinstance(target, str) else tuple(target)


def _classes_before(kind: type, name: str) -> int:
    """Return how many classes come before the one that defines ``name``: 0 if ``kind`` does itself.

    Classes are counted in the order in which Python looks for the name, from ``kind`` on; all, if none defines it.
    """
    order = kind.__mro__
    return next((k for k, base in enumerate(order) if name in vars(base)), len(order))


def _as_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _as_json(item) for key, item in value.items()}
    return [_as_json(item) for item in value] if isinstance(value, (list, tuple)) else value
