"""Random operators: the same numbers on any plan, new ones at every step, and of the right distribution."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyfi_core
from hyfi_core.errors import RequestError
from hyfi_core.ops import draws
from tests.harness import run_copies


class DropoutNet(nn.Module):
    """Every way to drop: elements, channels, paths of two kinds, noise, and features of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.elements = nn.Dropout(0.3)
        self.channels = nn.Dropout2d(0.4)
        self.alpha = nn.AlphaDropout(0.2)
        self.fc = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.alpha(self.channels(self.elements(self.conv(x))))
        if self.training:
            path = torch.rand((x.shape[0], 1, 1, 1), dtype=x.dtype, device=x.device)
            x = x + torch.tanh(x) / 0.8 * (0.8 + path).floor_()
            x = x.div(0.7) * x.new_empty((x.shape[0], 1, 1, 1)).bernoulli_(0.7)
            x = x + 0.1 * torch.randn_like(x) + 0.1 * torch.randn((x.shape[0], 1, *x.shape[2:]), dtype=x.dtype)
        return self.fc(F.dropout(x.mean((2, 3)), 0.5, self.training))


SHAPE = (4, 3, 17, 23)


def trained(
    grid: tuple[int, int], microbatches: int = 1, replicas: int = 1, steps: int = 2, seed: int = 5
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses and weights after some steps."""
    torch.manual_seed(3)
    model = DropoutNet().double()
    images, labels = torch.randn(SHAPE, dtype=torch.float64), torch.tensor([0, 1, 1, 0])
    plan = hyfi_core.ParallelPlan(grids=(grid,), microbatches=microbatches, replicas=replicas)
    torch.manual_seed(seed)

    def body(comm: Any, module: nn.Module) -> Any:
        replica, share = comm.rank // plan.ranks_per_replica, SHAPE[0] // replicas
        mine = slice(replica * share, (replica + 1) * share)
        engine = hyfi_core.parallelize(
            module, (share, *SHAPE[1:]), plan, comm, optimizer=lambda params: torch.optim.SGD(params, lr=0.1)
        )
        return [engine.train_step(images[mine], labels[mine]) for _ in range(steps)], engine.gather_state_dict()

    losses, state = run_copies(model, plan.ranks, body)[0]
    return losses, state


def assert_same(found: Any, wanted: Any) -> None:
    assert found[0] == pytest.approx(wanted[0], abs=1e-12)
    for name, value in wanted[1].items():
        assert (found[1][name] - value).abs().max() < 1e-12, name


@pytest.mark.parametrize(
    "plan", [{"grid": (2, 2)}, {"grid": (3, 1)}, {"grid": (1, 2), "microbatches": 2}, {"grid": (1, 2), "replicas": 2}]
)
def test_any_plan_draws_the_same_numbers(plan: dict[str, Any]) -> None:
    assert_same(trained(**plan), trained((1, 1)))


def test_another_seed_and_another_step_draw_other_numbers() -> None:
    losses, _ = trained((1, 2))
    others, _ = trained((1, 2), seed=6)
    assert abs(losses[0] - others[0]) > 1e-3


def test_steps_differ_though_nothing_else_does() -> None:
    torch.manual_seed(3)
    images, labels = torch.randn(SHAPE), torch.tensor([0, 1, 1, 0])

    def body(comm: Any, module: nn.Module) -> Any:
        engine = hyfi_core.parallelize(module, SHAPE, hyfi_core.ParallelPlan(grids=((1, 2),)), comm)
        first, second = engine.accumulate(images, labels), engine.accumulate(images, labels)
        engine.random.step = 0
        return first, second, engine.accumulate(images, labels)

    first, second, again = run_copies(DropoutNet(), 2, body)[0]
    assert first == again
    assert first != second


def test_evaluation_mode_drops_nothing() -> None:
    torch.manual_seed(4)
    model, images = DropoutNet(), torch.randn(SHAPE)

    def body(comm: Any, module: nn.Module) -> Any:
        return hyfi_core.parallelize(module, SHAPE, hyfi_core.ParallelPlan(grids=((2, 1),)), comm).predict(images)

    logits = run_copies(model, 2, body)[0]
    assert torch.allclose(logits, model.eval()(images), atol=1e-5)


def test_dropout_of_one_process_is_dropout() -> None:
    """With the engine's own mask put into plain PyTorch, loss and gradients agree."""
    probability, shape = 0.3, (2, 3, 9, 11)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(probability), nn.Flatten(1), nn.Linear(297, 2)).double()
    images, labels = torch.randn(shape, dtype=torch.float64), torch.tensor([0, 1])
    torch.manual_seed(9)

    def body(comm: Any, module: nn.Module) -> Any:
        engine = hyfi_core.parallelize(module, shape, hyfi_core.ParallelPlan(grids=((2, 2),)), comm)
        return engine.accumulate(images, labels), engine.gather_gradients()

    loss, gradients = run_copies(model, 4, body)[0]
    where = torch.arange(images.numel()).view(shape)
    mask = draws.uniform(draws.mixed(9, 0, 0), where, torch.float64) >= probability
    wanted = F.cross_entropy(model[1:](images * mask / (1 - probability)), labels)
    wanted.backward()
    assert abs(loss - wanted.item()) < 1e-12
    assert (gradients["2.weight"] - model[2].weight.grad).abs().max() < 1e-12


def test_a_random_operator_without_a_rule_is_refused() -> None:
    class Jitter(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.rrelu(x, training=True).mean((2, 3))

    def body(comm: Any, module: nn.Module) -> Any:
        hyfi_core.parallelize(module, SHAPE, hyfi_core.ParallelPlan(grids=((1, 2),)), comm)

    with pytest.raises(RequestError, match=r"rrelu.*what works"):
        run_copies(Jitter(), 2, body)


class Noisy(nn.Module):
    """Adds noise by an operator whose numbers come from torch's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x.mean((2, 3)))
        return y * F.rrelu(-torch.ones_like(y), training=True)


def test_numbers_of_torch_s_generator_are_not_drawn_again() -> None:
    model = Noisy().double()
    images, labels = torch.randn(2, 3, 8, 8, dtype=torch.float64), torch.tensor([0, 1])
    torch.manual_seed(5)
    wanted = F.cross_entropy(model(images), labels)
    (slope,) = torch.autograd.grad(wanted, [model.fc.weight])
    comm = hyfi_core.init()
    engine = hyfi_core.parallelize(model, images.shape, hyfi_core.ParallelPlan(((1, 1),)), comm, verify=False)
    torch.manual_seed(5)
    assert engine.accumulate(images, labels) == pytest.approx(float(wanted), abs=1e-12)
    torch.testing.assert_close(model.fc.weight.grad, slope)
    with pytest.raises(RequestError, match=r"aten.rrelu.* draws from torch's generator, .*plan.recompute"):
        plan = hyfi_core.ParallelPlan(((1, 1),), recompute=True)
        hyfi_core.parallelize(Noisy().double(), images.shape, plan, comm, verify=False)


def test_parts_make_up_the_whole() -> None:
    shape, device = (2, 3, 7, 10), torch.device("cpu")
    whole = draws.positions(shape, None, (0, 0, 0, 0), device, 1000)
    assert whole.flatten().tolist() == list(range(1000, 1000 + 420))
    part = draws.positions(shape, (2, 3), (2, 5, 4, 10), device, 1000)
    assert torch.equal(part, whole[:, :, 2:5, 4:10])
    assert draws.positions((2, 7, 10, 3), (1, 2), (3, 3, 0, 5), device, 0).shape == (2, 0, 5, 3)


def test_the_hash_is_the_published_one() -> None:
    """First outputs of splitmix64 seeded with 1234567, as its reference implementation prints them."""
    golden = 0x9E3779B97F4A7C15
    words = draws._hashed(1234567, torch.arange(1, 4))
    assert [int(word) % 2**64 for word in words] == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert draws._signed(golden) % 2**64 == golden


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_numbers_are_uniform_and_independent(dtype: torch.dtype) -> None:
    count = 1 << 16
    numbers = draws.uniform(draws.mixed(1, 2, 3), torch.arange(count), dtype).double()
    assert float(numbers.min()) >= 0.0 and float(numbers.max()) < 1.0
    histogram = torch.histc(numbers, 64, 0.0, 1.0)
    chi2 = float(((histogram - count / 64) ** 2 / (count / 64)).sum())
    assert chi2 < 120  # 63 degrees of freedom: beyond 120 lies one in 10^5
    other = draws.uniform(draws.mixed(1, 2, 4), torch.arange(count), dtype).double()
    for a, b in ((numbers[:-1], numbers[1:]), (numbers, other)):
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 5 / count**0.5


def test_normal_numbers_are_normal() -> None:
    numbers = draws.normal(draws.mixed(7), torch.arange(1 << 16), torch.float64)
    moments = [float(numbers.pow(power).mean()) for power in (1, 2, 3, 4)]
    assert moments == pytest.approx([0, 1, 0, 3], abs=0.06)
