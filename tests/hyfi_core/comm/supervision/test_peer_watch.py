"""A rank that dies takes all others along, and is named; one that leaves does not."""

from __future__ import annotations

import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hyfi_core.comm.supervision.peer_watch import allow_files, is_lost_peer
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[4]
RANK = """
import os, signal, socket, sys, time
from hyfi_core.comm.supervision.peer_watch import PeerWatch
rank, what = int(sys.argv[1]), sys.argv[2]
peers = {int(number): socket.socket(fileno=int(fd)) for number, fd in (word.split(":") for word in sys.argv[3:])}
watch = PeerWatch(rank, peers, lambda lost: print(f'rank {lost} was lost', file=sys.stderr, flush=True))
if rank == int(what.partition("-")[2]):
    time.sleep(0.5)
    if what.startswith("killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    watch.fail() if what.startswith("fails") else watch.leave()
    sys.exit(5)
time.sleep(3 if what.startswith('leaves') else 99)  # a call that knows nothing of the others
watch.leave()
sys.exit(0)
"""


def ranks(what: str) -> tuple[list[int], list[str], float]:
    """Run three ranks; return their exit codes, what they wrote on standard error, and the seconds it took."""
    pairs = {1: socket.socketpair(), 2: socket.socketpair()}
    began_s, processes = time.monotonic(), []
    for rank in range(3):
        mine = [(number, pair[0]) for number, pair in pairs.items()] if rank == 0 else [(0, pairs[rank][1])]
        words = [f"{number}:{end.fileno()}" for number, end in mine]
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", RANK, str(rank), what, *words],
                cwd=ROOT,
                pass_fds=[end.fileno() for _, end in mine],
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    for pair in pairs.values():
        for end in pair:
            end.close()
    said = [process.communicate(timeout=PATIENCE_S)[1] for process in processes]
    return [process.returncode for process in processes], said, time.monotonic() - began_s


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("Read error [127.0.0.1]:1: Connection reset by peer. This is typically"), True),
        (RuntimeError("Connection closed by peer [127.0.0.1]:1"), True),
        (BrokenPipeError(32, "Broken pipe"), True),
        (ValueError("shapes differ"), False),
    ],
)
def test_an_error_by_a_lost_peer_is_known(error: Exception, lost: bool) -> None:
    """One of gloo's two messages was not, so that a second rank told of its own failure."""
    assert is_lost_peer(error) is lost


@pytest.mark.parametrize(("lost", "speaks"), [(2, 0), (1, 0), (0, 1)])
def test_a_killed_rank_ends_all_and_is_named_once(lost: int, speaks: int) -> None:
    codes, said, _ = ranks(f"killed-{lost}")
    assert codes == [-signal.SIGKILL if rank == lost else 70 for rank in range(3)]
    assert [f"rank {lost} was lost" in text for text in said] == [rank == speaks for rank in range(3)]


def test_a_rank_that_fails_reports_itself() -> None:
    codes, said, _ = ranks("fails-1")
    assert codes == [70, 5, 70]
    assert said == ["", "", ""]


@pytest.mark.parametrize("first", [0, 2])
def test_a_rank_that_leaves_ends_nobody(first: int) -> None:
    codes, said, _ = ranks(f"leaves-{first}")
    assert codes == [5 if rank == first else 0 for rank in range(3)]
    assert said == ["", "", ""]


def test_rank_0_may_have_a_connection_for_each_of_thousands_of_ranks() -> None:
    """The usual limit is 1,024 files: beyond that many ranks, nobody would have been watched."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] != resource.RLIM_INFINITY and before[1] < 3072:
        pytest.skip(f"this machine allows {before[1]} files at most")
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
        allow_files(2048)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (3072, before[1])
        allow_files(10**9)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] in (before[1], 3072)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
