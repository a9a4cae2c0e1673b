"""The ranks of a command notice at once that another one has died, whatever started them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workflows.console import warn
from workflows.launch.status import RunStatus
from workflows.out_of_memory import advice

if TYPE_CHECKING:
    from hyfi_core.comm.base import Communicator
    from hyfi_core.comm.supervision.peer_watch import PeerWatch

_watch: PeerWatch | None = None


def join() -> Communicator:
    """Return the communicator of all ranks of this command, which from now on end together (collective).

    Under this command's own launcher nothing more is needed: that one watches over its ranks.

    Raises:
        RequestError: as :func:`hyfi_core.init`.
    """
    import hyfi_core
    from hyfi_core.comm.supervision.peer_watch import watch_peers

    global _watch
    world = hyfi_core.init(supervised=False)
    if RunStatus.of_environment() is None:
        _watch = watch_peers(world, _tell_lost)
    return world


def leave() -> None:
    """Say to the other ranks that this one ends as it should."""
    if _watch is not None:
        _watch.leave()


def fail() -> None:
    """Say to the other ranks that this one ends by an error, which it reports itself."""
    if _watch is not None:
        _watch.fail()


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error says that another rank has gone: most likely that one failed first."""
    from hyfi_core.comm.supervision.peer_watch import is_lost_peer

    return is_lost_peer(error)


def _tell_lost(rank: int) -> None:
    warn(
        f"hyfi: rank {rank} was killed or crashed (by a signal, out of memory, or with its node); all ranks were "
        f"stopped. If memory ran out: {advice()}"
    )
