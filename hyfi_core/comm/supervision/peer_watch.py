"""Detection of ranks that have died, under any launcher.

::

    rank 0 ── listens ──┬── connection of rank 1          the connection of a dead process is closed: rank 0 reports
                        ├── connection of rank 2          which rank it was, and every rank ends;
                        └── …                             a lost node stops answering: the same after 7 s

Launchers differ: ``mpiexec`` ends the other ranks within a second or two, ``torchrun`` after half a minute, ``srun``
without ``--kill-on-bad-exit`` never. Connections are kept by the kernel, so a rank in a long computation or in a wait
inside MPI does not appear dead.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import resource
import secrets
import selectors
import socket
import struct
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hyfi_core.errors import FAULT

if TYPE_CHECKING:  # the watch itself needs no torch
    from hyfi_core.comm.base import Communicator

_LEAVES, _FAILS, _END = b"L", b"F", b"E"
_TOKEN_BYTES = 16
_CONNECT_S = 20.0
_LOST_MS = 7000
"""A peer that has not acknowledged anything for this time is lost: its node or the network has failed."""


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error or one of its causes is a lost connection, so that another rank has failed first."""
    seen: BaseException | None = error
    while seen is not None:
        by_mpi = type(seen).__module__.startswith("mpi4py")
        if by_mpi or re.search(r"(closed|reset) by peer|Broken pipe", str(seen)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


class PeerWatch:
    """One rank's end of the watch.

    Args:
        rank: this one.
        peers: rank -> connection: on rank 0 to all others, on others to rank 0.
        tell: reports that a rank has died; called on one rank, before its process ends.
    """

    def __init__(self, rank: int, peers: dict[int, socket.socket], tell: Callable[[int], None]) -> None:
        self._rank, self._peers, self._tell = rank, peers, tell
        self._leaving = False
        # A child that outlives this process would keep the connections open.
        os.register_at_fork(after_in_child=self._close)
        threading.Thread(target=self._watch, daemon=True, name="hyfi-peers").start()

    def leave(self) -> None:
        """Tell the others that this rank ends normally."""
        self._leaving = True
        self._send(_LEAVES)

    def fail(self) -> None:
        """Tell the others that this rank ends by an error, which it reports itself."""
        self._leaving = True
        self._send(_FAILS)

    def _close(self) -> None:
        for peer in self._peers.values():
            peer.close()

    def _send(self, word: bytes) -> None:
        for peer in list(self._peers.values()):
            with contextlib.suppress(OSError):
                peer.sendall(word)

    def _watch(self) -> None:
        with selectors.DefaultSelector() as ready:
            for rank, peer in self._peers.items():
                ready.register(peer, selectors.EVENT_READ, rank)
            while ready.get_map():
                for key, _ in ready.select():
                    rank = int(key.data)
                    word = _read(self._peers[rank])
                    if not word or word in (_FAILS, _END):
                        self._end(rank, reported=bool(word))
                    ready.unregister(key.fileobj)  # it has ended normally

    def _end(self, lost: int, reported: bool) -> None:
        """End this process, because rank ``lost`` has died or failed.

        Args:
            lost: the rank.
            reported: whether another rank reports it.
        """
        if self._leaving:
            return
        if not reported and self._rank in (0, 1):  # rank 0 reports, or rank 1 if rank 0 has died
            self._tell(lost)
        self._send(_END)
        os._exit(FAULT)


@dataclass(frozen=True)
class _Address:
    host: str
    port: int
    token: bytes


def watch_peers(world: Communicator, tell: Callable[[int], None]) -> PeerWatch | None:
    """Start watching (collective); None for a single process, or if a rank cannot connect to rank 0.

    Args:
        world: all ranks of the job.
        tell: see :class:`PeerWatch`.
    """
    if world.size == 1:
        return None
    hosts = world.broadcast_object(world.gather_objects(socket.gethostname()))
    listener, address = _listen(hosts) if world.rank == 0 else (None, None)
    found = world.broadcast_object([address.host, address.port, address.token.hex()] if address else None)
    peers: dict[int, socket.socket] | None = None
    if listener is not None and address is not None:
        peers = _accept(listener, address, world.size - 1)
    elif found is not None:
        peers = _connect(_Address(found[0], found[1], bytes.fromhex(found[2])), world.rank)
    refused = world.broadcast_object(_missing(world.gather_objects(peers is not None)))
    if refused is None and peers is not None:
        return PeerWatch(world.rank, peers, tell)
    if world.rank == 0:
        message = f"hyfi: rank {refused} cannot connect to rank 0, so only the launcher detects ranks that are killed"
        print(message, file=sys.stderr, flush=True)
    for peer in (peers or {}).values():
        peer.close()
    return None


def _missing(connected: list[bool] | None) -> int | None:
    return connected.index(False) if connected is not None and False in connected else None


def _listen(hosts: list[str]) -> tuple[socket.socket | None, _Address | None]:
    """Return a listening socket and its address; only local if all ranks are on this node."""
    here = len(set(hosts)) == 1
    allow_files(len(hosts))
    try:
        listener = socket.create_server(("127.0.0.1" if here else "", 0), backlog=len(hosts))
    except OSError:
        return None, None
    name = "127.0.0.1" if here else hosts[0]
    return listener, _Address(name, listener.getsockname()[1], secrets.token_bytes(_TOKEN_BYTES))


def allow_files(more: int) -> None:
    """Raise this process's limit of open files, often 1,024, by ``more``, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = soft + more if hard == resource.RLIM_INFINITY else min(hard, soft + more)
    if soft not in (wanted, resource.RLIM_INFINITY):
        with contextlib.suppress(OSError, ValueError):  # then ranks that cannot connect are reported
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _accept(listener: socket.socket, address: _Address, count: int) -> dict[int, socket.socket] | None:
    """Return the connections of all other ranks, None if one is missing; others are closed."""
    peers: dict[int, socket.socket] = {}
    listener.settimeout(_CONNECT_S)
    try:
        while len(peers) < count:
            peer, _ = listener.accept()
            peer.settimeout(_CONNECT_S)
            hello = _read(peer, _TOKEN_BYTES + 4)
            if len(hello) == _TOKEN_BYTES + 4 and hmac.compare_digest(hello[:_TOKEN_BYTES], address.token):
                peers[struct.unpack("!I", hello[_TOKEN_BYTES:])[0]] = _kept_alive(peer)
            else:
                peer.close()
    except OSError:
        return None
    finally:
        listener.close()
    return peers


def _connect(address: _Address, rank: int) -> dict[int, socket.socket] | None:
    try:
        peer = socket.create_connection((address.host, address.port), timeout=_CONNECT_S)
        peer.sendall(address.token + struct.pack("!I", rank))
    except OSError:
        return None
    return {0: _kept_alive(peer)}


def _kept_alive(peer: socket.socket) -> socket.socket:
    """Enable TCP keep-alive: after 3 s of silence, the kernel probes the other side every second."""
    peer.settimeout(None)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    settings = {"TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": _LOST_MS}
    for name, value in settings.items():
        if hasattr(socket, name):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return peer


def _read(peer: socket.socket, count: int = 1) -> bytes:
    """Return ``count`` bytes, fewer if the connection is closed."""
    data = b""
    with contextlib.suppress(OSError):
        while len(data) < count:
            piece = peer.recv(count - len(data))
            if not piece:
                break
            data += piece
    return data
