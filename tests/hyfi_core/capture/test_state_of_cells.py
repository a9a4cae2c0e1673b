"""Caches, flags and imports of a forward lead to no new program on any rank or in any cell; real changes count."""

from __future__ import annotations

import copy
import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyfi_core
from hyfi_core import ParallelPlan
from hyfi_core.capture.outside_names import outside_values
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.comm.threads import run_ranks
from hyfi_core.errors import RequestError

pytestmark = pytest.mark.captures_each

SHAPE = (2, 3, 21, 17)
NUMBERS: dict[Any, float] = {}
TENSORS: dict[Any, torch.Tensor] = {}
SEEN: set[str] = set()
WARNED = False
TURN = 0.0


def number(x: torch.Tensor) -> float:
    if x.shape[2] not in NUMBERS:
        NUMBERS[x.shape[2]] = 1 / (1 + x.shape[2])
    return NUMBERS[x.shape[2]]


def positions(height: int, width: int) -> torch.Tensor:
    return torch.linspace(0, 1, height, dtype=torch.float64)[:, None] + torch.arange(width)


def table(x: torch.Tensor) -> torch.Tensor:
    if x.shape[2:] not in TENSORS:
        TENSORS[x.shape[2:]] = positions(*x.shape[2:])
    return TENSORS[x.shape[2:]]


@functools.lru_cache
def kept(height: int, width: int) -> torch.Tensor:
    return positions(height, width)


def warned(x: torch.Tensor) -> float:
    global WARNED
    if not WARNED:
        WARNED = True
        warnings.warn("said once", stacklevel=2)
    if "this" not in SEEN:
        SEEN.add("this")
    return 1.0


def imported(x: torch.Tensor) -> float:
    import colorsys

    return 1.0 if colorsys.__name__ in sys.modules else 2.0


def turned(x: torch.Tensor) -> float:
    global TURN
    scale = 2.0 if TURN is None else 3.0
    TURN = None
    return scale


class Scaled(nn.Module):
    """A small network of which a function scales the map."""

    def __init__(self, scale: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.scale, self.stem, self.norm = scale, nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.stem(x))
        return self.head(F.relu(y * self.scale(y)).mean((2, 3)))


@pytest.fixture(autouse=True)
def anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "WARNED", False)
    monkeypatch.setitem(globals(), "TURN", 0.0)
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    for held in (NUMBERS, TENSORS, SEEN):
        held.clear()
    kept.cache_clear()


def network(scale: Callable[[torch.Tensor], Any]) -> nn.Module:
    torch.manual_seed(0)
    return Scaled(scale).double()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SHAPE, dtype=torch.float64, generator=generator), torch.tensor([0, 1])


@pytest.mark.parametrize(
    "plan", [ParallelPlan(((1, 1),), cells=(2, 2)), ParallelPlan(((1, 2),), cells=(2, 1))], ids=str
)
@pytest.mark.parametrize("scale", [number, table, lambda y: kept(*y.shape[2:]), warned, imported])
def test_what_a_forward_keeps_is_the_same_in_all_cells_and_ranks(scale: Any, plan: ParallelPlan) -> None:
    model, (images, labels) = network(scale), batch()
    copies = [copy.deepcopy(model) for _ in range(plan.ranks)]

    def body(comm: Any) -> Any:
        engine = hyfi_core.parallelize(copies[comm.rank], SHAPE, plan, comm)
        losses = [engine.accumulate(images, labels)]
        engine.predict(images)
        losses.append(engine.accumulate(images, labels))
        return losses, engine.predict(images), len(engine._subject.programs)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ((losses, logits, programs), *_) = run_ranks(plan.ranks, body, timeout_s=120)
        wanted = F.cross_entropy(model(images), labels)
        model(images)
    assert losses == pytest.approx([float(wanted)] * 2, abs=1e-12)
    assert programs == 2  # to train, and to predict
    assert (logits - model.eval()(images)).abs().max() < 1e-12  # the cache holds no tensor without values


def test_another_value_is_a_change() -> None:
    model, (images, labels) = network(number), batch()
    plain = copy.deepcopy(model)
    plain(images)
    engine = hyfi_core.parallelize(model, SHAPE, ParallelPlan(((1, 1),), cells=(2, 1)), AloneCommunicator())
    before = engine.accumulate(images, labels)
    NUMBERS[11] = 5.0
    assert engine.accumulate(images, labels) == pytest.approx(float(F.cross_entropy(plain(images), labels)), abs=1e-12)
    NUMBERS[11] = 1 / 12
    assert engine.accumulate(images, labels) == before and len(engine._subject.programs) == 2


def test_a_forward_that_computes_otherwise_the_next_time_is_refused_at_start() -> None:
    for verify in (True, False):
        with pytest.raises(RequestError, match=r"TURN|does not compute what"):
            hyfi_core.parallelize(network(turned), SHAPE, ParallelPlan(((1, 1),)), AloneCommunicator(), verify=verify)
        globals()["TURN"] = 0.0


def test_what_a_forward_does_not_reach_does_not_count() -> None:
    class Large(Scaled):
        kind = "large"

        def load(self) -> Any:
            return sys.modules[__name__], self.kind, UNREACHED

    found = dict(outside_values(Large(number)))
    assert not {"UNREACHED", "sys.modules", f"{Large.__qualname__}.kind"} & found.keys() and "NUMBERS" in found


UNREACHED = 1.0
