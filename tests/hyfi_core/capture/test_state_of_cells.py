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


ONE_RANK, TWO_RANKS = ParallelPlan(((1, 1),), cells=(2, 2)), ParallelPlan(((1, 2),), cells=(2, 1))
SCALES = [number, table, lambda y: kept(*y.shape[2:]), warned, imported]


@pytest.mark.parametrize(
    ("plan", "scale"),
    [(ONE_RANK, table), *((TWO_RANKS, scale) for scale in SCALES)]  # two ranks have cells, too
    + [pytest.param(ONE_RANK, scale, marks=pytest.mark.soak) for scale in SCALES if scale is not table],
)
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
        ((losses, logits, programs), *_) = run_ranks(plan.ranks, body)
        wanted = F.cross_entropy(model(images), labels)
        model(images)
    assert losses == pytest.approx([float(wanted)] * 2, abs=1e-12)
    assert programs == 2  # to train, and to predict
    assert (logits - model.eval()(images)).abs().max() < 1e-12  # the cache holds no tensor without values


class Kept(Scaled):
    """Keeps tables by size: in a dict, as an attribute, or in evaluation mode alone, as LeViT does."""

    warned = False

    def __init__(self, kind: str) -> None:
        super().__init__(number)
        self.kind, self.tables, self.table = kind, dict[Any, torch.Tensor](), None
        self.biases = nn.Parameter(torch.rand(4, 1, 1))

    def train(self, mode: bool = True) -> Kept:
        if mode and self.kind == "evaluation":
            self.tables = {}
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.stem(x))
        return self.head(F.relu(y * self.of(y)).mean((2, 3)))

    def of(self, y: torch.Tensor) -> torch.Tensor:
        size = (y.shape[2], y.shape[3])
        Kept.warned = True
        if self.kind == "attribute":
            if self.table is None or self.table.shape != size:
                self.table = positions(*size)
            return self.table
        if self.kind == "evaluation":
            if self.training:
                return self.biases
            self.tables.setdefault("biases", self.biases * 2.0)
            return self.tables["biases"] / 2.0
        if size not in self.tables:
            self.tables[size] = positions(*size)
        return self.tables[size]


def own_forward(model: nn.Module, size: tuple[int, int] = SHAPE[2:], training: bool = False) -> None:
    """A forward of the user's own, which fills caches; statistics stay as they are."""
    state, mode = {name: value.clone() for name, value in model.state_dict().items()}, model.training
    with torch.no_grad():
        model.train(training)(torch.ones(1, 3, *size, dtype=torch.float64))
    model.load_state_dict(state)
    model.train(mode)


@pytest.mark.parametrize(
    ("kind", "cells", "when"),
    [
        ("dict", None, "at start"),
        ("dict", None, "after predictions"),
        ("dict", (2, 1), "before a prediction"),
        ("dict", None, "of another size"),
        ("attribute", None, "at start"),
        ("attribute", (2, 1), "after predictions"),
        *(  # as of a dict
            pytest.param("attribute", None, when, marks=pytest.mark.soak)
            for when in ("before a prediction", "of another size")
        ),
        ("evaluation", None, "before a prediction"),
        ("evaluation", (2, 1), "after predictions"),
    ],
)
def test_a_cache_that_one_rank_alone_has_filled_changes_nothing(
    kind: str, cells: tuple[int, int] | None, when: str
) -> None:
    torch.manual_seed(0)
    model, (images, labels) = Kept(kind).double(), batch()
    plan, copies = ParallelPlan(((1, 2),), cells=cells), [copy.deepcopy(model) for _ in range(2)]

    def body(comm: Any) -> Any:
        mine = copies[comm.rank]
        if when == "at start" and comm.rank == 0:
            own_forward(mine, training=True)
        engine = hyfi_core.parallelize(mine, SHAPE, plan, comm)
        losses = [engine.accumulate(images, labels)]
        if when in ("before a prediction", "of another size") and comm.rank == 0:
            own_forward(mine, SHAPE[2:] if when == "before a prediction" else (9, 12), training=True)
        engine.predict(images)
        if when == "after predictions" and comm.rank == 0:
            own_forward(mine)
        losses.append(engine.accumulate(images, labels))
        return losses, engine.predict(images), len(engine._subject.programs)

    ((losses, logits, programs), *_) = run_ranks(2, body)
    wanted = [float(F.cross_entropy(model(images), labels)) for _ in range(2)]
    assert losses == pytest.approx(wanted, abs=1e-12)
    assert programs == 2
    assert (logits - model.eval()(images)).abs().max() < 1e-12


def test_a_cached_table_that_is_changed_counts() -> None:
    """Also in place, where no program has it: it was computed instead."""
    torch.manual_seed(0)
    model, (images, labels) = Kept("dict").double(), batch()
    plain = copy.deepcopy(model)
    engine = hyfi_core.parallelize(model, SHAPE, ParallelPlan(((1, 1),)), AloneCommunicator())
    before = engine.accumulate(images, labels)
    for one in (model, plain):
        own_forward(one)
    assert engine.accumulate(images, labels) == before
    for change in (lambda table: table.mul_(3.0), lambda table: table.add_(1.0)):
        for one in (model, plain):
            change(one.tables[11, 9])
        found = engine.accumulate(images, labels)
        assert found == pytest.approx(float(F.cross_entropy(plain(images), labels)), abs=1e-12) and found != before


def test_a_constant_that_is_no_cache_is_kept() -> None:
    class Masked(Scaled):
        def __init__(self) -> None:
            super().__init__(lambda y: 1.0)
            self.mask: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.stem(x) if self.mask is None else self.stem(x) * self.mask
            return self.head(y.mean((2, 3)))

    torch.manual_seed(0)
    model, (images, labels) = Masked().double(), batch()
    model.mask = positions(11, 9)
    engine = hyfi_core.parallelize(model, SHAPE, ParallelPlan(((1, 1),), cells=(2, 1)), AloneCommunicator())
    wanted = float(F.cross_entropy(model(images), labels))
    assert engine.accumulate(images, labels) == pytest.approx(wanted, abs=1e-12)
    model.mask = model.mask * 2.0
    wanted = float(F.cross_entropy(model(images), labels))
    assert engine.accumulate(images, labels) == pytest.approx(wanted, abs=1e-12)


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
