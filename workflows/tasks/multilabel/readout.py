"""How the outputs of a multilabel model are read: the probability of each label, and which reach their thresholds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch

from data.samples.label_sets import NONE
from pathology.predict.readout import PageColumn, ReadBar, Readout, Values, percent, points

HALF = 0.5
_BRIEFLY = 4


@dataclass(frozen=True)
class LabelsReadout(Readout):
    """Several labels: the probability of each is the sigmoid of its logit; it is predicted from its threshold on.

    Attributes:
        names: The labels.
        thresholds: Threshold on the probability of each label.
        chosen: Whether the thresholds were chosen on validation slides; otherwise they are one half.
    """

    names: tuple[str, ...]
    thresholds: tuple[float, ...]
    chosen: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """``p_<label>`` of each label."""
        return tuple(f"p_{name}" for name in self.names)

    @property
    def channels(self) -> tuple[str, ...]:
        """The labels."""
        return self.names

    def values(self, logits: Values) -> Values:
        """Return the probabilities."""
        probabilities: Values = torch.from_numpy(np.asarray(logits, np.float64)).sigmoid().numpy()
        return probabilities

    def position_scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the sigmoid of the positions."""
        return logits.float().sigmoid()

    def prediction(self, values: Values) -> str:
        """Return the labels that reach their thresholds, with ``;`` between them; ``none`` if none does."""
        pairs = zip(self.names, values, self.thresholds, strict=True)
        return ";".join(name for name, value, threshold in pairs if value >= threshold) or NONE

    def main(self, values: Values) -> int:
        """Return the label that exceeds its threshold most."""
        return self.channel(values)

    def channel(self, values: Values) -> int:
        """Return the label that exceeds its threshold most, or is nearest to it."""
        return int(np.argmax(values - np.array(self.thresholds)))

    def bars(self, values: Values) -> Sequence[ReadBar]:
        """Return the labels with their probabilities."""
        return [ReadBar(name, float(values[k]), percent(float(values[k])), k) for k, name in enumerate(self.names)]

    def verdict(self, values: Values) -> str:
        """Return nothing: each label has a probability of its own."""
        return ""

    def brief(self, values: Values) -> str:
        """Return the highest probabilities."""
        order = np.argsort(-values, kind="stable")[:_BRIEFLY]
        return ", ".join(f"{self.names[k]} {values[k]:.3f}" for k in order)

    def spread_text(self, spread: float, column: int) -> str:
        """Return percentage points."""
        return points(spread)

    def note(self, models: int, calibrations: Sequence[Mapping[str, Any]]) -> str:
        """Return what the probabilities and thresholds are."""
        averaged = f"Mean of {models} models, ± their standard deviation in percentage points. " if models > 1 else ""
        how = "50 %, as there were no validation slides"
        if self.chosen:
            pairs = zip(self.names, self.thresholds, strict=True)
            how = (
                ", ".join(f"{name} {percent(threshold)}" for name, threshold in pairs)
                + "; chosen on the validation slides"
            )
        return f"{averaged}Sigmoid of the model's logits. A label is predicted from its threshold on: {how}."

    def metadata(self, values: Values, uncalibrated: Values) -> dict[str, Any]:
        """Return the probabilities and the thresholds."""
        thresholds = dict(zip(self.names, self.thresholds, strict=True))
        return {"values": super().metadata(values, uncalibrated)["values"], "thresholds": thresholds}

    def page_columns(self) -> Sequence[PageColumn]:
        """Return a bar for each label."""
        return [PageColumn(name, k) for k, name in enumerate(self.names)]

    def joined(self, members: Sequence[Self]) -> Self:
        """Return the readout with the mean thresholds of the members."""
        means = np.mean([member.thresholds for member in members], axis=0)
        return replace(self, thresholds=tuple(means.tolist()), chosen=all(member.chosen for member in members))
