from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from hyfi_core.capture.export import capture
from hyfi_core.capture.program import Program
from hyfi_core.cost.memory.forecast import MemoryForecast
from hyfi_core.errors import RequestError
from hyfi_core.job_limits import MemoryLimit
from hyfi_core.plan.parallel_plan import ParallelPlan
from tests.workflows.archive import make_config, make_store
from tests.workflows.runs import in_this_process, run_here
from workflows.config.load import load_config
from workflows.evaluation import programs
from workflows.launch import memory_pools
from workflows.launch.memory_pools import MemoryPool, RankPlace
from workflows.training.job import prepare
from workflows.training.memory import (
    PROCESS_BYTES,
    _Forecaster,
    cheaper_plans,
    check_room,
    describe_memory,
    describe_unchecked,
    rank_bytes,
)

GB = 10**9


def of_weights(size: int) -> MemoryForecast:
    return MemoryForecast(4 * size, 0, 0, 0, 0, size)


def test_a_rank_of_two_directions_writes_for_both_of_its_stages() -> None:
    """The first rank that has a stage also has the copy from which it writes checkpoints: 3 and 6 bytes."""
    stages = [of_weights(1), of_weights(2)]
    one_way = ParallelPlan(grids=((1, 1), (1, 1)), microbatches=2, replicas=2)
    assert rank_bytes(one_way, stages, (114, 228)) == [PROCESS_BYTES + n for n in (114 + 3, 228 + 6, 114, 228)]
    both_ways = ParallelPlan(grids=((1, 1), (1, 1)), microbatches=2, schedule="chimera")
    assert rank_bytes(both_ways, stages, (342, 342)) == [PROCESS_BYTES + 342 + 9, PROCESS_BYTES + 342]


def test_ranks_share_the_copy_of_large_weights() -> None:
    """Two shares of 128 MiB or more: on the first ranks of both replicas."""
    weights = 3 * 2**27 - 4
    plan = ParallelPlan(grids=((1, 2),), replicas=2)
    needed = rank_bytes(plan, [of_weights(weights)], [4 * weights] * 2)
    assert needed == [PROCESS_BYTES + 4 * weights + more for more in (3 * weights // 2, 0, 3 * weights // 2, 0)]


def test_too_little_room_is_refused_with_the_first_change_that_fits() -> None:
    hosts = [MemoryPool("a", (0, 1), 5 * GB)]
    check_room([2 * GB, 3 * GB], hosts)
    changes = {"plan.microbatches=2": [3 * GB] * 2, "plan.microbatches=4": [GB] * 2}
    with pytest.raises(
        RequestError, match=r"trainers on a \(2\) need at least 8 GB, but 5 GB are free; plan.microbatches=4"
    ):
        check_room([4 * GB, 4 * GB], hosts, changes)
    with pytest.raises(RequestError, match="use more machines"):
        check_room([4 * GB, 4 * GB], hosts)
    with pytest.raises(RequestError, match=r"at least 1500 GB, but 5 GB are .*plan.cells=auto plan.spill=FOLDER"):
        check_room([750 * GB, 750 * GB], hosts)
    with pytest.raises(RequestError, match=r"but 5 GB are free \(by SLURM_MEM_PER_NODE\); "):
        check_room([4 * GB, 4 * GB], [MemoryPool("a", (0, 1), 5 * GB, "by SLURM_MEM_PER_NODE")])


def test_the_description_names_peaks_and_the_fullest_pool() -> None:
    pools = [MemoryPool("a", (0, 1), 8 * GB), MemoryPool("b", (2,), 8 * GB)]
    text = describe_memory([GB, 2 * GB, 2 * GB], pools)
    assert text == "memory: about 1 to 2 GB for each trainer, 3 GB of 8 GB free on a"
    limited = [pools[0], MemoryPool("b", (2,), 3 * GB, "by ulimit -v")]
    assert describe_memory([GB, 2 * GB, 2 * GB], limited).endswith("2 GB of 3 GB free on b (by ulimit -v)")


def test_changes_give_whole_micro_batches() -> None:
    pieces, *others = cheaper_plans(ParallelPlan(grids=((1, 1),)), 6)
    assert pieces == "plan.interleave=8 plan.recompute=true" and others == [f"plan.microbatches={n}" for n in (2, 3, 6)]
    # An empty list of cuts, which a single stage may have, was refused at the start of every run.
    assert list(cheaper_plans(ParallelPlan(grids=((1, 1),), cuts=()), 1)) == [f"{pieces} plan.cuts=auto"]
    assert "plan.recompute=true" in cheaper_plans(ParallelPlan(grids=((1, 1), (1, 1))), 1)
    interleaved = ParallelPlan(grids=((1, 1), (1, 1)), microbatches=2, interleave=2, recompute=True)
    assert list(cheaper_plans(interleaved, 12)) == [f"plan.microbatches={n}" for n in (4, 6, 12)]


@pytest.fixture
def _here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with in_this_process(monkeypatch):
        yield


@pytest.mark.usefixtures("_here")
def test_a_run_without_room_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tmp_path, make_store(tmp_path), run={"steps": 1})
    with monkeypatch.context() as little:
        little.setattr(memory_pools, "available_memory", lambda process=True: MemoryLimit(10**8, ""))
        assert run_here(config) == 2
    assert "memory: the trainers on" in capfd.readouterr().err and not (tmp_path / "run").exists()
    assert run_here(config) == 0
    assert "memory: about 0.4" in capfd.readouterr().out


@pytest.mark.usefixtures("_here")
def test_a_run_on_gpus_is_compared_with_their_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The host has room for processes only; a trainer on a CPU would be refused there."""
    config = make_config(tmp_path, make_store(tmp_path), run={"steps": 1})

    def on_gpu(device_bytes: int) -> None:
        place = RankPlace("node1", 0, 2, 10**8, device="cuda:0", device_bytes=device_bytes)
        monkeypatch.setattr(RankPlace, "here", lambda trainer, device: place)

    on_gpu(10**6)
    assert run_here(config) == 2
    assert "memory: the trainers on cuda:0 of node1 (1) need at least" in capfd.readouterr().err
    on_gpu(10**9)
    assert run_here(config) == 0
    printed = capfd.readouterr().out
    assert "of 1 GB free on cuda:0 of node1" in printed and "host memory: about 0.4 GB for each trainer" in printed


@pytest.mark.usefixtures("_here")
def test_the_checks_before_a_run_capture_its_model_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    captured = []

    def noted(model: nn.Module, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Program:
        captured.append(shape)
        return capture(model, shape, dtype)

    monkeypatch.setattr(programs, "capture", noted)
    assert run_here(make_config(tmp_path, make_store(tmp_path), run={"steps": 1})) == 0
    assert len(captured) == 1 and "memory: about" in capfd.readouterr().out


def test_a_run_in_cells_says_that_its_memory_is_not_compared() -> None:
    in_cells = ParallelPlan(grids=((1, 1),), cells=(2, 2))
    assert "plan.cells without plan.spill keep all maps" in describe_unchecked(in_cells)
    spilling = replace(in_cells, spill="memory")
    assert "half of what is free" in describe_unchecked(spilling)
    assert "keeps each trainer within 6 GB" in describe_unchecked(replace(spilling, memory_bytes=6 * GB))


def test_bfloat16_needs_less_than_float32(tmp_path: Path) -> None:
    """Maps take half, weights stay as they are."""
    path = make_config(tmp_path, make_store(tmp_path), run={"steps": 1})
    wide, narrow = (
        _Forecaster(prepare(load_config(path, [f"run.precision={precision}"])), on_gpus=True)
        for precision in ("float32", "bfloat16")
    )
    plan = ParallelPlan(grids=((1, 1),))
    ((of_wide,), (of_narrow,)) = (one.device_bytes(plan) for one in (wide, narrow))
    assert 0.45 * of_wide < of_narrow < 0.8 * of_wide
