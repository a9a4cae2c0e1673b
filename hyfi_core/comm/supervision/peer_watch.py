"""Detection of ranks that have died or do not go on, under any launcher.

::

    rank 0 ── listens ──┬── connection of rank 1          the connection of a dead process is closed: rank 0 reports
                        ├── connection of rank 2          which rank it was, and every rank ends;
                        └── …                             a lost node stops answering: the same after 7 s
           ◀── heartbeats, both ways, every second ──▶     rank 0 judges all ranks (``stall``), the others judge rank 0

Launchers differ: ``mpiexec`` ends the other ranks within a second or two, ``torchrun`` after half a minute, ``srun``
without ``--kill-on-bad-exit`` never. Connections are kept by the kernel, so a rank in a long computation or in a wait
inside MPI does not appear dead.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import re
import resource
import secrets
import selectors
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from hyfi_core.comm.supervision.heartbeat import Beat, Heart
from hyfi_core.comm.supervision.stall import Place, Stall, StallRule
from hyfi_core.errors import FAULT

if TYPE_CHECKING:  # the watch itself needs no torch
    from hyfi_core.comm.base import Communicator

_LEAVES, _FAILS, _END, _BEAT, _KILL = b"L", b"F", b"E", b"B", b"K"
"""Words, in order: this rank ends normally; it ends by an error that it reports; the receiver shall end, too; a
heartbeat follows; the receiver shall kill a frozen rank of its host."""
_TOKEN_BYTES = 16
_CONNECT_S = 20.0
_PERIOD_S = 1.0
_RANKS_PER_PERIOD = 256  # with more ranks, each beats less often
_TELL_S = 1.0  # time for the others to act before this process ends
_LOST_MS = 7000
"""A peer that has not acknowledged anything for this time is lost: its node or the network has failed."""


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error or one of its causes is a lost connection, so that another rank has failed first."""
    cause: BaseException | None = error
    while cause is not None:
        by_mpi = type(cause).__module__.startswith("mpi4py")
        # Gloo and stores raise RuntimeErrors for other reasons, too: only the text shows the reason.
        if by_mpi or re.search(r"(closed|reset) by peer|Broken pipe", str(cause)):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


class PeerWatch:
    """One rank's end of the watch.

    Args:
        rank: this rank.
        peers: rank -> connection to it: on rank 0 all other ranks, on others only rank 0.
        tell: reports that a rank has died; called on one rank, before its process ends.
        places: host and process of each rank; if empty, there are no heartbeats.
        tell_stalled: reports ranks that do not go on; called on one rank, before its process ends.
        stop_requested: whether this rank was requested to stop.
        ends_with_dead: whether this process ends when another has died; not if a launcher sees to that.
    """

    def __init__(
        self,
        rank: int,
        peers: dict[int, socket.socket],
        tell: Callable[[int], None],
        places: Sequence[Place] = (),
        tell_stalled: Callable[[Stall], None] = lambda stall: None,
        stop_requested: Callable[[], bool] = lambda: False,
        ends_with_dead: bool = True,
    ) -> None:
        self._rank, self._peers, self._tell, self._tell_stalled = rank, peers, tell, tell_stalled
        # Host and process of each rank, to judge and kill those that do not go on; empty: there are no heartbeats.
        self._places = tuple(places)
        self._ends_with_dead = ends_with_dead  # whether this process ends itself when another rank has died
        self._leaving = False  # whether this rank has told the others that it ends
        # Ranks to which no more heartbeats are sent, because their connection is full: after half a heartbeat, the
        # receiver would misread all later words.
        self._full = set[int]()
        self.rule = StallRule(dict(enumerate(self._places)))  # judges from heartbeats which ranks do not go on
        self._heart = Heart(stop_requested)  # makes the heartbeats of this rank
        # A child that outlives this process would keep the connections open.
        os.register_at_fork(after_in_child=self._close)
        threading.Thread(target=self._watch, daemon=True, name="hyfi-peers").start()

    def leave(self) -> None:
        """Tell the connected ranks that this rank ends normally."""
        self._leaving = True
        self._send(_LEAVES)

    def fail(self) -> None:
        """Tell the connected ranks that this rank ends by an error, which it reports itself."""
        self._leaving = True
        if self._ends_with_dead:
            self._send(_FAILS)

    def _close(self) -> None:
        for peer in self._peers.values():
            peer.close()

    def _send(self, word: bytes) -> None:
        for peer in list(self._peers.values()):
            with contextlib.suppress(OSError):
                peer.sendall(word)

    def _watch(self) -> None:
        """Read from all peers and, if there are heartbeats, send and judge them, until every connection has ended."""
        period_s = _PERIOD_S * max(1.0, len(self._places) / _RANKS_PER_PERIOD)
        beaten_s = time.monotonic()
        with selectors.DefaultSelector() as ready:
            for rank, peer in self._peers.items():
                ready.register(peer, selectors.EVENT_READ, rank)
            while ready.get_map():
                due_s = beaten_s + period_s
                events = ready.select(max(0.0, due_s - time.monotonic()) if self._places else None)
                time_s = time.monotonic()
                if self._places and time_s >= due_s:
                    if time_s > due_s + 3 * period_s:
                        self.rule.forgive(time_s)  # this process itself did not run
                    beaten_s = time_s
                    self._beat(time_s)
                for key, _ in events:
                    if not self._read(int(key.data)):
                        ready.unregister(key.fileobj)
                        self.rule.leave(int(key.data))
                if time_s == beaten_s:  # after a heartbeat, and only once all words that have arrived are read
                    self._judge(time_s)

    def _read(self, rank: int) -> bool:
        """Read and handle one word of a rank; return whether more may follow."""
        peer = self._peers[rank]
        word = _read(peer)
        if word == _BEAT:
            # Padded, here and below: if the connection is closed in the middle of a word, bytes are missing.
            text = _read(peer, struct.unpack("!H", _read(peer, 2).rjust(2, b"\0"))[0])
            with contextlib.suppress(ValueError, TypeError):
                self.rule.hear(rank, Beat(*json.loads(text)), time.monotonic())
            return True
        if word == _KILL:
            self._kill(struct.unpack("!I", _read(peer, 4).rjust(4, b"\0"))[0])
            return True
        if word == _END or (self._ends_with_dead and (not word or word == _FAILS)):
            self._end(rank, reported=bool(word))
        return False  # it has ended

    def _beat(self, now_s: float) -> None:
        """Send this rank's heartbeat to its peers, except those that read no more."""
        beat = self._heart.beat()
        self.rule.hear(self._rank, beat, now_s)
        # Its length is sent in 16 bits.
        text = json.dumps([*astuple(beat)]).encode()[:65535]
        for rank, peer in self._peers.items():
            if rank not in self._full:
                try:
                    # Without waiting: a stopped peer reads nothing, and its full buffer would stop this thread.
                    sent = peer.send(_BEAT + struct.pack("!H", len(text)) + text, socket.MSG_DONTWAIT)
                    if sent < 3 + len(text):  # 3 bytes come before the text; see ``_full``
                        self._full.add(rank)
                except OSError:  # it reads no more, or has ended
                    self._full.add(rank)

    def _judge(self, now_s: float) -> None:
        """End all ranks if some do not go on: rank 0 judges all, the others judge rank 0, first rank 1."""
        if self._leaving:
            return
        if self._rank == 0:
            stall = self.rule.frozen(now_s) or self.rule.stuck(now_s)
        else:
            # Rank 1 reports; the others end without a message, and later, so that rank 1 can report before.
            stall = self.rule.frozen(now_s - (0.0 if self._rank == 1 else 2 * _TELL_S))
        if stall is None:
            return
        if self._rank in (0, 1):
            self._tell_stalled(stall)
        for rank in stall.ranks:
            if rank != self._rank:
                # Sent to all ranks, because only a process on the frozen rank's host can kill it.
                self._send(_KILL + struct.pack("!I", rank))
                self._kill(rank)
        self._send(_END)
        time.sleep(_TELL_S)
        # Not an exception: the main thread may be inside MPI, where none reaches it.
        os._exit(FAULT)

    def _kill(self, rank: int) -> None:
        """Kill a frozen rank of this host: it cannot end by itself, and some launchers wait for it."""
        if rank < len(self._places) and rank != self._rank and self._places[rank].host == socket.gethostname():
            with contextlib.suppress(OSError):
                os.kill(self._places[rank].pid, signal.SIGKILL)

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


def watch_peers(
    world: Communicator,
    tell: Callable[[int], None],
    tell_stalled: Callable[[Stall], None] | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
    ends_with_dead: bool = True,
) -> PeerWatch | None:
    """Start watching (collective); None for a single process, or if a rank cannot connect to rank 0.

    Args:
        world: all ranks of the job.
        tell: reports that a rank has died; called on one rank, before its process ends.
        tell_stalled: reports ranks that do not go on, likewise; None: these are not detected.
        stop_requested: whether this rank was requested to stop.
        ends_with_dead: whether this process ends when another has died; not if a launcher sees to that.
    """
    if world.size == 1:
        return None
    places = [Place(*at) for at in world.broadcast_object(world.gather_objects((socket.gethostname(), os.getpid())))]
    listener, address = _listen([at.host for at in places]) if world.rank == 0 else (None, None)
    shared_address = world.broadcast_object([address.host, address.port, address.token.hex()] if address else None)
    peers: dict[int, socket.socket] | None = None
    if listener is not None and address is not None:
        peers = _accept(listener, address, world.size - 1)
    elif shared_address is not None:
        peers = _connect(_Address(shared_address[0], shared_address[1], bytes.fromhex(shared_address[2])), world.rank)
    # All ranks watch, or none: a rank without a connection would look like one that has died.
    refused = world.broadcast_object(_missing(world.gather_objects(peers is not None)))
    if refused is None and peers is not None:
        if tell_stalled is None:
            return PeerWatch(world.rank, peers, tell)
        return PeerWatch(world.rank, peers, tell, places, tell_stalled, stop_requested, ends_with_dead)
    if world.rank == 0:
        message = f"hyfi: rank {refused} cannot connect to rank 0, so only the launcher detects ranks that are killed"
        print(message, file=sys.stderr, flush=True)
    for peer in (peers or {}).values():
        peer.close()
    return None


def _missing(connected: list[bool] | None) -> int | None:
    return connected.index(False) if connected is not None and False in connected else None


def _listen(hosts: list[str]) -> tuple[socket.socket | None, _Address | None]:
    """Return a listening socket and its address; a local address if all ranks are on this node."""
    is_one_node = len(set(hosts)) == 1
    allow_files(len(hosts))
    try:
        listener = socket.create_server(("127.0.0.1" if is_one_node else "", 0), backlog=len(hosts))
    except OSError:
        return None, None
    name = "127.0.0.1" if is_one_node else hosts[0]
    return listener, _Address(name, listener.getsockname()[1], secrets.token_bytes(_TOKEN_BYTES))


def allow_files(more: int) -> None:
    """Raise this process's limit of open files, often 1,024, by ``more``, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = soft + more if hard == resource.RLIM_INFINITY else min(hard, soft + more)
    if soft not in (limit, resource.RLIM_INFINITY):
        with contextlib.suppress(OSError, ValueError):  # then ranks that cannot connect are reported
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _accept(listener: socket.socket, address: _Address, count: int) -> dict[int, socket.socket] | None:
    """Return the connections of all other ranks, None if one is missing; connections of strangers are closed."""
    peers: dict[int, socket.socket] = {}
    listener.settimeout(_CONNECT_S)
    try:
        while len(peers) < count:
            peer, _ = listener.accept()
            peer.settimeout(_CONNECT_S)
            hello = _read(peer, _TOKEN_BYTES + 4)
            # Any program on the network can connect; only ranks know the token, from a broadcast.
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
    """Return rank 0 -> a connection to it, over which this rank has sent its number; None if rank 0 does not answer."""
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
    # 3 s of silence and 4 probes make 7 s. While data are unacknowledged, no probes are sent: TCP_USER_TIMEOUT holds.
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
