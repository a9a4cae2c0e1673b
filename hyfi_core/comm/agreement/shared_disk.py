"""Checks that all ranks see the same files, made before a run relies on a folder that only one node may have."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from hyfi_core.errors import RequestError

if TYPE_CHECKING:  # without torch, for processes that only read slides
    from hyfi_core.comm.base import Communicator

T = TypeVar("T")

SEEN_WITHIN_S = 5.0
"""A network disk may show a new file to other nodes this much later."""


def agree_everywhere(world: Communicator, check: Callable[[], T]) -> T:
    """Return this rank's ``check()``; if any rank refuses, all raise, with the names of those ranks unless all refused.

    Collective; ``check`` must not communicate.

    Raises:
        RequestError: On every rank, with the message of the first that refused.
    """
    refusal, result = None, None
    try:
        result = check()
    except RequestError as raised:
        refusal = str(raised)
    answers = world.gather_objects((refusal, socket.gethostname()))
    text = world.broadcast_object(_first_of(answers) if answers is not None else None)
    if text is not None:
        raise RequestError(text)
    return result  # type: ignore[return-value]


def require_shared(world: Communicator, folder: Path, purpose: str) -> None:
    """Check that a folder which rank 0 has made is the same on every rank (collective).

    Args:
        world: All ranks.
        folder: The folder.
        purpose: The folder's name in the message, such as ``run.dir runs/mine``.

    Raises:
        RequestError: On every rank, if one does not see what rank 0 writes there.
    """
    if world.size == 1:
        return
    # A new name every time: a client of NFS may remember for seconds that a name was not there.
    mark = world.broadcast_object(f".seen-{secrets.token_hex(8)}" if world.rank == 0 else None)
    if world.rank == 0:
        (folder / mark).touch()  # a full disk is an error of this rank, raised as such
    # No rank looks before the file is there.
    world.barrier()
    answers = world.gather_objects((_is_seen(folder / mark), socket.gethostname()))
    if world.rank == 0:
        (folder / mark).unlink(missing_ok=True)
    refusal = None
    if answers is not None:
        blind = [(rank, host) for rank, (sees, host) in enumerate(answers) if not sees]
        if blind:
            refusal = (
                f"{purpose}: {_places(blind)} cannot see what rank 0 on {answers[0][1]} writes there; "
                "choose a folder on a disk that all nodes share"
            )
    refusal = world.broadcast_object(refusal)
    if refusal is not None:
        raise RequestError(refusal)


def _is_seen(file: Path) -> bool:
    """Whether a new file is there, on a network disk maybe a little later."""
    deadline_s = time.monotonic() + SEEN_WITHIN_S
    while not file.exists():
        if time.monotonic() > deadline_s:
            return False
        for folder in reversed(file.parents):  # opening a folder makes NFS forget that something was not there
            with contextlib.suppress(OSError):
                os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
        time.sleep(0.1)
    return True


def _first_of(answers: list[tuple[str | None, str]]) -> str | None:
    """Return the first refusal, with the ranks that refused if not all did; None if none did."""
    refused = [(rank, host, text) for rank, (text, host) in enumerate(answers) if text is not None]
    if not refused:
        return None
    text = refused[0][2]
    if len(refused) == len(answers):
        return text
    places = [(rank, host) for rank, host, _ in refused]
    return f"{text} (only {_places(places)} found this: do all nodes see the same files?)"


def _places(ranks: list[tuple[int, str]]) -> str:
    """Return ranks and their hosts as text, such as ``rank 3 on node2``."""
    shown = ", ".join(f"rank {rank} on {host}" for rank, host in ranks[:4])
    return f"{shown} and {len(ranks) - 4} more" if len(ranks) > 4 else shown
