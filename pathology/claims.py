"""Claims: files by which processes on many nodes divide work in a shared folder, without locks.

```
FOLDER/<name>.0       created exclusively: its creator holds <name>, and touches the file while working
FOLDER/<name>.1       created when .0 is stale; its creator, if .0 is still unchanged, now holds <name>
```

A claim is stale when its process has ended (seen on the same machine), or when its file has not been touched for two
minutes by the clock of the disk that holds it. Processes that find the same stale claim try to create the same next
file, and only one succeeds. `flock` is not used: on network disks it is often missing or unreliable. On object storage
claims are objects, see :mod:`pathology.object_claims`.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from data.object_path import ObjectPath
from pathology.object_claims import ClaimLostError, ObjectClaim, is_held_object, names_of
from pathology.process_token import has_ended, this_process

__all__ = ["Claim", "ClaimLostError", "is_held", "remove_ended", "sweep"]

# Twelve beats: a network disk that hangs for a minute does not cost a process its claim.
STALE_AFTER_S = 120.0
BEAT_S = 10.0
_UNREADABLE_GRACE_S = 10.0


class Claim:
    """The exclusive right to work on one name, from `take`; a context manager that releases it.

    A thread touches the claim's file every ten seconds.

    Args:
        path: The claim's file, which exists.
        token: The file's content, which no other claim at the same path has.
    """

    def __init__(self, path: Path, token: str) -> None:
        self._path, self._token = path, token
        self._stop = threading.Event()
        self._beat = threading.Thread(target=self._keep_alive, name="claim", daemon=True)
        self._beat.start()

    @classmethod
    def take(cls, folder: Path, name: str) -> Claim | ObjectClaim | None:
        """Return the claim on ``name``, or None if another process holds it.

        Args:
            folder: The folder of claims; created if it does not exist.
            name: Name to claim, such as a slide's; must be a valid file name.

        Raises:
            OSError: The folder cannot be written.
        """
        if isinstance(folder, ObjectPath):
            return ObjectClaim.take(folder, name)
        folder.mkdir(parents=True, exist_ok=True)
        before = _latest(folder, name)
        # Read only once: `_is_mine` compares with this state, so a claim that was renewed meanwhile is not taken over.
        if before is not None and not before.is_stale():
            return None
        number = 0 if before is None else before.number + 1
        # With a random part, because one process may take, lose and take the same name again.
        path, token = folder / f"{name}.{number}", f"{this_process()} {secrets.token_hex(8)}"
        if not _create(path, token):
            return None
        # Not valid if another process has taken over and released the claim since it was read.
        if not _is_mine(folder, name, number, before):
            path.unlink(missing_ok=True)
            return None
        return cls(path, token)

    @classmethod
    def wait(cls, folder: Path, name: str, every_s: float = 0.05) -> Claim | ObjectClaim:
        """Return the claim on ``name`` as soon as it is free."""
        while (claim := cls.take(folder, name)) is None:
            time.sleep(every_s)
        return claim

    def check(self) -> None:
        """Check that the claim is still valid, before an irreversible action.

        A network file system may show an outdated list of a folder for a minute. But the server decides about exclusive
        creation: so this creates the file that another process would create to take over, and removes it again.

        Raises:
            ClaimLostError: Another process has taken over.
        """
        folder, (name, number) = self._path.parent, _parts(self._path)
        after = folder / f"{name}.{number + 1}"
        free = _create(after, self._token)
        if free:
            after.unlink()
        # This claim's file may also be missing: a holder with a higher number removes older files at release.
        if not free or _token(self._path) != self._token:
            raise ClaimLostError(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Release the claim, and remove the stale claims that it replaced."""
        self._stop.set()
        # Before any file is removed: the thread must not touch a file that another process has created again.
        self._beat.join()
        folder, (name, number) = self._path.parent, _parts(self._path)
        # A file of a lower number is a stale claim, which was replaced by creating the file of the next number.
        if _token(self._path) == self._token:
            for older in _numbers(folder, name):
                if older <= number:
                    # In ascending order: if this process is killed here, no stale claim is left without its successor.
                    with contextlib.suppress(OSError):
                        (folder / f"{name}.{older}").unlink()

    def _keep_alive(self) -> None:
        while not self._stop.wait(BEAT_S):
            with contextlib.suppress(OSError):
                os.utime(self._path)


def is_held(folder: Path, name: str) -> bool:
    """Whether a live process holds ``name``."""
    if isinstance(folder, ObjectPath):
        return is_held_object(folder, name)
    latest = _latest(folder, name)
    return latest is not None and not latest.is_stale()


def remove_ended(folder: Path, name: str) -> None:
    """Remove the claim on ``name`` if no living process holds it."""
    claim = Claim.take(folder, name)
    if claim is not None:
        claim.release()


def sweep(folder: Path) -> None:
    """Remove the claims of killed processes."""
    if isinstance(folder, ObjectPath):
        names = names_of(folder)
    else:
        names = {_parts(path)[0] for path in folder.glob("*") if path.name.rpartition(".")[2].isdecimal()}
    for name in names:
        if not is_held(folder, name):
            remove_ended(folder, name)


@dataclass(frozen=True, slots=True)
class _ClaimFile:
    """The state of a claim's file when it was read."""

    path: Path
    number: int
    token: str | None

    def is_stale(self) -> bool:
        """Whether the claim's process has ended, or has not touched the file for too long."""
        try:
            # Both times by the file server's clock: that of a node may differ by minutes.
            silent_s = _now_on_disk(self.path.parent) - self.path.stat().st_mtime
        except FileNotFoundError:
            return False  # just released: the next attempt succeeds
        # None: the file was removed before it was read.
        if self.token is None:
            return False
        if not self.token:
            # Created but empty: its creator is writing, or has died.
            return silent_s > _UNREADABLE_GRACE_S
        return silent_s > STALE_AFTER_S or has_ended(self.token)


def _latest(folder: Path, name: str) -> _ClaimFile | None:
    """Return the claim's file with the highest number; None if there is none."""
    numbers = _numbers(folder, name)
    if not numbers:
        return None
    path = folder / f"{name}.{max(numbers)}"
    return _ClaimFile(path, max(numbers), _token(path))


def _numbers(folder: Path, name: str) -> list[int]:
    """Return the numbers of a name's claim files, ascending."""
    pattern = re.compile(re.escape(name) + r"\.(\d+)")
    with os.scandir(folder) as entries:
        return sorted(int(match[1]) for entry in entries if (match := pattern.fullmatch(entry.name)))


def _parts(path: Path) -> tuple[str, int]:
    """Return the name and the number of a claim's file."""
    name, _, number = path.name.rpartition(".")
    return name, int(number)


def _create(path: Path, token: str) -> bool:
    """Create a claim's file exclusively; return False if it exists."""
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    except FileExistsError:
        return False
    try:
        os.write(handle, token.encode())
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(handle)
    return True


def _is_mine(folder: Path, name: str, number: int, before: _ClaimFile | None) -> bool:
    """Whether a new claim is valid: none has a higher number, and the stale claim has not changed since it was read."""
    if max(_numbers(folder, name), default=-1) != number:
        return False
    return before is None or _token(before.path) == before.token


def _token(path: Path) -> str | None:
    """Return the content of a claim; None if it was removed."""
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return None


def _now_on_disk(folder: Path) -> float:
    """Return the current time of the file system's clock, which is the server's on a network disk."""
    probe = folder / f".now-{socket.gethostname()}-{os.getpid()}-{threading.get_ident()}"
    try:
        probe.touch()
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)
