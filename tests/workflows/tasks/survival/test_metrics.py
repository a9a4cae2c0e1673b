"""Losses and metrics of survival are those of scikit-survival and lifelines, on draws with ties, too."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lifelines import CoxPHFitter
from lifelines.statistics import logrank_test
from pandas import DataFrame
from sksurv.linear_model.coxph import BreslowEstimator
from sksurv.metrics import (
    concordance_index_censored,
    concordance_index_ipcw,
    cumulative_dynamic_auc,
    integrated_brier_score,
)
from sksurv.util import Surv

from workflows.tasks.survival.losses import cox_loss, drawn_cox_losses, hazard_losses, hazard_survival
from workflows.tasks.survival.metrics import breslow, log_rank, survival_metrics


def drawn_samples(seed: int, count: int = 60) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Times with ties, events, and risks with ties, higher for shorter times; the last is censored."""
    rng = np.random.default_rng(seed)
    times, events = np.ceil(rng.exponential(10, count)), rng.random(count) < 0.6
    times[0], events[0] = times.max() + 1, False
    return times, events, np.round(rng.normal(size=count) - 0.05 * times, 1)


def tensor(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.float64))


@pytest.mark.filterwarnings("ignore:invalid value")  # of scikit-survival
@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000))
def test_metrics_are_those_of_scikit_survival_on_draws(seed: int) -> None:
    times, events, risks = drawn_samples(seed)
    rng = np.random.default_rng(seed)
    quantiles = np.quantile(times[events], [0.1, 0.3, 0.5, 0.7, 0.9], method="inverted_cdf")
    horizons = tuple(np.unique(quantiles).tolist())
    survival = np.sort(rng.random((60, len(horizons))))[:, ::-1].copy()
    counts = rng.multinomial(60, np.full(60, 1 / 60), size=2)
    counts[:, 0] = 1
    targets = torch.stack([tensor(times), tensor(events)], 1)
    drawn = survival_metrics(tensor(risks), tensor(survival), targets, horizons, tensor(counts))
    for k, row in enumerate(counts):
        t, e, r, s = (np.repeat(one, row, axis=0) for one in (times, events, risks, survival))
        truth = Surv.from_arrays(e, t)
        assert float(drawn["concordance"][k]) == pytest.approx(concordance_index_censored(e, t, r)[0])
        uno = concordance_index_ipcw(truth, truth, r, tau=horizons[-1])[0]
        assert float(drawn["uno_concordance"][k]) == pytest.approx(uno)
        area = cumulative_dynamic_auc(truth, truth, r, horizons)[1]
        assert np.isnan(area) or float(drawn["time_auroc"][k]) == pytest.approx(area)  # NaN: no event up to the first
        assert float(drawn["brier"][k]) == pytest.approx(integrated_brier_score(truth, truth, s, horizons))


def test_the_sign_is_that_of_a_risk() -> None:
    times, once = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64), torch.ones(1, 4, dtype=torch.float64)
    targets = torch.stack([times, torch.ones_like(times)], 1)
    good = survival_metrics(-times, None, targets, (1.0, 2.0, 3.0), once)
    bad = survival_metrics(times, None, targets, (1.0, 2.0, 3.0), once)
    for name in ("concordance", "uno_concordance", "time_auroc"):
        assert (float(good[name]), float(bad[name])) == (1.0, 0.0)
    assert math.isnan(float(good["brier"]))
    events = torch.ones_like(times)
    assert float(cox_loss(-times, times, events)) < float(cox_loss(times, times, events))
    edges = (1.0, 2.0, 3.0, 4.0)
    dies_late = torch.tensor([[-3.0, -3.0, -3.0, 3.0]], dtype=torch.float64)
    late, early = (hazard_losses(dies_late, torch.tensor([at]).double(), torch.ones(1), edges) for at in (4.0, 1.0))
    assert float(late) < float(early)


def test_the_cox_loss_is_the_partial_likelihood_with_efrons_ties() -> None:
    times, events, risks = drawn_samples(3)
    table = DataFrame({"time": times, "event": events.astype(float), "risk": risks})
    fitted = CoxPHFitter().fit(table, "time", "event")
    scaled = tensor(risks * fitted.params_["risk"]).requires_grad_()
    loss = cox_loss(scaled, tensor(times), tensor(events))
    assert float(loss.detach()) == pytest.approx(-fitted.log_likelihood_ / events.sum(), rel=1e-6)
    loss.backward()
    assert scaled.grad is not None
    assert float(scaled.grad @ tensor(risks)) == pytest.approx(0, abs=1e-5)  # lifelines is at the maximum
    counts = np.random.default_rng(1).multinomial(60, np.full(60, 1 / 60), size=2)
    drawn = drawn_cox_losses(tensor(risks), tensor(times), tensor(events), tensor(counts))
    for k, row in enumerate(counts):
        repeated = (tensor(np.repeat(one, row)) for one in (risks, times, events))
        assert float(drawn[k]) == pytest.approx(float(cox_loss(*repeated)))


def test_a_batch_without_an_event_has_no_gradient_and_large_risks_no_infinity() -> None:
    risks = torch.tensor([900.0, -900.0, 3.0]).requires_grad_()
    times = torch.tensor([1.0, 2.0, 2.0])
    for events, finite in ((torch.zeros(3), 0.0), (torch.ones(3), None)):
        risks.grad = None
        loss = cox_loss(risks, times, events)
        loss.backward()
        assert bool(loss.isfinite()) and risks.grad is not None and bool(risks.grad.isfinite().all())
        assert finite is None or (float(loss.detach()), float(risks.grad.abs().sum())) == (0.0, 0.0)


def test_hazards_make_survival() -> None:
    logits = torch.tensor([[0.0, 0.0]], dtype=torch.float64)  # a hazard of one half in each interval
    assert hazard_survival(logits, (2.0, 6.0), (0.0, 2.0, 6.0, 9.0))[0].tolist() == pytest.approx([1, 0.5, 0.25, 0.25])
    assert float(hazard_survival(logits, (2.0, 6.0), (1.0,))) == pytest.approx(0.5**0.5)
    at = torch.tensor([2.0, 6.0, 3.0, 4.0, 9.0], dtype=torch.float64)
    events = torch.tensor([1, 1, 0, 0, 1], dtype=torch.float64)
    losses = hazard_losses(logits.expand(5, -1), at, events, (2.0, 6.0))
    # Dies in the first, in the second; seen for less than half of the second, for half of it; after the last edge.
    assert (losses / math.log(2)).tolist() == pytest.approx([1, 2, 1, 2, 2])


def test_baseline_and_log_rank() -> None:
    times, events, risks = drawn_samples(5)
    truth = BreslowEstimator().fit(risks, events, times)
    at = (2.0, 5.0, 9.0)
    expected = truth.cum_baseline_hazard_(np.array(at))
    assert breslow(tensor(risks), tensor(times), tensor(events), at) == pytest.approx(expected.tolist())
    high = risks > np.median(risks)
    p = logrank_test(times[high], times[~high], events[high], events[~high]).p_value
    assert log_rank(tensor(times), tensor(events), torch.from_numpy(high)) == pytest.approx(p)
    assert log_rank(tensor(times), tensor(events), torch.ones(60, dtype=torch.bool)) is None
