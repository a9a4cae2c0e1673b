"""Several targets of one model: the outputs of all side by side, and the weighted sum of their losses."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray

from data.csv_table import Table, read_table
from data.samples.labels import Labels, Target
from hyfi_core.errors import RequestError
from pathology.predict.readout import Readout
from workflows.config.data import DataConfig
from workflows.config.targets import SEVERAL, TargetKeys
from workflows.config.tasks import TaskFacts
from workflows.tasks.bootstrap import Intervals
from workflows.tasks.class_metrics import Metrics
from workflows.tasks.own_task import name_of
from workflows.tasks.page_section import MetricNumber, PageSection
from workflows.tasks.several.labels import side_by_side
from workflows.tasks.several.part import TargetPart, parts_of
from workflows.tasks.several.readout import BETWEEN, SeveralReadout, calibration_of, texts_of
from workflows.tasks.single import single_task
from workflows.tasks.task import Aggregation, LabelSource, Task, target_columns

_KEYS = re.compile(r"\b(?:data|model)\.(task|target|loss|time_bins|class_weights|classes)\b")
"""Keys of a run with one target; with several, each target has its own."""


@dataclass(frozen=True)
class Several(Task):
    """Several targets. The label of a slide has the numbers of each, NaN where the slide lacks it.

    Attributes:
        parts: The targets.
    """

    facts: ClassVar[TaskFacts] = TaskFacts(SEVERAL, "each slide has several targets", (), (), ())
    parts: tuple[TargetPart, ...] = ()

    @classmethod
    def read_labels(cls, source: LabelSource) -> Labels:
        """Return the labels of all targets; see ``Task``."""
        labels = []
        for target in source.targets:
            target_source = replace(source, columns=target.columns, classes=target.classes, targets=())
            with _in_target(target.title):
                labels.append(single_task(target.task).read_labels(target_source))
        titles = [target.title for target in source.targets]
        return side_by_side(titles, labels, [_numbers_of(target_labels) for target_labels in labels])

    def read_again(
        self, path: Path | Table, rows: Sequence[Mapping[str, str]], merge_alike: bool, missing: tuple[str, ...]
    ) -> Labels:
        """Return the labels of a table for a trained model; a table of another cohort may lack some targets."""
        columns, first = set(read_table(path, "labels").columns), 0
        part_labels: list[Labels | None] = []
        for part in self.parts:
            # `self.columns` are those of `--target`, if it was given; the task has those of training.
            own = self.columns[first : first + len(part.task.columns)]
            first += len(own)
            task = replace(part.task, columns=own)
            part_labels.append(task.read_again(path, rows, merge_alike, missing) if columns.intersection(own) else None)
        if not any(part_labels):
            raise RequestError(f"{path}: no column {', '.join(self.columns)}; it has {', '.join(sorted(columns))}")
        names = [part.name for part in self.parts]
        labels = side_by_side(names, part_labels, [part.task.label_numbers for part in self.parts])
        absent = [name for name, own_labels in zip(names, part_labels, strict=True) if own_labels is None]
        note = f"{path} has no column of {', '.join(absent)}, which cannot be evaluated"
        return replace(labels, notes=(*labels.notes, note)) if absent else labels

    @classmethod
    def fitted(cls, data: TargetKeys, labels: Labels, train: Sequence[Target]) -> Self:
        """Return the tasks of all targets, each fitted to the slides that have a label of it."""
        assert isinstance(data, DataConfig) and data.targets is not None
        tasks = []
        trained = _labels_of_each(labels, train)
        for target, own_labels, own_train in zip(data.targets, labels.parts, trained, strict=True):  # type: ignore[attr-defined]
            if not own_train:
                raise RequestError(
                    f"data.targets: none of {len(train)} training slides has a label of {target.title!r} "
                    f"({', '.join(target.columns)}); check the splits, or leave the target out"
                )
            with _in_target(target.title):
                task = single_task(target.task).fitted(target, own_labels, own_train)
            task = replace(task, own_loss=target.own_loss)
            tasks.append((target.title, task, target.weight, len(own_train) / len(train)))
        return cls(data.columns, parts_of(tasks))

    @classmethod
    def of_json(cls, model: Mapping[str, Any]) -> Self:
        """Return the tasks of a ``model.json``."""
        tasks = []
        for entry in model["targets"]:
            task = replace(single_task(str(entry["task"])).of_json(entry), own_loss=str(entry.get("loss", "")))
            tasks.append((str(entry["name"]), task, float(entry["weight"]), float(entry["labelled"])))
        return cls(target_columns(model), parts_of(tasks))

    def to_json(self) -> dict[str, Any]:
        """Return the names of the outputs, and ``targets``: what the ``model.json`` of each would say."""
        targets = [
            {
                "name": part.name,
                "task": name_of(part.task),
                "target": list(part.task.columns),
                "weight": part.weight,
                "labelled": part.labelled,
                "loss": part.task.own_loss,
                **part.task.to_json(),
            }
            for part in self.parts
        ]
        return {"class_names": list(self.names), "targets": targets}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the outputs of each, after its name and a dot."""
        return self.readout(None).channels

    @property
    def outputs(self) -> int:
        """Number of outputs of all targets."""
        return self.parts[-1].outputs[1]

    @property
    def label_numbers(self) -> int:
        """Number of numbers in the labels of all targets."""
        return self.parts[-1].numbers[1]

    @property
    def loss_over(self) -> Literal["batch", "microbatch"]:
        """``batch`` if the loss of a target is computed over the batch."""
        return "batch" if any(part.over_batch for part in self.parts) else "microbatch"

    @property
    def metric_names(self) -> tuple[str, ...]:
        """``loss``, and loss and metrics of each target, after its name and a dot."""
        return ("loss", *(f"{part.name}.{name}" for part in self.parts for name in part.task.metric_names))

    def tensor(self, targets: Iterable[Target]) -> torch.Tensor:
        """Return (N, numbers) float64, NaN where a slide lacks a target."""
        return torch.tensor(list(targets), dtype=torch.float64).reshape(-1, self.label_numbers)

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return Σ weight · loss of each target."""
        losses = [part.weight * part.loss(outputs, targets) for part in self.parts]
        return torch.stack(losses).sum()

    def drawn(self, outputs: torch.Tensor, targets: torch.Tensor, counts: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the metrics of each target on the slides that have it, and the weighted sum of their losses."""
        metrics: dict[str, torch.Tensor] = {}
        total = torch.zeros(len(counts), dtype=torch.float64)
        for part in self.parts:
            own_outputs, labels = part.labelled_rows(outputs, targets)
            if not len(labels):
                metrics |= {f"{part.name}.{name}": torch.full_like(total, math.nan) for name in part.task.metric_names}
                continue
            own = part.task.drawn(own_outputs, labels, counts[:, part.has_label(targets)])
            metrics |= {f"{part.name}.{name}": own[name] for name in part.task.metric_names}
            total = total + part.weight * own["loss"]
        return {"loss": total, **metrics}

    def metrics(self, outputs: torch.Tensor, targets: torch.Tensor) -> Metrics:
        """Return the metrics of each target, and ``loss``: the weighted sum of their losses that are defined."""
        metrics = super().metrics(outputs, targets)
        for part in self.parts:
            # The metrics above are computed by `drawn`, which does not know the user's loss.
            if part.task.loss_is_own:
                own = part.task.metrics(*part.labelled_rows(outputs, targets))
                metrics |= {f"{part.name}.{name}": value for name, value in own.items()}
        if not self.own_loss:
            losses = [(part.weight, metrics[f"{part.name}.loss"]) for part in self.parts]
            weighted = [weight * loss for weight, loss in losses if loss is not None]
            metrics["loss"] = sum(weighted) if weighted else None
        return metrics

    def intervals(self, outputs: torch.Tensor, targets: torch.Tensor, counts: torch.Tensor) -> Intervals:
        """Return the intervals of each target, as its task has them; the sum of the losses has none."""
        intervals: Intervals = {}
        for part in self.parts:
            # Of the slides that have a label of this target.
            own = part.task.intervals(*part.labelled_rows(outputs, targets), counts[:, part.has_label(targets)])
            # The user's functions return one number, without draws.
            own |= dict.fromkeys(part.task.own_names)
            intervals |= {f"{part.name}.{name}": interval for name, interval in own.items()}
        return intervals

    def with_labels(self, targets: Sequence[Target]) -> Sequence[tuple[Task, Sequence[Target]]]:
        """Return the tasks with the labels of the slides that have one."""
        return [(part.task, part.labels_of(targets)) for part in self.parts]

    def try_own(self, batch: Sequence[Target], evaluated: Sequence[Target]) -> None:
        """Try the user's own functions of all targets, and those of each; see ``Task``."""
        super().try_own(batch, evaluated)
        for part in self.parts:
            # A batch, or the slides to evaluate, may have no label of a target: then those of the other are tried.
            of_batch, of_evaluated = part.labels_of(batch), part.labels_of(evaluated)
            if part.task.own_loss and (of_batch or of_evaluated):
                part.task.try_own(of_batch or of_evaluated, of_evaluated or of_batch)

    def in_units(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs of each as its task gives them."""
        return torch.cat([part.task.in_units(outputs[:, slice(*part.outputs)]) for part in self.parts], 1)

    def by_case(
        self, outputs: torch.Tensor, targets: torch.Tensor, of_case: torch.Tensor, how: Aggregation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return outputs and labels of M cases; for each target they come from the slides that have its label."""
        cases = int(of_case.max()) + 1 if len(of_case) else 0
        # 0 for a target whose label the case lacks: these outputs count nowhere.
        merged = torch.zeros(cases, self.outputs, dtype=torch.float64)
        labels = torch.full((cases, self.label_numbers), math.nan, dtype=torch.float64)
        for part in self.parts:
            # Numbered anew: tasks expect cases 0, 1, …, and here some may lack the target.
            labelled, own_case = of_case[part.has_label(targets)].unique(return_inverse=True)
            if not len(labelled):
                continue
            own, own_labels = part.task.by_case(*part.labelled_rows(outputs, targets), own_case, how)
            merged[labelled, slice(*part.outputs)] = own.double()
            labels[labelled, slice(*part.numbers)] = own_labels.double().reshape(len(labelled), -1)
        return merged, labels

    def calibration(self, outputs: torch.Tensor, targets: torch.Tensor, of_case: torch.Tensor) -> dict[str, Any] | None:
        """Return what is fitted for each target, under ``targets`` and its name."""
        fitted = {}
        for part in self.parts:
            own_outputs, labels = part.labelled_rows(outputs, targets)
            # Numbered anew, as in `by_case`.
            _, own_case = of_case[part.has_label(targets)].unique(return_inverse=True)
            own = part.task.calibration(own_outputs, labels, own_case) if len(labels) else None
            if own is not None:
                fitted[part.name] = own
        return {"targets": fitted} if fitted else None

    def describe_calibration(
        self, outputs: torch.Tensor, targets: torch.Tensor, fitted: Mapping[str, Any]
    ) -> tuple[str, dict[str, Any]] | None:
        """Return the effect of what was fitted for each target, as text and as JSON; None: no effect."""
        texts, effects = [], {}
        for part in self.parts:
            own, (own_outputs, labels) = calibration_of(fitted, part.name), part.labelled_rows(outputs, targets)
            if own is None or not len(labels):
                continue
            described = part.task.describe_calibration(own_outputs, labels, own)
            if described is not None:
                text, effects[part.name] = described
                texts.append(f"{part.name} ({len(labels)} labelled): {text}")
        return ("; ".join(texts), {"targets": effects}) if texts else None

    def describe(self) -> str:
        """Return what each predicts, its weight, and the share of the training slides that have it."""
        return "; ".join(
            f"{part.name}: {part.task.facts.name}, {part.task.describe()}"
            + (f", weight {part.weight:g}" if part.weight != 1 else "")
            + (f", {part.labelled:.0%} of the training slides labelled" if part.labelled < 1 else "")
            for part in self.parts
        )

    def text(self, target: Target) -> str:
        """Return the label of each that the slide has, after its name: ``grade: high | age: 41``."""
        pairs = [(part, part.label_of(target)) for part in self.parts]
        return BETWEEN.join(f"{part.name}: {part.task.text(own)}" for part, own in pairs if own is not None)

    def target_of(self, text: str) -> Target | None:
        """Return the labels in ``grade: high | age: 41``, or in the columns' cells, ``high;41``; None: none is."""
        texts, cells = texts_of(text, [part.name for part in self.parts]), text.split(";")
        if not texts and len(cells) == len(self.columns):
            # A target of two columns, such as time and event, takes two cells.
            ends = np.cumsum([len(part.task.columns) for part in self.parts])[:-1]
            texts = {part.name: ";".join(own) for part, own in zip(self.parts, np.split(cells, ends), strict=True)}
        numbers: list[float] = []
        for part in self.parts:
            own = part.task.target_of(texts[part.name]) if texts.get(part.name) else None
            if own is None:
                numbers += (math.nan,) * part.task.label_numbers
            else:
                numbers += (float(own),) if isinstance(own, int) else own
        return None if all(map(math.isnan, numbers)) else tuple(numbers)

    def warnings(self, train: Sequence[Target], val: Sequence[Target]) -> list[str]:
        """Return the warnings of each target, after its name."""
        warnings = []
        for part in self.parts:
            own_train, own_val = part.labels_of(train), part.labels_of(val)
            if val and not own_val:
                warnings.append(f"{part.name}: no validation slide has a label: its metrics are undefined")
            warnings += [f"{part.name}: {text}" for text in part.task.warnings(own_train, own_val)]
        return warnings

    def check_batch(self, batch: int) -> None:
        """Check each target for the slides of a batch that have a label of it, on average."""
        for part in self.parts:
            # Of a user's own loss nothing is known.
            if not part.task.own_loss:
                # Only labelled slides count: a batch of 8 has 4 of a target that half of the slides lack.
                part.task.check_batch(max(1, math.floor(batch * part.labelled)))

    def check_validation(self, val: Sequence[Target]) -> None:
        """Check each target."""
        for part in self.parts:
            if own := part.labels_of(val):
                part.task.check_validation(own)

    def batch_warnings(self, batch: int) -> list[str]:
        """Return the warnings of each target, after its name."""
        return [
            f"{part.name}: {text}"
            for part in self.parts
            for text in part.task.batch_warnings(max(1, math.floor(batch * part.labelled)))
        ]

    def readout(self, calibration: Mapping[str, Any] | None) -> SeveralReadout:
        """Return the readouts of all targets."""
        names = tuple(part.name for part in self.parts)
        readouts = (part.task.readout(calibration_of(calibration, part.name)) for part in self.parts)
        return SeveralReadout(names, tuple(readouts))

    def is_wrong(self, prediction: str, target: Target) -> bool:
        """Whether the prediction of a target is wrong."""
        texts = texts_of(prediction, [part.name for part in self.parts])
        pairs = [(part, part.label_of(target)) for part in self.parts]
        return any(part.task.is_wrong(texts.get(part.name, ""), own) for part, own in pairs if own is not None)

    def page(
        self,
        values: NDArray[np.float64],
        targets: Sequence[Target],
        draws: NDArray[np.float64],
        readout: Readout,
        before: NDArray[np.float64] | None = None,
    ) -> PageSection:
        """Return the page sections of the targets, each after its name and of the slides that have a label for it."""
        assert isinstance(readout, SeveralReadout)
        part_values = readout.of_each(values)
        part_before = [None] * len(part_values) if before is None else readout.of_each(before)
        sections = {}
        for part, own_readout, own_values, own_before in zip(
            self.parts, readout.parts, part_values, part_before, strict=True
        ):
            rows = [k for k, target in enumerate(targets) if part.label_of(target) is not None]
            if not rows:
                continue
            own, uncalibrated = own_values[rows], None if own_before is None else own_before[rows]
            if uncalibrated is not None and np.array_equal(uncalibrated, own, equal_nan=True):
                uncalibrated = None  # another target was calibrated, not this one
            page = part.task.page(own, part.labels_of(targets), draws[:, rows], own_readout, uncalibrated)
            sections[part.name] = (rows, page)
        return _joined(sections)


def _joined(sections: Mapping[str, tuple[Sequence[int], PageSection]]) -> PageSection:
    """Return the sections of several targets as one; errors of a target count relative to its largest.

    ``sections``: name of a target -> (indices of its labelled slides among all, the section of these slides).
    """
    metrics, plots, tables = [], [], []
    numbers: dict[str, MetricNumber] = {}
    errors: dict[int, float] = {}
    for name, (rows, section) in sections.items():
        metrics += [(f"{name}: {title}", text) for title, text in section.metrics]
        plots += [replace(plot, title=f"{name}: {plot.title}") for plot in section.plots]
        tables += [replace(table, caption=f"{name}: {table.caption}") for table in section.tables]
        numbers |= {f"{name}.{title}": number for title, number in section.numbers.items()}
        # Errors of years and of grades have no common unit: each counts by the share of its largest.
        largest = max(section.errors.values(), default=0.0) or 1.0
        for index, size in section.errors.items():
            errors[rows[index]] = errors.get(rows[index], 0.0) + size / largest
    return PageSection(metrics, plots, tables, errors, numbers)


@contextmanager
def _in_target(title: str) -> Iterator[None]:
    """Context in which a refusal names the target, and its keys without ``data.`` and ``model.``."""
    try:
        yield
    except RequestError as error:
        # With several targets, keys are those of an entry of the list: `task`, not `data.task`.
        own = _KEYS.sub(r"\1", str(error))
        raise RequestError(f"data.targets, {title}: {own}") from error


def _labels_of_each(labels: Labels, targets: Sequence[Target]) -> list[list[Target]]:
    """Return the labels of each target, of the slides that have one."""
    rows = [labels.each(target) for target in targets]  # type: ignore[attr-defined]
    count = len(labels.parts)  # type: ignore[attr-defined]
    return [[label for row in rows if (label := row[k]) is not None] for k in range(count)]


def _numbers_of(labels: Labels) -> int:
    """Return how many numbers a label of a slide has; the index of a class is one."""
    first = next(target for target in labels.indices.values() if target is not None)
    return 1 if isinstance(first, int) else len(first)
