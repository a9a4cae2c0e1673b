"""Claims on object storage: an object per name, created and replaced under a condition that the server checks.

```
FOLDER/<name>       created if it does not exist: its creator holds <name>, and writes it again while working
                    replaced if it is still the stale version that was read: the replacer now holds <name>
```
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from types import TracebackType
from typing import Self

from data.object_path import ObjectPath
from pathology.process_token import has_ended, this_process

# Six beats; longer than on disks, because a request may be repeated for a minute.
STALE_AFTER_S = 180.0
BEAT_S = 30.0


class ClaimLostError(Exception):
    """Another process has taken over, because this one did not renew its claim on ``name``."""

    def __init__(self, name: str) -> None:
        super().__init__(f"another process has taken over {name}, because this one did not renew its claim in time")


class ObjectClaim:
    """The exclusive right to work on one name, from `take`; a context manager that releases it.

    A thread writes its object again every 30 seconds.

    Args:
        path: The claim's object, which exists.
        token: The object's content; each time it is written again, a number is added.
        version: The object's version on the server.
    """

    def __init__(self, path: ObjectPath, token: str, version: str) -> None:
        self._path, self._token, self._version, self._beats = path, token, version, 0
        self._lock, self._stop, self._lost = threading.Lock(), threading.Event(), False
        self._beat = threading.Thread(target=self._keep_alive, name="claim", daemon=True)
        self._beat.start()

    @classmethod
    def take(cls, folder: ObjectPath, name: str) -> ObjectClaim | None:
        """Return the claim on ``name``, or None if another process holds it.

        Raises:
            OSError: The folder cannot be written.
        """
        path, token = folder / name, f"{this_process()} {secrets.token_hex(8)}"
        try:
            return cls(path, token, path.create(token.encode()))
        except FileExistsError:
            stale = _stale_version(path)
        if stale is None:
            return None
        try:
            return cls(path, token, path.replace_revision(token.encode(), stale))
        except (FileExistsError, FileNotFoundError):
            return None

    def check(self) -> None:
        """Check that the claim is still valid, before an irreversible action.

        Raises:
            ClaimLostError: Another process has taken over.
            OSError: The server does not answer.
        """
        with self._lock:
            try:
                is_valid = not self._lost and self._path.revision() == self._version
            except FileNotFoundError:
                is_valid = False
        if not is_valid:
            raise ClaimLostError(self._path.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Release the claim; if the server does not answer, it becomes stale."""
        self._stop.set()
        # Otherwise a beat could write the claim again after it was removed.
        self._beat.join()
        with contextlib.suppress(OSError):
            # Two requests: between them, another process could still take over a stale claim.
            if not self._lost and self._path.revision() == self._version:
                self._path.unlink(missing_ok=True)

    def _keep_alive(self) -> None:
        """Renew the claim again and again, until it is released or lost."""
        while not self._stop.wait(BEAT_S):
            self._beats += 1
            with self._lock:
                try:
                    # The version may be a hash of the content: with the number, each beat has another version, so a
                    # process that has read an earlier one cannot replace this object.
                    content = f"{self._token} {self._beats}".encode()
                    self._version = self._path.replace_revision(content, self._version)
                except (FileExistsError, FileNotFoundError):
                    self._lost = True
                    return
                except OSError:
                    continue


def is_held_object(folder: ObjectPath, name: str) -> bool:
    """Whether a live process holds ``name``."""
    path = folder / name
    try:
        return path.is_file() and _stale_version(path) is None
    except FileNotFoundError:
        return False


def names_of(folder: ObjectPath) -> set[str]:
    """Return the names that are claimed."""
    return {name for name in folder.versions() if not name.startswith(".")}


def _stale_version(path: ObjectPath) -> str | None:
    """Return the version of a claim if it is stale; None if a process renews it, or it was just released."""
    try:
        version, renewed_at_s = path.revision(), path.stat().st_mtime
        # The first four words are the token of the holder's process; the fifth counts how often it renewed its claim.
        token = " ".join(path.read_bytes().decode(errors="replace").split()[:4])
        if has_ended(token) or _server_time_s(path) - renewed_at_s > STALE_AFTER_S:
            # Read the version again: a beat may have come between the requests for version, time and content.
            return version if path.revision() == version else None
    except FileNotFoundError:
        pass
    return None


def _server_time_s(path: ObjectPath) -> float:
    """Return the time by the server's clock, which dates all claims; the clocks of hosts differ."""
    # The server dates each object that is written: write an empty one, and read its date.
    probe = path.with_name(f".now-{secrets.token_hex(8)}")
    try:
        probe.write_bytes(b"")
        return probe.stat().st_mtime
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
