"""Several classes, one for each slide: softmax and cross-entropy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from numpy.typing import NDArray

from data.samples.labels import Labels, Target, class_weights, load_labels
from hyfi_core.errors import RequestError
from pathology.predict.readout import ClassReadout, Readout
from workflows.config.targets import TargetKeys
from workflows.config.tasks import TASKS, TaskFacts
from workflows.tasks.bootstrap import Intervals, drawn_metrics, intervals
from workflows.tasks.calibration import evaluate_temperature, fit_temperature
from workflows.tasks.cases import aggregated
from workflows.tasks.class_page import class_section
from workflows.tasks.page_section import PageSection
from workflows.tasks.task import Aggregation, LabelSource, Task, at_least_float32, target_columns


@dataclass(frozen=True)
class Multiclass(Task):
    """Classes. A target is the index of a class.

    Attributes:
        classes: Their names, in the order of the logits.
        weights: Weight of each class in the loss, with mean 1 over the training split.
    """

    facts: ClassVar[TaskFacts] = TASKS["multiclass"]
    classes: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()

    @classmethod
    def read_labels(cls, source: LabelSource) -> Labels:
        """Return the class of each slide; see ``Task`` and `data.samples.labels.load_labels`."""
        (column,) = source.columns
        labels = load_labels(
            source.path,
            column,
            classes=source.classes,
            rows=source.rows,
            merge_alike=source.merge_alike,
            missing=source.missing,
        )
        # A softmax over one class is 1, whatever the model says.
        if len(labels.classes) < 2:
            name = labels.classes[0]
            raise RequestError(f"{source.path}: {column!r} is {name} for every slide; at least two classes are needed")
        return labels

    @classmethod
    def fitted(cls, data: TargetKeys, labels: Labels, train: Sequence[Target]) -> Self:
        """Return the classes, with their weights if they are to be balanced."""
        names = labels.classes
        if data.class_weights == "none":
            return cls(data.columns, names, (1.0,) * len(names))
        return cls(data.columns, names, class_weights([int(label) for label in train], names))  # type: ignore[arg-type]

    @classmethod
    def of_json(cls, model: Mapping[str, Any]) -> Self:
        """Return the classes of a ``model.json``, which may lack weights."""
        names = tuple(str(name) for name in model["class_names"])
        weights = model.get("class_weights") or [1.0] * len(names)
        return cls(target_columns(model), names, tuple(weights))

    def to_json(self) -> dict[str, Any]:
        """Return names and weights."""
        return {"class_names": list(self.classes), "class_weights": list(self.weights)}

    @property
    def names(self) -> tuple[str, ...]:
        """The classes."""
        return self.classes

    @property
    def outputs(self) -> int:
        """Number of classes."""
        return len(self.classes)

    def tensor(self, targets: Iterable[Target]) -> torch.Tensor:
        """Return class indices (N,) int64."""
        return torch.tensor(list(targets), dtype=torch.long)

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean of w_y · ℓ over samples.

        All micro-batches have the same size, so the mean of their losses is Σ w_y · ℓ / B over the whole batch, however
        it is divided. torch's weighted mean divides by Σ w_y instead, which depends on the division.
        """
        return self.losses(outputs, targets).mean()

    def drawn(self, outputs: torch.Tensor, targets: torch.Tensor, counts: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the metrics of `workflows.tasks.class_metrics`."""
        return drawn_metrics(outputs, targets, self.losses(outputs, targets), counts)

    def intervals(self, outputs: torch.Tensor, targets: torch.Tensor, counts: torch.Tensor) -> Intervals:
        """Return intervals by bootstrap, of ``accuracy`` by Wilson."""
        return intervals(outputs, targets, self.losses(outputs, targets), counts)

    def by_case(
        self, outputs: torch.Tensor, targets: torch.Tensor, of_case: torch.Tensor, how: Aggregation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probabilities and the highest class of each case, see `workflows.tasks.cases`."""
        cases = aggregated(outputs, targets, of_case, how)
        return cases.logits, cases.targets

    def calibration(self, outputs: torch.Tensor, targets: torch.Tensor, of_case: torch.Tensor) -> dict[str, Any] | None:
        """Return the temperature and its effect."""
        fitted = fit_temperature(outputs, targets)
        return None if fitted is None else fitted.to_json()

    def describe_calibration(
        self, outputs: torch.Tensor, targets: torch.Tensor, fitted: Mapping[str, Any]
    ) -> tuple[str, dict[str, Any]] | None:
        """Return the effect of a temperature."""
        effect = evaluate_temperature(outputs, targets, float(fitted.get("temperature", 1.0)))
        return effect.describe(), effect.to_json()

    def describe(self) -> str:
        """Return the names of the classes."""
        return f"classes {', '.join(self.classes)}"

    def text(self, target: Target) -> str:
        """Return the name of a class."""
        assert isinstance(target, int)
        return self.classes[target]

    def target_of(self, text: str) -> Target | None:
        """Return the index of a class."""
        return self.classes.index(text) if text in self.classes else None

    def warnings(self, train: Sequence[Target], val: Sequence[Target]) -> list[str]:
        """Return warnings about classes without slides, and validation slides of one class."""
        warnings = []
        trained = set(train)
        absent = [name for index, name in enumerate(self.classes) if index not in trained]
        if absent:
            warnings.append(f"no training slide has class {' or '.join(absent)}: the model cannot learn it")
        return [*warnings, *self.evaluation_warnings(val, "validation")]

    def evaluation_warnings(self, targets: Sequence[Target], slides: str) -> list[str]:
        """Return a warning about classes that no slide has: metrics are then those of the other classes."""
        present = set(targets)
        absent = [name for index, name in enumerate(self.classes) if index not in present]
        if len(present) == 1:
            return [f"all {slides} slides are of one class: auroc and balanced accuracy are undefined"]
        if not present or not absent:
            return []
        return [f"no {slides} slide has class {' or '.join(absent)}: auroc, balanced accuracy and f1 leave it out"]

    def check_resumed(self, model: Mapping[str, Any]) -> None:
        """Check that the classes are the same; their weights may change with the data."""
        names = tuple(model["class_names"])
        if names != self.classes:
            raise RequestError(
                f"data.labels: the classes are {', '.join(self.classes)}; those of the run are {', '.join(names)}; if "
                "words such as unknown are classes, list what is missing as data.missing"
            )

    def readout(self, calibration: Mapping[str, Any] | None) -> Readout:
        """Return probabilities by softmax, with the temperature if there is one."""
        return ClassReadout(self.classes, float((calibration or {}).get("temperature", 1.0)))

    def is_wrong(self, prediction: str, target: Target) -> bool:
        """Whether the predicted class differs from the label."""
        return prediction != self.text(target)

    def page(
        self,
        values: NDArray[Any],
        targets: Sequence[Target],
        draws: NDArray[Any],
        readout: Readout,
        before: NDArray[Any] | None = None,
    ) -> PageSection:
        """Return curves, confusion, reliability and thresholds."""
        return class_section(values, targets, draws, self.classes, before)

    def losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return w_y · ℓ of each sample ``(N,)``: cross-entropy times the weight of the sample's class."""
        logits = at_least_float32(outputs)
        weights = torch.tensor(self.weights, dtype=logits.dtype, device=logits.device)
        return torch.nn.functional.cross_entropy(logits, targets, weight=weights, reduction="none")
