"""``offload_naive``: spare ranks join data parallelism, with shares of each batch by speed; the result is the same."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hyfi_core.comm.base import Communicator
from hyfi_core.comm.threads import run_ranks
from hyfi_core.runtime.checkpoint import load_checkpoint
from hyfi_core.runtime.engine import Engine
from tests.workflows.archive import make_config
from tests.workflows.runs import losses, run_here, run_on
from workflows.config.load import load_config, refuse_changes
from workflows.evaluation.evaluate import predict_slides
from workflows.training.checks.norm_batches import describe_norm_change
from workflows.training.pace import TIMED_TURNS, seconds_of_a_turn

pytestmark = pytest.mark.usefixtures("in_process")

SPARE = ["roles.design=offload_naive", "plan.sync_batch_norm=true"]
STEPS, SHORT = 4, "run.steps=2"


def config_of(folder: Path, store: Path, batch: int, microbatches: int = 1, model: str = "tiny") -> Path:
    return make_config(
        folder,
        store,
        data={"batch_size": batch},
        model={"name": f"tests.workflows.faults:{model}"},
        lr_schedule={"name": "constant"},
        plan={"microbatches": microbatches, "sync_batch_norm": True},
        validation={"every_steps": 2},
        run={"precision": "float64", "steps": STEPS},
    )


def recorded(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "plan.json").read_text())
    return found


def assert_close_runs(one: Path, other: Path) -> None:
    """Of float64: rounding, and nothing else."""
    assert losses(one) == pytest.approx(losses(other), rel=1e-9)
    assert_close_weights(one, other)


def assert_close_weights(one: Path, other: Path) -> None:
    here, there = (load_checkpoint(run / "checkpoints" / "latest").weights for run in (one, other))
    assert here.keys() == there.keys()
    assert all(torch.allclose(here[key], there[key], rtol=1e-8, atol=1e-10) for key in here)


def test_replicas_are_timed_together_and_are_as_fast_as_their_slowest_rank() -> None:
    calls: list[list[int]] = [[] for _ in range(4)]

    def body(comm: Communicator) -> tuple[float, ...]:
        def turn(number: int) -> None:
            calls[comm.rank].append(number)
            time.sleep((0.5 if number == 0 else 0.0) if comm.rank < 3 else 0.1)

        return seconds_of_a_turn(comm, comm.rank // 2, turn)

    found = run_ranks(4, body)
    assert found == [found[0]] * 4 and len(found[0]) == 2
    assert found[0][1] >= 0.1 > found[0][0] > 0
    assert calls == [list(range(TIMED_TURNS + 1))] * 4


def test_slides_are_judged_by_those_who_have_time() -> None:
    """Each replica asks as often as the others whether to go on: that is one question to all of them."""

    class EngineStub:
        def predict(self, images: Any) -> torch.Tensor:
            return torch.tensor([[float(images)]])

    class NumbersStub:
        def of(self, index: int) -> int:
            return index

    def judged(replica: int, shares: tuple[int, ...] | None) -> tuple[list[int], int]:
        asked: list[int] = []
        images: Any = NumbersStub()
        found = predict_slides(EngineStub(), images, 10, (replica, 2), lambda: bool(asked.append(1)), shares)
        assert all(values == [float(index)] for index, values in found.items())
        return list(found), len(asked)

    assert [judged(replica, (12, 4)) for replica in range(2)] == [([0, 1, 2, 4, 5, 6, 8, 9], 3), ([3, 7], 3)]
    assert [judged(replica, None) for replica in range(2)] == [([0, 2, 4, 6, 8], 5), ([1, 3, 5, 7, 9], 5)]


@pytest.mark.parametrize(
    ("ranks", "microbatches", "words"),
    [
        (2, 2, ["roles.shares=[6,2]"]),
        (4, 2, ["plan.grids=[[1,1],[1,1]]", "plan.cuts=[norm1]"]),
    ],
)
def test_any_shares_train_as_one_rank_does(
    tmp_path: Path, store: Path, ranks: int, microbatches: int, words: list[str]
) -> None:
    """With batch norm, dropout, class weights and clipping; the second measures its shares."""
    config = config_of(tmp_path, store, 8, microbatches, "dropping")
    assert run_here(config, f"run.dir={tmp_path / 'inline'}") == 0
    assert run_on(ranks, config, *SPARE, *words) == [0] * ranks
    assert_close_runs(tmp_path / "run", tmp_path / "inline")
    plan = recorded(tmp_path / "run")
    assert sum(plan["shares"]) == 8 and plan["replicas"] == len(plan["shares"])
    assert (plan["pace_s"] is None) == any(word.startswith("roles.shares") for word in words)
    assert plan["pace_s"] is None or all(pace_s > 0 for pace_s in plan["pace_s"])


def test_a_run_goes_on_with_other_shares(tmp_path: Path, store: Path) -> None:
    """In mid-epoch: six slides, four a step."""
    config = config_of(tmp_path, store, 4)
    assert run_here(config, f"run.dir={tmp_path / 'inline'}") == 0
    assert run_here(config, "run.steps=1") == 0
    assert run_on(2, config, *SPARE, "run.steps=2", "roles.shares=[3,1]", resume=True) == [0, 0]
    assert run_on(3, config, *SPARE, "roles.spare=2", "roles.shares=[1,2,1]", resume=True) == [0] * 3
    assert recorded(tmp_path / "run")["shares"] == [1, 2, 1]
    there = losses(tmp_path / "inline")
    found = {key: value for key, value in losses(tmp_path / "run").items() if key in there}
    assert found == pytest.approx(there, rel=1e-9)
    assert_close_weights(tmp_path / "run", tmp_path / "inline")


def test_several_plain_replicas_become_shared_ones(tmp_path: Path, store: Path) -> None:
    """Of two micro-batches, ordinary replicas normalise other images together, which is said; of one, the same."""
    config = config_of(tmp_path, store, 8)
    plain, shared = (load_config(config, [f"plan.replicas={n}", *words]) for n, words in ((2, []), (1, SPARE)))
    refuse_changes(plain, shared)
    assert describe_norm_change(plain, shared, 3) is None
    two = ["plan.microbatches=2"]
    plain, shared = (load_config(config, [f"plan.replicas={n}", *words, *two]) for n, words in ((2, []), (1, SPARE)))
    said = describe_norm_change(plain, shared, 3)
    assert said is not None and "other 4 images together than before" in said and "from step 4 on" in said


def assert_shares_by_speed(run: Path, said: str) -> None:
    plan = recorded(run)
    shares, pace_s = plan["shares"], plan["pace_s"]
    assert sum(shares) == 8 and len(shares) == len(pace_s) == 2 and plan["design"] == "offload_naive"
    assert shares[0] > shares[1] and pace_s[0] < pace_s[1]
    assert f"the replicas take {shares[0]}, {shares[1]}" in said
    assert "effective batch 8" in said and "in proportion to speed" in said


def test_a_spare_rank_takes_its_share(
    tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less than half of the batch: it sleeps before each micro-batch."""
    config, accumulate = config_of(tmp_path, store, 8), Engine.accumulate

    def slow(engine: Engine, *given: Any) -> Any:
        time.sleep(0.2 if threading.current_thread().name == "rank-1" else 0.0)
        return accumulate(engine, *given)

    monkeypatch.setattr(Engine, "accumulate", slow)
    assert run_on(2, config, *SPARE, SHORT) == [0, 0]
    assert_shares_by_speed(tmp_path / "run", "".join(capfd.readouterr()))
    assert run_on(2, config, *SPARE, SHORT, "roles.shares=[4,4]", f"run.dir={tmp_path / 'equal'}") == [0, 0]
    assert_close_runs(tmp_path / "run", tmp_path / "equal")


@pytest.mark.soak  # above: the same without processes
@pytest.mark.mpi
def test_a_spare_process_takes_its_share(tmp_path: Path, store: Path, hyfi: Any) -> None:
    config = config_of(tmp_path, store, 8, model="faulty")
    done = hyfi("train", config, *SPARE, SHORT, "--json", OMP_NUM_THREADS="1", HYFI_TEST_FAULT="1:0:accumulate:slow")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["status"] == "done"
    assert_shares_by_speed(tmp_path / "run", done.stderr + done.stdout)
    assert run_on(2, config, *SPARE, SHORT, "roles.shares=[4,4]", f"run.dir={tmp_path / 'equal'}") == [0, 0]
    assert_close_runs(tmp_path / "run", tmp_path / "equal")
