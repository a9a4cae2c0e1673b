"""Snapshots of weights: bytes in the order of names; on a GPU made of CPU tensors, copied while training goes on."""

from __future__ import annotations

import pytest
import torch

from hyfi_core.runtime.saving.snapshot import SnapshotPool, unflatten
from tests.fake_gpu import FakeGpu, RaceError

SEEDS = range(5)


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"weight": torch.randn(40, 3, generator=generator), "count": torch.tensor(7)}


def on_gpu() -> dict[str, torch.Tensor]:
    return {name: value.to("cuda") for name, value in weights().items()}


def test_the_order_of_a_state_does_not_matter() -> None:
    state = {"a": torch.arange(3.0), "b": torch.ones(3), "c": torch.tensor(7)}
    snapshot = SnapshotPool().acquire(1, state)
    found = unflatten(snapshot.flat, {name: torch.zeros_like(state[name]) for name in ("c", "b", "a")})
    assert all(torch.equal(found[name], value) for name, value in state.items())


@pytest.mark.parametrize("seed", SEEDS)
def test_training_goes_on_while_a_snapshot_is_copied(seed: int) -> None:
    with FakeGpu(seed) as gpu:
        state, pool = on_gpu(), SnapshotPool()
        for step in range(3):
            with gpu.no_synchronisation():
                snapshot = pool.acquire(step, state)
                others = state["weight"] * 2  # the next step
                while not snapshot.ready():
                    others = others + 1
            found = unflatten(snapshot.flat, state)
            for name, value in weights().items():
                assert torch.equal(found[name], value)
            pool.release(snapshot)


@pytest.mark.parametrize("seed", SEEDS)
def test_weights_in_training_may_be_changed_at_once(seed: int) -> None:
    with FakeGpu(seed) as gpu:
        state = on_gpu()
        with gpu.no_synchronisation():
            snapshot = SnapshotPool().acquire(1, state, changing=True)
            state["weight"].add_(1)  # on the same stream: after the copy
        snapshot.wait()
        assert torch.equal(unflatten(snapshot.flat, state)["weight"], weights()["weight"])


@pytest.mark.parametrize("seed", SEEDS)
def test_what_may_not_be_done_before_it_is_ready_is_seen(seed: int) -> None:
    with FakeGpu(seed):
        state = on_gpu()
        snapshot = SnapshotPool().acquire(1, state)
        with pytest.raises(RaceError, match="may still be using its memory"):
            snapshot.flat.clone()
        with pytest.raises(RaceError, match="may still be using its memory"):
            state["weight"].add_(1)
        snapshot.wait()
        state["weight"].add_(1)
        assert torch.equal(unflatten(snapshot.flat, state)["weight"], weights()["weight"])


def test_weights_that_are_freed_before_they_are_copied_are_seen() -> None:
    with FakeGpu(), pytest.raises(RaceError, match="memory was freed"):
        state = on_gpu()
        snapshot = SnapshotPool().acquire(1, state)
        snapshot._state = None
        del state
        torch.zeros(3)
