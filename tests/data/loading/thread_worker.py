"""A worker without a process."""

from __future__ import annotations

import socket
import threading
from multiprocessing.connection import Connection

from data.loading.decode_worker import Memory, work


class ThreadWorker:
    """A worker in a thread of this process: what it reads can be counted, and it starts at once."""

    def __init__(self, memory: Memory) -> None:
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours.detach())
        self._theirs = Connection(theirs.detach())
        how = (self._theirs, memory.samples, memory.slots.array, memory.cache.array)
        self._thread = threading.Thread(target=work, args=how, daemon=True, name="decode")
        self._thread.start()

    @property
    def connection(self) -> Connection:
        return self._connection

    def stop(self, patience_s: float = 0.0) -> bool:
        self._connection.close()
        return False
