"""Tapes of all cells run in one thread, depth first, and change to another cell where one has to wait."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from hyfi_core.cells.baton import Baton, Lockstep
from hyfi_core.cells.communicator import CellCommunicator, cell_communicators
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.comm.base import Communicator, Message
from hyfi_core.comm.threads import run_ranks
from hyfi_core.comm.waits import Driver, OwnThread, Waits, within
from tests.patience import PATIENCE_S


def on_cells(cells: int, body: Any) -> list[Any]:
    """Return what ``body(communicator, driver)`` returns in each cell."""
    baton = Baton(cells)
    comms = cell_communicators(AloneCommunicator(), baton, [(0, cell) for cell in range(cells)])
    return baton.run(lambda cell: body(comms[cell], Lockstep(baton)))


def ring(comm: Communicator, order: list[str]) -> Waits[float]:
    """Send this rank's number to the next one, add all numbers, and return both."""
    order.append(f"{comm.rank} sends")
    box, last = torch.empty(1), comm.size - 1
    sends = [Message((comm.rank + 1) % comm.size, torch.tensor([float(comm.rank)]))]
    yield comm.exchange(sends, [Message((comm.rank - 1) % comm.size, box)])
    order.append(f"{comm.rank} has")
    total = torch.tensor([float(comm.rank)])
    yield comm.start_all_reduce(total)
    order.append(f"{comm.rank} knows the sum")
    return float(box) + 10 * float(total) + 100 * last


def test_cells_run_until_they_wait_in_the_thread_of_the_caller() -> None:
    order: list[str] = []
    threads: set[str] = set()

    def body(comm: CellCommunicator, driver: Driver) -> float:
        def steps() -> Waits[float]:
            threads.add(threading.current_thread().name)
            return (yield from ring(comm, order))

        return driver.run(steps())

    assert on_cells(3, body) == [232.0, 230.0, 231.0]
    first = ["0 sends", "1 sends", "1 has", "2 sends", "2 has", "0 has", "0 knows the sum"]
    assert order == [*first, "1 knows the sum", "2 knows the sum"]
    assert threads == {threading.current_thread().name}


def test_the_same_computation_is_that_of_a_rank_in_its_own_thread() -> None:
    wanted = run_ranks(3, lambda comm: OwnThread().run(ring(comm, [])))
    assert on_cells(3, lambda comm, driver: driver.run(ring(comm, []))) == wanted


def test_waits_of_a_tape_wake_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    wakes, wait = [], threading.Condition.wait

    def counted(condition: threading.Condition, timeout: float | None = None) -> bool:
        wakes.append(condition)
        return wait(condition, timeout)

    def many(comm: CellCommunicator) -> Waits[None]:
        for _ in range(50):
            yield comm.start_all_reduce(torch.ones(1))

    monkeypatch.setattr(threading.Condition, "wait", counted)
    on_cells(8, lambda comm, driver: driver.run(many(comm)))
    assert len(wakes) < 50, "8 cells come and go once; a hand-over for each wait would be 400"


def test_what_lies_between_tapes_may_wait_as_before() -> None:
    def body(comm: CellCommunicator, driver: Driver) -> list[float]:
        found = []
        for _ in range(3):
            found.append(driver.run(ring(comm, [])))
            comm.barrier()
            found.append(comm.broadcast_object(comm.rank, 1))
        return found

    assert on_cells(3, body) == [[own, 1] * 3 for own in (232.0, 230.0, 231.0)]


def test_cells_of_two_processes_wait_for_each_other_in_their_tapes() -> None:
    members = ((0, 0), (1, 0), (0, 1), (1, 1))

    def process(comm: Communicator) -> list[float]:
        baton = Baton(2)
        comms = cell_communicators(comm, baton, members)
        return baton.run(lambda cell: Lockstep(baton).run(ring(comms[cell], [])))

    found = run_ranks(2, process)
    wanted = run_ranks(4, lambda comm: OwnThread().run(ring(comm, [])))
    assert [found[process][cell] for process, cell in members] == wanted


def test_a_context_ends_where_another_cell_runs() -> None:
    seen = []

    def inside(comm: CellCommunicator) -> Waits[None]:
        seen.append((comm.rank, torch.is_grad_enabled()))
        yield comm.start_all_reduce(torch.ones(1))
        seen.append((comm.rank, torch.is_grad_enabled()))

    def body(comm: CellCommunicator, driver: Driver) -> None:
        driver.run(driver.within(torch.enable_grad, inside(comm)) if comm.rank else inside(comm))

    on_cells(2, body)
    assert seen == [(0, False), (1, True), (1, True), (0, False)] and torch.is_grad_enabled()


def test_a_context_of_steps_is_entered_again_after_each_wait() -> None:
    steps = within(torch.no_grad, ring(AloneCommunicator(), []))
    next(steps)
    assert torch.is_grad_enabled()
    assert OwnThread().run(steps) == 0.0


def test_tapes_that_wait_for_each_other_are_an_error_at_once() -> None:
    def receive(comm: CellCommunicator) -> Waits[None]:
        yield comm.exchange([], [Message(1 - comm.rank, torch.empty(1))])

    with pytest.raises(RuntimeError, match=r"cells \[0, 1\] wait for each other"):
        on_cells(2, lambda comm, driver: driver.run(receive(comm)))


def test_a_cell_sleeps_while_its_tape_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last cell to come falls asleep only after its tape has begun, in the other thread."""
    begun, asleep, take, taken = threading.Event(), threading.Event(), Baton._take, []

    def late(self: Baton, cell: int) -> None:
        taken.append(cell)
        if cell == 1 and taken.count(1) == 2:  # first to begin, then to wait for its tape
            assert begun.wait(PATIENCE_S)
            asleep.set()
        take(self, cell)

    def steps(comm: CellCommunicator) -> Waits[int]:
        if comm.rank == 1:
            begun.set()
            assert asleep.wait(PATIENCE_S)
            time.sleep(0.02)  # a cell that did not sleep would go on now, without a result
        yield comm.start_all_reduce(torch.ones(1))
        return comm.rank

    monkeypatch.setattr(Baton, "_take", late)
    assert on_cells(2, lambda comm, driver: driver.run(steps(comm))) == [0, 1]


def test_a_cell_that_comes_to_no_tape_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"cells \[0, 2\] wait for cells \[1\], which have ended"):
        on_cells(3, lambda comm, driver: None if comm.rank == 1 else driver.run(ring(comm, [])))


def test_a_tape_that_blocks_is_an_error() -> None:
    def block(comm: CellCommunicator) -> Waits[None]:
        comm.barrier()
        yield comm.start_all_reduce(torch.ones(1))

    with pytest.raises(AssertionError, match="a tape yields what it waits for"):
        on_cells(2, lambda comm, driver: driver.run(block(comm)))


def test_one_failing_tape_ends_all_and_leaves_nothing_behind() -> None:
    ended, baton = [], Baton(3)
    comms = cell_communicators(AloneCommunicator(), baton, [(0, cell) for cell in range(3)])

    def failing(comm: CellCommunicator) -> Waits[None]:
        try:
            yield comm.start_all_reduce(torch.ones(1))
            if comm.rank == 1:
                raise ValueError("the second cell fails")
            yield comm.start_all_reduce(torch.ones(1))
        finally:
            ended.append(comm.rank)

    with pytest.raises(ValueError, match="the second cell fails"):
        baton.run(lambda cell: Lockstep(baton).run(failing(comms[cell])))
    assert sorted(ended) == [0, 1, 2]
    assert baton.run(lambda cell: Lockstep(baton).run(ring(comms[cell], []))) == [232.0, 230.0, 231.0]
