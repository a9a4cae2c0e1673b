"""Ranks notice at once that another one has died, whatever started them.

::

    rank 0 ── listens ──┬── connection of rank 1          a process that dies closes its connection: rank 0 says which
                        ├── connection of rank 2          rank it was, and every rank ends;
                        └── …                             a node that is lost stops answering: the same after 7 s

Launchers differ: ``mpiexec`` ends the other ranks within a second or two, ``torchrun`` after half a minute, ``srun``
without ``--kill-on-bad-exit`` never. The connections belong to the kernel, so neither a long computation nor a wait
inside MPI makes a living rank look dead.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import re
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
"""A peer that acknowledges nothing for so long is lost: its node has failed, or the network."""


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error, or one that it follows from, says that another rank has gone: that one failed first."""
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
        peers: connections by rank: on rank 0 to all others, on the others to rank 0 alone.
        tell: says that a rank has died; called on one rank alone, before this process ends.
    """

    def __init__(self, rank: int, peers: dict[int, socket.socket], tell: Callable[[int], None]) -> None:
        self._rank, self._peers, self._tell = rank, peers, tell
        self._leaving = False
        os.register_at_fork(after_in_child=self._close)  # a child that lives on would keep the connections open
        threading.Thread(target=self._watch, daemon=True, name="hyfi-peers").start()

    def leave(self) -> None:
        """Say that this rank ends as it should."""
        self._leaving = True
        self._send(_LEAVES)

    def fail(self) -> None:
        """Say that this rank ends by an error, which it reports itself."""
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
                        self._end(rank, said=bool(word))
                    ready.unregister(key.fileobj)  # it left as it should

    def _end(self, lost: int, said: bool) -> None:
        """End this process: ``lost`` has died or failed; ``said``: somebody reports it."""
        if self._leaving:
            return
        if not said and self._rank in (0, 1):  # rank 0 speaks, or rank 1 where it was rank 0 that died
            self._tell(lost)
        self._send(_END)
        os._exit(FAULT)


@dataclass(frozen=True)
class _Address:
    host: str
    port: int
    token: bytes


def watch_peers(world: Communicator, tell: Callable[[int], None]) -> PeerWatch | None:
    """Begin to watch (collective); None where this process is alone, or where ranks cannot reach rank 0.

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
        words = f"hyfi: rank {refused} cannot connect to rank 0: a rank that is killed is noticed by the launcher alone"
        print(words, file=sys.stderr, flush=True)
    for peer in (peers or {}).values():
        peer.close()
    return None


def _missing(connected: list[bool] | None) -> int | None:
    return connected.index(False) if connected is not None and False in connected else None


def _listen(hosts: list[str]) -> tuple[socket.socket | None, _Address | None]:
    """Return a socket that listens and its address: only for this node where all ranks are here."""
    here = len(set(hosts)) == 1
    try:
        listener = socket.create_server(("127.0.0.1" if here else "", 0), backlog=len(hosts))
    except OSError:
        return None, None
    name = "127.0.0.1" if here else hosts[0]
    return listener, _Address(name, listener.getsockname()[1], secrets.token_bytes(_TOKEN_BYTES))


def _accept(listener: socket.socket, address: _Address, count: int) -> dict[int, socket.socket] | None:
    """Return the connections of all other ranks, None where one does not come; strangers are turned away."""
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
    """Have the kernel ask whether the other side is there, every second once it has been silent for three."""
    peer.settimeout(None)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    settings = {"TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": _LOST_MS}
    for name, value in settings.items():
        if hasattr(socket, name):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return peer


def _read(peer: socket.socket, count: int = 1) -> bytes:
    """Return ``count`` bytes, fewer where the other side has gone."""
    data = b""
    with contextlib.suppress(OSError):
        while len(data) < count:
            piece = peer.recv(count - len(data))
            if not piece:
                break
            data += piece
    return data
