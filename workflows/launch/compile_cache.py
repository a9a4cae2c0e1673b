"""The folder in which ``torch.compile`` keeps compiled code, so that later runs need not compile it again."""

from __future__ import annotations

import os
from pathlib import Path

from hyfi_core.errors import RequestError
from workflows.console import warn

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""PyTorch's own setting; by default it is a folder in the temporary directory, which nodes empty."""


def on_gpu(device: str) -> bool:
    """Whether trainers may compute on a GPU of this node; ``device`` is ``run.device``."""
    import torch

    return device != "cpu" and torch.cuda.is_available()


def keep_compiled(folder: Path | None, warns: bool = True) -> None:
    """Let this process and those that it starts keep compiled code in a folder that only its user may write.

    Args:
        folder: ``run.compile_cache``; None: ``TORCHINDUCTOR_CACHE_DIR`` if it is set, else ``hyfi/compile`` in the
            user's cache folder; if that cannot be used, PyTorch keeps its own default.
        warns: Whether this process warns if the folder cannot be used.

    Raises:
        RequestError: ``folder`` cannot be made or written, or other users may write code there, which is then loaded.
    """
    if folder is None and VARIABLE in os.environ:
        return
    cache_folder = folder or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hyfi" / "compile"
    problem = _problem(cache_folder)
    if problem is None:
        # Absolute, because processes that inherit it may work in another folder.
        os.environ[VARIABLE] = str(cache_folder.absolute())
    elif folder is not None:
        raise RequestError(f"run.compile_cache: {cache_folder} {problem}; give a folder of yours, or null")
    elif warns:
        warn(
            f"hyfi: {cache_folder} {problem}; compiled code is not kept there (run.compile_cache names another folder)"
        )


def _problem(folder: Path) -> str | None:
    """Make a folder if it is missing; return why it cannot be used, None if it can."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # After `mkdir`, and of what is really there: the folder, or a link of that name, may be of another user.
        status = folder.stat()
    except OSError as error:
        return f"cannot be made ({error.strerror})"
    if not os.access(folder, os.W_OK | os.X_OK):
        return "cannot be written"
    if status.st_uid != os.getuid():
        return "belongs to another user, and code is loaded from it"
    # Writable by the group or by others.
    if status.st_mode & 0o022:
        return "may be written by other users, and code is loaded from it"
    return None
