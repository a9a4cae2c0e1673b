"""Temperature scaling, which calibrates a model's probabilities (Guo et al., 2017, arXiv:1706.04599).

Logits are divided by the temperature before the softmax. The temperature minimises the cross-entropy on slides that
were not trained on. It does not change the predicted class of a slide, nor the area under the ROC curve of two classes.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from workflows.tasks.class_metrics import metrics_of_logits

PRIOR = 0.5
"""Standard deviation of the prior of log temperature, which has mean 0. The prior matters for a few slides, or if all
slides are classified correctly (their cross-entropy is least at temperature 0), and hardly for several dozen."""
MAX_TEMPERATURE = 20.0
_GRID = 200
_REFINEMENTS = 40


@dataclass(frozen=True)
class Calibration:
    """A temperature and its effect on some slides.

    Attributes:
        temperature: What logits are divided by.
        slides: Number of slides, or of cases that are one sample each, on which it was fitted or evaluated.
        loss: Mean cross-entropy before and after, without class weights.
        calibration_error: Expected calibration error before and after.
    """

    temperature: float
    slides: int
    loss: tuple[float, float]
    calibration_error: tuple[float | None, float | None]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object of the fields; pairs are (before, after)."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    def describe(self) -> str:
        """Return the temperature and its effect as one line of text."""
        errors = ["undefined" if value is None else f"{value:.3f}" for value in self.calibration_error]
        return (
            f"temperature {self.temperature:.3f}: calibration error {errors[0]} → {errors[1]}, cross entropy "
            f"{self.loss[0]:.3f} → {self.loss[1]:.3f}"
        )


def fit_temperature(logits: torch.Tensor, labels: torch.Tensor) -> Calibration | None:
    """Return the maximum a posteriori temperature; None without slides, or if logits are not finite.

    Args:
        logits: (N, classes).
        labels: (N,) class indices.
    """
    logits = logits.double()
    if not len(labels) or not bool(torch.isfinite(logits).all()):
        return None

    def cost(log_t: torch.Tensor) -> torch.Tensor:
        """Return the negative log posterior of log temperatures (T,)."""
        scaled = logits[None] / log_t.exp()[:, None, None]
        label_logits = scaled.gather(2, labels[None, :, None].expand(len(log_t), -1, 1))[..., 0]
        # A sum over slides, not a mean: the more slides, the less the prior weighs.
        return (scaled.logsumexp(2) - label_logits).sum(1) + log_t**2 / (2 * PRIOR**2)

    # In log temperature, where halving and doubling are equally far.
    low, high = -math.log(MAX_TEMPERATURE), math.log(MAX_TEMPERATURE)
    for _ in range(_REFINEMENTS):
        grid = torch.linspace(low, high, _GRID, dtype=torch.float64)
        best, step = float(grid[int(cost(grid).argmin())]), (high - low) / (_GRID - 1)
        # The least cost lies within a step of the best point: each round divides the range by 100.
        low, high = best - step, best + step
        if step < 1e-9:
            break
    return evaluate_temperature(logits, labels, math.exp(best))


def evaluate_temperature(logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> Calibration:
    """Return the effect of a temperature on some slides."""
    before_and_after = [logits.double(), logits.double() / temperature]
    losses = [float(torch.nn.functional.cross_entropy(scaled, labels)) for scaled in before_and_after]
    errors = [metrics_of_logits(scaled, labels)["calibration_error"] for scaled in before_and_after]
    return Calibration(temperature, len(labels), (losses[0], losses[1]), (errors[0], errors[1]))
