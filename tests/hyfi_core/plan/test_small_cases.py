"""All small cases, where drawn ones meet a limit by chance only: boxes, windows and parts of a few positions."""

from __future__ import annotations

from itertools import product

import pytest

from hyfi_core.errors import RequestError
from hyfi_core.plan import AxisWindow, Box, Layout, ParallelPlan
from hyfi_core.plan.apportion import apportion
from hyfi_core.plan.boxes import Boxes, meeting
from hyfi_core.plan.branches import Branches
from hyfi_core.plan.device import RankGpus, assign_devices, spare_devices
from hyfi_core.plan.input_part import InputPart
from hyfi_core.plan.placement import Placement
from hyfi_core.plan.strategy import plan_for

INTERVALS = [(start, stop) for start in range(-1, 4) for stop in range(-1, 4)]
WINDOWS = [
    AxisWindow(kernel, stride, padding, dilation)
    for kernel, stride, dilation in product((1, 2, 3, 5), (1, 2, 3), (1, 2))
    for padding in range(((kernel - 1) * dilation + 1) // 2 + 1)
]


def test_every_interval_within_every_other() -> None:
    for (start, stop), (first, last) in product(INTERVALS, INTERVALS):
        own, other = set(range(start, stop)), set(range(first, last))
        for turned in (False, True):
            have, need = (Boxes((i,), ((0, 2),), turned) for i in ((start, stop), (first, last)))
            assert have.cover(need, Box(-1, 4, 0, 2)) == (other <= own)
            have, need = (Boxes(((0, 2),), (i,), turned) for i in ((start, stop), (first, last)))
            assert have.cover(need, Box(0, 2, -1, 4)) == (other <= own)
        common = [(0, (max(start, first), min(stop, last)))] if own & other else []
        assert list(meeting([(start, stop)], (first, last))) == common
        tall, wide = Box(start, stop, 0, 2), Box(0, 2, start, stop)
        assert tall.contains(Box(first, last, 0, 2)) == wide.contains(Box(0, 2, first, last)) == (other <= own)
        assert tall.empty == wide.empty == (not own)
        part = InputPart(Box(start, stop, 0, 2), first, last)
        assert [at for at in range(-2, 5) if part.has_sample(at)] == sorted(other)
    same = Boxes(((0, 1),), ((0, 2),))
    assert same == same and same != Boxes(((0, 1),), ((0, 2), (2, 3))) and same != "boxes"


def test_a_part_of_a_batch_covers_what_is_within_it() -> None:
    for first, stop in product(range(4), range(1, 5)):
        if first < stop:
            inside = {(a, b) for a, b in product(range(6), range(6)) if first <= a and b <= stop}
            part = InputPart(Box(0, 2, 0, 2), first, stop)
            assert {(a, b) for a, b in product(range(6), range(6)) if part.covers(part.box, a, b)} == inside


def test_cuts_of_small_maps_move_the_fewest_positions() -> None:
    for window, inputs in product(WINDOWS, range(1, 8)):
        outputs = (inputs + 2 * window.padding - window.extent) // window.stride + 1
        if outputs < 1:
            continue
        reads = [window.input_interval(out, out + 1) for out in range(outputs)]
        for cut in range(1, inputs):
            moved = [
                max(0, min(max((stop for _, stop in reads[:out]), default=0), inputs) - cut)
                + max(0, cut - max(min((start for start, _ in reads[out:]), default=inputs), 0))
                for out in range(outputs + 1)
            ]
            fewest = [out for out in range(outputs + 1) if moved[out] == min(moved)]
            for balanced in range(outputs + 1):
                target = cut if window.stride == 1 and outputs == inputs else balanced
                chosen = window.cut(cut, inputs, outputs, balanced)
                assert chosen == min(fewest, key=lambda out: (abs(out - target), out))
        assert [window.cut(cut, inputs, outputs, 0) for cut in (0, inputs)] == [0, outputs]


def test_as_many_trainers_as_gpus_leave_none() -> None:
    full = [RankGpus("a", "", 2)] * 2
    assert assign_devices("cuda", full) == ["cuda:0", "cuda:1"]
    assert spare_devices("auto", full, [RankGpus("a", "", 2)]) == ["cpu"]


def test_what_is_not_said_is_one_of_each() -> None:
    assert (Branches().planes, Branches().order, Branches(2, (("a", "b"), ("c",))).order) == (
        1,
        {},
        {"a": 0, "b": 1, "c": 2},
    )
    plan = ParallelPlan(((1, 2), (1, 1)))
    assert (plan.microbatches, plan.replicas, plan.interleave, plan.branches) == (1, 1, 1, 1)
    assert plan.recompute is False and plan.sync_batch_norm is False and plan.ranks == 3
    assert Placement.of(plan).group(1) == (2,)
    assert apportion(3, [1.0, 1.0]) == (2, 1)
    assert AxisWindow(3) == AxisWindow(3, 1, 0, 1) and not Layout.even(2, 2, (1, 1)).parts.turned


def test_fields_at_the_limits_of_what_goes_together() -> None:
    one = {"grids": ((1, 2),), "interleave": 1, "cells": (1, 1), "spill": "memory"}
    assert ParallelPlan(**one).interleave == 1  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="on one grid"):
        ParallelPlan(**{**one, "interleave": 2, "schedule": "1f1b"})  # type: ignore[arg-type]
    assert [plan_for("hybrid", ranks, 4).grids for ranks in (2, 3)] == [((1, 2),), ((1, 2), (1, 1))]
    for rows, shown in ((9, True), (10, False)):
        text = ParallelPlan(grids=((rows, 1),)).describe()
        assert ("⋮" not in text) == shown and text.count("\n") == (1 + 9)
        wide = ParallelPlan(grids=((1, rows),)).describe()
        assert ("…" not in wide) == shown
    assert ", to the end of a" in ParallelPlan(((1, 1), (1, 1)), cuts=("a",)).describe()


def test_messages_of_apportionment_say_what_works() -> None:
    for samples, unit, works in ((3, 2, 4), (7, 2, 6), (2, 3, 6), (9, 2, 8)):
        with pytest.raises(RequestError, match=rf"least {unit} for each; use a batch of {works}, fewer"):
            apportion(samples, [1.0, 1.0], unit)
