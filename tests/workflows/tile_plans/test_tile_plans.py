"""Forecasts of runs of tiles: they follow ranks, memory and what is trained; what does not fit is named."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from hyfi_core.cost.machines.machine_file import load_machine
from hyfi_core.errors import RequestError
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.tiles.encoding.encoder_facts import TileBytes
from tests.workflows.training.test_tile_runs import tile_config
from workflows.commands import plan, simulate
from workflows.config.load import load_config
from workflows.tile_plans.bag_costs import BagCosts
from workflows.tile_plans.bag_forecast import bag_plans, forecast_bags

MACHINE = load_machine("cpu")
WHOLE = {"tiles": {"size_px": 32}, "augment": False}


@pytest.fixture(scope="module")
def costs(store: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, BagCosts]:
    """Of an encoder that is trained, and of the same one frozen."""
    config = tile_config(tmp_path_factory.mktemp("costs"), store, data=WHOLE, optimizer={"groups": []})
    words = {"all": [], "none": ["model.encoder.train=none"]}
    return {name: BagCosts.of(load_config(config, more)) for name, more in words.items()}


def test_what_a_tile_needs(costs: dict[str, BagCosts]) -> None:
    trained, frozen = costs["all"], costs["none"]
    assert trained.tiles == (64,) * 6
    first, second = 2 * 8 * 7 * 7 * 75, 2 * 8 * 3 * 3 * 72
    assert trained.forward_flops["convolution"] == first + second
    assert trained.backward_flops["convolution"] > trained.forward_flops["convolution"]
    assert frozen.backward_flops == {"convolution": 0.0, "product": 0.0}
    assert frozen.trained_bytes < trained.trained_bytes < trained.weight_bytes + 1


def test_ranks_memory_and_training(costs: dict[str, BagCosts]) -> None:
    one = forecast_bags(costs["all"], ParallelPlan(tiles=1), 2, MACHINE)
    two = forecast_bags(costs["all"], ParallelPlan(tiles=2), 2, MACHINE)
    assert one.kept == 1 and one.parts_s["encoding again"] == 0
    assert two.parts_s["encoding"] == pytest.approx(one.parts_s["encoding"] / 2, rel=1e-6)
    assert two.memory_bytes < one.memory_bytes
    small = forecast_bags(costs["all"], ParallelPlan(tiles=1, memory_bytes=one.least_bytes + 1000), 2, MACHINE)
    assert small.kept == 0 and small.parts_s["encoding again"] == pytest.approx(one.parts_s["encoding"])
    frozen = forecast_bags(costs["none"], ParallelPlan(tiles=1), 2, MACHINE)
    assert frozen.parts_s["backward"] == 0
    beside = [case.least_bytes - costs[name].process_bytes for name, case in (("none", frozen), ("all", one))]
    assert beside[0] < beside[1]
    with pytest.raises(RequestError, match=r"slides with 64 tiles needs at least .* but 0.1 GB are allowed"):
        forecast_bags(costs["all"], ParallelPlan(tiles=1, memory_bytes=100_000_000), 2, MACHINE)


def test_freed_blocks_and_shards_count(costs: dict[str, BagCosts]) -> None:
    facts = replace(costs["all"].facts, forward=TileBytes(1_000_000, 0))
    large = replace(costs["all"], facts=facts, weight_bytes=4_000_000, trained_bytes=4_000_000)
    least = forecast_bags(large, ParallelPlan(tiles=1), 2, MACHINE).least_bytes
    kept_bytes = int(large.facts.kept.of(32) * 1.15)
    some = forecast_bags(large, ParallelPlan(tiles=1, memory_bytes=least + kept_bytes + 2_000_000), 2, MACHINE)
    assert some.kept < 1 and some.memory_bytes >= least + 1_150_000  # what a forward frees, with the slack
    whole = forecast_bags(large, ParallelPlan(tiles=2), 2, MACHINE).least_bytes
    shards = forecast_bags(replace(large, shard=True, gathered_bytes=500_000), ParallelPlan(tiles=2), 2, MACHINE)
    assert whole - shards.least_bytes == 5 * 4_000_000 // 2 - 500_000  # weights, gradients twice, two moments
    alone = forecast_bags(replace(large, shard=True, gathered_bytes=500_000), ParallelPlan(tiles=1), 2, MACHINE)
    assert alone.least_bytes == least


def test_plans_of_all_ranks(costs: dict[str, BagCosts]) -> None:
    plans, refused = bag_plans(costs["all"], 4, 2, MACHINE)
    assert {(one.plan.tiles, one.plan.replicas) for one in plans} == {(2, 2), (4, 1)}
    assert [one.step_s for one in plans] == sorted(one.step_s for one in plans)
    assert refused == ["replicas 4: 2 slides of a step cannot be divided among them"]


def test_commands(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tile_config(tmp_path, store, data=WHOLE)
    assert plan.run(config, [], None, 2, None, None, 2, True, True) == 0
    said = capsys.readouterr().out
    assert f"{config}: plan written\n" in said
    best = json.loads(said.splitlines()[-1])["plans"][0]  # last, also after what was written
    # The keys of every plan, whatever is planned.
    assert best["bubble"] == 0.0 and best["step_s"] > 0 and best["memory_bytes"] > 0
    assert best["parts_s"][best["bound_by"]] == max(best["parts_s"].values())
    assert f"bound by {best['bound_by']} (" in said
    best = best["plan"]
    written = load_config(config).plan.build()
    assert (written.tiles, written.replicas, written.memory_bytes) == (*list(best.values())[:2], MACHINE.memory_bytes)
    assert simulate.run(config, [], None, None, None, True) == 0
    said = capsys.readouterr().out
    assert re.search(r"6 slides of 64 tiles in the mean, 64 at most\nplan.tiles=", said)
    assert json.loads(said.splitlines()[-1])["plan"] == best


def test_an_automatic_plan_is_the_best_one(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tile_config(tmp_path, store, data=WHOLE)
    words = plan.chosen_plan(config, [], 2, False)
    assert "chunks of" in capsys.readouterr().out
    chosen = load_config(config, words).plan.build()
    assert chosen.ranks == 2 and chosen.memory_bytes is not None
