"""Combinations: one function of what all ranks contribute; ranks that share memory compute it once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest import mock

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
        first = start_combined(comm, lambda: comm.rank + 1.0, combination(packed, combined))
        second = start_combined(comm, lambda: 2.0, combination([], []))  # both are under way
        first.pending.wait()
        second.pending.wait()
        return first.result()[0].item(), second.result()[0].item()

    assert RANKS[ranks](body) == [(30**0.5, 4.0)] * 4
    assert sorted(rank for here in packed for rank in here) == [0, 1, 2, 3]
    assert sorted(map(len, packed)) == packed_by and combined == [30.0] * len(packed_by)


@pytest.mark.parametrize("spills", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_cells_that_spill_have_copies_of_what_they_keep(spills: bool, kept: bool) -> None:
    baton = Baton(2)
    comms = cell_communicators(AloneCommunicator(), baton, [(0, 0), (0, 1)], spills)

    def body(cell: int) -> torch.Tensor:
        combined = start_combined(comms[cell], lambda: 1.0, combination([], []), kept)
        combined.pending.wait()
        return combined.result()[0]

    first, second = baton.run(body)
    assert torch.equal(first, second) and (first is second) != (spills and kept)


@pytest.mark.parametrize("ranks", RANKS)
def test_each_rank_counts_one_message(ranks: str) -> None:
    def body(comm: Communicator) -> Any:
        counted = CountedCommunicator(comm)
        combined = start_combined(counted.of("reduce"), lambda: 1.0, combination([], []))
        combined.pending.wait()
        assert combined.result()[0].item() == 2.0 and combined.pending.test()
        return counted.counts.messages["reduce"], counted.counts.sent_bytes["reduce"], counted.counts.messages["halo"]

    assert RANKS[ranks](body) == [(1, 8, 0)] * 4


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("copies", [False, True])
def test_a_second_run_neither_contributes_nor_combines_nor_sends(ranks: str, copies: bool) -> None:
    def body(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        recording = RecordingCommunicator(CountedCommunicator(comm), copies=copies)
        combined = start_combined(recording.of("reduce"), lambda: comm.rank + 1.0, combination([], []), kept=True)
        combined.pending.wait()
        first = combined.result()[0]
        assert len(recording.log) == 1 and combined.result()[0] is not None  # asked again: kept once
        replaying: Any = ReplayingCommunicator(recording.log, comm.rank, comm.size)
        never = Combination(mock.Mock(side_effect=AssertionError), mock.Mock(side_effect=AssertionError), 8)
        again = start_combined(replaying, mock.Mock(side_effect=AssertionError), never, kept=True)
        again.pending.wait()
        assert not recording.log
        return first, again.result()[0]

    for first, again in RANKS[ranks](body):
        assert first.item() == again.item() == 30**0.5
        assert first.data_ptr() != again.data_ptr() or not copies  # a pager may free the memory of the first
