"""As few cells as the memory allows, none where all fits, or a refusal that says what would do."""

from __future__ import annotations

import pytest
import torch

import hyfi_core
from hyfi_core import ParallelPlan
from hyfi_core.capture.export import capture
from hyfi_core.cells import budget, page_forecast
from hyfi_core.cells.budget import with_cells
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.cost.memory.forecast import forecast_memory, rank_peaks
from hyfi_core.errors import RequestError
from tests.hyfi_core.cells.small_models import Dense

SHAPE = (2, 3, 67, 53)


@pytest.fixture(autouse=True)
def no_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a limit be about the maps of a small network, not about libraries and records."""
    monkeypatch.setattr(budget, "LIBRARY_BYTES", 0)
    for module in (budget, page_forecast):
        monkeypatch.setattr(module, "RECORD_BYTES", {True: 1, False: 1})
    monkeypatch.setattr(page_forecast, "SMALLEST_BYTES", 1)


def test_less_memory_means_more_cells() -> None:
    program = capture(Dense(), SHAPE, torch.float32)
    chosen = []
    whole = ParallelPlan(((1, 1),))
    stages = forecast_memory(program, whole)
    state = stages[0].state_bytes
    maps = rank_peaks(whole, stages)[0] - state
    for part in (1.5, 1.0, 0.25, 0.05):
        memory_bytes = state + int(part * maps)
        plan = ParallelPlan(((1, 1),), cells="auto", spill="memory", memory_bytes=memory_bytes)
        assert ParallelPlan.from_json(plan.to_json()) == plan and "as many cells as" in plan.describe()
        chosen.append(with_cells(plan, program, 0, torch.device("cpu")))
    assert chosen[0].cells is None and chosen[0].spill is None
    sides = [plan.cells[0] for plan in chosen[1:]]  # type: ignore[index]
    assert sides == sorted(set(sides)) and len(sides) == 3 and chosen[1].spill == "memory"
    with pytest.raises(
        RequestError, match=r"plan\.memory_bytes is 7,000, but with any number of cells a rank needs at least [\d,]+,"
    ):
        with_cells(
            ParallelPlan(((1, 1),), cells="auto", spill="memory", memory_bytes=7000), program, 0, torch.device("cpu")
        )
    with pytest.raises(RequestError, match=r'plan\.cells is "auto", which needs plan\.spill, such as "memory"; set it'):
        ParallelPlan(((1, 1),), cells="auto")


def test_an_engine_tells_the_cells_that_it_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "resident_bytes", lambda: 0)
    model = Dense()
    plan = ParallelPlan(((1, 1),), cells="auto", spill="memory", memory_bytes=500_000)
    engine = hyfi_core.parallelize(model, SHAPE, plan, AloneCommunicator())
    assert isinstance(engine.plan.cells, tuple)
    loss = engine.accumulate(torch.randn(SHAPE), torch.tensor([0, 1]))
    assert loss > 0 and engine.spilled().peak_bytes <= 500_000  # type: ignore[union-attr]


def test_evaluation_keeps_less_and_has_fewer_cells() -> None:
    program = capture(Dense().eval(), SHAPE, torch.float32)
    chosen = {}
    for memory_bytes in (300_000, 400_000, 1_000_000):
        plan = ParallelPlan(((1, 1),), cells="auto", spill="memory", memory_bytes=memory_bytes)
        chosen[memory_bytes] = with_cells(plan, program, 0, torch.device("cpu"), trains=False).cells
    assert chosen[1_000_000] is None
    assert chosen[300_000] > chosen[400_000] > (1, 1)  # type: ignore[operator]
    plan = ParallelPlan(((1, 1),), cells="auto", spill="memory", memory_bytes=20_000)
    with pytest.raises(RequestError, match=r"is 20,000, but with any number of cells a rank needs at least 89,656"):
        with_cells(plan, program, 0, torch.device("cpu"), trains=False)


def test_the_least_that_a_refusal_names_counts_what_the_capture_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first capture loads a hundred megabytes of libraries: measured before it, the least was too little to start."""
    resident = {"bytes": 10_000}

    def loading(*given: object) -> object:
        resident["bytes"] = 50_000
        return capture(*given)  # type: ignore[arg-type]

    monkeypatch.setattr("hyfi_core.runtime.subject.capture", loading)
    monkeypatch.setattr(budget, "resident_bytes", lambda: resident["bytes"])
    comm = AloneCommunicator()
    plan = ParallelPlan(((1, 1),), cells="auto", spill="memory", memory_bytes=20_000)
    with pytest.raises(RequestError, match="a rank needs at least") as refused:
        hyfi_core.parallelize(Dense(), SHAPE, plan, comm, verify=False)
    least = int(str(refused.value).split("at least ")[1].split(" bytes")[0].replace(",", ""))
    assert least > 50_000
    enough = ParallelPlan(((1, 1),), cells="auto", spill="memory", memory_bytes=least)
    hyfi_core.parallelize(Dense(), SHAPE, enough, comm, verify=False)
