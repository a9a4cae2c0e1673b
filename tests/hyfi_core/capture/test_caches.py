"""Caches by size: what a forward stores that does not depend on the image is computed in every program, and removed."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyfi_core
from hyfi_core.capture.export import capture
from hyfi_core.capture.module_state import module_state
from hyfi_core.capture.storing.filled_caches import compute_the_same
from hyfi_core.capture.verify import verify_capture
from hyfi_core.comm.threads import run_ranks
from hyfi_core.errors import RequestError

pytestmark = pytest.mark.captures_each

SHAPE = (2, 3, 17, 14)
Size = tuple[int, int]
CODES: dict[Any, Any] = {}
LATEST: torch.Tensor | None = None
HELPER = types.SimpleNamespace(code=None)


def code(size: Size, scale: float = 1.0) -> torch.Tensor:
    rows, columns = (torch.linspace(0, scale, side, dtype=torch.float64) for side in size)
    return rows[:, None] + columns


@functools.lru_cache
def remembered(size: Size) -> torch.Tensor:
    return code(size)


class Net(nn.Module):
    """A convolution, a position code that is kept somewhere, and a head."""

    kept: torch.Tensor | None = None

    def __init__(self, positions: Callable[[Net, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3, 2, 1), nn.Linear(4, 2)
        self.biases = nn.Parameter(torch.rand(4))
        self.positions, self.cache, self.code = positions, dict[Any, Any](), None
        self.size: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        return self.fc((x * self.positions(self, x)).mean((2, 3)))


class Doubled(nn.Module):
    """Adds a value that depends on no input and is used twice by each of the next operators."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times, self.weight = times, nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = torch.arange(x.shape[-1], dtype=x.dtype)
        for _ in range(self.times):
            value = value + 0.5 * value
        return self.weight * x + value


def test_values_that_are_used_again_and_again_are_compared_at_once() -> None:
    # As texts, their expressions would have 2 ** 40 operators.
    one, other, longer = (capture(Doubled(times), SHAPE, torch.float64) for times in (40, 40, 41))
    assert compute_the_same(one, other)
    assert not compute_the_same(one, longer)


def own_dict(net: Net, x: torch.Tensor) -> torch.Tensor:
    if x.shape[2:] not in net.cache:
        net.cache[x.shape[2:]] = code(x.shape[2:])
    return net.cache[x.shape[2:]]


def own_biases(net: Net, x: torch.Tensor) -> torch.Tensor:
    """As LeViT: kept in evaluation mode only."""
    if net.training:
        return net.biases[:, None, None]
    key = str(x.device)
    if key not in net.cache:
        net.cache[key] = net.biases[:, None, None] * 2.0
    return net.cache[key] / 2.0


def own_attribute(net: Net, x: torch.Tensor) -> torch.Tensor:
    if net.code is None or net.code.shape != x.shape[2:]:
        net.code = code(x.shape[2:])
    return net.code


def global_dict(net: Net, x: torch.Tensor) -> torch.Tensor:
    if x.shape not in CODES:
        CODES[x.shape] = {"value": code(x.shape[2:])}
    return CODES[x.shape]["value"]


def global_name(net: Net, x: torch.Tensor) -> torch.Tensor:
    global LATEST
    if LATEST is None or LATEST.shape != x.shape[2:]:
        LATEST = code(x.shape[2:]).to(x)
    return LATEST


def helper(net: Net, x: torch.Tensor) -> torch.Tensor:
    if HELPER.code is None:
        HELPER.code = torch.zeros_like(x[0, 0]) + code(x.shape[2:])
    return HELPER.code


def of_class(net: Net, x: torch.Tensor) -> torch.Tensor:
    if Net.kept is None:
        Net.kept = code(x.shape[2:])
    return Net.kept


def memoised(net: Net, x: torch.Tensor) -> torch.Tensor:
    return remembered(tuple(x.shape[2:]))


def size_only(net: Net, x: torch.Tensor) -> torch.Tensor:
    """As Swin's H and W."""
    net.size = tuple(x.shape[2:])
    return code(net.size)


KINDS = [own_dict, own_biases, own_attribute, global_dict, global_name, helper, of_class, memoised, size_only]


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    CODES.clear()
    remembered.cache_clear()
    monkeypatch.setattr(HELPER, "code", None)
    monkeypatch.setattr(Net, "kept", None)


@pytest.mark.parametrize("positions", KINDS, ids=lambda kind: kind.__name__)
def test_a_cache_by_size_is_as_in_one_process(positions: Any) -> None:
    torch.manual_seed(0)
    net = Net(positions).double()
    before = module_state(net)
    assert verify_capture(net, SHAPE, torch.float64) is None
    capture(net, SHAPE, torch.float64)
    capture(net, (2, 3, 9, 14), torch.float64)  # another size
    assert not net.cache and net.code is None and not CODES and LATEST is None and HELPER.code is None
    assert Net.kept is None and not remembered.cache_info().currsize and module_state(net) == before


@pytest.mark.parametrize("positions", [own_biases, memoised], ids=lambda kind: kind.__name__)
def test_steps_and_predictions_equal_one_process(positions: Any) -> None:
    torch.manual_seed(0)
    images, labels = torch.randn(2, *SHAPE, dtype=torch.float64), torch.tensor([0, 1])
    nets = [Net(positions).double() for _ in range(3)]
    for net in nets[1:]:
        net.load_state_dict(nets[0].state_dict())

    def body(comm: Any) -> Any:
        engine = hyfi_core.parallelize(
            nets[comm.rank],
            SHAPE,
            hyfi_core.ParallelPlan(grids=((1, 2),)),
            comm,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        )
        return [(engine.train_step(x, labels), engine.predict(x)) for x in images]

    found = run_ranks(2, body)[0]
    net, optimizer = nets[2], torch.optim.SGD(nets[2].parameters(), lr=0.1)
    for x, (loss, logits) in zip(images, found, strict=True):
        wanted = F.cross_entropy(net.train()(x), labels)
        wanted.backward()
        assert abs(loss - wanted.item()) < 1e-12
        optimizer.step()
        optimizer.zero_grad()
        net.cache.clear()
        with torch.no_grad():
            torch.testing.assert_close(logits, net.eval()(x), rtol=0, atol=1e-12)
        net.cache.clear()


@pytest.mark.parametrize(
    ("positions", "words"),
    [
        (lambda net, x: net.cache.setdefault("first", x.mean()), "the forward changes the attribute 'cache'"),
        (lambda net, x: vars(net).update(size=(net.size or 0) + 1) or x * net.size, "changes the attribute 'size'"),
        (lambda net, x: x * (2.0 if vars(net).update(size=1) or net.size else 1.0), None),
        (lambda net, x: [x * (2.0 if net.size else 1.0), vars(net).update(size=1)][0], "changes the attribute 'size'"),
    ],
)
def test_what_a_later_forward_would_compute_otherwise_is_refused(positions: Any, words: str | None) -> None:
    net = Net(positions).double()
    if words is None:
        capture(net, SHAPE, torch.float64)
        return
    with pytest.raises(RequestError, match=words):
        capture(net, SHAPE, torch.float64)
