"""The status folder, in which ranks report to their launcher how they ended.

Process managers do not forward signals and exit codes reliably: some return one code for all ranks, some kill all ranks
as soon as one exits with a code other than 0. So ranks and launcher use small files:

    pid-<rank>     process id, written when a rank starts
    exit-<rank>    exit code, written when a rank ends by itself
    stop           created to request all ranks to save and stop, also those that start later
    advice         text to print if memory runs out
    body           pickled function that each rank calls; only if the launcher has left one
    failure.json   rank and error of the first rank that failed; only one rank can create it
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STATUS_VARIABLE = "HYFI_STATUS"
EXIT_VARIABLE = "HYFI_EXIT_FILE"
"""Names the file in which ranks leave their exit code for a script of `hyfi launch`; launchers may return another."""
FAILURE, STOP = "failure.json", "stop"


def leave_exit_code(code: int) -> None:
    """Write the exit code of this rank for the script that started the launcher, if one did."""
    name = os.environ.get(EXIT_VARIABLE)
    if name:
        # All ranks may write the same file at the same time: each renames one of its own.
        temporary = Path(f"{name}.{os.getpid()}.tmp")
        with contextlib.suppress(OSError):  # a full disk: the script returns the launcher's code
            temporary.write_text(f"{code}\n", encoding="utf-8")
            temporary.replace(name)


class RunStatus:
    """Reads and writes the files of one launch; has no state of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def from_environment(cls) -> RunStatus | None:
        """Return the status folder of this process's launcher; None without this project's launcher."""
        folder = os.environ.get(STATUS_VARIABLE)
        return cls(Path(folder)) if folder and Path(folder).is_dir() else None

    def leave_body(self, body: Callable[[], int]) -> None:
        """Write a function and its arguments for the ranks; only this user can write here, so unpickling is safe."""
        (self.folder / "body").write_bytes(pickle.dumps(body))

    def body(self) -> Callable[[], int]:
        """Return the function that the launcher has left."""
        body: Callable[[], int] = pickle.loads((self.folder / "body").read_bytes())
        return body

    def begin(self, rank: int) -> None:
        """Write this process's id for ``rank``."""
        self._write(f"pid-{rank}", str(os.getpid()))

    def end(self, rank: int, code: int) -> None:
        """Write the exit code of ``rank``."""
        self._write(f"exit-{rank}", str(code))

    def request_stop(self) -> None:
        """Request all ranks to stop, also those that have not started yet."""
        (self.folder / STOP).touch()

    def write_advice(self, text: str) -> None:
        """Write the advice to print if memory runs out."""
        self._write("advice", text)

    @property
    def advice(self) -> str:
        """The advice, or "" if there is none."""
        file = self.folder / "advice"
        return file.read_text(encoding="utf-8") if file.exists() else ""

    @property
    def stop_requested(self) -> bool:
        """Whether a stop was requested."""
        return (self.folder / STOP).exists()

    def claim_failure(self, rank: int, error: str) -> bool:
        """Write a failure if it is the first, and return whether it is; otherwise wait until the first is written.

        Raises:
            OSError: It cannot be written.
        """
        try:
            descriptor = os.open(self.folder / FAILURE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            # The first rank may not have written its file yet, and what this one does next, MPI_Abort, would kill it.
            deadline_s = time.monotonic() + 1.0
            while self.failure() is None and time.monotonic() < deadline_s:
                time.sleep(0.01)
            return False
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump({"rank": rank, "error": error}, file)
        except OSError:
            # An empty file would claim the failure, and nobody could report it.
            (self.folder / FAILURE).unlink(missing_ok=True)
            raise
        return True

    @property
    def failed(self) -> bool:
        """Whether a rank has claimed a failure."""
        return (self.folder / FAILURE).exists()

    def failure(self) -> dict[str, Any] | None:
        """Return {"rank", "error"} of the first failure; None if there is none."""
        try:
            failure: dict[str, Any] = json.loads((self.folder / FAILURE).read_text(encoding="utf-8"))
        # Not written completely yet.
        except (FileNotFoundError, json.JSONDecodeError):
            return None
        return failure

    def codes(self) -> dict[int, int]:
        """Return {rank: exit code} of the ranks that ended by themselves."""
        return self._numbers("exit-")

    def pids(self) -> dict[int, int]:
        """Return {rank: process id} of the ranks that started."""
        return self._numbers("pid-")

    def _numbers(self, prefix: str) -> dict[int, int]:
        files = sorted(self.folder.glob(f"{prefix}*"))
        return {int(file.name.removeprefix(prefix)): int(file.read_text()) for file in files}

    def _write(self, name: str, text: str) -> None:
        # Atomic: the launcher may read at any time.
        # With a dot, so that `_numbers` does not find it.
        temporary = self.folder / f".{name}.{os.getpid()}.tmp"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(self.folder / name)
