"""Readouts: from the outputs of a model to the numbers and prediction of a slide, and the scores of a heatmap.

Code of predictions uses the interface `Readout`; `ClassReadout` is that of classes, other tasks have their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray

Values = NDArray[np.float64]


@dataclass(frozen=True)
class ReadBar:
    """A line with a bar in a slide's report.

    Attributes:
        name: Name of the number.
        share: Length of the bar, 0 to 1.
        text: The number as text.
        channel: Index of the channel whose colour the bar has, or `NO_CHANNEL`.
        column: Index of the readout's column with the number; None: the index of the bar.
    """

    name: str
    share: float
    text: str
    channel: int
    column: int | None = None


@dataclass(frozen=True)
class PageColumn:
    """A number of each slide on a page; ``channel``: for shares from 0 to 1, the channel that colours their bars.

    `NO_CHANNEL` if there is none.
    """

    name: str
    channel: int | None = None


class Readout(ABC):
    """How the outputs of one model are read. Channels of the heatmap are the model's outputs.

    Attributes:
        exclusive: Whether the scores of a position sum to 1 over the channels.
    """

    exclusive: ClassVar[bool] = False

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """Names of the numbers of a slide, as in ``predictions.csv``."""

    @property
    @abstractmethod
    def channels(self) -> tuple[str, ...]:
        """Names of the heatmap's channels, one for each output."""

    @abstractmethod
    def values(self, logits: Values) -> Values:
        """Return the numbers of a slide, (columns,), from the outputs (channels,); NaN where there is none."""

    def uncalibrated(self, logits: Values) -> Values:
        """Return the numbers of `values` as they are without what was fitted on validation slides."""
        return self.values(logits)

    @abstractmethod
    def position_scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Return scores from 0 to 1 of positions, (channels, h, w), from their outputs (channels, h, w)."""

    @abstractmethod
    def prediction(self, values: Values) -> str:
        """Return the prediction of a slide as text."""

    @abstractmethod
    def main(self, values: Values) -> int:
        """Return the column whose spread over an ensemble counts."""

    @abstractmethod
    def channel(self, values: Values) -> int:
        """Return the channel whose regions are shown."""

    @abstractmethod
    def bars(self, values: Values) -> Sequence[ReadBar]:
        """Return the lines of a slide's report."""

    def main_bar(self, values: Values) -> int:
        """Return the index of the bar that is emphasised: that of the channel whose regions are shown."""
        channel = self.channel(values)
        return next((k for k, bar in enumerate(self.bars(values)) if bar.channel == channel), 0)

    @abstractmethod
    def verdict(self, values: Values) -> str:
        """Return the text beside the prediction in a report, such as its probability; may be empty."""

    def brief(self, values: Values) -> str:
        """Return the verdict for a line of text."""
        return self.verdict(values)

    def spread_text(self, spread: float, column: int) -> str:
        """Return the standard deviation of a column's number over an ensemble as text, in the unit of its bar."""
        return f"{spread:.3g}"

    @abstractmethod
    def note(self, models: int, calibrations: Sequence[Mapping[str, Any]]) -> str:
        """Return how the numbers of a report were computed; ``calibrations``: those of the members that have one."""

    def metadata(self, values: Values, uncalibrated: Values) -> dict[str, Any]:
        """Return the keys of ``prediction.json`` with the numbers of a slide; null where there is none."""
        arrays = {"values": values, "values_uncalibrated": uncalibrated}
        return {
            name: {
                column: value if np.isfinite(value) else None
                for column, value in zip(self.columns, array.tolist(), strict=True)
            }
            for name, array in arrays.items()
        }

    def page_columns(self) -> Sequence[PageColumn]:
        """Return how a page of many slides shows ``columns``."""
        return [PageColumn(name) for name in self.columns]

    def joined(self, members: Sequence[Self]) -> Self:
        """Return the readout of an ensemble, whose members have ``members``, this one among them."""
        return self


@dataclass(frozen=True)
class ClassReadout(Readout):
    """Classes: their probabilities are the softmax of the logits divided by a temperature.

    Attributes:
        names: Names of the classes.
        temperature: See `workflows.tasks.calibration`.
    """

    names: tuple[str, ...]
    temperature: float = 1.0
    exclusive: ClassVar[bool] = True

    @property
    def columns(self) -> tuple[str, ...]:
        """``p_<class>`` of each class."""
        return tuple(f"p_{name}" for name in self.names)

    @property
    def channels(self) -> tuple[str, ...]:
        """The classes."""
        return self.names

    def values(self, logits: Values) -> Values:
        """Return the probabilities."""
        return softmax(logits / self.temperature)

    def uncalibrated(self, logits: Values) -> Values:
        """Return the probabilities without temperature."""
        return softmax(logits)

    def position_scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the softmax of the positions."""
        return (logits.float() / self.temperature).softmax(dim=0)

    def prediction(self, values: Values) -> str:
        """Return the class with the highest probability, the first of equals."""
        return self.names[self.channel(values)]

    def main(self, values: Values) -> int:
        """Return the class with the highest probability."""
        return self.channel(values)

    def channel(self, values: Values) -> int:
        """Return the class with the highest probability."""
        return int(values.argmax())

    def bars(self, values: Values) -> Sequence[ReadBar]:
        """Return the classes with their probabilities."""
        return [ReadBar(name, float(values[k]), percent(float(values[k])), k) for k, name in enumerate(self.names)]

    def verdict(self, values: Values) -> str:
        """Return the probability of the class."""
        return percent(float(values.max()))

    def page_columns(self) -> Sequence[PageColumn]:
        """Return a bar for each class."""
        return [PageColumn(name, k) for k, name in enumerate(self.names)]

    def metadata(self, values: Values, uncalibrated: Values) -> dict[str, Any]:
        """Return the probabilities, in the order of the classes."""
        return {"probabilities": values.tolist(), "probabilities_uncalibrated": uncalibrated.tolist()}

    def brief(self, values: Values) -> str:
        """Return the probability of the class as a number."""
        return f"{values.max():.3f}"

    def spread_text(self, spread: float, column: int) -> str:
        """Return percentage points."""
        return points(spread)

    def note(self, models: int, calibrations: Sequence[Mapping[str, Any]]) -> str:
        """Return a sentence that the numbers are a softmax, with its temperatures."""
        fitted = [f"{float(calibration.get('temperature', 1.0)):.3g}" for calibration in calibrations]
        note = f"calibrated by temperature {', '.join(fitted)}" if len(fitted) == models else "not calibrated"
        if models == 1:
            return f"Softmax of the model's logits: a score between 0 and 1, {note}."
        return f"Mean of {models} models, ± their standard deviation in percentage points; {note}."


def softmax(logits: Values) -> Values:
    """Return the softmax of ``logits`` (classes,)."""
    # The largest is subtracted, as `exp` of a large logit would be infinite.
    weights = np.exp(logits - logits.max())
    probabilities: Values = weights / weights.sum()
    return probabilities


def points(spread: float) -> str:
    """Return the standard deviation of a probability in percentage points, for a bar that `percent` describes."""
    return f"{spread * 100:.1f}"


def percent(fraction: float) -> str:
    """Return a fraction as a percentage; only 0 and 1 themselves are shown as 0 and 100 %."""
    if 0 < fraction < 0.001:
        return "< 0.1 %"
    if 0.999 < fraction < 1:
        return "> 99.9 %"
    return f"{fraction * 100:.1f} %"
