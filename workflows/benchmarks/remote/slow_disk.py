"""Files of this machine that are as slow as those of a network disk: each opening and each reading waits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data import location
from data.location import OpenFile, opened
from data.store import sharded_array
from data.store.slide_store import SlideStore


class SlowOpener:
    """Opens slides as from a network disk: each opening and each reading of a file waits. May be pickled."""

    def __init__(self, latency_s: float) -> None:
        self.latency_s = latency_s

    def __call__(self, path: Path) -> SlideStore:
        """Open a slide; the first call makes all later reads of shards in this process slow, by patching modules."""
        # Here rather than in `__init__`, which does not run in workers: these unpickle the opener.
        if vars(sharded_array)["opened"] is opened:
            vars(sharded_array)["opened"] = self._opened
            for module in (sharded_array, location):
                # A path on this disk looks near, but is to be read in the way of files that are far away.
                vars(module)["is_far"] = lambda path: True
        time.sleep(self.latency_s)
        return SlideStore.open(path, check_files=False)

    @contextmanager
    def _opened(self, path: Path) -> Iterator[OpenFile]:
        time.sleep(self.latency_s)
        with opened(path) as file:
            yield SlowFile(file, self.latency_s)


class SlowFile:
    """A file whose every read waits."""

    def __init__(self, file: OpenFile, latency_s: float) -> None:
        self._file, self._latency_s = file, latency_s

    def read(self, offset: int, length: int) -> bytes | memoryview:
        """Return the bytes, later."""
        time.sleep(self._latency_s)
        return self._file.read(offset, length)

    def tail(self, length: int) -> tuple[bytes, int]:
        """Return the last bytes and the size, later."""
        time.sleep(self._latency_s)
        return self._file.tail(length)
