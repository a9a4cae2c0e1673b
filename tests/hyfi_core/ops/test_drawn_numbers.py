"""Numbers of each distribution from uniform ones, by the formulas of their quantiles; the words stay as they are."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from hyfi_core.ops import draws
from hyfi_core.ops.draws import _hashed, mixed

F64 = torch.float64
KEY, WHERE = 12345, torch.arange(3000)
WORDS = [word % 2**64 for word in _hashed(KEY, WHERE).tolist()]
U = torch.tensor([(word >> 11) / 2**53 for word in WORDS], dtype=F64)


def test_a_later_version_draws_the_same_numbers() -> None:
    """A run that is resumed goes on with the numbers of the version that began it."""
    assert mixed(1, 2, 3) == 2869315087210772132
    numbers = [-1.4285011718595975, 0.08106758791182875, 0.027835514256818805]
    assert draws.normal(7, torch.arange(3), F64).tolist() == pytest.approx(numbers, rel=1e-12)


def test_normal_numbers_are_those_of_box_and_muller() -> None:
    first, second = (draws.uniform(mixed(KEY, which), WHERE, F64) for which in (1, 2))
    plain = (-2 * (1 - first).log()).sqrt() * (2 * math.pi * second).cos()
    assert torch.allclose(draws.normal(KEY, WHERE, F64, 3.0, 0.5), 3 + 0.5 * plain, atol=1e-9)
    assert torch.allclose(draws.log_normal(KEY, WHERE, F64, 0.2, 0.5), (0.2 + 0.5 * plain).exp(), rtol=1e-9)
    assert stats.kstest(plain.numpy(), "norm").pvalue > 0.01


def test_continuous_numbers_are_quantiles() -> None:
    quantiles = {
        "exponential": (draws.exponential(KEY, WHERE, F64, 2.0), stats.expon(scale=0.5)),
        "Cauchy": (draws.cauchy(KEY, WHERE, F64, 1.0, 3.0), stats.cauchy(1.0, 3.0)),
        "uniform": (draws.uniform(KEY, WHERE, F64, -1.0, 3.0), stats.uniform(-1.0, 4.0)),
    }
    for name, (found, distribution) in quantiles.items():
        assert torch.allclose(found, torch.tensor(distribution.ppf(U.numpy())), rtol=1e-9, atol=1e-9), name
    assert draws.exponential(KEY, WHERE, torch.float16).min() > 0


def test_whole_numbers_are_quantiles() -> None:
    for chance in (0.05, 0.4, 0.99, 1.0):
        wanted = torch.tensor(stats.geom(chance).ppf(U.numpy())).clamp(min=1)
        assert draws.geometric(KEY, WHERE, F64, chance).equal(wanted)
    rates = torch.tensor([0.0, 0.3, 4.0, 900.0, 1e6]).to(F64)
    for rate in rates:
        found = draws.poisson(KEY, WHERE, F64, rate)
        assert (found - torch.tensor(stats.poisson(float(rate)).ppf(U.numpy())).clamp(min=0)).abs().max() <= 0
    broken = draws.poisson(KEY, WHERE[:3], F64, torch.tensor([-1.0, math.inf, math.nan]))
    assert broken.isnan().all()
    assert draws.bernoulli(KEY, WHERE, F64, 0.3).equal((U < 0.3).to(F64))
    chances = torch.linspace(0, 1, len(WHERE), dtype=F64)
    assert draws.bernoulli(KEY, WHERE, torch.bool, chances).equal(chances > U)
    order = draws.permutation(KEY, WHERE, torch.int64)
    assert order.sort()[0].equal(WHERE) and U[order].equal(U.sort()[0])


def test_integers_are_remainders_of_words() -> None:
    half = [word >> 1 for word in WORDS]
    assert draws.integers(KEY, WHERE, torch.int64, 7).tolist() == [word % 7 for word in half]
    assert draws.integers(KEY, WHERE, torch.int64, -3, 9).tolist() == [word % 12 - 3 for word in half]
    for kind, most in ((torch.uint8, 255), (torch.int16, 2**15 - 1), (torch.float32, 2**24), (torch.float16, 2**11)):
        assert draws.any_integers(KEY, WHERE, kind).to(F64).tolist() == [word % (most + 1) for word in half]
    assert draws.any_integers(KEY, WHERE, F64).tolist() == [float(word % (2**53 + 1)) for word in half]
    assert draws.any_integers(KEY, WHERE, torch.int64).tolist() == half
    assert draws.any_integers(KEY, WHERE, torch.bool).tolist() == [word % 2 == 1 for word in half]


def test_uniform_numbers_of_few_bits_stay_below_their_limit() -> None:
    top = torch.arange(200_000)
    for kind in (torch.float16, torch.bfloat16):
        found = draws.uniform(KEY, top, kind)
        assert float(found.max()) == 1 - torch.finfo(kind).eps and found.dtype == kind
        shifted = draws.uniform(KEY, top, kind, 1.0, 2.0)
        assert float(shifted.min()) >= 1 and float(shifted.max()) < 2
    exact = torch.tensor([(word >> 40) / 2**24 for word in WORDS], dtype=torch.float32)
    assert draws.uniform(KEY, WHERE, torch.float32).equal(exact)
    assert draws.uniform(KEY, WHERE, torch.float32, 0.0, 2.0).equal(exact * 2)
