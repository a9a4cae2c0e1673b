"""How the outputs of an ordinal model are read: a probability of each grade, and their median."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pathology.predict.colors import NO_CHANNEL
from pathology.predict.readout import PageColumn, ReadBar, Readout, Values, percent, points
from workflows.tasks.ordinal.corn import predicted_grades
from workflows.tasks.ordinal.links import LINKS


@dataclass(frozen=True)
class GradeReadout(Readout):
    """Grades; each channel of the heatmap is the probability of a grade above one of them.

    Attributes:
        names: The grades, the lowest first.
        link: Name of the loss, see `LINKS`.
    """

    names: tuple[str, ...]
    link: str = "corn"

    @property
    def columns(self) -> tuple[str, ...]:
        """``p_<grade>`` of each grade."""
        return tuple(f"p_{name}" for name in self.names)

    @property
    def channels(self) -> tuple[str, ...]:
        """``above <grade>`` of all but the highest."""
        return tuple(f"above {name}" for name in self.names[:-1])

    def values(self, logits: Values) -> Values:
        """Return the probabilities."""
        probabilities: Values = LINKS[self.link].probabilities(torch.from_numpy(np.asarray(logits, np.float64))).numpy()
        return probabilities

    def position_scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the probability of a grade above each."""
        return LINKS[self.link].above(logits.float().movedim(0, -1)).exp().movedim(-1, 0)

    def grade(self, values: Values) -> int:
        """Return the index of the median grade."""
        return int(predicted_grades(torch.from_numpy(np.asarray(values, np.float64))[None]))

    def prediction(self, values: Values) -> str:
        """Return the median grade."""
        return self.names[self.grade(values)]

    def main(self, values: Values) -> int:
        """Return the median grade."""
        return self.grade(values)

    def channel(self, values: Values) -> int:
        """Return the channel ``above`` the next lower grade, the first channel for the lowest grade."""
        return max(0, self.grade(values) - 1)

    def bars(self, values: Values) -> Sequence[ReadBar]:
        """Return the grades with their probabilities, each in the colour of the channel above the next lower grade.

        The lowest grade has no channel.
        """
        return [
            ReadBar(name, float(values[k]), percent(float(values[k])), k - 1 if k else NO_CHANNEL)
            for k, name in enumerate(self.names)
        ]

    def main_bar(self, values: Values) -> int:
        """Return the median grade."""
        return self.grade(values)

    def _reached(self, values: Values) -> float:
        return float(values[self.grade(values) :].sum())

    def verdict(self, values: Values) -> str:
        """Return the probability of the median grade or a higher one."""
        return f"{percent(self._reached(values))} for {self.prediction(values)} or higher"

    def brief(self, values: Values) -> str:
        """Return this probability as a number between 0 and 1."""
        return f"{self._reached(values):.3f} for {self.prediction(values)} or higher"

    def spread_text(self, spread: float, column: int) -> str:
        """Return percentage points."""
        return points(spread)

    def note(self, models: int, calibrations: Sequence[Mapping[str, Any]]) -> str:
        """Return what is predicted."""
        averaged = f"Mean of {models} models, ± their standard deviation in percentage points. " if models > 1 else ""
        return f"{averaged}The prediction is the median grade: a higher one has a probability of at most 50 %."

    def metadata(self, values: Values, uncalibrated: Values) -> dict[str, Any]:
        """Return the numbers."""
        return {"values": super().metadata(values, uncalibrated)["values"]}

    def page_columns(self) -> Sequence[PageColumn]:
        """Return a bar for each grade."""
        return [PageColumn(bar.name, bar.channel) for bar in self.bars(np.zeros(len(self.names)))]
