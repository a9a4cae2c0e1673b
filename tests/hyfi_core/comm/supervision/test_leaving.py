"""The first rank ends last: the others have stopped reading the board that it hosts."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from hyfi_core.comm.supervision import supervisor
from hyfi_core.comm.supervision.board import Board
from tests.patience import SOON_S


class RankOf:
    """As much of a communicator as leaving needs."""

    size = 3

    def __init__(self, rank: int) -> None:
        self.rank = rank


def test_the_first_rank_waits_until_no_other_reads_the_board(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_STAY_S", 2 * SOON_S)
    store: Any = torch.distributed.HashStore()
    boards = [Board(store, rank, RankOf.size) for rank in range(RankOf.size)]
    order: list[int] = []

    def leave(rank: int) -> None:
        stub: Any = object.__new__(supervisor.RankSupervisor)
        stub._comm = RankOf(rank)
        time.sleep(0.1 * (rank == 0))  # it is the last to end: others find out later than itself
        boards[rank].post("ended", "")
        stub._stay(boards[rank])
        order.append(rank)

    threads = [threading.Thread(target=leave, args=(rank,)) for rank in range(RankOf.size)]
    begin_s = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert order[-1] == 0 and sorted(order) == [0, 1, 2]
    assert time.monotonic() - begin_s < SOON_S
