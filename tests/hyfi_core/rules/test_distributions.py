"""Numbers of every distribution on maps: the same on any plan, and distributed as those of PyTorch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyfi_core
from hyfi_core.capture.export import capture
from hyfi_core.capture.verify import verify_capture
from hyfi_core.errors import RequestError
from hyfi_core.lowering.lower import Target, lower
from hyfi_core.ops import draws
from tests.harness import Answers, Result, compare, parallel

SHAPE = (4, 3, 11, 15)
DRAWN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exponential": lambda y: y * torch.empty_like(y).exponential_(2.0),
    "uniform": lambda y: y + torch.empty_like(y).uniform_(-1.0, 2.0),
    "uniform of tokens": lambda y: y.flatten(2).transpose(1, 2) * torch.rand_like(y.flatten(2).transpose(1, 2)),
    "normal": lambda y: y * torch.empty_like(y).normal_(1.0, 0.5),
    "normal in place of a map": lambda y: y * y.clone().normal_(),
    "normal of a shape": lambda y: y * torch.normal(1.0, 0.5, y.shape, dtype=y.dtype),
    "normal of means": lambda y: y + torch.normal(y, 2.0),
    "normal of deviations": lambda y: y + torch.normal(1.0, y[:, :, :1].abs()),
    "normal of both": lambda y: y + torch.normal(y, y.mean((2, 3), keepdim=True).abs()),
    "log-normal": lambda y: y * torch.empty_like(y).log_normal_(0.0, 0.3),
    "Cauchy": lambda y: y + torch.empty_like(y).cauchy_(0.0, 0.1).clamp(-2, 2),
    "geometric": lambda y: y / torch.empty_like(y).geometric_(0.4),
    "integers": lambda y: y * torch.randint_like(y, 5) + torch.randint_like(y, -3, 5),
    "integers of a shape": lambda y: y * torch.randint(2, 7, (y.shape[0], 1, *y.shape[2:])),
    "integers in place": lambda y: y * torch.empty_like(y).random_(9),
    "channels in random order": lambda y: y[:, torch.randperm(y.shape[1])] * y[:, :1],
    "tokens in random order": lambda y: y.flatten(2)[:, :, torch.randperm(y.shape[2] * y.shape[3])].cumsum(2),
    "integers of a range in place": lambda y: y * torch.empty_like(y).random_(-2, 9),
    "integers without a range": lambda y: y * torch.empty_like(y).random_() / 2.0**53,
    "bits": lambda y: y * torch.empty(y.shape[0], 1, *y.shape[2:], dtype=torch.bool).random_(),
    "zeros and ones of chances": lambda y: y * y.clone().bernoulli_(y.sigmoid()),
    "zeros and ones of chances by channel": lambda y: y * torch.empty_like(y).bernoulli_(y.mean((2, 3), True).abs()),
    "zeros and ones of a map of chances": lambda y: y + torch.bernoulli(y[:, :, :1].sigmoid()),
    "Poisson": lambda y: y + torch.poisson(3 * y.abs()) / 9.0,
    "Gumbel": lambda y: F.gumbel_softmax(y, dim=1),
}


class Noise(nn.Module):
    """A convolution, and one function of its map after the other, each of which draws."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.fc, self.last = nn.Conv2d(3, 6, 3, 2, 1), nn.Linear(6, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.stem(x))
        z = sum(draw(y).reshape(len(y), 6, -1).sin().mean(2) for draw in DRAWN.values())
        return self.last(self.fc(z) * torch.empty((len(y), 1), dtype=y.dtype).uniform_(0.5, 1.5))


def drawn(plan: hyfi_core.ParallelPlan) -> Result:
    torch.manual_seed(3)
    model = Noise().double()
    images, labels = torch.randn(SHAPE, dtype=torch.float64), torch.tensor([0, 1, 1, 0])
    torch.manual_seed(5)
    return parallel(model, images, labels, plan, F.cross_entropy, None)


@functools.cache
def of_one_rank() -> Result:
    return drawn(hyfi_core.ParallelPlan(grids=((1, 1),)))


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(hyfi_core.ParallelPlan(grids=((1, 2),)), marks=pytest.mark.soak),  # columns are in "both", too
        hyfi_core.ParallelPlan(grids=((2, 1),), recompute=True),
        hyfi_core.ParallelPlan(grids=((2, 2),), microbatches=2),
        hyfi_core.ParallelPlan(grids=((2, 1), (1, 1)), cuts=("fc",), microbatches=2),
        hyfi_core.ParallelPlan(grids=((1, 1),), cells=(2, 2), spill="memory"),
    ],
    ids=["columns", "recomputed", "both", "stages", "cells"],
)
def test_any_plan_draws_the_same_numbers(plan: hyfi_core.ParallelPlan) -> None:
    compare(drawn(plan), of_one_rank())


@pytest.mark.captures_each
def test_its_capture_is_what_the_module_computes() -> None:
    assert verify_capture(Noise(), SHAPE, torch.float32) is None


def test_a_random_order_of_rows_names_what_works() -> None:
    program = capture(Answers({"rows": lambda y: y[:, :, torch.randperm(y.shape[2])]}).double(), SHAPE, torch.float64)
    with pytest.raises(
        RequestError, match=r"indexes dims \[2\].*height and width.*what works: .*channels.*gather_bytes="
    ):
        lower(program, Target((2, 2), 0, gather_bytes=0))


SHARES = torch.tensor([0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98], dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("draw", "parameters", "reference"),
    [
        (draws.uniform, (-1.0, 3.0), torch.distributions.Uniform(-1.0, 3.0)),
        (draws.normal, (2.0, 0.5), torch.distributions.Normal(2.0, 0.5)),
        (draws.log_normal, (0.5, 0.7), torch.distributions.LogNormal(0.5, 0.7)),
        (draws.exponential, (4.0,), torch.distributions.Exponential(4.0)),
        (draws.cauchy, (1.0, 2.0), torch.distributions.Cauchy(1.0, 2.0)),
    ],
)
def test_numbers_have_the_distribution_s_quantiles(
    draw: Callable[..., torch.Tensor],
    parameters: tuple[float, ...],
    reference: torch.distributions.Distribution,
    dtype: torch.dtype,
) -> None:
    numbers = draw(draws.mixed(11), torch.arange(1 << 16), dtype, *parameters)
    assert numbers.dtype == dtype
    below = (numbers.double()[:, None] <= reference.icdf(SHARES)).double().mean(0)
    assert (below - SHARES).abs().max() < (0.01 if dtype != torch.bfloat16 else 0.02)


def test_integers_and_trials_are_as_frequent_as_they_should_be() -> None:
    where = torch.arange(1 << 16)
    found = torch.bincount(draws.integers(draws.mixed(2), where, torch.int64, -2, 5) + 2) / len(where)
    assert len(found) == 7 and (found - 1 / 7).abs().max() < 0.006
    assert set(draws.integers(3, where, torch.float32, 4).tolist()) == {0.0, 1.0, 2.0, 3.0}
    trials = torch.bincount(draws.geometric(draws.mixed(4), where, torch.float32, 0.3).long()) / len(where)
    assert [float(trials[k]) for k in range(4)] == pytest.approx([0.0, 0.3, 0.21, 0.147], abs=0.008)
    assert (draws.geometric(draws.mixed(4), where, torch.float32, 1.0) == 1).all(), "it cannot fail"
    order = draws.permutation(draws.mixed(6), where, torch.int64)
    assert torch.equal(order.sort()[0], where) and not torch.equal(order, where)


@pytest.mark.parametrize("rate", [0.0, 0.02, 2.5, 30.0, 4e4])
def test_counts_have_the_poisson_distribution(rate: float) -> None:
    where = torch.arange(1 << 16)
    found = draws.poisson(draws.mixed(8), where, torch.float64, torch.tensor(rate, dtype=torch.float64))
    share = math.sqrt(rate / len(where))
    assert abs(float(found.mean()) - rate) <= 4 * share and abs(float(found.var()) - rate) <= 0.03 * rate
    counts = torch.arange(100, dtype=torch.float64)
    true = torch.distributions.Poisson(torch.tensor(rate, dtype=torch.float64)).log_prob(counts).exp().cumsum(0)
    below = (found[:, None] <= counts).double().mean(0)
    assert (below - true).abs().max() < 0.006


def test_poisson_numbers_of_no_rate_are_not_numbers() -> None:
    rates = torch.tensor([-1.0, math.nan, math.inf, 0.0])
    assert draws.poisson(1, torch.arange(4), torch.float32, rates).isnan().tolist() == [True, True, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_integers_without_a_range_have_that_of_torch(dtype: torch.dtype) -> None:
    """The largest of many, and the mean, are those of ``Tensor.random_()``."""
    count = 1 << 15
    found = draws.any_integers(draws.mixed(3), torch.arange(count), dtype).double()
    true = torch.empty(count, dtype=dtype).random_(generator=torch.Generator().manual_seed(1)).double()
    assert float(found.min()) >= 0
    assert float(found.max()) == pytest.approx(float(true.max()), rel=1e-3)
    assert float(found.mean()) == pytest.approx(float(true.mean()), rel=0.03)


def test_samples_of_classes_on_a_map_are_refused_by_name() -> None:
    answers = Answers({"classes": lambda y: torch.multinomial(y.flatten(1).sigmoid(), 2).to(y.dtype)})
    program = capture(answers.double(), SHAPE, torch.float64)
    with pytest.raises(RequestError, match=r"aten.multinomial.*what works"):
        lower(program, Target((2, 2), 0))


def test_limits_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exponential number has a logarithm, and rounding does not reach the upper limit of uniform numbers."""
    monkeypatch.setattr(draws, "_uniform", lambda key, where, dtype: torch.zeros(where.shape, dtype=dtype))
    assert float(draws.exponential(0, torch.arange(1), torch.float16)) > 0
    monkeypatch.setattr(draws, "_uniform", lambda key, where, dtype: torch.full(where.shape, 1 - 2**-24, dtype=dtype))
    assert float(draws.uniform(0, torch.arange(1), torch.float32, 1.0, 2.0)) < 2.0
