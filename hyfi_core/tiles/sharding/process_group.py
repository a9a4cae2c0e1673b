"""The process group of ``torch.distributed`` with which the ranks of a replica gather the weights that they share.

Ranks that ``torchrun`` started have one. Ranks of MPI make one: rank 0 opens a store and sends its address to the
others.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hyfi_core.comm.base import Communicator
from hyfi_core.errors import RequestError
from hyfi_core.runtime.groups import node_name

_LIMIT = timedelta(days=30)
"""The job's supervision notices ranks that fail, so the library needs no time limit of its own."""
_MADE: dict[str, Any] = {}
"""Host of the first rank and address of the store -> the group that was made with it."""


class _RankProcess(NamedTuple):
    """The process of a rank.

    Attributes:
        host: name of its node.
        process_id: id of the process on that node.
        group_sizes: key of ``_MADE`` -> number of ranks of that group.
        in_use: whether ``torch.distributed`` is initialised.
    """

    host: str
    process_id: int
    group_sizes: dict[str, int]
    in_use: bool


def process_group(comm: Communicator, device: torch.device) -> Any:
    """Return the process group of these ranks (collective).

    Args:
        comm: the ranks.
        device: device of the weights.

    Raises:
        RequestError: on every rank: ranks are threads of one process, or their processes use torch.distributed already.
    """
    own = getattr(comm, "process_group", None)
    if own is not None:
        return own
    sizes = {address: group.size() for address, group in _MADE.items()}
    here = _RankProcess(node_name(), os.getpid(), sizes, dist.is_initialized())
    # Objects are sent as JSON, which makes lists of records.
    ranks = [_RankProcess(*values) for values in comm.broadcast_object(comm.gather_objects([*here]))]
    if len({(rank.host, rank.process_id) for rank in ranks}) < comm.size:
        raise RequestError("shard=True needs a process for each rank; these ranks are threads of one")
    for earlier, size in ranks[0].group_sizes.items():
        if size == comm.size and all(earlier in rank.group_sizes for rank in ranks):
            return _MADE[earlier]  # all of these ranks made it, and no others
    if any(rank.in_use for rank in ranks):
        raise RequestError("shard=True: torch.distributed is in use by these processes, for other ranks than these")
    library: Any = dist
    store, address = None, ""
    if comm.rank == 0:
        host = "127.0.0.1" if len({rank.host for rank in ranks}) == 1 else socket.getfqdn(here.host)
        # Port 0: the system chooses a free one, which rank 0 sends to the others below.
        store = library.TCPStore(host, 0, comm.size, is_master=True, timeout=_LIMIT, wait_for_workers=False)
        address = f"{host}:{store.port}"
    address = comm.broadcast_object(address)
    if store is None:
        host, _, port = address.rpartition(":")
        store = library.TCPStore(host, int(port), comm.size, is_master=False, timeout=_LIMIT, wait_for_workers=False)
    backend = "nccl" if device.type == "cuda" else "gloo"
    our_hook = sys.excepthook
    dist.init_process_group(backend, store=store, rank=comm.rank, world_size=comm.size, timeout=_LIMIT)
    # init_process_group has wrapped our hook, to write what it prints once it has returned. Ours ends the process and
    # never returns, so what it prints would be lost.
    sys.excepthook = our_hook
    atexit.register(_leave)
    _MADE[f"{ranks[0].host} {address}"] = dist.group.WORLD
    return dist.group.WORLD


def _leave() -> None:
    """Destroy all groups before the interpreter shuts down: gloo's threads must not outlive it."""
    if dist.is_initialized():
        dist.destroy_process_group()
