"""How the outputs of several targets are read: each as its task reads it, under its name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch

from pathology.predict.colors import NO_CHANNEL
from pathology.predict.readout import PageColumn, ReadBar, Readout, Values

BETWEEN = " | "
"""Separator of the predictions or labels of two targets: ``grade: high | age: 41``."""


def texts_of(text: str, names: Sequence[str]) -> dict[str, str]:
    """Return the text of each target of ``grade: high | age: 41``; targets that are not in it are left out."""
    # What is before the first name, then each name and its text in turn.
    before, *pairs = re.split(rf"(?:^| \| )({'|'.join(map(re.escape, names))}): ", text)
    return dict(zip(pairs[0::2], pairs[1::2], strict=True)) if not before.strip() else {}


@dataclass(frozen=True)
class SeveralReadout(Readout):
    """Several targets; the first is the one whose regions are shown.

    Attributes:
        names: Names of the targets.
        parts: The readout of each target.
    """

    names: tuple[str, ...]
    parts: tuple[Readout, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of each target, after its name and a dot."""
        return tuple(f"{name}.{column}" for name, part in self._pairs() for column in part.columns)

    @property
    def channels(self) -> tuple[str, ...]:
        """The channels of each target, after its name and a dot; a channel of the target's own name has no prefix."""
        return tuple(
            channel if channel == name else f"{name}.{channel}"
            for name, part in self._pairs()
            for channel in part.channels
        )

    def values(self, logits: Values) -> Values:
        """Return the numbers of all targets, one after the other."""
        return np.concatenate([part.values(own) for part, own in zip(self.parts, self._outputs(logits), strict=True)])

    def uncalibrated(self, logits: Values) -> Values:
        """Return the numbers of all targets without what was fitted on validation slides."""
        pairs = zip(self.parts, self._outputs(logits), strict=True)
        return np.concatenate([part.uncalibrated(own) for part, own in pairs])

    def position_scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the scores of all targets, one after the other."""
        split = logits.split([len(part.channels) for part in self.parts])
        return torch.cat([part.position_scores(own) for part, own in zip(self.parts, split, strict=True)])

    def prediction(self, values: Values) -> str:
        """Return the prediction of each target, after its name: ``grade: high | age: 41``."""
        each = zip(self.names, self.parts, self.of_each(values), strict=True)
        return BETWEEN.join(f"{name}: {part.prediction(own)}" for name, part, own in each)

    def main(self, values: Values) -> int:
        """Return the column of the first target whose spread over an ensemble counts."""
        return self.parts[0].main(self.of_each(values)[0])

    def channel(self, values: Values) -> int:
        """Return the channel whose regions are shown: one of the first target."""
        return self.parts[0].channel(self.of_each(values)[0])

    def bars(self, values: Values) -> Sequence[ReadBar]:
        """Return the bars of all targets; a bar that is not named as its target gets both names: ``grade: high``.

        A target's own bars have the indices of its own channels and columns; here they get those among all targets.
        """
        bars: list[ReadBar] = []
        first_channel = first_column = 0  # of this target, among those of all targets
        for name, part, own in zip(self.names, self.parts, self.of_each(values), strict=True):
            for index, bar in enumerate(part.bars(own)):
                title = bar.name if bar.name == name else f"{name}: {bar.name}"
                own_column = index if bar.column is None else bar.column
                channel = _channel_among_all(bar.channel, first_channel)
                bars.append(replace(bar, name=title, channel=channel, column=first_column + own_column))
            first_channel, first_column = first_channel + len(part.channels), first_column + len(part.columns)
        return bars

    def main_bar(self, values: Values) -> int:
        """Return the bar that the first target emphasises; its bars come first."""
        return self.parts[0].main_bar(self.of_each(values)[0])

    def verdict(self, values: Values) -> str:
        """Return the verdicts of the targets that have one, each after its name."""
        each = zip(self.names, self.parts, self.of_each(values), strict=True)
        return BETWEEN.join(f"{name}: {text}" for name, part, own in each if (text := part.verdict(own)))

    def brief(self, values: Values) -> str:
        """Return the brief text of each target that has one, after its name."""
        each = zip(self.names, self.parts, self.of_each(values), strict=True)
        return BETWEEN.join(f"{name}: {text}" for name, part, own in each if (text := part.brief(own)))

    def spread_text(self, spread: float, column: int) -> str:
        """Return the spread as text, as the target of the column writes it."""
        part, own_column = [(part, k) for part in self.parts for k in range(len(part.columns))][column]
        return part.spread_text(spread, own_column)

    def note(self, models: int, calibrations: Sequence[Mapping[str, Any]]) -> str:
        """Return the note of each target, after its name."""
        notes = []
        for name, part in self._pairs():
            own = [fitted for calibration in calibrations if (fitted := calibration_of(calibration, name))]
            notes.append(f"{name}: {part.note(models, own)}")
        return " ".join(notes)

    def metadata(self, values: Values, uncalibrated: Values) -> dict[str, Any]:
        """Return the entries of each target in ``prediction.json``, under ``targets`` and its name.

        Args:
            values: From `values`: the numbers of all targets.
            uncalibrated: From `uncalibrated`: the same ones without calibration.
        """
        pairs = zip(self.of_each(values), self.of_each(uncalibrated), strict=True)
        each = {
            name: {"prediction": part.prediction(own), **part.metadata(own, own_uncalibrated)}
            for (name, part), (own, own_uncalibrated) in zip(self._pairs(), pairs, strict=True)
        }
        return {"targets": each}

    def page_columns(self) -> Sequence[PageColumn]:
        """Return the columns of all targets; one that is not named as its target gets both names: ``grade: high``.

        A target's own columns have the indices of its own channels; here they get those among all targets.
        """
        columns: list[PageColumn] = []
        first_channel = 0  # of this target, among the channels of all targets
        for name, part in self._pairs():
            for column in part.page_columns():
                title = column.name if column.name == name else f"{name}: {column.name}"
                channel = None if column.channel is None else _channel_among_all(column.channel, first_channel)
                columns.append(PageColumn(title, channel))
            first_channel += len(part.channels)
        return columns

    def joined(self, others: Sequence[Self]) -> Self:
        """Return the readout of the joined parts."""
        parts = [part.joined([other.parts[k] for other in others]) for k, part in enumerate(self.parts)]
        return replace(self, parts=tuple(parts))

    def of_each(self, values: Values) -> list[Values]:
        """Return the numbers of each target; also of several slides, (N, columns)."""
        return np.split(values, np.cumsum([len(part.columns) for part in self.parts])[:-1], axis=-1)

    def _outputs(self, logits: Values) -> list[Values]:
        """Return the model's outputs for each target; a channel of the heatmap is an output."""
        return np.split(logits, np.cumsum([len(part.channels) for part in self.parts])[:-1])

    def _pairs(self) -> list[tuple[str, Readout]]:
        return list(zip(self.names, self.parts, strict=True))


def _channel_among_all(channel: int, first_channel: int) -> int:
    """Return the index of a target's channel among those of all targets, where its first one has ``first_channel``."""
    return NO_CHANNEL if channel == NO_CHANNEL else first_channel + channel


def calibration_of(calibration: Mapping[str, Any] | None, name: str) -> Mapping[str, Any] | None:
    """Return what was fitted for a target, from the ``calibration`` of a ``model.json``; None: nothing."""
    fitted: Mapping[str, Any] | None = ((calibration or {}).get("targets") or {}).get(name)
    return fitted
