"""A board that all ranks read and write, apart from their messages: who computes, who waits, who has ended or failed.

It is a key-value store in the memory of the first rank (or of ``torchrun``), so another thread can ask it while the
main thread waits for a message that never comes.
"""

from __future__ import annotations

import itertools
import json
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch

from hyfi_core.comm.base import Communicator

State = Literal["computes", "waits", "ended"]
_CONNECT = timedelta(seconds=20)


@dataclass(frozen=True)
class RankStatus:
    """The last report of a rank about itself.

    Attributes:
        state: computes, waits or ended.
        where: the place in its program.
        count: how many reports it has made.
    """

    state: State
    where: str
    count: int


class Board:
    """What one rank writes and reads.

    Args:
        store: a ``torch.distributed`` store; calls of it raise ``RuntimeError`` where its host has gone.
        rank: this one.
        size: ranks of the job.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._count = itertools.count()
        self.post("computes", "")

    def post(self, state: State, where: str) -> None:
        """Say what this rank does."""
        self._store.set(f"state/{self._rank}", json.dumps([state, where, next(self._count)]))

    def states(self) -> list[RankStatus]:
        """Return the last report of each rank."""
        return [RankStatus(*json.loads(self._store.get(f"state/{rank}"))) for rank in range(self._size)]

    def claim_failure(self) -> bool:
        """Whether this rank is the first of all to fail."""
        return int(self._store.add("failures", 1)) == 1

    @property
    def failed(self) -> bool:
        """Whether a rank has."""
        return bool(self._store.check(["failures"]))

    def set_told(self) -> None:
        """Say that the first failure has been printed."""
        self._store.set("told", "1")

    @property
    def told(self) -> bool:
        """Whether it has been."""
        return bool(self._store.check(["told"]))


def open_board(comm: Communicator) -> Board | None:
    """Return a board for all ranks of ``comm``, None on all where one of them cannot reach it (collective)."""
    hosts = comm.broadcast_object(comm.gather_objects(socket.gethostname()))
    store, address = None, None
    if comm.rank == 0:
        store, address = _hosted(hosts)
    address = comm.broadcast_object(address)
    if comm.rank and address is not None:
        store = _connected(*address)
    everybody = torch.tensor([int(store is not None)])
    comm.all_reduce(everybody, "min")
    return Board(store, comm.rank, comm.size) if int(everybody) else None


def _hosted(hosts: list[str]) -> tuple[Any, list[Any] | None]:
    """Return (a store in this process, where others find it); only for this node where all ranks are here."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    here = len(set(hosts)) == 1
    try:
        listener = socket.create_server(("127.0.0.1" if here else "", 0))
        name, port = "127.0.0.1" if here else hosts[0], listener.getsockname()[1]
        store = TCPStore(
            name, port, is_master=True, wait_for_workers=False, timeout=_CONNECT, master_listen_fd=listener.detach()
        )
    except (OSError, RuntimeError):
        return None, None
    return store, [name, port]


def _connected(name: str, port: int) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    try:
        return TCPStore(name, port, is_master=False, wait_for_workers=False, timeout=_CONNECT)
    except (OSError, RuntimeError):
        return None
