"""The time of each slide to an event, which may be censored: Cox's partial likelihood, or hazards of intervals."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray

from data.missing import is_missing
from data.samples.labels import Labels, Target
from data.samples.survival_times import event_of, load_survival
from hyfi_core.errors import RequestError
from pathology.predict.readout import Readout
from workflows.config.targets import TargetKeys
from workflows.config.tasks import TASKS, TaskFacts
from workflows.tasks.cases import members_of
from workflows.tasks.page_section import PageSection
from workflows.tasks.survival.losses import cox_loss, drawn_cox_losses, hazard_losses, hazard_survival
from workflows.tasks.survival.metrics import (
    breslow,
    integrated_brier,
    kaplan_meier,
    log_rank,
    probability_uncensored,
    survival_metrics,
)
from workflows.tasks.survival.page import survival_section
from workflows.tasks.survival.readout import SurvivalReadout
from workflows.tasks.task import Aggregation, LabelSource, Task, at_least_float32, target_columns

COX = "cox"
HORIZONS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Quantiles of the event times of training at which survival is stated and evaluated."""
TIME_BINS = 4
"""Default of ``data.time_bins``."""
_REFUSED_EMPTY, _WARNED_EMPTY = 0.5, 0.05
"""Fractions of batches without an event that are refused, and warned of."""


@dataclass(frozen=True)
class Survival(Task):
    """Times to an event. A target is (time, event), event 1.0 or 0.0: censored.

    Attributes:
        kind: ``cox`` or ``hazards``.
        times: Times at which survival is stated and evaluated.
        edges: Ends of the intervals of ``hazards``.
        slides, events: Numbers of training slides and of those with an event.
    """

    facts: ClassVar[TaskFacts] = TASKS["survival"]
    kind: str = COX
    times: tuple[float, ...] = ()
    edges: tuple[float, ...] = ()
    slides: int = 0
    events: int = 0

    @classmethod
    def read_labels(cls, source: LabelSource) -> Labels:
        """Return time and event of each slide; see ``Task`` and `data.samples.survival_times.load_survival`."""
        time, event = source.columns
        merge = source.merge_alike
        return load_survival(source.path, time, event, rows=source.rows, merge_alike=merge, missing=source.missing)

    @classmethod
    def fitted(cls, data: TargetKeys, labels: Labels, train: Sequence[Target]) -> Self:
        """Return the task whose times and intervals are quantiles of the event times of the training slides."""
        pairs = [_pair(target) for target in train]
        # Without events at time 0, so that every interval has a length.
        event_times = np.array([time for time, event in pairs if event and time > 0])
        if not len(event_times):
            raise RequestError(
                f"data.target: none of {len(pairs)} training slides has an event ({labels.target}) after time 0: there "
                "is nothing to learn; check the splits"
            )
        if len({time for time, _ in pairs}) < 2:
            raise RequestError(
                f"data.target: all {len(pairs)} training slides have the time {pairs[0][0]:g}: there is nothing to "
                "learn"
            )
        kind, bins = data.named_loss, data.time_bins or TIME_BINS
        # Cox's loss has no intervals of time.
        edges = () if kind == COX else _quantiles(event_times, [k / bins for k in range(1, bins + 1)])
        events = sum(event > 0 for _, event in pairs)
        times = _quantiles(event_times, HORIZONS)
        return cls(data.columns, kind, times=times, edges=edges, slides=len(pairs), events=events)

    @classmethod
    def of_json(cls, model: Mapping[str, Any]) -> Self:
        """Return the task of a ``model.json``."""
        survival = model["survival"]
        times, edges = (tuple(map(float, survival[name])) for name in ("times", "edges"))
        columns = target_columns(model)
        return cls(columns, str(survival["loss"]), times, edges, int(survival["slides"]), int(survival["events"]))

    def to_json(self) -> dict[str, Any]:
        """Return the names of the outputs, and ``survival``: ``loss``, ``times``, ``edges``, ``slides``, ``events``."""
        settings = {"loss": self.kind, "times": list(self.times), "edges": list(self.edges)}
        counts = {"slides": self.slides, "events": self.events}
        return {"class_names": list(self.names), "survival": {**settings, **counts}}

    @property
    def names(self) -> tuple[str, ...]:
        """``risk``, or the intervals: ``event 0 to 12``."""
        starts = (0.0, *self.edges[:-1])
        pairs = zip(starts, self.edges, strict=True) if self.edges else ()
        return tuple(f"event {start:.6g} to {end:.6g}" for start, end in pairs) or ("risk",)

    @property
    def outputs(self) -> int:
        """One, or one for each interval."""
        return len(self.edges) or 1

    @property
    def label_numbers(self) -> int:
        """Time and event."""
        return 2

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Without ``brier`` of Cox, whose probabilities need the baseline of `calibration`."""
        return tuple(name for name in super().metric_names if self.kind != COX or name != "brier")

    @property
    def loss_over(self) -> Literal["batch", "microbatch"]:
        """Cox compares the slides of a batch."""
        return "batch" if self.kind == COX else "microbatch"

    def tensor(self, targets: Iterable[Target]) -> torch.Tensor:
        """Return times and events (N, 2) float64."""
        return torch.tensor([_pair(target) for target in targets], dtype=torch.float64).reshape(-1, 2)

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the negative log partial likelihood for each event of the batch, or the mean loss of hazards."""
        times, events = targets.unbind(1)
        if self.kind == COX:
            return cox_loss(at_least_float32(outputs)[:, 0], times, events)
        return hazard_losses(at_least_float32(outputs), times, events, self.edges).mean()

    def drawn(self, outputs: torch.Tensor, targets: torch.Tensor, counts: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the metrics of `workflows.tasks.survival.metrics` of each draw; ``brier`` only of hazards.

        Args:
            outputs: (N, channels), of N samples.
            targets: (N, 2): time and event.
            counts: (draws, N): how often each draw has each sample.
        """
        times, events = targets.unbind(1)
        if self.kind == COX:
            risks, survival = outputs[:, 0].double(), None
            losses = drawn_cox_losses(risks, times, events, counts)
        else:
            survival = hazard_survival(outputs.double(), self.edges, self.times)
            risks = 1 - survival.mean(1)
            losses = counts @ hazard_losses(outputs.double(), times, events, self.edges) / counts.sum(1)
        return {"loss": losses, **survival_metrics(risks, survival, targets, self.times, counts)}

    def by_case(
        self, outputs: torch.Tensor, targets: torch.Tensor, of_case: torch.Tensor, how: Aggregation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean outputs of each case (``max``: those of its slide of highest risk), and its latest target."""
        case_outputs, case_targets, risks = [], [], self._risks(outputs)
        for members in members_of(of_case):
            highest = members[risks[members].argmax()]
            case_outputs.append(outputs[highest] if how == "max" else outputs[members].mean(0))
            # Slides of a case are of one patient, who was followed up to the latest time.
            case_targets.append(targets[members[targets[members, 0].argmax()]])
        return torch.stack(case_outputs), torch.stack(case_targets)

    def calibration(self, outputs: torch.Tensor, targets: torch.Tensor, of_case: torch.Tensor) -> dict[str, Any] | None:
        """Return the median risk; with Cox also mean and spread of the outputs, and Breslow's cumulative hazard."""
        if not bool(outputs.isfinite().all()):
            return None
        cases, _ = self.by_case(outputs, targets, of_case, "mean")
        calibration: dict[str, Any] = {"slides": len(targets), "cases": len(cases)}
        if self.kind != COX:
            return {**calibration, "cutoff": float(np.median(self._risks(cases).numpy()))}
        risks, centre = outputs[:, 0].double(), float(outputs[:, 0].double().mean())
        # Without Bessel's correction, so that one slide has 0, not NaN.
        spread = float(risks.std(correction=0))
        baseline = breslow(risks - centre, targets[:, 0], targets[:, 1], self.times)
        cutoff = float(np.median((cases[:, 0].double() - centre).numpy()))
        return {**calibration, "cutoff": cutoff, "centre": centre, "spread": spread or 1.0, "baseline": list(baseline)}

    def describe_calibration(
        self, outputs: torch.Tensor, targets: torch.Tensor, fitted: Mapping[str, Any]
    ) -> tuple[str, dict[str, Any]] | None:
        """Return the Brier score of the probabilities of survival, and the log-rank p of the risk groups."""
        if "cutoff" not in fitted:
            return None
        readout, (times, events) = self.readout(fitted), targets.unbind(1)
        values = torch.from_numpy(np.stack([readout.values(output) for output in outputs.double().numpy()]))
        once = torch.ones(1, len(times), dtype=torch.float64)
        uncensored = probability_uncensored(times, events, once)
        distinct, curve = kaplan_meier(times, events, once)
        # What a model must be better than: Kaplan and Meier's curve of all slides, the same for each.
        steps = torch.cat([torch.ones(1, dtype=torch.float64), curve[0]])
        one_curve = steps[torch.searchsorted(distinct, torch.tensor(self.times, dtype=torch.float64), right=True)]
        scores = [
            float(integrated_brier(survival, times, events, uncensored, self.times, once))
            for survival in (values[:, 1:], one_curve.expand(len(times), -1))
        ]
        p = log_rank(times, events, values[:, 0] > float(fitted["cutoff"]))
        brier = [score if math.isfinite(score) else None for score in scores]
        shown = ["undefined" if score is None else f"{score:.3f}" for score in brier]
        text = f"integrated Brier score {shown[0]} (one curve for all: {shown[1]}), log-rank p of the risk groups "
        measures = {"brier": brier[0], "brier_one_curve": brier[1], "log_rank_p": p, "slides": len(times)}
        return text + ("undefined" if p is None else f"{p:.2g}"), {**fitted, **measures}

    def describe(self) -> str:
        """Return the columns, and the number of events."""
        how = "Cox" if self.kind == COX else f"hazards of {len(self.edges)} intervals up to {self.edges[-1]:.6g}"
        return f"{', '.join(self.columns)} ({self.events} events of {self.slides}; {how})"

    def text(self, target: Target) -> str:
        """Return ``12 (event)`` or ``12 (censored)``, from which `target_of` returns the same time."""
        time, event = _pair(target)
        short = f"{time:.12g}"
        return f"{short if float(short) == time else repr(time)} ({'event' if event else 'censored'})"

    def target_of(self, text: str) -> Target | None:
        """Return the target of ``12 (event)``, or of the cells of both columns, ``12;1``."""
        match = re.fullmatch(r"(.*?)[;(](.*?)\)?", text.strip())
        if match is None or is_missing(match[1].strip()) or is_missing(match[2].strip()):
            return None
        try:
            time, event = float(match[1]), event_of(match[2].strip())
        except ValueError:
            return None
        return None if event is None or not math.isfinite(time) or time < 0 else (time, event)

    def warnings(self, train: Sequence[Target], val: Sequence[Target]) -> list[str]:
        """Return warnings about validation slides without events."""
        events = sum(_pair(target)[1] > 0 for target in val)
        if val and events < 2:
            return [f"{events} of {len(val)} validation slides have an event: concordance is undefined or says nothing"]
        return []

    def check_batch(self, batch: int) -> None:
        """Check that most batches of Cox have an event, without which there is nothing to learn from them."""
        if self.kind != COX:
            return
        empty = _probability_of_no_event(self.slides, self.events, batch)
        if batch > 1 and empty <= _REFUSED_EMPTY:
            return
        sizes = range(2, self.slides + 1)
        # The smallest batch for which there is not even a warning.
        enough = next(
            (size for size in sizes if _probability_of_no_event(self.slides, self.events, size) <= _WARNED_EMPTY),
            self.slides,
        )
        why = f"{empty:.0%} of the batches have no event" if batch > 1 else "a batch of one slide compares nothing"
        raise RequestError(
            f"data.batch_size: given {batch}; the Cox loss compares the slides of a batch ({self.events} events of "
            f"{self.slides} training slides): {why}; use {max(2, enough)} or more (with as many plan.microbatches they "
            "take the memory of one slide), or data.loss=hazards, which takes any"
        )

    def check_validation(self, val: Sequence[Target]) -> None:
        """Check that a validation slide has an event, without which Cox has neither a loss nor a metric."""
        if self.kind == COX and not self.own_loss and val and not any(_pair(target)[1] > 0 for target in val):
            raise RequestError(
                f"none of {len(val)} validation slides has an event ({', '.join(self.columns)}): neither loss nor "
                "metrics are defined, and best cannot be chosen; put cases with events into the validation split "
                "(hyfi split --stratify COLUMN), or use data.loss=hazards"
            )

    def batch_warnings(self, batch: int) -> list[str]:
        """Return a warning if several batches of Cox have no event."""
        empty = _probability_of_no_event(self.slides, self.events, batch) if self.kind == COX else 0.0
        if empty <= _WARNED_EMPTY:
            return []
        return [
            f"{empty:.0%} of the batches have no event and teach nothing; a larger data.batch_size has fewer of them"
        ]

    def readout(self, calibration: Mapping[str, Any] | None) -> SurvivalReadout:
        """Return how risk, survival and risk group are read from outputs, with what `calibration` has returned."""
        fitted = calibration or {}
        cutoff, baseline = fitted.get("cutoff"), fitted.get("baseline")
        return SurvivalReadout(
            self.names,
            self.times,
            self.edges,
            centre=float(fitted.get("centre", 0.0)),
            spread=float(fitted.get("spread", 1.0)),
            baseline=None if baseline is None else tuple(map(float, baseline)),
            cutoff=None if cutoff is None else float(cutoff),
        )

    def page(
        self,
        values: NDArray[np.float64],
        targets: Sequence[Target],
        draws: NDArray[np.float64],
        readout: Readout,
        before: NDArray[np.float64] | None = None,
    ) -> PageSection:
        """Return Kaplan–Meier curves of the risk groups, AUROC over time, and metrics."""
        true, metrics = self.tensor(targets), self.facts.metrics
        assert isinstance(readout, SurvivalReadout)
        return survival_section(values, true, draws, self.times, readout.cutoff, self.columns, metrics)

    def _risks(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the risk of each slide, (N,): the output, or the mean probability of the event over ``times``."""
        if self.kind == COX:
            return outputs[:, 0].double()
        return 1 - hazard_survival(outputs.double(), self.edges, self.times).mean(1)


def _quantiles(values: NDArray[np.float64], shares: Sequence[float]) -> tuple[float, ...]:
    """Return quantiles, ascending, each once; each of them is exactly one of the values."""
    # Not rounded: the last edge is the latest event, and lower by one digit, no interval would have that event.
    return tuple(np.unique(np.quantile(values, shares, method="inverted_cdf")).tolist())


def _probability_of_no_event(slides: int, events: int, batch: int) -> float:
    """Return the probability that ``batch`` different slides have no event."""
    censored = slides - events
    return math.comb(censored, batch) / math.comb(slides, batch) if batch <= censored else 0.0


def _pair(target: Target) -> tuple[float, float]:
    assert isinstance(target, tuple)
    time, event = target
    return time, event
