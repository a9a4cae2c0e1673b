"""Runs that cannot go on for a reason outside them: a full disk, a store that was removed, a server that ended.

Such an error becomes a line that says what happened, where, and how to continue; its traceback is in the rank's log.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from hyfi_core.errors import RequestError
from hyfi_core.size_text import size_text

if TYPE_CHECKING:
    from workflows.config.load import Config

_FILE_ADVICE = {
    errno.EACCES: "; let its owner give you access, or use another path",
    errno.EPERM: "; let its owner give you access, or use another path",
    errno.EROFS: "; choose a path on a disk that can be written",
}
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class RunInterruptedError(RuntimeError):
    """A run was ended by something outside it; the message needs no traceback."""


def interruption(error: RequestError | OSError, config: Config) -> str | None:
    """Return why a run cannot go on after an error, and how to continue it; None if the error is not of this kind.

    Args:
        error: Raised while the run trains.
        config: The configuration of the run.
    """
    reason = _of_request(error, config) if isinstance(error, RequestError) else _of_file(error, config.run.dir)
    return None if reason is None else f"the run cannot continue: {reason}; {how_to_continue(config.run.dir)}"


def is_full_disk(error: BaseException | None) -> bool:
    """Whether an error says that a disk or a quota is full, or that a file is too large for its file system."""
    return isinstance(error, OSError) and error.errno in DISK_FULL


def describe_full_disk(error: OSError, path: Path | None) -> str:
    """Return a message: the file that could not be written, and how much room its disk has; a quota may allow less.

    Args:
        error: An error for which `is_full_disk` is true.
        path: The file; None: unknown.
    """
    try:
        usage = None if path is None else shutil.disk_usage(path if path.is_dir() else path.parent)
    except OSError:  # the disk may be gone altogether
        usage = None
    on_disk = "" if usage is None else f"; its disk has {size_text(usage.free)} free of {size_text(usage.total)}"
    return f"{path or 'a file'} cannot be written ({error.strerror}{on_disk}); make room there, or raise the quota"


def describe_file_error(error: BaseException) -> str | None:
    """Return which file or folder cannot be used, and why; None for errors that name no file."""
    if not isinstance(error, OSError) or error.errno is None or not error.filename:
        return None
    if not isinstance(error.filename, (str, bytes)):
        return None
    from data.files import reason_of

    return f"{os.fsdecode(error.filename)}: {reason_of(error)}{_FILE_ADVICE.get(error.errno, '')}"


def file_of(error: OSError) -> Path | None:
    """Return the file that an error names; None without one."""
    return Path(error.filename) if isinstance(error.filename, str) else None


def _of_request(error: RequestError, config: Config) -> str:
    """Return the text of a refusal; if the store has vanished, that is said first."""
    from data.location import is_remote, location

    store = location(config.data.store)
    # A server's own message says more than that the store is not there.
    if is_remote(store) or store.exists():
        return str(error)
    return f"data.store {store} is not there any more ({error}); put it back"


def _of_file(error: OSError, run: Path) -> str | None:
    """Return what is wrong with a file; None if the error may be a fault of the program."""
    path = file_of(error)
    if is_full_disk(error):
        return describe_full_disk(error, path or run)
    # Files of the run, such as after a change of rights: no fault of the program.
    if path is not None and path.absolute().is_relative_to(run.absolute()):
        return f"{path} cannot be written ({error.strerror}); check its folder, its rights and the disk"
    return None


def how_to_continue(run: Path) -> str:
    """Return after which step a run continues, and what is lost."""
    latest = run / "checkpoints" / "latest"
    if not latest.exists():
        return "there is no checkpoint yet: --resume begins the run again"
    # The name that `latest` points to: nothing of a damaged checkpoint is read.
    step = int(latest.resolve().name.removeprefix("step-"))
    return f"--resume continues after step {step}, that of the latest checkpoint; later steps are computed again"
