"""Detection of dead ranks, for commands whose launcher is not this project's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyfi_core.errors import RendezvousError
from workflows import signals
from workflows.console import warn
from workflows.launch.status import RunStatus
from workflows.out_of_memory import advice

if TYPE_CHECKING:
    from hyfi_core.comm.base import Communicator
    from hyfi_core.comm.supervision.peer_watch import PeerWatch

_watch: PeerWatch | None = None
_still_waits = False


def join() -> Communicator:
    """Return the communicator of all ranks of this command, and watch for ranks that die (collective).

    Under this project's own launcher (`workflows.launch.launch`) no watch is needed, because it supervises the ranks.

    Raises:
        RequestError: As :func:`hyfi_core.init`.
        KeyboardInterrupt: A stop was requested while this rank waited for others.
    """
    import hyfi_core
    from hyfi_core.comm.supervision.peer_watch import watch_peers

    global _watch, _still_waits
    try:
        world = hyfi_core.init(supervised=False, interrupted=signals.requested)
    except KeyboardInterrupt:
        _still_waits = True
        warn("hyfi: stopped on request, while it waited for other ranks; nothing was started")
        raise
    except RendezvousError:
        _still_waits = True
        raise
    if RunStatus.from_environment() is None:
        _watch = watch_peers(world, _report_lost)
    return world


def still_waits() -> bool:
    """Whether a thread may still wait for other ranks inside a library, which could crash while the process ends."""
    return _still_waits


def leave() -> None:
    """Tell the other ranks that this one ends normally."""
    if _watch is not None:
        _watch.leave()


def fail() -> None:
    """Tell the other ranks that this one ends with an error that it reports itself."""
    if _watch is not None:
        _watch.fail()


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error means that the connection to another rank was lost, which then failed first."""
    from hyfi_core.comm.supervision.peer_watch import is_lost_peer

    return is_lost_peer(error)


def _report_lost(rank: int) -> None:
    warn(
        f"hyfi: rank {rank} was killed or crashed (by a signal, out of memory, or with its node); all ranks were "
        f"stopped. If memory ran out: {advice()}",
        "ERROR",
    )
