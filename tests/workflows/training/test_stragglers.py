"""Slow trainers are named: by comparison of times, and in a run one of whose ranks is slow."""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hyfi_core.runtime.engine import Engine
from tests.workflows.archive import make_config
from tests.workflows.runs import run_on
from workflows.commands import status
from workflows.training.bound_by import KINDS
from workflows.training.metrics_log import read_metrics
from workflows.training.stragglers import TrainerPlace, describe_stragglers, slowest, stragglers

PLACES = [TrainerPlace(rank, f"node{rank // 2}") for rank in range(4)]


def spent(**seconds: list[float]) -> list[dict[str, float]]:
    return [{kind: seconds.get(kind, [0.0] * 4)[rank] for kind in KINDS} for rank in range(4)]


def test_the_slowest_of_every_kind_over_the_median() -> None:
    found = slowest(spent(compute=[2, 2, 3, 2], halo=[1, 1.5, 0, 1], wait=[0, 0, 0, 0.5]), PLACES)
    assert found == {
        "compute": {"rank": 2, "host": "node1", "seconds": 3, "over_median": 1.5},
        "halo": {"rank": 1, "host": "node0", "seconds": 1.5, "over_median": 1.5},
        "wait": {"rank": 3, "host": "node1", "seconds": 0.5, "over_median": None},
    }
    assert slowest(spent(compute=[1, 1, 1, 1])[:1], PLACES[:1]) == {}  # alone there is nobody to compare with


@pytest.mark.parametrize(
    ("times", "named"),
    [
        ({"compute": [10, 10, 14, 10], "halo": [4, 4, 0, 4]}, "slow: rank 2 on node1, computing 1.4 × the median"),
        ({"compute": [10, 10, 11.9, 10]}, ""),  # less than 1.2 times
        ({"compute": [10] * 4, "save": [0.1, 0.3, 0.1, 0.1]}, ""),  # three times nothing
        ({"compute": [10] * 4, "save": [5, 0.01, 0.01, 0]}, ""),  # rank 0 writes for all
        ({"compute": [10] * 4, "save": [2, 2, 5, 2]}, "slow: rank 2 on node1, saving 2.5 × the median"),
        ({"compute": [10] * 4, "halo": [1, 9, 1, 1]}, ""),  # rank 1 is delayed, and delays nobody
        (
            {"compute": [10, 15, 10, 10], "wait": [0, 0, 8, 0]},
            "slow: rank 2 on node1, waiting 8 s, most others not at all; rank 1 on node0, computing 1.5 × the median",
        ),
    ],
)
def test_only_what_delays_others_is_named(times: dict[str, list[float]], named: str) -> None:
    assert describe_stragglers(stragglers(spent(**times), PLACES)) == named


@pytest.mark.usefixtures("in_process")
def test_a_slow_rank_of_a_run_is_named_everywhere(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = dict[int, int]()
    whole = Engine.update_unread

    def slow_on_rank_1(self: Engine, *args: Any, **kwargs: Any) -> None:
        if ranks.setdefault(threading.get_ident(), self._groups.all.rank) == 1:
            time.sleep(0.6)  # far longer than a step, also on a busy machine
        whole(self, *args, **kwargs)

    monkeypatch.setattr(Engine, "update_unread", slow_on_rank_1)
    config = make_config(tmp_path, store, plan={"grids": [[1, 2]]}, validation={"every_steps": 50})
    assert run_on(2, config, "run.steps=4", "run.tensorboard=true") == [0, 0]
    last = read_metrics(tmp_path / "run" / "metrics.jsonl")[-2]
    assert (last["kind"], last["step"]) == ("train", 4)
    compute = last["slowest"]["compute"]
    assert compute["rank"] == 1 and compute["over_median"] > 1.2
    assert ("compute", 1) in [(entry["kind"], entry["rank"]) for entry in last["stragglers"]]
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    event = board.Scalars("train/slowest/compute/rank")[-1]
    assert (event.step, event.value) == (4, 1)
    assert last["fullest"]["memory_bytes"] > 1e7 and last["fullest"]["rank"] in (0, 1)
    assert last["seconds"] > 0.25 and last["images_per_second"] < 8  # rank 0 waits for it, and says so
    printed = capsys.readouterr()
    epoch = re.search(r"^epoch 0: .*slow: .*rank 1 on \S+, computing.*; (most memory.*)$", printed.out, re.MULTILINE)
    # Ranks are threads of one process here: which of them was asked at its fullest moment may change between lines.
    memory = f"most memory: [\\d.]+ GB, rank [01] on {last['fullest']['host']}"
    assert re.fullmatch(memory, epoch[1])
    assert re.search(r"4/4 .*, [\d.]+ GB on rank 0", printed.err)
    assert status.run(tmp_path / "run", as_json=True) == 0
    *lines, result = capsys.readouterr().out.splitlines()
    assert any(re.fullmatch(r"slow: .*rank 1 on \S+, computing .*\(until step 4\)", line) for line in lines)
    assert any(re.fullmatch(rf"{memory} \(at step 4\)", line) for line in lines)
    assert json.loads(result)["stragglers"] == last["stragglers"]
