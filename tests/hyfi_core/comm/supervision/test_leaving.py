"""The first rank ends last: the others have stopped reading the board that it hosts."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from hyfi_core.comm.supervision.board import Board
from hyfi_core.comm.supervision.supervisor import RankSupervisor


class RankOf:
    """As much of a communicator as leaving needs."""

    size = 3

    def __init__(self, rank: int) -> None:
        self.rank = rank


def test_the_first_rank_waits_until_no_other_reads_the_board() -> None:
    store: Any = torch.distributed.HashStore()
    boards = [Board(store, rank, RankOf.size) for rank in range(RankOf.size)]
    order: list[int] = []

    def leave(rank: int) -> None:
        supervisor: Any = object.__new__(RankSupervisor)
        supervisor._comm = RankOf(rank)
        time.sleep(0.1 * (rank == 0))  # it is the last to end: others find out later than itself
        boards[rank].post("ended", "")
        supervisor._stay(boards[rank])
        order.append(rank)

    threads = [threading.Thread(target=leave, args=(rank,)) for rank in range(RankOf.size)]
    begin_s = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert order[-1] == 0 and sorted(order) == [0, 1, 2]
    assert time.monotonic() - begin_s < 4.0
