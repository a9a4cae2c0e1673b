"""A folder in which ranks report to their launcher how they ended.

Signals and exit codes do not survive every process manager: some send one code for all ranks, some kill the others as
soon as one leaves with anything but 0. A few small files do.

    pid-<rank>     written when a rank begins
    exit-<rank>    its exit code, written when it ends by itself
    stop           created when all ranks shall save and stop; also found by ranks that start later
    advice         advice if memory runs out
    failure.json   rank and error of the first that failed; only one rank can create it
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

VARIABLE = "HYFI_STATUS"
FAILURE, STOP = "failure.json", "stop"


class RunStatus:
    """The files of one launch; stateless."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of_environment(cls) -> RunStatus | None:
        """Return the folder of this node's launcher; None if there is none."""
        folder = os.environ.get(VARIABLE)
        return cls(Path(folder)) if folder and Path(folder).is_dir() else None

    def begin(self, rank: int) -> None:
        """Note that ``rank`` is this process."""
        self._write(f"pid-{rank}", str(os.getpid()))

    def end(self, rank: int, code: int) -> None:
        """Note the exit code of ``rank``."""
        self._write(f"exit-{rank}", str(code))

    def request_stop(self) -> None:
        """Ask all ranks to stop, those too that have not begun yet."""
        (self.folder / STOP).touch()

    def note_advice(self, text: str) -> None:
        """Store the advice if memory runs out."""
        self._write("advice", text)

    @property
    def advice(self) -> str:
        """The stored advice, or ""."""
        file = self.folder / "advice"
        return file.read_text(encoding="utf-8") if file.exists() else ""

    @property
    def stop_requested(self) -> bool:
        """Whether that has been asked for."""
        return (self.folder / STOP).exists()

    def claim_failure(self, rank: int, error: str) -> bool:
        """Record a failure and return whether it is the first; later ones wait until the first is complete."""
        try:
            descriptor = os.open(self.folder / FAILURE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            deadline_s = time.monotonic() + 1.0
            while self.failure() is None and time.monotonic() < deadline_s:
                time.sleep(0.01)
            return False
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump({"rank": rank, "error": error}, file)
        return True

    @property
    def failed(self) -> bool:
        """Whether a rank has claimed a failure."""
        return (self.folder / FAILURE).exists()

    def failure(self) -> dict[str, Any] | None:
        """Return {"rank", "error"} of the first failure, None if there was none."""
        try:
            found: dict[str, Any] = json.loads((self.folder / FAILURE).read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):
            return None
        return found

    def codes(self) -> dict[int, int]:
        """Return {rank: exit code} of the ranks that ended by themselves."""
        return self._numbers("exit-")

    def pids(self) -> dict[int, int]:
        """Return {rank: process id} of the ranks that began."""
        return self._numbers("pid-")

    def _numbers(self, prefix: str) -> dict[int, int]:
        files = sorted(self.folder.glob(f"{prefix}*"))
        return {int(file.name.removeprefix(prefix)): int(file.read_text()) for file in files}

    def _write(self, name: str, text: str) -> None:
        # Atomic: the launcher may read at any time.
        beside = self.folder / f".{name}.{os.getpid()}.tmp"
        beside.write_text(text, encoding="utf-8")
        beside.replace(self.folder / name)
