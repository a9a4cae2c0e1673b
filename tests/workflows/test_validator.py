"""The validation service: no weights skipped, a queue with a bound, a stop that does not wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import pytest
import torch

from hyfi_core.comm.base import Communicator
from hyfi_core.comm.threads import run_ranks
from workflows.evaluation import Interrupted
from workflows.validator import QUEUE, Metrics, ValidationClient, ValidationService, flatten, unflatten

STATE = {
    "a.weight": torch.arange(6.0).reshape(2, 3),
    "a.count": torch.tensor(7),
    "b": torch.ones(5, dtype=torch.float64),
}


def state_of(step: int) -> dict[str, torch.Tensor]:
    return {name: value + step for name, value in STATE.items()}


def serve(world: Communicator, seconds: float) -> bool:
    """Serve as a validator whose judgement of weights is their sum, slide by slide."""
    group = world.split(1, world.rank)
    assert group is not None

    def evaluate(weights: Mapping[str, torch.Tensor], interrupted: Callable[[], bool]) -> Metrics | None:
        for _ in range(4):
            if interrupted():
                raise Interrupted
            time.sleep(seconds / 4)
        total = torch.tensor(sum(float(value.double().sum()) for value in weights.values()), dtype=torch.float64)
        group.all_reduce(total)
        return {"loss": float(total) / group.size, "auroc": None} if group.rank == 0 else None

    return ValidationService(world, group, STATE, evaluate).serve()


def never() -> bool:
    return False


def expected(step: int) -> float:
    return sum(float(value.double().sum()) for value in state_of(step).values())


def test_a_snapshot_survives_the_journey() -> None:
    again = unflatten(flatten(STATE), STATE)
    assert all(torch.equal(again[key], STATE[key]) and again[key].dtype == STATE[key].dtype for key in STATE)
    with pytest.raises(ValueError, match="does not fit"):
        unflatten(flatten(STATE)[:-1], STATE)


@pytest.mark.parametrize("validators", [1, 2, 3])
def test_every_step_is_validated_in_order_with_its_own_weights(validators: int) -> None:
    most_open = []

    def body(world: Communicator) -> object:
        if world.rank > 0:
            return serve(world, seconds=0.02)
        world.split(None, 0)
        client = ValidationClient(world, leader=1)
        results = []
        for step in range(1, 8):
            state = state_of(step)
            assert client.submit(step, state, never)
            for value in state.values():
                value.zero_()  # the snapshot is a copy: training goes on at once
            most_open.append(len(client.open_steps))
            results += client.collect()
        assert client.drain(never)
        client.close(stopped=False)
        return results + client.collect()

    results = run_ranks(1 + validators, body, timeout_s=60)
    assert [step for step, _ in results[0]] == list(range(1, 8))
    assert all(metrics["loss"] == pytest.approx(expected(step)) for step, metrics in results[0])
    assert all(metrics["auroc"] is None for _, metrics in results[0])
    assert max(most_open) == QUEUE
    assert results[1:] == [False] * validators


def test_handing_over_does_not_wait_for_the_result() -> None:
    def body(world: Communicator) -> float:
        if world.rank > 0:
            serve(world, seconds=0.8)
            return 0.0
        world.split(None, 0)
        client = ValidationClient(world, leader=1)
        start = time.monotonic()
        client.submit(1, state_of(1), never)
        handed_over_s = time.monotonic() - start
        client.drain(never)
        client.close(stopped=False)
        return handed_over_s

    assert run_ranks(2, body)[0] < 0.4


def test_a_stop_gives_up_what_is_open() -> None:
    def body(world: Communicator) -> object:
        if world.rank > 0:
            return serve(world, seconds=40.0)
        world.split(None, 0)
        client = ValidationClient(world, leader=1)
        client.submit(1, state_of(1), never)
        client.submit(2, state_of(2), never)
        assert not client.submit(3, state_of(3), lambda: True)
        assert not client.drain(lambda: True)
        client.close(stopped=True)
        return client.collect()

    start = time.monotonic()
    assert run_ranks(3, body) == [[], True, True]
    assert time.monotonic() - start < 15
