"""Cells of one process take turns, and are ranks of one group with the cells of others."""

from __future__ import annotations

import copy
import gc
import threading
from typing import Any

import pytest
import torch
from torch import nn

from hyfi_core.cells.baton import Baton
from hyfi_core.cells.communicator import CellCommunicator, cell_communicators, tag_of_cells
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.comm.base import Communicator, Message
from hyfi_core.comm.threads import ThreadCommunicator, run_ranks
from hyfi_core.errors import RequestError
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.runtime.parallelize import parallelize

MEMBERS = ((0, 0), (1, 0), (0, 1), (1, 1))  # ranks go across two processes of two cells each


def on_cells(cells: int, body: Any) -> list[Any]:
    baton = Baton(cells)
    comms = cell_communicators(AloneCommunicator(), baton, [(0, cell) for cell in range(cells)])
    return baton.run(lambda cell: body(comms[cell]))


def on_two_processes(body: Any) -> list[Any]:
    def process(comm: Communicator) -> list[Any]:
        baton = Baton(2)
        comms = cell_communicators(comm, baton, MEMBERS)
        return baton.run(lambda cell: body(comms[cell]))

    found = run_ranks(2, process)
    return [found[process][cell] for process, cell in MEMBERS]


def test_a_cell_that_has_run_may_have_what_others_wait_for() -> None:
    """The last cell sends to the second, which is not the next to be asked: nobody waits for ever."""

    def body(comm: CellCommunicator) -> float:
        last, box = comm.size - 1, torch.empty(1)
        if comm.rank == last:
            comm.exchange([Message(1, torch.tensor([7.0]))], []).wait()  # nothing to wait for
        if comm.rank == 1:
            comm.exchange([], [Message(last, box)]).wait()
        comm.barrier()
        return float(box) if comm.rank == 1 else 0.0

    assert on_cells(4, body) == [0.0, 7.0, 0.0, 0.0]


def test_a_group_ends_with_its_communicators() -> None:
    """The baton once kept every group for as long as the engine lived, which makes groups for each capture."""
    baton = Baton(2)
    comms = cell_communicators(AloneCommunicator(), baton, [(0, 0), (0, 1)])
    baton.run(lambda cell: comms[cell].split(0, cell))
    gc.collect()
    assert list(baton.groups) == [comms[0].group]


def test_one_cell_runs_at_a_time_until_it_has_to_wait_and_nothing_is_done_twice() -> None:
    order: list[str] = []

    def body(comm: CellCommunicator) -> float:
        order.append(f"{comm.rank} sends")
        box, peer = torch.empty(1), (comm.rank + 1) % 3
        pending = comm.exchange([Message(peer, torch.tensor([float(comm.rank)]))], [Message((comm.rank - 1) % 3, box)])
        pending.wait()
        order.append(f"{comm.rank} has")
        return float(box)

    assert on_cells(3, body) == [2.0, 0.0, 1.0]
    assert order == ["0 sends", "1 sends", "1 has", "2 sends", "2 has", "0 has"]


def everything(comm: CellCommunicator) -> list[Any]:
    """Call everything that a step calls, more than once, and return what came of it."""
    found: list[Any] = []
    for turn in range(2):
        total = torch.tensor([0.1 * (comm.rank + 1) + turn], dtype=torch.float64)
        top = total.clone()
        pending = comm.start_all_reduce(total)
        comm.all_reduce(top, "max")
        pending.wait()
        boxes = [torch.empty(1) for _ in range(comm.size)]
        comm.exchange(
            [Message(peer, torch.tensor([10.0 * comm.rank + peer])) for peer in range(comm.size)],
            [Message(peer, box) for peer, box in enumerate(boxes)],
        ).wait()
        told = torch.tensor([float(comm.rank)])
        comm.broadcast(told, comm.size - 1)
        comm.barrier()
        found += [float(total), float(top), [float(box) for box in boxes], float(told)]
        found += [comm.broadcast_object({"rank": comm.rank}, 1), comm.gather_objects(comm.rank, 2)]
    group = comm.split(0, -comm.rank)
    assert group is not None
    found.append((group.rank, group.gather_objects(comm.rank, 0)))
    return found


@pytest.mark.parametrize("run", [lambda body: on_cells(4, body), on_two_processes])
def test_cells_are_ranks_of_a_group_wherever_they_are(run: Any) -> None:
    wanted = run_ranks(4, everything)
    found = run(everything)
    for ours, theirs in zip(found, wanted, strict=True):
        assert [ours[n] for n in (1, 2, 3, 4, 5)] == [theirs[n] for n in (1, 2, 3, 4, 5)]
        assert ours[-1] == theirs[-1]
        assert abs(ours[0] - theirs[0]) < 1e-15, "sums are taken within each process first"
    assert len({ours[0] for ours in found}) == 1, "and are the same bits for all"


def test_one_cells_failure_ends_all() -> None:
    def body(comm: CellCommunicator) -> None:
        if comm.rank == 1:
            raise ValueError("the second cell fails")
        comm.barrier()

    with pytest.raises(ValueError, match="the second cell fails"):
        on_cells(3, body)


def test_a_turn_wakes_one_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    wakes, wait = [], threading.Condition.wait

    def counted(condition: threading.Condition, timeout: float | None = None) -> bool:
        wakes.append(condition)
        return wait(condition, timeout)

    cells, rounds = 24, 5
    monkeypatch.setattr(threading.Condition, "wait", counted)
    on_cells(cells, lambda comm: [comm.barrier() for _ in range(rounds)])
    assert len(wakes) < 4 * cells * rounds, "all cells woken in every turn would be cells² · rounds"


def test_cells_that_wait_for_ever_are_told() -> None:
    def body(comm: CellCommunicator) -> None:
        comm.exchange([], [Message(1 - comm.rank, torch.empty(1))]).wait()

    with pytest.raises(RuntimeError, match=r"cells \[0, 1\] wait for each other"):
        on_cells(2, body)


def test_what_no_step_calls_is_not_offered() -> None:
    with pytest.raises(AttributeError, match="cells have no poll_object"):
        on_cells(1, lambda comm: comm.poll_object(0))


@pytest.mark.parametrize("cells", [1, 2, 7, 30])
def test_no_two_pairs_of_cells_share_a_tag(cells: int) -> None:
    every = range(cells)
    tags = {tag_of_cells(source, target, cells, tag) for source in every for target in every for tag in range(3)}
    assert len(tags) == 3 * cells**2 and min(tags) == 0
    assert tag_of_cells(cells - 1, cells - 1, cells) == cells**2 - 1


@pytest.mark.parametrize(("cells", "fits"), [((2, 2), True), ((1, 5), False)])
def test_more_cells_than_a_library_has_tags_are_refused(
    monkeypatch: pytest.MonkeyPatch, cells: tuple[int, int], fits: bool
) -> None:
    monkeypatch.setattr(ThreadCommunicator, "largest_tag", 15)
    plan, model = ParallelPlan(((1, 2),), cells=cells), nn.Conv2d(3, 2, 1)

    def body(comm: Communicator) -> str:
        try:
            parallelize(copy.deepcopy(model), (1, 3, 4, 10), plan, comm, verify=False)
        except RequestError as refused:
            return str(refused)
        return ""

    for message in run_ranks(2, body):
        assert not message if fits else "tags up to 24" in message and "at most 4 cells a rank" in message
