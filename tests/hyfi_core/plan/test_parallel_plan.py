import json
from fractions import Fraction

import pytest

from hyfi_core import ParallelPlan
from hyfi_core.errors import RequestError


def test_a_plan_counts_its_ranks_and_survives_json() -> None:
    plan = ParallelPlan(grids=((2, 2), (1, 1)), cuts=("layer2",), microbatches=2, replicas=3)
    assert plan.ranks == 15 and plan.ranks_per_replica == 5
    assert ParallelPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_shares_weigh_replicas_and_survive_json() -> None:
    plan = ParallelPlan(grids=((1, 2),), microbatches=2, replicas=2, shares=[6, 2])  # type: ignore[arg-type]
    assert plan.shares == (6, 2) and (plan.weight(0), plan.weight(1)) == (Fraction(3, 4), Fraction(1, 4))
    assert (plan.mean_over, ParallelPlan(((1, 1),), replicas=2).mean_over) == (1, 2)
    assert ParallelPlan(((1, 1),), replicas=2).weight(1) == Fraction(1, 2)
    assert ParallelPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert "of every 8 samples, the replicas take 6, 2" in plan.describe()


def test_planes_multiply_the_ranks_of_a_replica() -> None:
    plan = ParallelPlan(((1, 2), (1, 1)), ("layer2",), replicas=2, branches=2)
    assert (plan.ranks_per_plane, plan.ranks_per_replica, plan.ranks) == (3, 6, 12)
    assert ParallelPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    text = plan.describe()
    assert "divided among the 2 planes" in text and "replica 1, plane 1, stage 0" in text
    assert " 9 │ 10" in text and text.endswith("    11")


def test_describe_draws_every_rank_once() -> None:
    text = ParallelPlan(grids=((2, 3),), replicas=2).describe()
    assert text.startswith("12 trainers: 2 replicas of 6 ranks, 1 stage, 1 micro-batch, schedule 1f1b\n")
    assert " 3 │  4 │  5" in text and " 9 │ 10 │ 11" in text


def test_one_of_each_is_told_so() -> None:
    told = ParallelPlan(grids=((1, 1),), microbatches=2).describe()
    assert told.startswith("1 trainer: 1 replica of 1 rank, 1 stage, 2 micro-batches, schedule 1f1b\n")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"grids": ()}, "grids is empty"),
        ({"grids": ((0, 2),)}, "whole numbers from 1"),
        ({"grids": (2, 2)}, "rows x columns"),
        ({"grids": ((1, 2),), "microbatches": 0}, "microbatches is 0"),
        ({"grids": ((1, 2),), "replicas": True}, "replicas is True"),
        ({"grids": ((1, 2),), "schedule": "zigzag"}, "gems_mast"),
        ({"grids": ((1, 2), (1, 1)), "cuts": ()}, "2 stage(s) need 1"),
        ({"grids": ((1, 2),), "cuts": "layer1"}, "a list of module names"),
        ({"grids": ((1, 2),), "fused_halo": 0}, '"auto"'),
        ({"grids": ((1, 2),), "replicas": 2, "shares": (3,)}, "1 share(s); use null, or a multiple"),
        ({"grids": ((1, 2),), "shares": 3}, "shares is 3"),
        ({"grids": ((1, 2),), "replicas": 2, "shares": (3, 0)}, "shares has 0; every replica needs at least one"),
        ({"grids": ((1, 2),), "replicas": 2, "microbatches": 2, "shares": (4, 3)}, "shares has 3"),
        ({"grids": ((1, 2),), "replicas": 2, "shares": (1, 1.0)}, "shares has 1.0"),
        ({"grids": ((1, 2),), "recompute": (1,)}, "recompute is (1,); use true, false, or stages from 0 to 0"),
        ({"grids": ((1, 2),), "recompute": "all"}, "recompute is 'all'"),
        ({"grids": ((1, 2),), "recompute": 0}, "recompute is 0"),
        ({"grids": ((1, 2),), "branches": 0}, "branches is 0"),
        ({"grids": ((1, 2),), "branches": 2, "cells": (2, 2)}, "cells of one rank take turns"),
    ],
)
def test_an_illegal_field_is_named_with_what_would_work(fields: dict, words: str) -> None:
    with pytest.raises(RequestError, match=words.replace("(", r"\(").replace(")", r"\)")):
        ParallelPlan(**fields)


def test_json_with_an_unknown_field_names_the_known_ones() -> None:
    with pytest.raises(RequestError, match=r"'grid'.*grids, cuts"):
        ParallelPlan.from_json({"grid": [[1, 2]]})


def test_of_large_grids_and_of_many_replicas_the_ends_are_drawn() -> None:
    text = ParallelPlan(grids=((32, 64),), replicas=100).describe()
    assert len(text) < 6000 and len(text.splitlines()) == 1 + 8 * 10 + 1
    assert "0 │      1 │      2 │      3 │      … │     60 │" in text and "204799" in text and "replica 4," not in text
    nine = ParallelPlan(grids=((9, 9),), replicas=9).describe()
    assert "…" not in nine and "⋮" not in nine and "728" in nine


def test_numbers_of_ranks_are_as_wide_as_the_largest_and_micro_batches_of_two_directions_are_even() -> None:
    for ranks, lines in ((10, ("    0", "    9")), (11, ("     0", "    10")), (100, ("     0", "    99"))):
        text = ParallelPlan(grids=((1, 1),), replicas=ranks).describe().splitlines()
        assert (text[2], text[-1]) == lines
    assert ParallelPlan(((1, 1), (1, 1)), ("a",), schedule="gems_mast", microbatches=4).microbatches == 4
    with pytest.raises(RequestError, match="even number, such as 4"):
        ParallelPlan(((1, 1), (1, 1)), ("a",), schedule="gems_mast", microbatches=3)


def test_a_replica_of_a_shared_batch_knows_what_is_before_it() -> None:
    plan = ParallelPlan(grids=((1, 1),), replicas=3, microbatches=2, shares=(4, 2, 6))
    assert [plan.share_of(replica) for replica in range(3)] == [(0, 6), (2, 6), (3, 6)]
    assert ParallelPlan(grids=((1, 1),), replicas=3).share_of(1) is None


def test_the_ends_of_what_is_allowed_are_allowed() -> None:
    grids, cuts = ((1, 1), (1, 1)), ("a",)
    assert ParallelPlan(grids, cuts, gather_bytes=0).gather_bytes == 0
    assert ParallelPlan(grids, cuts, recompute=(1, 0, 1)).recompute == (0, 1)  # type: ignore[arg-type]
    both_ways = ParallelPlan(grids, cuts, schedule="gems_mast", microbatches=2, mirror="point_to_point")
    assert both_ways.mirror == "point_to_point"
    for wrong in ((2,), (-1,), (True,), "01", 1):
        with pytest.raises(RequestError, match=r"plan.recompute is .*; use true, false, or stages from 0 to 1"):
            ParallelPlan(grids, cuts, recompute=wrong)  # type: ignore[arg-type]


def test_cuts_and_stages_may_come_from_a_generator() -> None:
    stages = ((1, 1), (1, 1), (1, 1))
    plan = ParallelPlan(stages, (name for name in "ab"), recompute=(stage for stage in (2, 0)))  # type: ignore[arg-type]
    assert plan.cuts == ("a", "b") and plan.recompute == (0, 2)
