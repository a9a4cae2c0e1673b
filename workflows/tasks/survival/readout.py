"""How the outputs of a survival model are read: risk, survival at some times, risk group."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch

from pathology.predict.readout import PageColumn, ReadBar, Readout, Values, percent, points
from workflows.tasks.survival.losses import hazard_survival

HIGH, LOW = "high risk", "low risk"


@dataclass(frozen=True)
class SurvivalReadout(Readout):
    """Survival: a higher risk means an earlier event.

    With the loss ``cox``, the risk is the log hazard ratio to the mean of the validation slides; with ``hazards``, the
    probability of the event, averaged over ``times``. A slide has high risk if it exceeds the median of validation.

    Attributes:
        names: Names of the outputs.
        times: Times for which the probability of survival is stated.
        edges: Ends of the intervals of ``hazards``; empty with ``cox``.
        centre, spread: With ``cox``, mean and standard deviation of the outputs on validation slides.
        baseline: With ``cox``, cumulative hazard at ``times`` of a slide with risk 0; None: unknown.
        cutoff: The risk between the low and the high group; None: unknown.
    """

    names: tuple[str, ...]
    times: tuple[float, ...]
    edges: tuple[float, ...] = ()
    centre: float = 0.0
    spread: float = 1.0
    baseline: tuple[float, ...] | None = None
    cutoff: float | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """The risk, and the probability to survive each time."""
        return ("risk", *(f"survival_{time:.6g}" for time in self.times))

    @property
    def channels(self) -> tuple[str, ...]:
        """The risk, or the intervals."""
        return self.names

    def values(self, logits: Values) -> Values:
        """Return the risk and the probabilities."""
        if self.edges:
            survival = hazard_survival(torch.from_numpy(np.asarray(logits, np.float64))[None], self.edges, self.times)
            return np.concatenate([[1 - float(survival.mean())], survival[0].numpy()])
        risk = float(logits[0]) - self.centre
        hazards = np.full(len(self.times), math.nan) if self.baseline is None else np.array(self.baseline)
        # S(t) = exp(−H₀(t) · e^risk) with the baseline H₀; math.exp raises OverflowError above 709.
        return np.concatenate([[risk], np.exp(-hazards * math.exp(min(risk, 700.0)))])

    def position_scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Return hazards; with Cox, a position's quantile among the validation slides, if their risks are normal."""
        if self.edges:
            return logits.float().sigmoid()
        scores: torch.Tensor = torch.special.ndtr((logits.float() - self.centre) / self.spread)
        return scores

    def prediction(self, values: Values) -> str:
        """Return the risk group, or the risk if the cutoff is unknown."""
        if self.cutoff is None:
            return f"{values[0]:.3g}"
        return HIGH if values[0] > self.cutoff else LOW

    def main(self, values: Values) -> int:
        """Return the risk."""
        return 0

    def channel(self, values: Values) -> int:
        """Return the channel of the risk; with hazards, of the interval in which the event is most probable."""
        if not self.edges:
            return 0
        # Survival is known at `times` only: between them, a straight line is enough to find the interval.
        at = np.concatenate([[0.0], self.times])
        survival = np.interp(np.array(self.edges), at, np.concatenate([[1.0], values[1:]]))
        return int(np.argmax(np.concatenate([[1.0], survival[:-1]]) - survival))

    def bars(self, values: Values) -> Sequence[ReadBar]:
        """Return the probability to survive each time; the risk if these are unknown."""
        channel = self.channel(values)
        # Column 0 is the risk.
        shown = [
            ReadBar(f"survives {time:.6g}", float(values[column]), percent(float(values[column])), channel, column)
            for column, time in enumerate(self.times, 1)
            if not math.isnan(values[column])
        ]
        # A bar has a length from 0 to 1, which the sigmoid gives any risk.
        return shown or [ReadBar("risk", float(torch.tensor(values[0]).sigmoid()), f"{values[0]:.3g}", channel, 0)]

    def verdict(self, values: Values) -> str:
        """Return the risk."""
        return f"risk {values[0]:.3g}"

    def spread_text(self, spread: float, column: int) -> str:
        """Return percentage points of a probability to survive, or the spread of the risk itself."""
        return points(spread) if column else super().spread_text(spread, column)

    def note(self, models: int, calibrations: Sequence[Mapping[str, Any]]) -> str:
        """Return what the numbers mean."""
        averaged = (
            f"Mean of {models} models, ± their standard deviation, of survival in percentage points. "
            if models > 1
            else ""
        )
        kind = (
            "the mean probability of the event up to the times shown"
            if self.edges
            else "the log hazard ratio to the mean of the validation slides"
        )
        group = "unknown, as there were no validation slides"
        if self.cutoff is not None:
            group = f"high above {self.cutoff:.3g}, the median of the validation slides"
        return f"{averaged}The risk is {kind}; the group is {group}. Bars: probability to survive each time."

    def metadata(self, values: Values, uncalibrated: Values) -> dict[str, Any]:
        """Return the numbers."""
        return {"values": super().metadata(values, uncalibrated)["values"]}

    def page_columns(self) -> Sequence[PageColumn]:
        """Return the risk, and a bar for each time."""
        return [PageColumn("risk"), *(PageColumn(f"survives {time:.6g}", 0) for time in self.times)]

    def joined(self, members: Sequence[Self]) -> Self:
        """Return the readout with the mean cutoff of the members; None if one has none."""
        cutoffs = [member.cutoff for member in members]
        defined = [cutoff for cutoff in cutoffs if cutoff is not None]
        return replace(self, cutoff=sum(defined) / len(defined) if len(defined) == len(cutoffs) else None)
