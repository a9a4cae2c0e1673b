"""Combinations: one function of what all ranks contribute; ranks that share memory compute it once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from hyfi_core.cells.baton import Baton
from hyfi_core.cells.communicator import cell_communicators
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.comm.base import Communicator, Tensors
from hyfi_core.comm.combined import Combination, start_combined
from hyfi_core.comm.counted import CountedCommunicator
from hyfi_core.comm.replay import RecordingCommunicator, ReplayingCommunicator
from hyfi_core.comm.threads import run_ranks
from tests.hyfi_core.cells.test_communicator import on_cells, on_two_processes

RANKS = {"threads": lambda body: run_ranks(4, body), "cells": lambda body: on_cells(4, body), "both": on_two_processes}


def combination(packed: list[list[int]], combinations: list[float]) -> Combination:
    """Return a sum of squares, which notes what it packs and what it combines."""

    def pack(parts: Mapping[int, float]) -> torch.Tensor:
        packed.append(sorted(parts))
        return torch.tensor([sum(value**2 for value in parts.values())], dtype=torch.float64)

    def combine(total: torch.Tensor) -> Tensors:
        combinations.append(total.item())
        return (total.sqrt(),)

    return Combination(pack, combine, 8)


@pytest.mark.parametrize(("ranks", "packed_by"), [("threads", [1, 1, 1, 1]), ("cells", [4]), ("both", [2, 2])])
def test_all_ranks_read_the_same_and_each_process_packs_and_combines_once(ranks: str, packed_by: list[int]) -> None:
    packed: list[list[int]] = []
    combined: list[float] = []

    def body(comm: Communicator) -> tuple[float, ...]:
        first = start_combined(comm, comm.rank + 1.0, combination(packed, combined))
        second = start_combined(comm, 2.0, combination([], []))  # both are under way
        first.pending.wait()
        second.pending.wait()
        return first.result()[0].item(), second.result()[0].item(), first.packed().item()

    assert RANKS[ranks](body) == [(30**0.5, 4.0, 30.0)] * 4
    assert sorted(rank for here in packed for rank in here) == [0, 1, 2, 3]
    assert sorted(map(len, packed)) == packed_by and combined == [30.0] * len(packed_by)


@pytest.mark.parametrize("spills", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_cells_that_spill_have_copies_of_what_they_keep(spills: bool, kept: bool) -> None:
    baton = Baton(2)
    comms = cell_communicators(AloneCommunicator(), baton, [(0, 0), (0, 1)], spills)

    def body(cell: int) -> torch.Tensor:
        combined = start_combined(comms[cell], 1.0, combination([], []), kept)
        combined.pending.wait()
        return combined.result()[0]

    first, second = baton.run(body)
    assert torch.equal(first, second) and (first is second) != (spills and kept)


@pytest.mark.parametrize("ranks", RANKS)
def test_each_rank_counts_one_message(ranks: str) -> None:
    def body(comm: Communicator) -> Any:
        counted = CountedCommunicator(comm)
        combined = start_combined(counted.of("reduce"), 1.0, combination([], []))
        combined.pending.wait()
        assert combined.result()[0].item() == combined.packed().item() ** 0.5 == 2.0 and combined.pending.test()
        return counted.counts.messages["reduce"], counted.counts.sent_bytes["reduce"], counted.counts.messages["halo"]

    assert RANKS[ranks](body) == [(1, 8, 0)] * 4


@pytest.mark.parametrize("ranks", RANKS)
def test_a_second_run_combines_again_and_sends_nothing(ranks: str) -> None:
    def body(comm: Communicator) -> tuple[float, float]:
        recording = RecordingCommunicator(CountedCommunicator(comm))
        combined = start_combined(recording, comm.rank + 1.0, combination([], []))
        combined.pending.wait()
        assert combined.pending.test()  # once more: the sum is kept once
        assert [len(entry) for entry in recording.log] == [1]
        replaying: Any = ReplayingCommunicator(recording.log, comm.rank, comm.size)
        again = start_combined(replaying, comm.rank + 1.0, combination([], []))
        return combined.result()[0].item(), again.result()[0].item()

    assert RANKS[ranks](body) == [(30**0.5, 30**0.5)] * 4
