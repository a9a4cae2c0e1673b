"""Maps that leave memory while no cell needs them, or are computed again, change no bit of a training step."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hyfi_core
from hyfi_core import ParallelPlan
from hyfi_core.cells import budget, page_forecast, pager, paging
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.errors import RequestError
from hyfi_core.models.amoebanet import amoebanet_d
from hyfi_core.models.resnet import resnet10
from tests.harness import captured_once  # noqa: F401 (what follows captures each model once)
from tests.hyfi_core.cells.small_models import Dense
from tests.steps import assert_plan_equals_one_process, sgd
from tests.test_cells import Mixed, frozen

MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet": lambda: resnet10(2, width=4),
    "frozen": lambda: frozen(Dense()),
    "mixed": Mixed,
    "dense": Dense,
}


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every map be a page, and a pager hold 30 KB of them: less than most steps need."""
    monkeypatch.setattr(pager, "SMALLEST_BYTES", 1)
    monkeypatch.setattr(paging, "page_limit", lambda *given: 30_000)


def step(name: str, plan: ParallelPlan, **others: Any) -> tuple[float, list[torch.Tensor], Any]:
    torch.manual_seed(7)
    model = MODELS[name]().double()
    torch.manual_seed(8)
    shape = (2, 3, 67, 53)
    engine = hyfi_core.parallelize(model, shape, plan, AloneCommunicator(), **others)
    loss = engine.accumulate(torch.randn(shape, dtype=torch.float64), torch.tensor([0, 1]))
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return loss, [*gradients, *model.buffers()], engine.spilled()


CASES = [
    pytest.param("resnet", (2, 2), "memory", {}, marks=pytest.mark.soak),
    ("dense", (1, 2), "folder", {"microbatches": 2, "fused_halo": 2}),
    ("dense", (2, 1), "folder", {"microbatches": 2, "schedule": "gems_mast", "recompute": True}),
    ("frozen", (3, 2), "folder", {}),
    ("mixed", (2, 2), "memory", {}),
    pytest.param("dense", (4, 4), "folder", {}, marks=pytest.mark.soak),
]


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize(("name", "cells", "where", "others"), CASES)
def test_a_step_that_spills_gives_the_same_bits(
    name: str, cells: tuple[int, int], where: str, others: dict[str, Any], tmp_path: Path
) -> None:
    spill = str(tmp_path) if where == "folder" else where
    loss, tensors, none = step(name, ParallelPlan(((1, 1),), cells=cells, **others))
    spilled_loss, spilled, counts = step(name, ParallelPlan(((1, 1),), cells=cells, spill=spill, **others))
    assert none is None and loss == spilled_loss
    assert all(torch.equal(a, b) for a, b in zip(tensors, spilled, strict=True))
    assert min(counts.written_bytes, counts.read_bytes, counts.store_bytes) > 10_000
    assert counts.recomputed_bytes > 0 or name == "mixed"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("name", ["resnet", "mixed"])
def test_an_answer_whose_maps_leave_memory_is_the_same(name: str, tmp_path: Path) -> None:
    torch.manual_seed(7)
    model, images = MODELS[name]().double().eval(), torch.randn(4, 3, 67, 53, dtype=torch.float64)
    plan = ParallelPlan(((1, 1),), cells=(2, 2), spill=str(tmp_path), microbatches=2)
    engine = hyfi_core.parallelize(model, (4, 3, 67, 53), plan, AloneCommunicator(), optimizer=sgd)
    before = [engine.predict(images) for _ in range(2)]
    counts = engine.spilled()
    assert min(counts.written_bytes, counts.read_bytes) > 10_000 and counts.recomputed_bytes == 0
    with torch.no_grad():
        torch.testing.assert_close(before[1], model(images), rtol=1e-10, atol=1e-10)
    assert torch.equal(*before)
    explained = engine.explain(images)
    assert min(engine.spilled().written_bytes, engine.spilled().read_bytes) > 10_000  # type: ignore[union-attr]
    in_memory = ParallelPlan(((1, 1),), microbatches=2)
    whole = hyfi_core.parallelize(model, (4, 3, 67, 53), in_memory, AloneCommunicator()).explain(images)
    for found, expected in zip(explained, whole, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    engine.train_step(images, torch.tensor([0, 1, 1, 0]))
    assert engine.seconds()["spill"] > 0
    with torch.no_grad():
        torch.testing.assert_close(engine.predict(images), model(images), rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("small_pages")
def test_a_process_that_has_grown_keeps_fewer_maps_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = ParallelPlan(((1, 1),), cells=(2, 2), spill="memory", memory_bytes=10**9)
    monkeypatch.setattr(paging, "page_limit", lambda *given: 500_000)
    monkeypatch.setattr(budget, "resident_bytes", lambda: 10**8)
    loss, tensors, counts = step("dense", plan)
    monkeypatch.setattr(budget, "resident_bytes", lambda: 10**9)  # of other things than maps
    grown_loss, grown_tensors, grown = step("dense", plan)
    assert grown.read_bytes > 1.4 * counts.read_bytes and grown.peak_bytes < 0.9 * counts.peak_bytes
    assert loss == grown_loss and all(torch.equal(a, b) for a, b in zip(tensors, grown_tensors, strict=True))


@pytest.mark.usefixtures("small_pages")
def test_bfloat16_steps_spill_the_same_bits(tmp_path: Path) -> None:
    plans = [ParallelPlan(((1, 1),), cells=(2, 2), spill=spill) for spill in (None, str(tmp_path))]
    (loss, tensors, _), (spilled_loss, spilled, counts) = (step("dense", p, autocast=torch.bfloat16) for p in plans)
    assert loss == spilled_loss and counts.read_bytes > 0
    assert all(torch.equal(a, b) for a, b in zip(tensors, spilled, strict=True))


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize(
    ("grids", "cuts", "others"),
    [(((1, 2),), (), {}), (((1, 1), (1, 1)), ("layers.1",), {"microbatches": 2, "schedule": "1f1b"})],
)
def test_ranks_of_any_plan_spill(grids: Any, cuts: Any, others: dict[str, Any], tmp_path: Path) -> None:
    plan = ParallelPlan(grids, cuts, cells=(2, 1), spill=str(tmp_path), **others)
    torch.manual_seed(3)
    assert_plan_equals_one_process(Dense(), (2, 3, 67, 53), plan, factory=sgd, steps=2, strict=False)


@pytest.mark.soak
@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize(
    ("name", "grids", "cuts", "others"),
    [
        ("resnet", ((2, 2),), (), {"cells": (2, 1)}),
        ("resnet", ((1, 2), (1, 1)), ("layer2",), {"cells": (2, 2), "microbatches": 2, "schedule": "chimera"}),
        ("dense", ((1, 2),), (), {"cells": (4, 4), "microbatches": 2, "fused_halo": 2}),
        (
            "resnet",
            ((2, 1), (1, 1)),
            ("layer2",),
            {"cells": (1, 3), "microbatches": 2, "schedule": "gems_master", "recompute": True},
        ),
        ("amoebanet", ((1, 1),), (), {"cells": (2, 3)}),
    ],
)
def test_many_steps_that_spill_are_those_of_one_process(
    name: str, grids: Any, cuts: Any, others: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(3)
    model = amoebanet_d(2, 3, 16) if name == "amoebanet" else MODELS[name]()
    plan = ParallelPlan(grids, cuts, spill=str(tmp_path), **others)
    shape = (2, 3, 97, 113) if name == "amoebanet" else (2, 3, 67, 53)
    assert_plan_equals_one_process(model, shape, plan, factory=sgd, steps=20, strict=False)


@pytest.mark.usefixtures("small_pages")
def test_bfloat16_that_spills_is_at_most_twice_as_far_from_float64_as_plain_bfloat16() -> None:
    torch.manual_seed(7)
    exact = Dense().double()
    images, labels = torch.randn(2, 3, 67, 53), torch.tensor([0, 1])
    cross_entropy(exact(images.double()), labels).backward()
    plain, spilled = (copy.deepcopy(exact).float() for _ in range(2))
    plain.zero_grad()
    spilled.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        answer = plain(images)
    cross_entropy(answer.float(), labels).backward()
    plan = ParallelPlan(((1, 1),), cells=(2, 3), spill="memory")
    engine = hyfi_core.parallelize(spilled, (2, 3, 67, 53), plan, AloneCommunicator(), autocast=torch.bfloat16)
    engine.accumulate(images, labels)
    far = [
        torch.cat([(p.grad - q.grad).flatten() for p, q in zip(model.parameters(), exact.parameters(), strict=True)])
        for model in (spilled, plain)
    ]
    assert far[0].norm() <= 2 * far[1].norm()


def test_the_callers_images_and_all_weights_stay_where_they_are(
    small_pages: None,
    tmp_path: Path,
) -> None:
    torch.manual_seed(7)
    model = Dense()
    plan = ParallelPlan(((1, 1),), cells=(1, 1), spill=str(tmp_path))
    engine = hyfi_core.parallelize(model, (2, 3, 67, 53), plan, AloneCommunicator(), optimizer=sgd)
    assert re.search(r"\nkept for backward: up to [\d,]{6,} bytes; the largest step of a cell needs", engine.describe())
    images = torch.randn(2, 3, 67, 53)
    before = images.clone()
    for _ in range(3):
        engine.train_step(images, torch.tensor([0, 1]))
    assert torch.equal(images, before) and engine.spilled().written_bytes > 0
    assert all(tensor.untyped_storage().nbytes() >= tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def test_what_cannot_work_is_refused_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match=r"plan\.spill .* needs plan\.cells"):
        ParallelPlan(((1, 1),), spill="memory")
    with pytest.raises(RequestError, match=r"plan\.spill is 3"):
        ParallelPlan(((1, 1),), cells=(2, 2), spill=3)  # type: ignore[arg-type]
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match=r"plan\.spill is .*file, where no file can be created"):
        step("dense", ParallelPlan(((1, 1),), cells=(2, 2), spill=str(tmp_path / "file")))
    plan = ParallelPlan(((1, 1),), cells=(2, 2), spill=str(tmp_path), memory_bytes=10_000)
    with pytest.raises(RequestError, match=r"plan\.memory_bytes is 10,000, .* a rank needs at least [\d,]{9,}"):
        step("dense", plan)
    monkeypatch.setattr(paging, "page_limit", lambda *given: 30_000)
    monkeypatch.setattr(page_forecast, "SMALLEST_BYTES", 1)
    monkeypatch.setattr(os, "posix_fallocate", _full)
    monkeypatch.setattr("hyfi_core.cells.spill_store.shutil.disk_usage", lambda path: _Usage(1000))
    plan = ParallelPlan(((1, 1),), cells=(2, 2), spill=str(tmp_path))
    with pytest.raises(
        RequestError, match=r"a step spills up to [\d,]{7,} bytes to .*\(plan\.spill\), which has 1,000"
    ):
        step("dense", plan)


class _Usage:
    def __init__(self, free: int) -> None:
        self.free = free


def _full(*given: int) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.usefixtures("small_pages")
def test_a_disk_that_is_full_in_mid_step_ends_it_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", _full)
    with pytest.raises(RequestError, match=r"\(plan\.spill\): No space left on device; free some space"):
        step("dense", ParallelPlan(((1, 1),), cells=(2, 2), spill=str(tmp_path)))
