"""A status board shared by all ranks, independent of their messages: which ranks compute, wait, have ended or failed.

It is a key-value store in the memory of the first rank (or of ``torchrun``), so another thread can read it while the
main thread waits for a message.
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

RankState = Literal["computes", "waits", "ended"]
_CONNECT = timedelta(seconds=20)


@dataclass(frozen=True)
class RankStatus:
    """The last report of a rank about itself.

    Attributes:
        state: computes, waits or ended.
        where: its place in the program.
        count: number of reports that it had made before.
        nbytes: size of the messages that it waits for.
    """

    state: RankState
    where: str
    count: int
    nbytes: int = 0


class Board:
    """One rank's access to the board.

    Args:
        store: a ``torch.distributed`` store; its calls raise ``RuntimeError`` if its host has ended.
        rank: this one.
        size: ranks of the job.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._count = itertools.count()
        self.post("computes", "")

    def post(self, state: RankState, where: str, nbytes: int = 0) -> None:
        """Write this rank's status."""
        # The count makes reports with equal texts differ: any change on the board shows that the job goes on.
        self._store.set(f"state/{self._rank}", json.dumps([state, where, next(self._count), nbytes]))

    def states(self) -> list[RankStatus]:
        """Return the last report of each rank."""
        return [RankStatus(*json.loads(self._store.get(f"state/{rank}"))) for rank in range(self._size)]

    def leave(self) -> None:
        """Record that this rank does not use the board any more."""
        self._store.add("left", 1)

    @property
    def left(self) -> int:
        """Return how many ranks do not use the board any more."""
        # Adding 0 reads the counter at once; ``get`` would wait until a rank has set it.
        return int(self._store.add("left", 0))

    def claim_failure(self) -> bool:
        """Return whether this rank is the first to fail."""
        # ``add`` is atomic: it returns 1 to one rank only.
        return int(self._store.add("failures", 1)) == 1

    @property
    def failed(self) -> bool:
        """Return whether a rank has failed."""
        # ``check`` does not wait for a key, as ``get`` would.
        return bool(self._store.check(["failures"]))

    def set_reported(self) -> None:
        """Record that the first failure has been printed."""
        self._store.set("reported", "1")

    @property
    def reported(self) -> bool:
        """Return whether the first failure has been printed."""
        return bool(self._store.check(["reported"]))


def open_board(comm: Communicator) -> Board | None:
    """Return a board for all ranks of ``comm``, or None on all if one of them cannot reach it (collective)."""
    hosts = comm.broadcast_object(comm.gather_objects(socket.gethostname()))
    store, address = None, None
    if comm.rank == 0:
        store, address = _hosted(hosts)
    address = comm.broadcast_object(address)
    if comm.rank and address is not None:
        store = _connected(*address)
    have_store = torch.tensor([int(store is not None)])
    # All or none: a rank without a board would look like one that never reports.
    comm.all_reduce(have_store, "min")
    return Board(store, comm.rank, comm.size) if int(have_store) else None


def _hosted(hosts: list[str]) -> tuple[Any, list[Any] | None]:
    """Return (a store in this process, its addresses); local addresses only if all ranks are on this node."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    is_one_node = len(set(hosts)) == 1
    try:
        listener = socket.create_server(("127.0.0.1" if is_one_node else "", 0))
        name, port = "127.0.0.1" if is_one_node else hosts[0], listener.getsockname()[1]
        # The store takes over the bound socket: of a free port's number alone, another program may have taken the port.
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
