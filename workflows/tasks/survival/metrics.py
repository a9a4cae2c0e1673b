"""Metrics of survival, of many draws from the samples at once.

::

    pairs (i, j):  i ends with the event, j lives longer      ──► concordance: does i have the higher risk?
    weights 1 / G(time of i):  how rarely one is still followed ──► the same, as if nobody were censored

G is Kaplan and Meier's estimate of being uncensored, from the same draw. Tests compare all with scikit-survival, which
is not used here: it and what it needs take two seconds to import, and it computes one draw at a time.
"""

from __future__ import annotations

import torch

PAIRS = 2_000_000
"""Most pairs that are compared at once."""


def survival_metrics(
    risks: torch.Tensor,
    survival: torch.Tensor | None,
    targets: torch.Tensor,
    horizons: tuple[float, ...],
    counts: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Return the metrics of each bootstrap draw, (draws,) each; NaN if undefined.

    G is the probability of being uncensored at a sample's time.

    ``concordance``: Harrell's C (JAMA 247:2543, 1982), ties of risks count one half. ``uno_concordance``: Uno's C (Stat
    Med 30:1105, 2011), events weighted by 1 / G², up to the last horizon. ``time_auroc``: cumulative/dynamic AUROC at
    the horizons, averaged with the fall of the survival curve (Lambert and Chevret, Stat Methods Med Res 25, 2016).
    ``brier``: Brier score of the survival probabilities, integrated over the horizons (Graf et al., Stat Med 18:2529,
    1999). Horizons that nobody of a draw survives are left out.

    Args:
        risks: (N,) float64, higher: earlier event.
        survival: (N, horizons) probabilities of surviving them; None: unknown, ``brier`` is undefined.
        targets: (N, 2) float64: time, event.
        horizons: Ascending times.
        counts: (draws, N) float64, how often each draw has each sample.
    """
    times, events = targets.unbind(1)
    uncensored = probability_uncensored(times, events, counts)
    # Who is not drawn may have a time at which nobody is uncensored any more: 0 · (1 / 0) would be NaN.
    weights = torch.where(counts > 0, 1 / uncensored, 0.0)
    harrell, uno = concordances(risks, times, events, weights, horizons[-1], counts)
    areas, falls = time_areas(risks, times, events, counts * weights, horizons, counts)
    is_defined = areas.isfinite()
    mean_area = torch.where(is_defined, areas * falls, 0.0).sum(1) / (is_defined * falls).sum(1)
    scores = torch.full_like(mean_area, torch.nan)
    if survival is not None:
        scores = integrated_brier(survival, times, events, uncensored, horizons, counts)
    return {"concordance": harrell, "uno_concordance": uno, "time_auroc": mean_area, "brier": scores}


def kaplan_meier(times: torch.Tensor, events: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the distinct times (T,) and the probability to survive each of them, (draws, T)."""
    distinct, deaths, _, at_risk = life_table(times, events, counts)
    left = torch.where(at_risk > 0, 1 - deaths / at_risk, 1.0)
    return distinct, left.cumprod(1)


def probability_uncensored(times: torch.Tensor, events: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the probability not to be censored up to each sample's time, (draws, N); events come before censoring."""
    distinct, deaths, censored, at_risk = life_table(times, events, counts)
    # Who has the event at a time is not at risk of being censored at the same time.
    left = at_risk - deaths
    uncensored = torch.where(left > 0, 1 - censored / left, 1.0).cumprod(1)
    return uncensored[:, torch.searchsorted(distinct, times.contiguous())]


def life_table(
    times: torch.Tensor, events: torch.Tensor, counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return distinct times (T,), and the events, censored, and still at risk at each of them, (draws, T)."""
    distinct, group = torch.unique(times, return_inverse=True)

    def at_times(weights: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(counts), len(distinct), dtype=torch.float64).index_add_(1, group, weights)

    deaths, censored = at_times(counts * events), at_times(counts * (1 - events))
    return distinct, deaths, censored, (deaths + censored).flip(1).cumsum(1).flip(1)


def concordances(
    risks: torch.Tensor,
    times: torch.Tensor,
    events: torch.Tensor,
    weights: torch.Tensor,
    last: float,
    counts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return Harrell's and Uno's C, each (draws,).

    Args:
        risks: (N,).
        times: (N,).
        events: (N,).
        weights: (draws, N) 1 / G, the probability of being uncensored at the sample's time.
        last: From this time on, events do not count for Uno's.
        counts: (draws, N) how often each draw has each sample.
    """
    sums = torch.zeros(4, len(counts), dtype=torch.float64)
    ended = events.nonzero()[:, 0]
    # Rows are samples with the event, in blocks: all pairs at once would not fit into memory.
    for rows in ended.split(max(1, PAIRS // len(risks))):
        at, risk = times[rows, None], risks[rows, None]
        # Censored at the time of the event: lives longer, as the event comes first.
        longer = (times > at) | ((times == at) & (events == 0))
        in_order = (longer * ((risk > risks) + 0.5 * (risk == risks))).double()
        drawn = counts[:, rows]
        # Squared: both members of a pair must still be followed at that time.
        weight = torch.where(times[rows] < last, weights[:, rows] ** 2, 0.0)
        # (draws, rows): the pairs of each row in right order, and all of its pairs, each as often as it is drawn.
        ordered, comparable = counts @ in_order.T * drawn, counts @ longer.double().T * drawn
        of_harrell = [ordered.sum(1), comparable.sum(1)]
        of_uno = [(ordered * weight).sum(1), (comparable * weight).sum(1)]
        sums += torch.stack([*of_harrell, *of_uno])
    return sums[0] / sums[1], sums[2] / sums[3]


def time_areas(
    risks: torch.Tensor,
    times: torch.Tensor,
    events: torch.Tensor,
    weighted: torch.Tensor,
    horizons: tuple[float, ...],
    counts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two tensors (draws, horizons): the AUROC at each horizon, and the fall of survival since the one before.

    The AUROC at a horizon says how often samples with the event up to it have higher risks than those that survive it.

    Args:
        risks: (N,).
        times: (N,).
        events: (N,).
        weighted: (draws, N) counts / G, the probability of being uncensored at the sample's time.
        horizons: Ascending times.
        counts: (draws, N) how often each draw has each sample.
    """
    rank = torch.unique(risks, return_inverse=True)[1]

    def by_rank(weights: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(counts), int(rank.max()) + 1, dtype=torch.float64).index_add_(1, rank, weights)

    areas = []
    for horizon in horizons:
        ended = by_rank(torch.where((times <= horizon) & (events > 0), weighted, 0.0))
        alive = by_rank(counts * (times > horizon))
        # Those alive with a lower risk; of those with the same risk, one half.
        below = alive.cumsum(1) - alive / 2
        areas.append((ended * below).sum(1) / (ended.sum(1) * alive.sum(1)))
    distinct, curve = kaplan_meier(times, events, counts)
    # Survival is 1 before the first time, for which searchsorted returns 0.
    curve = torch.cat([torch.ones_like(curve[:, :1]), curve], 1)
    survived = curve[:, torch.searchsorted(distinct, torch.tensor(horizons, dtype=torch.float64), right=True)]
    earlier = torch.cat([torch.ones_like(survived[:, :1]), survived], 1)[:, :-1]
    return torch.stack(areas, 1), earlier - survived


def integrated_brier(
    survival: torch.Tensor,
    times: torch.Tensor,
    events: torch.Tensor,
    uncensored: torch.Tensor,
    horizons: tuple[float, ...],
    counts: torch.Tensor,
) -> torch.Tensor:
    """Return the Brier score of survival probabilities, integrated over the horizons, (draws,); NaN if undefined.

    Args:
        survival: (N, horizons).
        times: (N,).
        events: (N,).
        uncensored: (draws, N) G, the probability of being uncensored at each sample's time.
        horizons: Ascending times.
        counts: (draws, N) how often each draw has each sample.
    """
    total, weights = counts.sum(1), torch.where(counts > 0, 1 / uncensored, 0.0)
    scores, survived = [], []  # of each horizon, (draws,)
    for k, horizon in enumerate(horizons):
        ended, alive = (times <= horizon) & (events > 0), times > horizon
        # G falls with time, so G at the horizon is the smallest up to it.
        uncensored_at_horizon = torch.where(times <= horizon, uncensored, 1.0).amin(1, keepdim=True)
        errors = torch.where(ended, survival[:, k] ** 2 * weights, 0.0)
        errors = errors + torch.where(alive, (1 - survival[:, k]) ** 2 / uncensored_at_horizon, 0.0)
        scores.append((counts * errors).sum(1) / total)
        survived.append((counts * alive).sum(1) > 0)
    is_defined = torch.stack(survived, 1)
    # Trapezoids only between horizons that somebody survives.
    distances = torch.tensor(horizons, dtype=torch.float64).diff()
    widths = torch.where(is_defined[:, 1:] & is_defined[:, :-1], distances, 0.0)
    length = widths.sum(1)
    heights = torch.where(is_defined, torch.stack(scores, 1), 0.0)
    area = (widths * (heights[:, 1:] + heights[:, :-1]) / 2).sum(1)
    return torch.where(length > 0, area / length, torch.nan)


def breslow(
    risks: torch.Tensor, times: torch.Tensor, events: torch.Tensor, horizons: tuple[float, ...]
) -> tuple[float, ...]:
    """Return the cumulative hazard at the horizons of a sample whose risk is 0 (Breslow, 1972)."""
    once = torch.ones(1, len(times), dtype=torch.float64)
    distinct, deaths, _, _ = life_table(times, events, once)
    hazards = torch.where(times[None, :] >= distinct[:, None], risks.exp(), 0.0).sum(1)
    return tuple(float((deaths[0] / hazards)[distinct <= horizon].sum()) for horizon in horizons)


def log_rank(times: torch.Tensor, events: torch.Tensor, high: torch.Tensor) -> float | None:
    """Return the p value of the log-rank test of two groups; None if one is empty or there is no event.

    Args:
        times: (N,) float64.
        events: (N,) float64.
        high: (N,) whether each sample is in the second group.
    """
    # As two draws: all samples, and those of the second group.
    groups = torch.stack([torch.ones(len(times), dtype=torch.float64), high.double()])
    _, deaths, _, at_risk = life_table(times, events, groups)
    share = at_risk[1] / at_risk[0]
    # Of the hypergeometric distribution; with one left at risk it is 0, whatever it is divided by.
    variance = deaths[0] * share * (1 - share) * (at_risk[0] - deaths[0]) / (at_risk[0] - 1).clamp(min=1)
    if not float(variance.sum()) > 0:
        return None
    statistic = (deaths[1] - deaths[0] * share).sum() ** 2 / variance.sum()
    # The tail of chi square with one degree of freedom.
    return float(torch.erfc((statistic / 2).sqrt()))
