"""Losses of survival: Cox's partial likelihood with Efron's ties, and discrete hazards."""

from __future__ import annotations

import torch


def cox_loss(risks: torch.Tensor, times: torch.Tensor, events: torch.Tensor) -> torch.Tensor:
    """Return the negative log partial likelihood of a batch for each event, a scalar; 0 without an event.

    Of d events at one time, Efron's approximation counts the l-th (l = 0 … d − 1) with a risk set from which l / d of
    these events have left (Efron, The efficiency of Cox's likelihood function for censored data, JASA 72:557, 1977).
    Every sum is a logsumexp, so that large risks do not overflow.

    Args:
        risks: (N,) log hazard ratios.
        times: (N,).
        events: (N,) 1 for an event, 0 if censored.
    """
    ended = events > 0
    at_risk = times[None, :] >= times[:, None]
    # Each sample is also tied with itself: a row of a censored one would else be log 0, and its gradient NaN, even
    # times 0.
    tied = (times[None, :] == times[:, None]) & ended[None, :] | torch.eye(
        len(times), dtype=torch.bool, device=times.device
    )
    # log Σ exp(risk), (N,): of those at risk at each sample's time, and of the events at this time.
    log_all = risks.expand(len(risks), -1).masked_fill(~at_risk, -torch.inf).logsumexp(1)
    log_tied = risks.expand(len(risks), -1).masked_fill(~tied, -torch.inf).logsumexp(1)
    # Efron's l / d; below the diagonal are the events of the same time that come before this one in the batch.
    gone = torch.tril(tied & ended[None, :], diagonal=-1).sum(1) / tied.sum(1)
    terms = log_all + torch.log1p(-gone.to(risks.dtype) * (log_tied - log_all).exp()) - risks
    # A batch without an event has the loss 0.
    return (terms * ended).sum() / ended.sum().clamp(min=1)


def drawn_cox_losses(
    risks: torch.Tensor, times: torch.Tensor, events: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """Return `cox_loss` of draws from the samples, (draws,): a sample drawn twice is tied with itself; NaN: no event.

    Args:
        risks: (N,) float64.
        times: (N,) float64.
        events: (N,) float64.
        counts: (draws, N) float64.
    """
    distinct, group = torch.unique(times, return_inverse=True)
    shape = (len(counts), len(distinct))
    # Only differences of risks matter: subtract the largest, so that no hazard overflows.
    hazard = (risks - risks.max()).exp()
    totals = torch.zeros(shape, dtype=torch.float64).index_add_(1, group, counts * hazard)
    # Times ascend: those at risk at a time are all of this and later ones.
    all_at_risk = totals.flip(1).cumsum(1).flip(1)
    drawn_events = counts * events
    tied = torch.zeros(shape, dtype=torch.float64).index_add_(1, group, drawn_events * hazard)
    deaths = torch.zeros(shape, dtype=torch.float64).index_add_(1, group, drawn_events)
    loss = -(drawn_events @ (risks - risks.max()))
    for step in range(int(deaths.max())):
        present = deaths > step
        # Efron's ties, as in `cox_loss`: of d events at one time, the next one finds step / d of them gone.
        remaining = torch.where(present, all_at_risk - step / deaths * tied, 1.0)
        loss = loss + remaining.log().sum(1)
    total = drawn_events.sum(1)
    return torch.where(total > 0, loss / total, torch.nan)


def hazard_losses(
    logits: torch.Tensor, times: torch.Tensor, events: torch.Tensor, edges: tuple[float, ...]
) -> torch.Tensor:
    """Return the negative log-likelihood of each sample (N,) for hazards of K intervals, whose logits are (N, K).

    Interval k is (edges[k − 1], edges[k]]; the first begins at 0. A censored sample has survived the intervals of
    which it has seen at least one half; what happens after the last edge is not known to the model (Gensheimer and
    Narasimhan, A scalable discrete-time survival model for neural networks, PeerJ 7:e6257, 2019).
    """
    right = torch.tensor(edges, dtype=times.dtype, device=times.device)
    left = torch.cat([torch.zeros_like(right[:1]), right[:-1]])
    ended, at = (events > 0)[:, None], times[:, None]
    # The interval of the event itself is not survived.
    survived = torch.where(ended, at > right, at >= (left + right) / 2)
    within = (at <= right) & ((at > left) | (torch.arange(len(edges), device=times.device) == 0))
    died = ended & within
    # With hazard h = sigmoid(o): −log(1 − h) = softplus(o), and −log h = softplus(−o).
    softplus = torch.nn.functional.softplus
    return (survived * softplus(logits) + died * softplus(-logits)).sum(1)


def hazard_survival(logits: torch.Tensor, edges: tuple[float, ...], times: tuple[float, ...]) -> torch.Tensor:
    """Return the probability to survive ``times``, (N, len(times)); hazards are constant within an interval.

    After the last edge, the probability stays constant.

    Args:
        logits: (N, K) of the hazards.
        edges: The ends of the K intervals.
        times: The times, ascending.
    """
    right = torch.tensor(edges, dtype=logits.dtype)
    left = torch.cat([torch.zeros_like(right[:1]), right[:-1]])
    # The part of each interval that lies before each time: 0, 1, or a fraction in which log survival falls linearly.
    part = ((torch.tensor(times, dtype=logits.dtype)[:, None] - left) / (right - left)).clamp(0, 1)
    # With hazard h = sigmoid(o), −log(1 − h) = softplus(o).
    return (-(torch.nn.functional.softplus(logits) @ part.T)).exp()
