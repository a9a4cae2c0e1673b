"""Cumulative probabilities of rising grades: the ordered logit (McCullagh, Regression models for ordinal data, 1980).

::

    grades       0 ──── 1 ──── 2 ──── 3        K grades, K − 1 outputs
    threshold       t₀  >  t₁  >  t₂           sigmoid(tₖ) = P(grade > k);  t₀ = o₀,  tₖ = tₖ₋₁ − softplus(oₖ)

Thresholds fall with k, so P(grade > k) never rises with k. The model outputs them for each slide.
"""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid, pad, softplus

_CLOSEST = 1e-15
"""Smallest distance of two thresholds: at 0, an output would be infinite."""


def above(outputs: torch.Tensor) -> torch.Tensor:
    """Return log P(grade > k), (…, K − 1), of outputs (…, K − 1)."""
    return logsigmoid(_thresholds(outputs))


def outputs_of(log_above: torch.Tensor) -> torch.Tensor:
    """Return the outputs for which `above` returns ``log_above``."""
    log_p = log_above.clamp(max=-_CLOSEST)
    # The inverse of logsigmoid: log p − log(1 − p). Below, that of softplus.
    thresholds = log_p - torch.log(-torch.expm1(log_p))
    distances = (thresholds[..., :-1] - thresholds[..., 1:]).clamp(min=_CLOSEST)
    return torch.cat([thresholds[..., :1], distances + torch.log(-torch.expm1(-distances))], -1)


def losses(outputs: torch.Tensor, grades: torch.Tensor) -> torch.Tensor:
    """Return the negative log-likelihood of each sample's grade, (N,).

    With sigmoid σ, the probability of a grade between two thresholds a > b is σ(a) − σ(b), which is
    σ(a) · σ(−b) · (1 − e^(b − a)); the last factor is σ(o), as a − b = softplus(o).
    """
    thresholds, at = _thresholds(outputs), grades[:, None]
    exceeded = pad(logsigmoid(thresholds), (1, 0)).gather(1, at)  # a sample of grade 0 exceeds none
    not_exceeded = pad(logsigmoid(-thresholds), (0, 1)).gather(1, at)
    between = pad(logsigmoid(outputs[:, 1:]), (1, 1)).gather(1, at)  # the lowest and the highest grade have one side
    return -(exceeded + not_exceeded + between)[:, 0]


def _thresholds(outputs: torch.Tensor) -> torch.Tensor:
    return torch.cat([outputs[..., :1], outputs[..., :1] - softplus(outputs[..., 1:]).cumsum(-1)], -1)
