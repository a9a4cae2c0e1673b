"""A number of each slide: Huber loss or squared error of standardised values, conformal intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray

from data.missing import is_missing
from data.samples.labels import Labels, Target
from data.samples.numbers import load_numbers
from hyfi_core.errors import RequestError
from pathology.predict.readout import ReadBar, Readout, Values
from workflows.config.targets import TargetKeys
from workflows.config.tasks import TASKS, TaskFacts
from workflows.tasks.bootstrap import measured, resampled
from workflows.tasks.cases import members_of
from workflows.tasks.number_metrics import number_metrics
from workflows.tasks.page_section import PageSection, metric_numbers, shown_metric
from workflows.tasks.plots import scatter_plot
from workflows.tasks.task import Aggregation, LabelSource, Task, at_least_float32, target_columns

LEVEL = 0.9
"""Share of new cases whose value lies in the prediction's interval; fewer than 9 validation cases give no interval."""


@dataclass(frozen=True)
class Regression(Task):
    """Numbers. A target is (value,); the model has one output, the value standardised by ``mean`` and ``std``.

    Attributes:
        mean: Mean of the training slides' values.
        std: Standard deviation of the training slides' values.
        kind: ``huber`` or ``mse``, of standardised values.
    """

    facts: ClassVar[TaskFacts] = TASKS["regression"]
    mean: float = 0.0
    std: float = 1.0
    kind: str = "huber"

    @classmethod
    def read_labels(cls, source: LabelSource) -> Labels:
        """Return the number of each slide; see ``Task`` and `data.samples.numbers.load_numbers`."""
        (column,) = source.columns
        merge = source.merge_alike
        return load_numbers(source.path, column, rows=source.rows, merge_alike=merge, missing=source.missing)

    @classmethod
    def fitted(cls, data: TargetKeys, labels: Labels, train: Sequence[Target]) -> Self:
        """Return the task with mean and standard deviation of the training slides."""
        values = np.array([_value(target) for target in train], dtype=np.float64)
        # Not by `std`: of equal numbers, it may be a rounding error above 0.
        if values.min() == values.max():
            raise RequestError(
                f"data.target: {labels.target!r} is {values[0]:g} for all {len(values)} training slides: there is "
                "nothing to learn"
            )
        return cls(data.columns, float(values.mean()), float(values.std()), data.named_loss)

    @classmethod
    def of_json(cls, model: Mapping[str, Any]) -> Self:
        """Return the task of a ``model.json``."""
        numbers = model["regression"]
        return cls(target_columns(model), float(numbers["mean"]), float(numbers["std"]), str(numbers["loss"]))

    def to_json(self) -> dict[str, Any]:
        """Return the target's name, and ``regression``: ``mean``, ``std``, ``loss``."""
        numbers = {"mean": self.mean, "std": self.std, "loss": self.kind}
        return {"class_names": list(self.names), "regression": numbers}

    @property
    def names(self) -> tuple[str, ...]:
        """The target."""
        return self.columns

    @property
    def outputs(self) -> int:
        """One."""
        return 1

    def tensor(self, targets: Iterable[Target]) -> torch.Tensor:
        """Return values (N,) float64."""
        return torch.tensor([_value(target) for target in targets], dtype=torch.float64)

    def in_units(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return values in the units of the target, (N, 1)."""
        return outputs * self.std + self.mean

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of standardised values."""
        return self.losses(outputs, targets).mean()

    def drawn(self, outputs: torch.Tensor, targets: torch.Tensor, counts: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the metrics of `workflows.tasks.number_metrics`, in the units of the target."""
        losses = (counts @ self.losses(outputs, targets)) / counts.sum(1)
        return {"loss": losses, **number_metrics(self._values(outputs), targets, counts)}

    def by_case(
        self, outputs: torch.Tensor, targets: torch.Tensor, of_case: torch.Tensor, how: Aggregation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean or the largest output and the mean or the largest value of each case."""
        reduce = torch.amax if how == "max" else torch.mean
        members = members_of(of_case)
        case_outputs = torch.stack([reduce(outputs[slides], 0) for slides in members])
        case_targets = torch.stack([reduce(targets[slides], 0) for slides in members])
        return case_outputs, case_targets

    def calibration(self, outputs: torch.Tensor, targets: torch.Tensor, of_case: torch.Tensor) -> dict[str, Any] | None:
        """Return the half width of intervals that contain the value of `LEVEL` of new cases.

        Split conformal prediction (Vovk et al., Algorithmic Learning in a Random World, 2005): of the residuals of n
        cases, the ⌈(n + 1) · level⌉-th smallest. A case counts with the largest residual of its slides.
        """
        if not bool(outputs.isfinite().all()):
            return None
        residuals = (self._values(outputs) - targets).abs()
        largest = torch.stack([residuals[members].amax() for members in members_of(of_case)]).sort().values
        rank = _interval_rank(len(largest))
        if rank is None:
            return None
        return {"half_width": float(largest[rank - 1]), "level": LEVEL, "cases": len(largest)}

    def describe_calibration(
        self, outputs: torch.Tensor, targets: torch.Tensor, fitted: Mapping[str, Any]
    ) -> tuple[str, dict[str, Any]] | None:
        """Return the share of the slides whose value lies within its interval."""
        inside = (self._values(outputs) - targets).abs() <= float(fitted["half_width"])
        share = float(inside.double().mean())
        text = f"intervals of ± {fitted['half_width']:.4g} contain {share:.1%} of {len(inside)} values"
        return f"{text} ({fitted['level']:.0%} expected)", {**fitted, "contained": share, "slides": len(inside)}

    def describe(self) -> str:
        """Return the target and its mean."""
        return f"{self.columns[0]} (mean {self.mean:.4g}, standard deviation {self.std:.4g})"

    def text(self, target: Target) -> str:
        """Return the number."""
        return f"{_value(target):.12g}"

    def target_of(self, text: str) -> Target | None:
        """Return the number of a text."""
        try:
            value = math.nan if is_missing(text) else float(text)
        except ValueError:
            return None
        return (value,) if math.isfinite(value) else None

    def warnings(self, train: Sequence[Target], val: Sequence[Target]) -> list[str]:
        """Return a warning if r2 and spearman are undefined on validation slides, or there will be no intervals."""
        warnings = []
        if val and len(set(val)) == 1:
            warnings.append("all validation slides have the same value: r2 and spearman are undefined")
        if val and _interval_rank(len(val)) is None:
            warnings.append(f"{len(val)} validation slides: predictions get no interval, which needs 9 cases")
        return warnings

    def readout(self, calibration: Mapping[str, Any] | None) -> Readout:
        """Return the value in the units of the target, with its interval if there is one."""
        width = (calibration or {}).get("half_width")
        return NumberReadout(self.columns[0], self.mean, self.std, None if width is None else float(width))

    def page(
        self,
        values: NDArray[np.float64],
        targets: Sequence[Target],
        draws: NDArray[np.float64],
        readout: Readout,
        before: NDArray[np.float64] | None = None,
    ) -> PageSection:
        """Return a plot of predicted against true values, and the error of each slide."""
        true, predicted = self.tensor(targets), torch.from_numpy(np.ascontiguousarray(values[:, 0]))

        def metrics_of_draws(counts: torch.Tensor) -> dict[str, torch.Tensor]:
            return number_metrics(predicted, true, counts)

        # Of the slides, each once; the draws give their intervals.
        once = measured(metrics_of_draws, len(true))
        bounds = resampled(metrics_of_draws, self.facts.metrics, torch.from_numpy(draws))
        metrics = [shown_metric(name, value, bounds[name]) for name, value in once.items()]
        plot = scatter_plot(true.numpy(), values, self.columns[0])
        errors = (predicted - true).abs().tolist()
        return PageSection(metrics, [plot], errors=dict(enumerate(errors)), numbers=metric_numbers(once, bounds))

    def _values(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs[:, 0].double() * self.std + self.mean

    def losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of each sample, (N,), which training and validation average.

        Args:
            outputs: (N, 1), standardised; ``in_units`` makes them values.
            targets: (N,) in the units of the target.
        """
        predicted = at_least_float32(outputs)[:, 0]
        # Subtracted in float64, as targets are: of years such as 2024, few digits of float32 would be left.
        standard = ((targets - self.mean) / self.std).to(predicted.dtype)
        function = torch.nn.functional.mse_loss if self.kind == "mse" else torch.nn.functional.huber_loss
        return function(predicted, standard, reduction="none")


@dataclass(frozen=True)
class NumberReadout(Readout):
    """A number in the units of the target.

    The score of a position is its quantile among the training values, if these are normally distributed.

    Attributes:
        name: The target.
        mean, std: Mean and standard deviation that turn outputs into values.
        half_width: Half the width of the interval; None: there is no interval.
    """

    name: str
    mean: float
    std: float
    half_width: float | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """The value and its interval."""
        return ("value", "value_low", "value_high")

    @property
    def channels(self) -> tuple[str, ...]:
        """The target."""
        return (self.name,)

    def values(self, logits: Values) -> Values:
        """Return the value and its interval."""
        value = float(logits[0]) * self.std + self.mean
        width = math.nan if self.half_width is None else self.half_width
        return np.array([value, value - width, value + width])

    def uncalibrated(self, logits: Values) -> Values:
        """Return the numbers of `values`: nothing of them was fitted on validation slides."""
        return self.values(logits)

    def position_scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the normal distribution function of standardised outputs: 0.5 is the mean of the training slides."""
        scores: torch.Tensor = torch.special.ndtr(logits.float())
        return scores

    def prediction(self, values: Values) -> str:
        """Return the value with four digits."""
        return f"{values[0]:.4g}"

    def main(self, values: Values) -> int:
        """Return the value."""
        return 0

    def channel(self, values: Values) -> int:
        """Return the only one."""
        return 0

    def bars(self, values: Values) -> Sequence[ReadBar]:
        """Return the value, on a bar of the distribution of the training values."""
        quantile = float(torch.special.ndtr(torch.tensor((values[0] - self.mean) / self.std)))
        return [ReadBar(self.name, quantile, self.prediction(values), 0)]

    def verdict(self, values: Values) -> str:
        """Return the interval."""
        return "" if math.isnan(values[1]) else f"{values[1]:.4g} to {values[2]:.4g}"

    def note(self, models: int, calibrations: Sequence[Mapping[str, Any]]) -> str:
        """Return what the interval means."""
        fitted = f"a new case lies in the interval with a probability of {LEVEL:.0%}, if it is like those of validation"
        how = fitted if self.half_width is not None else "no interval: too few validation cases"
        averaged = f"Mean of {models} models, ± their standard deviation. " if models > 1 else ""
        return f"{averaged}The bar is the place among the training slides; {how}."

    def metadata(self, values: Values, uncalibrated: Values) -> dict[str, Any]:
        """Return the numbers."""
        return {"values": super().metadata(values, uncalibrated)["values"]}


def _interval_rank(cases: int) -> int | None:
    """Return which of the residuals of ``cases`` cases, from the smallest, is half an interval; None: no interval."""
    # + 1 for the new case: with 8 cases, even the largest residual holds for 8 of 9 only.
    rank = math.ceil((cases + 1) * LEVEL)
    return rank if rank <= cases else None


def _value(target: Target) -> float:
    assert isinstance(target, tuple)
    return target[0]
