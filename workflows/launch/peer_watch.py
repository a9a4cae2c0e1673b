"""Detection of stalled ranks, and of dead ranks where the launcher is not this project's own, which detects them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hyfi_core.errors import FAULT, RendezvousError
from workflows import signals
from workflows.console import warn
from workflows.launch import rank_log
from workflows.launch.status import RunStatus, leave_exit_code
from workflows.out_of_memory import advice

if TYPE_CHECKING:
    from hyfi_core.comm.base import Communicator
    from hyfi_core.comm.supervision.peer_watch import PeerWatch
    from hyfi_core.comm.supervision.stall import Stall

_watch: PeerWatch | None = None
_rendezvous_waits = False
_how_to_continue: Callable[[], str] = lambda: ""  # noqa: E731 (replaced as a value)


def join() -> Communicator:
    """Return the communicator of all ranks of this command, and watch for ranks that die or freeze (collective).

    Under this project's own launcher (`workflows.launch.launch`), the launcher detects ranks that die.

    Raises:
        RequestError: As :func:`hyfi_core.init`.
        KeyboardInterrupt: A stop was requested while this rank waited for others.
    """
    import hyfi_core
    from hyfi_core.comm.supervision.peer_watch import watch_peers

    global _watch, _rendezvous_waits
    try:
        world = hyfi_core.init(supervised=False, interrupted=signals.requested)
    except KeyboardInterrupt:
        _rendezvous_waits = True  # a thread may wait for the others even now
        warn("hyfi: stopped on request, while it waited for other ranks; nothing was started")
        raise
    except RendezvousError:
        _rendezvous_waits = True
        raise
    # Under another launcher, this rank ends by itself when another dies; ours reports the death, once.
    foreign = RunStatus.from_environment() is None
    _watch = watch_peers(world, _report_lost, _report_stalled, signals.requested, ends_with_dead=foreign)
    return world


def expect_progress(limit_s: float | None, how_to_continue: Callable[[], str]) -> None:
    """Set after how many seconds without progress a rank counts as stalled.

    Args:
        limit_s: The seconds; None: ten times the longest step, at least 300; 0: never.
        how_to_continue: Returns advice for the message about a stalled rank.
    """
    global _how_to_continue
    _how_to_continue = how_to_continue
    if _watch is not None:
        _watch.rule.limit_s = limit_s


def rendezvous_waits() -> bool:
    """Whether a thread may still wait in the rendezvous, inside MPI or PyTorch, for ranks that never came."""
    return _rendezvous_waits


def leave() -> None:
    """Tell the other ranks that this one ends normally."""
    if _watch is not None:
        _watch.leave()


def fail() -> None:
    """Tell the other ranks that this one ends with an error that it reports itself."""
    if _watch is not None:
        _watch.fail()


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error means a lost connection to another rank; that rank then failed first."""
    from hyfi_core.comm.supervision.peer_watch import is_lost_peer

    return is_lost_peer(error)


def _report_stalled(stall: Stall) -> None:
    """Report stalled ranks to this project's own launcher, which ends all ranks, or to the user."""
    how_to_continue = _how_to_continue()
    text = f"{stall.text}\n{how_to_continue}" if how_to_continue else stall.text
    status = RunStatus.from_environment()
    # At once, because this rank may be killed next: the script that started it returns this code.
    leave_exit_code(FAULT)
    rank_log.note_error(text)
    if status is None:
        warn(f"hyfi: {text}\nhyfi: all ranks stop", "ERROR")
        return
    try:
        # In the name of the stalled rank, which cannot report itself; only the first of several reports counts.
        status.claim_failure(stall.ranks[0], text)
    except OSError:  # a full disk
        warn(f"hyfi: {text}", "ERROR")


def _report_lost(rank: int) -> None:
    # A rank that a library or a user's module ended by `os._exit(0)` has the code of one that is done.
    leave_exit_code(FAULT)
    warn(
        f"hyfi: rank {rank} was killed or crashed (by a signal, out of memory, or with its node); all ranks were "
        f"stopped. If memory ran out: {advice()}",
        "ERROR",
    )
