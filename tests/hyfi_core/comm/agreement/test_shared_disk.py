"""What only some ranks see is refused on all, with the ranks and their hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from hyfi_core.comm.agreement import shared_disk
from hyfi_core.comm.agreement.shared_disk import agree_everywhere, require_shared
from hyfi_core.comm.base import Communicator
from hyfi_core.comm.threads import run_ranks
from hyfi_core.errors import RequestError


def refusals(ranks: int, act: object) -> list[str]:
    assert callable(act)

    def body(comm: Communicator) -> str:
        try:
            return f"returned {act(comm)}"
        except RequestError as error:
            return str(error)

    return run_ranks(ranks, body)


def test_a_folder_of_one_node_alone_is_refused_on_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_disk, "SEEN_WITHIN_S", 0.2)
    for rank in range(3):
        (tmp_path / f"disk-{rank}").mkdir()
    own = refusals(3, lambda comm: require_shared(comm, tmp_path / f"disk-{min(comm.rank, 1)}", "run.dir"))
    assert len(set(own)) == 1 and "rank 1 on " in own[0] and "rank 2 on " in own[0]
    assert "cannot see what rank 0 on " in own[0] and "a disk that all nodes share" in own[0]
    assert refusals(3, lambda comm: require_shared(comm, tmp_path / "disk-0", "run.dir")) == ["returned None"] * 3
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_folder_that_appears_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, original = [0], Path.exists

    def late(self: Path, **how: bool) -> bool:
        if self.name.startswith(".seen"):
            seen[0] += 1
        return original(self, **how) and not 0 < seen[0] < 6

    monkeypatch.setattr(Path, "exists", late)
    assert refusals(2, lambda comm: require_shared(comm, tmp_path, "run.dir")) == ["returned None"] * 2


def test_a_refusal_of_some_ranks_names_them() -> None:
    def check(comm: Communicator, refusing: range) -> int:
        def own() -> int:
            if comm.rank in refusing:
                raise RequestError("not a store")
            return comm.rank

        return agree_everywhere(comm, own)

    (text,) = set(refusals(3, lambda comm: check(comm, range(2, 3))))
    assert text.startswith("not a store (only rank 2 on ") and "do all nodes see the same files?" in text
    assert set(refusals(3, lambda comm: check(comm, range(3)))) == {"not a store"}
    assert refusals(3, lambda comm: check(comm, range(0))) == ["returned 0", "returned 1", "returned 2"]
