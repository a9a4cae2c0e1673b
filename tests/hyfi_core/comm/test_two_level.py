"""Reductions in two levels give every rank what one level would, and send once a node between nodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hyfi_core.comm.base import Communicator
from hyfi_core.comm.counted import CountedCommunicator
from hyfi_core.comm.threads import run_ranks
from hyfi_core.comm.two_level import TwoLevelCommunicator, two_level


@pytest.mark.parametrize("nodes", ["aabb", "abab", "aaab", "abbbbc", "aaaaaa"])
@pytest.mark.parametrize("op", ["sum", "max"])
def test_several_reductions_under_way_equal_one_level(nodes: str, op: Any) -> None:
    def body(comm: Communicator) -> list[torch.Tensor]:
        levels = two_level(comm, list(nodes))
        generator = torch.Generator().manual_seed(comm.rank)
        tensors = [torch.randn(size, generator=generator, dtype=torch.float64) for size in (5, 1, 70)]
        expected = [tensor.clone() for tensor in tensors]
        started = [levels.start_all_reduce(tensor, op) for tensor in tensors]
        if comm.rank % 2:  # some ranks poll, some wait, and not for the first one first
            while not all(pending.test() for pending in started):
                pass
        for pending in reversed(started):
            pending.wait()
        for tensor in expected:
            comm.all_reduce(tensor, op)
        return [(a - b).abs().max() for a, b in zip(tensors, expected, strict=True)]

    for errors in run_ranks(len(nodes), body, strict=True):
        assert max(errors) <= 1e-14


def test_ranks_that_find_a_level_done_sooner_than_others_keep_one_order() -> None:
    """Without communicators of their own for the levels, one stream a group would deadlock here."""

    def body(comm: Communicator) -> list[float]:
        levels = two_level(comm, list("aabb"))
        first, second = torch.tensor([1.0 + comm.rank]), torch.tensor([10.0])
        pending = [levels.start_all_reduce(first)]
        if comm.rank in (1, 3):  # they are done with the first level, and go on; their leaders start the second tensor
            for _ in range(100):
                pending[0].test()
        pending.append(levels.start_all_reduce(second))
        for one in pending:
            one.wait()
        return [float(first), float(second)]

    assert run_ranks(4, body, strict=True) == [[10.0, 40.0]] * 4


def test_only_leaders_talk_between_nodes() -> None:
    def body(comm: Communicator) -> tuple[int, bool]:
        levels = two_level(comm, list("aabb"))
        assert isinstance(levels, TwoLevelCommunicator)
        if levels._across is not None:
            levels._across = CountedCommunicator(levels._across)
        levels.all_reduce(torch.ones(10))
        return (levels._across.counts.sent_bytes["halo"] if levels._across is not None else 0), levels.rank in (0, 2)

    assert run_ranks(4, body) == [(40, True), (0, False), (40, True), (0, False)]


def test_one_node_or_one_rank_a_node_needs_no_levels() -> None:
    assert all(run_ranks(2, lambda comm: two_level(comm, ["a", "a"]) is comm))
    assert all(run_ranks(2, lambda comm: two_level(comm, ["a", "b"]) is comm))
