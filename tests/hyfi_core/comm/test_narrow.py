"""Sums of 16-bit floats travel as such, are added in float32 and have the same bits on all ranks."""

from __future__ import annotations

import pytest
import torch

from hyfi_core.comm.base import Communicator
from hyfi_core.comm.counted import CountedCommunicator
from hyfi_core.comm.threads import run_ranks
from hyfi_core.comm.two_level import NarrowCommunicator, narrow, two_level


def share(rank: int, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(10 * seed + rank)).to(torch.bfloat16)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_several_sums_under_way_equal_one_float32_sum(ranks: int, strict: bool) -> None:
    shapes = [(7,), (2, 5), (1,), (64,), (0,)]

    def body(comm: Communicator) -> list[torch.Tensor]:
        group = narrow(comm)
        tensors = [share(comm.rank, shape, seed) for seed, shape in enumerate(shapes)]
        pending = [group.start_all_reduce(tensor) for tensor in tensors]
        assert isinstance(pending[-1].test(), bool)
        for one in reversed(pending):
            one.wait()
        return tensors

    results = run_ranks(ranks, body, strict=strict)
    for seed, shape in enumerate(shapes):
        wanted = sum((share(rank, shape, seed).float() for rank in range(ranks)), torch.zeros(shape)).to(torch.bfloat16)
        for found in results:
            assert torch.equal(found[seed], wanted)


def test_what_is_sent_is_16_bits_a_number() -> None:
    def body(comm: Communicator) -> list[int]:
        group = narrow(comm)
        assert isinstance(group, NarrowCommunicator)
        group._scatter, group._gather = CountedCommunicator(group._scatter), CountedCommunicator(group._gather)
        group.all_reduce(share(comm.rank, (100,)))
        return [counted.counts.sent_bytes["halo"] for counted in (group._scatter, group._gather)]  # type: ignore[attr-defined]

    assert run_ranks(2, body) == [[100, 100]] * 2  # half of 100 numbers of two bytes, there and back


def test_wide_sums_and_maxima_pass_through() -> None:
    def body(comm: Communicator) -> list[float]:
        group = narrow(comm)
        total, top = torch.tensor([1.0]), torch.tensor([float(comm.rank)], dtype=torch.bfloat16)
        group.all_reduce(total)
        group.all_reduce(top, "max")
        return [float(total), float(top)]

    assert run_ranks(3, body) == [[3.0, 2.0]] * 3


def test_over_nodes_every_level_is_narrow() -> None:
    def body(comm: Communicator) -> torch.Tensor:
        total = share(comm.rank, (33,))
        two_level(comm, list("aabb"), narrowed=True).all_reduce(total)
        return total

    results = run_ranks(4, body, strict=True)
    wanted = sum((share(rank, (33,)).float() for rank in range(4)), torch.zeros(33))
    for found in results:
        assert torch.equal(found, results[0])
        assert (found.float() - wanted).abs().max() <= 2**-7 * wanted.abs().max()
