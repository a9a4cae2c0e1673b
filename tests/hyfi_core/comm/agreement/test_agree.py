"""All ranks refuse or none does, with the same words."""

from __future__ import annotations

import pytest

from hyfi_core.comm.agreement.agree import agree, compare
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.comm.base import Communicator
from hyfi_core.comm.threads import run_ranks
from hyfi_core.errors import RequestError


def test_one_refusal_is_everybodys() -> None:
    def body(comm: Communicator) -> str:
        def check() -> int:
            if comm.rank in (1, 2):
                raise RequestError(f"rank {comm.rank} has no such file")
            return comm.rank

        with pytest.raises(RequestError) as told:
            agree(comm, check)
        return str(told.value)

    assert run_ranks(3, body) == ["rank 1 has no such file"] * 3


def test_without_a_refusal_each_rank_gets_its_own_answer() -> None:
    assert run_ranks(2, lambda comm: agree(comm, lambda: comm.rank * 10)) == [0, 10]
    assert agree(AloneCommunicator(), lambda: 7) == 7


def test_other_errors_count_as_refusals_where_that_is_asked() -> None:
    def body(comm: Communicator) -> str:
        def check() -> None:
            if comm.rank == 0:
                raise ValueError

        with pytest.raises(KeyError) as told:
            agree(comm, check, (ValueError, OSError), KeyError)
        return str(told.value.args[0])

    assert run_ranks(2, body) == ["ValueError"] * 2


@pytest.mark.parametrize(
    ("odd", "words"),
    [((2,), "batch is 4 on ranks 0-1, 3; 5 on rank 2"), ((0, 1), "batch is 5 on ranks 0-1; 4 on ranks 2-3")],
)
def test_what_differs_is_named_with_its_ranks(odd: tuple[int, ...], words: str) -> None:
    def body(comm: Communicator) -> str:
        with pytest.raises(RequestError) as told:
            compare(comm, {"plan": "a", "batch": "5" if comm.rank in odd else "4", "later": str(comm.rank)})
        return str(told.value)

    assert set(run_ranks(4, body)) == {f"ranks disagree: {words}; pass the same on every rank"}


def test_what_one_rank_lacks_differs() -> None:
    def body(comm: Communicator) -> None:
        compare(comm, {"a": "1"} if comm.rank else {"a": "1", "b": "2"})

    with pytest.raises(RequestError, match="b is 2 on rank 0; not given on rank 1"):
        run_ranks(2, body)


def test_the_same_facts_pass() -> None:
    run_ranks(3, lambda comm: compare(comm, {"a": "1", "b": "2"}))
