"""The validation service: real children that die, a queue with a bound, a stop that does not wait."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hyfi_core.comm.base import Communicator
from hyfi_core.comm.threads import run_ranks
from hyfi_core.errors import RequestError
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.runtime.saving.snapshot import ALIGN_BYTES, SnapshotPool, snapshot_bytes, unflatten
from tests.patience import PATIENCE_S, SOON_S
from tests.workflows.archive import make_config, make_store
from workflows.config.load import load_config
from workflows.evaluation.validation_child import validation_plan
from workflows.evaluation.validation_client import QUEUE, Policy, ValidationClient
from workflows.evaluation.validator import MAX_DEATHS, ValidationChildError, ValidationService
from workflows.launch.child_process import ChildProcess
from workflows.training.job import prepare

PROGRAM = [str(Path(__file__).parent / "summing_child.py")]
STATE = {
    "a.weight": torch.arange(6.0).reshape(2, 3),
    "a.count": torch.tensor(7),
    "b": torch.ones(5, dtype=torch.float64),
}


def state_of(step: int) -> dict[str, torch.Tensor]:
    return {name: value + step for name, value in STATE.items()}


def expected(step: int) -> float:
    return float(sum(value.view(-1).view(torch.uint8).sum() for value in state_of(step).values()))


def never() -> bool:
    return False


class Service:
    """Thread-ranks with a trainer and some validators, whose children a test can see and kill."""

    def __init__(self, **told: Any) -> None:
        self.children: list[ChildProcess] = []
        self._told = {"seconds": 0.0, "gate": None, "dies_at": [], "raises_at": [], **told}

    def run(
        self,
        body: Callable[[ValidationClient], Any],
        validators: int = 1,
        policy: Policy = "all",
        stopped: bool = False,
    ) -> Any:
        """Return what ``body`` returned on the trainer; every validator must say whether the run was stopped."""

        def rank(world: Communicator) -> Any:
            group = world.split(int(world.rank > 0), world.rank)
            if world.rank > 0:
                service = ValidationService(world, group, self._start)
                service.begin()
                world.barrier()
                return service.serve()
            world.barrier()  # as in a run: all begin together
            client = ValidationClient(world, 1, policy)
            found = body(client)
            client.close(stopped)
            return found

        results = run_ranks(1 + validators, rank)
        assert results[1:] == [stopped] * validators
        return results[0]

    def _start(self, rendezvous: Mapping[str, Any], descriptors: Sequence[int]) -> ChildProcess:
        child = ChildProcess(PROGRAM, {**self._told, "rendezvous": rendezvous}, descriptors)
        self.children.append(child)
        return child


def submit_all(
    client: ValidationClient, steps: range, after_each: Callable[[], object] = never
) -> list[tuple[int, Any]]:
    """Hand over the weights of some steps, overwriting them at once; return the results of all."""
    results = []
    for step in steps:
        state = state_of(step)
        assert client.submit(step, state, never)
        for value in state.values():
            value.zero_()  # the snapshot is a copy: training goes on at once
        after_each()
        results += client.collect()
    assert client.drain(never)
    return results + client.collect()


def test_a_snapshot_survives_the_journey() -> None:
    flat = SnapshotPool().acquire(1, STATE).flat
    again = unflatten(flat, STATE)
    assert all(torch.equal(again[key], STATE[key]) and again[key].dtype == STATE[key].dtype for key in STATE)
    assert flat.numel() == snapshot_bytes(STATE) == 3 * ALIGN_BYTES
    with pytest.raises(ValueError, match="does not fit"):
        unflatten(flat[:-1], STATE)


def test_memory_of_snapshots_is_used_again() -> None:
    pool = SnapshotPool()
    first = pool.acquire(1, STATE)
    second = pool.acquire(2, STATE)
    assert first.flat.data_ptr() != second.flat.data_ptr()
    pool.release(first)
    assert pool.acquire(3, STATE).flat.data_ptr() == first.flat.data_ptr()


@pytest.mark.parametrize("validators", [1, 3])
def test_every_step_is_validated_in_order_with_its_own_weights(validators: int) -> None:
    most_open = []

    def body(client: ValidationClient) -> Any:
        return submit_all(client, range(1, 8), lambda: most_open.append(client.waiting))

    results = Service(seconds=0.02).run(body, validators)
    assert [(step, metrics["loss"]) for step, metrics in results] == [(s, expected(s)) for s in range(1, 8)]
    assert max(most_open) == QUEUE


def test_all_waits_when_the_queue_is_full_and_latest_never_waits(tmp_path: Path) -> None:
    """No clock: the validator does nothing before the trainer has handed over everything."""

    def all_of_them(client: ValidationClient) -> None:
        assert [client.submit(step, state_of(step), lambda: True) for step in (1, 2, 3)] == [True, True, False]
        assert client.open_steps == (1, 2)
        (tmp_path / "gate").touch()
        assert client.drain(never)

    Service(gate=str(tmp_path / "gate")).run(all_of_them)
    (tmp_path / "gate").unlink()

    def the_latest(client: ValidationClient) -> Any:
        assert all(client.submit(step, state_of(step), lambda: True) for step in range(1, 7))
        assert client.open_steps == (1, 6)
        (tmp_path / "gate").touch()
        assert client.drain(never)
        return client.collect()

    results = Service(gate=str(tmp_path / "gate")).run(the_latest, policy="latest")
    assert [(step, metrics["loss"]) for step, metrics in results] == [(1, expected(1)), (6, expected(6))]


def test_a_stop_gives_up_what_is_open() -> None:
    def body(client: ValidationClient) -> Any:
        client.submit(1, state_of(1), never)
        client.submit(2, state_of(2), never)
        assert not client.submit(3, state_of(3), lambda: True)
        assert not client.drain(lambda: True)
        return client.collect()

    start_s = time.monotonic()
    assert Service(seconds=100.0).run(body, validators=2, stopped=True) == []
    assert time.monotonic() - start_s < SOON_S


@pytest.mark.parametrize("validators", [1, 2])
def test_killed_children_change_nothing(validators: int, capfd: pytest.CaptureFixture[str]) -> None:
    """Two kills, at moments that nobody chose; of the second validator's child, too."""
    service = Service(seconds=0.03)

    def kill_now_and_then() -> None:
        for deaths in range(2):
            while len(service.children) < validators * (1 + deaths):
                time.sleep(0.01)
            time.sleep(random.random() * 0.3)
            os.kill(service.children[-1].pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_now_and_then)
    killer.start()
    results = service.run(lambda client: submit_all(client, range(1, 25)), validators)
    killer.join()
    assert [(step, metrics["loss"]) for step, metrics in results] == [(s, expected(s)) for s in range(1, 25)]
    said = capfd.readouterr().err
    assert said.count(f"of validator {validators - 1} ended with signal 9 (SIGKILL); restarting it") == 2
    assert len(service.children) == validators * 3
    assert all(_gone(child.pid) for child in service.children)


def _gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_three_deaths_on_the_same_weights_and_the_validators_give_up(capfd: pytest.CaptureFixture[str]) -> None:
    service = Service(dies_at=[2])

    def body(client: ValidationClient) -> Any:
        results = []
        for step in (1, 2, 3):
            assert client.submit(step, state_of(step), never)
        assert client.drain(never)
        results = client.collect()
        assert client.gave_up and client.open_steps == (2, 3)
        client.forget()
        assert client.open_steps == ()
        return results

    assert [step for step, _ in service.run(body)] == [1]
    assert len(service.children) == MAX_DEATHS
    said = capfd.readouterr().err
    assert said.count("restarting it from the weights of step 2") == 2
    assert said.count("the trainers validate from now on") == 1


def test_a_child_that_raises_is_not_started_again() -> None:
    service = Service(raises_at=[1])
    with pytest.raises(ValidationChildError, match="ValueError: asked for"):
        service.run(lambda client: submit_all(client, range(1, 3)))
    assert len(service.children) == 1


def test_a_child_is_no_rank_and_ends_with_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    children: list[ChildProcess] = []
    environment: list[bytes] = []

    def parent() -> None:
        children.append(ChildProcess(PROGRAM, {"rendezvous": {"size": 1, "rank": 0}}))
        while children[0].receive() != {"kind": "ready"}:
            time.sleep(0.005)
        environment.append(Path(f"/proc/{children[0].pid}/environ").read_bytes())

    thread = threading.Thread(target=parent)
    thread.start()
    thread.join()  # to the kernel, the thread that started it is its parent
    deadline_s = time.monotonic() + PATIENCE_S
    while (word := children[0].receive()) is None and time.monotonic() < deadline_s:
        time.sleep(0.005)
    assert word == {"kind": "died", "how": "signal 9 (SIGKILL)"}
    assert b"PMI_RANK" not in environment[0] and b"OMPI_" not in environment[0]


def test_validators_share_the_work_as_the_grids_say(tmp_path: Path) -> None:
    config = make_config(tmp_path, make_store(tmp_path), validation={"grids": [[1, 2]]})
    job = prepare(load_config(config))
    plan = validation_plan(job.config, job.plan, 4)
    assert (plan.grids, plan.replicas, plan.ranks) == (((1, 2),), 2, 4)
    with pytest.raises(RequestError, match=r"number of validators \(3, roles"):
        validation_plan(job.config, job.plan, 3)

    def planned(*overrides: str) -> ParallelPlan:
        job = prepare(load_config(config, overrides))
        return validation_plan(job.config, job.plan, 3)

    row = planned("validation.grids=null")
    assert (row.grids, row.replicas) == (((1, 3),), 1)
    alone = ["validation.grids=null", "validation.cells=[4,2]"]
    spilling = planned(*alone, "plan.cells=[2,2]", "plan.spill=.", "plan.memory_bytes=5000000000")
    assert (spilling.cells, spilling.spill, spilling.memory_bytes) == ((4, 2), ".", 5_000_000_000)
    each = planned(*alone)
    assert (each.grids, each.replicas) == (((1, 1),), 3)
    with pytest.raises(RequestError, match=r"cells: \[4, 2\] and grids: \[\[1, 2\]\]"):
        load_config(config, ["validation.cells=[4,2]"])
