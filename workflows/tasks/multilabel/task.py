"""Several labels of each slide, present or not: a sigmoid and binary cross-entropy for each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from numpy.typing import NDArray

from data.csv_table import Table
from data.missing import is_missing
from data.samples.label_sets import NO, NONE, UNKNOWN, YES, label_set_text, load_label_sets, state_of
from data.samples.labels import Labels, Target
from hyfi_core.errors import RequestError
from pathology.predict.readout import Readout
from workflows.config.targets import TargetKeys
from workflows.config.tasks import TASKS, TaskFacts
from workflows.tasks.bootstrap import Intervals, measured
from workflows.tasks.cases import members_of
from workflows.tasks.multilabel.metrics import (
    MEANS,
    PREDICTION_MEANS,
    best_thresholds,
    label_metrics,
    macro,
    with_rank_intervals,
)
from workflows.tasks.multilabel.page import labels_section
from workflows.tasks.multilabel.readout import HALF, LabelsReadout
from workflows.tasks.page_section import PageSection
from workflows.tasks.task import Aggregation, LabelSource, Task, at_least_float32, target_columns


@dataclass(frozen=True)
class Multilabel(Task):
    """Labels. A target has `YES`, `NO` or `UNKNOWN` for each; unknown ones count nowhere.

    Attributes:
        labels: Their names, in the order of the logits.
        weights: Weights of (slides with, slides without) each label in the loss; empty: all 1.
    """

    facts: ClassVar[TaskFacts] = TASKS["multilabel"]
    labels: tuple[str, ...] = ()
    weights: tuple[tuple[float, float], ...] = ()

    @classmethod
    def read_labels(cls, source: LabelSource) -> Labels:
        """Return the labels of each slide; see ``Task`` and `data.samples.label_sets.load_label_sets`."""
        return load_label_sets(
            source.path,
            source.columns,
            classes=source.classes,
            rows=source.rows,
            merge_alike=source.merge_alike,
            missing=source.missing,
        )

    @classmethod
    def fitted(cls, data: TargetKeys, labels: Labels, train: Sequence[Target]) -> Self:
        """Return the labels, with weights if they are to be balanced."""
        task = cls(data.columns, labels.classes)
        if data.class_weights == "none":
            return task
        targets = task.tensor(train)
        # Numbers of slides with and without each label.
        yes, no = ((targets == value).sum(0).double() for value in (YES, NO))
        smaller = torch.minimum(yes, no).tolist()
        alike = [name for name, slides in zip(labels.classes, smaller, strict=True) if not slides]
        if alike:
            raise RequestError(
                f"data.class_weights: all training slides are alike in {', '.join(alike)}, which cannot be balanced"
            )
        # Slides with and without a label then weigh the same in all, and the mean weight is 1.
        weights = torch.stack([(yes + no) / (2 * yes), (yes + no) / (2 * no)], 1)
        return replace(task, weights=tuple((positive, negative) for positive, negative in weights.tolist()))

    @classmethod
    def of_json(cls, model: Mapping[str, Any]) -> Self:
        """Return the task of a ``model.json``."""
        weights = tuple((float(positive), float(negative)) for positive, negative in model["label_weights"])
        return cls(target_columns(model), tuple(map(str, model["class_names"])), weights)

    def to_json(self) -> dict[str, Any]:
        """Return names and weights."""
        return {"class_names": list(self.labels), "label_weights": [list(pair) for pair in self.weights]}

    def read_again(
        self, path: Path | Table, rows: Sequence[Mapping[str, str]], merge_alike: bool, missing: tuple[str, ...]
    ) -> Labels:
        """Return labels for a model that was trained before; several columns are those of its labels, in order."""
        classes = self.labels if len(self.columns) == 1 else self.columns
        labels = self.read_labels(LabelSource(path, self.columns, classes, rows, merge_alike, missing))
        return replace(labels, classes=self.labels)

    @property
    def names(self) -> tuple[str, ...]:
        """The labels."""
        return self.labels

    @property
    def outputs(self) -> int:
        """Number of labels."""
        return len(self.labels)

    @property
    def label_numbers(self) -> int:
        """One for each label."""
        return self.outputs

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Means over the labels, then the AUROC of each."""
        return (*super().metric_names, *(f"auroc_{name}" for name in self.labels))

    def tensor(self, targets: Iterable[Target]) -> torch.Tensor:
        """Return (N, labels) float64."""
        return torch.tensor([_states(target) for target in targets], dtype=torch.float64).reshape(-1, self.outputs)

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean over samples of the sum over known labels, divided by the number of labels.

        Every known label of a batch thus counts the same, however the batch is divided.
        """
        return self.losses(outputs, targets).mean()

    def drawn(self, outputs: torch.Tensor, targets: torch.Tensor, counts: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the metrics of `workflows.tasks.multilabel.metrics`, with thresholds of one half."""
        # A logit ranks as its probability does, but does not round to 1; from 0 on, the probability is one half or
        # more.
        metrics = label_metrics(outputs.double(), outputs >= 0, targets, counts)
        each = {f"auroc_{name}": metrics["auroc"][:, k] for k, name in enumerate(self.labels)}
        loss = counts @ self.losses(outputs.double(), targets) / counts.sum(1)
        return {"loss": loss, **{name: macro(metrics[name]) for name in MEANS}, **each}

    def intervals(self, outputs: torch.Tensor, targets: torch.Tensor, counts: torch.Tensor) -> Intervals:
        """Return intervals by bootstrap; of the AUROC of each label, if slides are few, by `area_interval`."""
        bootstrapped = super().intervals(outputs, targets, counts)
        if not len(targets) or not bool(outputs.isfinite().all()):
            return bootstrapped
        return with_rank_intervals(bootstrapped, self.metrics(outputs, targets), targets, counts, self.labels)

    def by_case(
        self, outputs: torch.Tensor, targets: torch.Tensor, of_case: torch.Tensor, how: Aggregation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits and labels of each case.

        ``mean``: logits of the mean probability of each label; ``max``: the highest logits; ``logits``: the mean
        logits. A case has a label if any of its slides has it.
        """
        case_outputs, case_labels = [], []
        log_yes, log_no = (torch.nn.functional.logsigmoid(sign * outputs.double()) for sign in (1, -1))
        for members in members_of(of_case):
            mean = log_yes[members].logsumexp(0) - log_no[members].logsumexp(0)  # exact where probabilities round to 1
            logits = outputs[members].double()
            case_outputs.append({"mean": mean, "max": logits.amax(0), "logits": logits.mean(0)}[how])
            # Present > absent > unknown as numbers: one known slide is enough.
            case_labels.append(targets[members].amax(0))
        return torch.stack(case_outputs), torch.stack(case_labels)

    def calibration(self, outputs: torch.Tensor, targets: torch.Tensor, of_case: torch.Tensor) -> dict[str, Any] | None:
        """Return each label's threshold of highest balanced accuracy; one half if all slides have the same label."""
        if not bool(outputs.isfinite().all()):
            return None
        chosen = best_thresholds(outputs.double().sigmoid(), targets)
        thresholds = {
            name: HALF if threshold is None else threshold for name, threshold in zip(self.labels, chosen, strict=True)
        }
        not_chosen = [name for name, threshold in zip(self.labels, chosen, strict=True) if threshold is None]
        return {"thresholds": thresholds, "not_chosen": not_chosen, "slides": len(targets)}

    def describe_calibration(
        self, outputs: torch.Tensor, targets: torch.Tensor, fitted: Mapping[str, Any]
    ) -> tuple[str, dict[str, Any]] | None:
        """Return the mean balanced accuracy and F1 of the labels at their thresholds, as text and as JSON."""
        if "thresholds" not in fitted:
            return None
        readout = self.readout(fitted)
        scores = outputs.double().sigmoid()
        predicted = scores >= torch.tensor(readout.thresholds, dtype=torch.float64)

        def metrics_of_draws(counts: torch.Tensor) -> dict[str, torch.Tensor]:
            metrics = label_metrics(scores, predicted, targets, counts)
            return {name: macro(metrics[name]) for name in PREDICTION_MEANS}

        # Of all slides, each once.
        shown = measured(metrics_of_draws, len(scores))
        texts = [f"{name.replace('_', ' ')} " + ("undefined" if v is None else f"{v:.3f}") for name, v in shown.items()]
        return f"with thresholds of the labels, mean {', '.join(texts)}", {**fitted, **shown, "slides": len(scores)}

    def describe(self) -> str:
        """Return the labels."""
        return f"labels {', '.join(self.labels)}"

    def text(self, target: Target) -> str:
        """Return the labels with ``;`` between them, ``none`` if there are none; unknown ones have a question mark."""
        return label_set_text(_states(target), self.labels)

    def target_of(self, text: str) -> Target | None:
        """Return the target that a text states; None if the text has neither form.

        The forms: what `text` returns, such as ``a;c?``, where labels without a name are absent and ``c?`` is unknown;
        or the cells of all columns, such as ``1;0;``, where an empty one is unknown.
        """
        parts = [part.strip() for part in text.replace("|", ";").split(";")]
        if len(self.columns) > 1 and len(parts) == len(self.labels) and all(map(_is_entry, parts)):
            states = [UNKNOWN if (state := state_of(part)) is None else state for part in parts]
            return tuple(states) if any(state != UNKNOWN for state in states) else None
        named = set(parts) - {"", NONE}
        possible = {form for name in self.labels for form in (name, f"{name}?")}
        if not text.strip() or not named <= possible:
            return None
        return tuple(YES if name in named else UNKNOWN if f"{name}?" in named else NO for name in self.labels)

    def warnings(self, train: Sequence[Target], val: Sequence[Target]) -> list[str]:
        """Return warnings about labels that all slides of a split have, or none."""
        warnings = []
        for slides, name, effect in (
            (train, "training", "cannot be learnt"),
            (val, "validation", "have no metrics and a threshold of 0.5"),
        ):
            targets = self.tensor(slides)
            alike = [
                label
                for k, label in enumerate(self.labels)
                if len(targets) and not bool((targets[:, k] == YES).any() and (targets[:, k] == NO).any())
            ]
            if alike:
                warnings.append(f"all {name} slides are alike in {', '.join(alike)}, which {effect}")
        return warnings

    def check_resumed(self, model: Mapping[str, Any]) -> None:
        """Check that the labels are the same; their weights may change with the data."""
        names = tuple(model["class_names"])
        if names != self.labels:
            raise RequestError(
                f"data.target: the labels are {', '.join(self.labels)}; those of the run {', '.join(names)}"
            )

    def readout(self, calibration: Mapping[str, Any] | None) -> LabelsReadout:
        """Return probabilities and thresholds."""
        chosen = (calibration or {}).get("thresholds")
        return LabelsReadout(
            self.labels, tuple(float((chosen or {}).get(name, HALF)) for name in self.labels), chosen is not None
        )

    def is_wrong(self, prediction: str, target: Target) -> bool:
        """Whether a known label is predicted that the slide does not have, or the reverse."""
        predicted = set(prediction.split(";"))
        states = zip(self.labels, _states(target), strict=True)
        return any((name in predicted) != (state == YES) for name, state in states if state != UNKNOWN)

    def page(
        self,
        values: NDArray[Any],
        targets: Sequence[Target],
        draws: NDArray[Any],
        readout: Readout,
        before: NDArray[Any] | None = None,
    ) -> PageSection:
        """Return the curves, the metrics and the table of all labels."""
        assert isinstance(readout, LabelsReadout)
        return labels_section(values, self.tensor(targets), draws, self.labels, readout.thresholds)

    def losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of each sample, (N,): the sum over its known labels, divided by the number of all labels."""
        logits = at_least_float32(outputs)
        is_known, yes = (targets != UNKNOWN).to(logits.dtype), (targets == YES).to(logits.dtype)
        losses = torch.nn.functional.binary_cross_entropy_with_logits(logits, yes, reduction="none") * is_known
        if self.weights:
            pairs = torch.tensor(self.weights, dtype=logits.dtype, device=logits.device)
            losses = losses * torch.where(yes > 0, pairs[:, 0], pairs[:, 1])
        return losses.sum(1) / len(self.labels)


def _is_entry(text: str) -> bool:
    return state_of(text) is not None or is_missing(text)


def _states(target: Target) -> tuple[float, ...]:
    assert isinstance(target, tuple)
    return target
