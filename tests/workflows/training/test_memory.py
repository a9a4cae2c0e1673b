from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hyfi_core import process_memory
from hyfi_core.cost.memory import MemoryForecast
from hyfi_core.errors import RequestError
from hyfi_core.plan.parallel_plan import ParallelPlan
from tests.workflows.archive import make_config, make_store
from tests.workflows.runs import in_this_process, run_here
from workflows.training.memory import (
    PROCESS_BYTES,
    Host,
    cheaper_plans,
    check_room,
    crowded,
    describe_memory,
    hosts_of,
    rank_bytes,
    short_of_cores,
)

GB = 10**9


def test_ranks_with_more_threads_than_cores_are_named() -> None:
    assert short_of_cores([(2, 2), (1, 4)]) == []
    (text,) = short_of_cores([(2, 2), (4, 1), (3, 2)])
    assert text.startswith("rank 1 (and 1 more) has 4 threads on 1 core: ")
    assert "--bind-to none or --map-by slot:PE=4; srun: --cpus-per-task=4" in text and "OMP_NUM_THREADS=1" in text


def test_ranks_are_gathered_by_host() -> None:
    ranks = [("a", 0, 2, 8 * GB), ("b", 1, 4, 9 * GB), ("a", None, 2, 8 * GB), ("b", 2, 4, 9 * GB)]
    assert hosts_of(ranks) == [Host("a", (0,), 2, 2, 8 * GB), Host("b", (1, 2), 2, 4, 9 * GB)]


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
    hosts = [Host("a", (0, 1), 2, 2, 5 * GB)]
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


def test_what_is_said_names_peaks_and_crowds() -> None:
    hosts = [Host("a", (0, 1), 5, 2, 8 * GB), Host("b", (2,), 1, 2, 8 * GB)]
    said = describe_memory([GB, 2 * GB, 2 * GB], hosts)
    assert said == "memory: about 1 to 2 GB for each trainer, 3 GB of 8 GB free on a"
    assert [line[:22] for line in crowded(hosts)] == ["5 ranks share 2 cores "]


def test_changes_give_whole_micro_batches() -> None:
    assert list(cheaper_plans(ParallelPlan(grids=((1, 1),)), 6)) == [f"plan.microbatches={n}" for n in (2, 3, 6)]
    assert "plan.recompute=true" in cheaper_plans(ParallelPlan(grids=((1, 1), (1, 1))), 1)


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
        little.setattr(process_memory, "available_bytes", lambda: 10**8)
        assert run_here(config) == 2
    assert "memory: the trainers on" in capfd.readouterr().err and not (tmp_path / "run").exists()
    assert run_here(config) == 0
    assert "memory: about 0.4" in capfd.readouterr().out
