"""Exclusive ownership of a folder by one writing process.

Uses the kernel's ``flock``, which is released when its process ends. On a network file system it also excludes
processes of other nodes, if the file system supports such locks.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import IO, Any

from hyfi_core.errors import RequestError
from workflows.console import warn

NAME = ".owner"
JOB_VARIABLE = "HYFI_SLURM_JOB"
"""Number of the Slurm job, for ranks whose launcher has removed Slurm's own variables."""
_ATTEMPTS, _PAUSE_S = 5, 0.05


class FolderOwner:
    """Locks a folder for this process until ``release``, or until the process ends.

    Args:
        folder: The folder; created if missing.
        remedy: What the user can do if it is locked, for the message.
        part: Name of a part of the work: owners of different parts may own the folder at the same time, but not
            together with an owner of the whole ("").

    Raises:
        RequestError: Another process owns it.
    """

    def __init__(self, folder: Path, remedy: str, part: str = "") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._names = folder, list[str]()
        self._files: list[IO[str]] = []
        try:
            # A part shares the lock of the whole with other parts; an owner of the whole has it alone.
            self._own(folder, NAME, remedy, shared=bool(part))
            if part:
                self._own(folder, f"{NAME}-{part}", remedy, shared=False)
        except RequestError:
            self.release()
            raise

    def release(self) -> None:
        """Unlock the folder."""
        for file in self._files:
            file.close()

    def withdraw(self) -> None:
        """Unlock the folder, and remove it if nothing else has been written there."""
        # Locks are still held: nobody else can begin to write here meanwhile.
        if self._names and {entry.name for entry in self._folder.iterdir()} <= set(self._names):
            for name in self._names:
                (self._folder / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self._folder.rmdir()
        self.release()

    def _own(self, folder: Path, name: str, remedy: str, shared: bool) -> None:
        """Lock a file of the folder, and write into it who owns it; ``shared``: others may have the lock, too."""
        # Not "w", which would erase the entry of an owner before the lock shows whether there is one.
        file = (folder / name).open("a+", encoding="utf-8")
        self._files.append(file)
        self._names.append(name)
        try:
            self._lock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        except BlockingIOError:
            raise _in_use(folder, owner_of(folder, name), remedy) from None
        except OSError as error:
            warn(
                f"hyfi: {folder}: its file system has no locks ({error.strerror}); make sure that no other process "
                f"writes there"
            )
        job = os.environ.get("SLURM_JOB_ID") or os.environ.get(JOB_VARIABLE)
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "job": job, "since": time.time()}
        try:
            # "a+" never erased an entry; only now is it known that its process has ended.
            file.truncate(0)
            os.write(file.fileno(), json.dumps(owner).encode())  # unbuffered: nothing is left to write on closing
        except OSError as error:
            raise RequestError(
                f"{folder}: cannot be written ({error.strerror}); make room there, or {remedy}"
            ) from None

    @staticmethod
    def _lock(file: IO[str], kind: int) -> None:
        """Lock a file; retry, because a process that looks for the owner (`owner_of`) locks it for a moment."""
        for _ in range(_ATTEMPTS - 1):
            with contextlib.suppress(BlockingIOError):
                return fcntl.flock(file, kind | fcntl.LOCK_NB)
            time.sleep(_PAUSE_S)
        fcntl.flock(file, kind | fcntl.LOCK_NB)


def check_free(folder: Path, remedy: str) -> None:
    """Check that no process owns a folder at this moment; ``remedy`` as for `FolderOwner`.

    Raises:
        RequestError: One does.
    """
    owner = owner_of(folder)
    if owner is not None:
        raise _in_use(folder, owner, remedy)


def _in_use(folder: Path, owner: dict[str, Any] | None, remedy: str) -> RequestError:
    return RequestError(f"{folder}: in use by {describe_owner(owner)}; wait for it or stop it, or {remedy}")


def owner_of(folder: Path, name: str = NAME) -> dict[str, Any] | None:
    """Return ``pid``, ``host``, ``job`` and ``since`` (Unix time in s) of a folder's current owner, or None."""
    try:
        # Opened for writing, though only read: network file systems give exclusive locks only on such files.
        with (folder / name).open("r+", encoding="utf-8") as file:
            try:
                # If this lock succeeds, there is no owner: the file's entry is of a process that has ended.
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return _parse(file.read())
    except OSError:
        pass
    return None


def describe_owner(owner: dict[str, Any] | None) -> str:
    """Return an owner as text: process, host and Slurm job."""
    if not owner or "pid" not in owner:
        return "another process"
    job = f", Slurm job {owner['job']}" if owner.get("job") else ""
    return f"process {owner['pid']} on {owner['host']}{job}"


def _parse(text: str) -> dict[str, Any]:
    """Return the entry of an owner; empty if it is not written completely."""
    try:
        document = json.loads(text)
    except json.JSONDecodeError:
        return {}
    return document if isinstance(document, dict) else {}
