"""Published points: what needs no machine is exact, and settings are those of the sources."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from hyfi_core.cost.machine import MachineModel
from hyfi_core.cost.machines.machine_file import load_machine
from hyfi_core.plan.parallel_plan import ParallelPlan
from workflows.benchmarks.headlines import ahead
from workflows.benchmarks.headlines.forecasts import NETWORKS, Forecasts
from workflows.benchmarks.headlines.points import Point, points

POINTS = points()


@pytest.mark.parametrize("point", [p for p in POINTS if p.what == "bubble"], ids=lambda p: f"{p.source} {p.setting}")
def test_bubbles_are_those_of_the_published_formulas(point: Point) -> None:
    assert point.modelled(Forecasts()) == pytest.approx(point.published, rel=5e-3)  # GEMS: of many repetitions


def test_one_set_of_efficiencies_serves_all_machines_of_the_points() -> None:
    p40, v100 = load_machine("p40"), load_machine("v100-lassen")
    assert (p40.efficiency, p40.kernel_s) == (v100.efficiency, v100.kernel_s)


def test_balances_of_the_published_pipelines_are_cut_at_cells() -> None:
    model = NETWORKS["AmoebaNet-D (18, 256)"]()
    settings = [point.setting for point in POINTS if "(18, 256)" in point.setting]
    assert len(settings) == 9
    assert len(list(model.get_submodule("cells").children())) == 22  # with stem and head, the 24 layers of the balances


def test_without_a_recomputed_micro_batch_a_step_takes_as_long_as_without_recomputation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(NETWORKS, "small", _small)
    plan = ParallelPlan(grids=((1, 1), (1, 1)), cuts=("0",), schedule="gpipe", recompute=True)
    forecasts = Forecasts()
    kept_s = forecasts.step_s("small", 64, 2, replace(plan, recompute=False), "p40")
    assert forecasts.torchgpipe_step_s("small", 64, 2, plan, "p40", but_last=True) == pytest.approx(kept_s)
    last_only_s = forecasts.torchgpipe_step_s("small", 64, 2, plan, "p40", but_last=False)
    assert kept_s < last_only_s
    two = replace(plan, microbatches=2)  # its last stage recomputes in our schedule, too
    assert forecasts.torchgpipe_step_s("small", 64, 2, two, "p40", but_last=False) < forecasts.step_s(
        "small", 64, 2, two, "p40"
    )


class _SmallDevices(Forecasts):
    """Machines of which a device has little memory."""

    def machine(self, name: str) -> MachineModel:
        machine = load_machine(name)
        return machine if name == "h100" else replace(machine, memory_bytes=1_800_000_000)


def test_each_headline_says_what_it_assumes_and_whether_it_fits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(NETWORKS, ahead.SMALL, _small)
    monkeypatch.setitem(NETWORKS, "ResNet-50", _small)
    layer = ParallelPlan(grids=((1, 1), (1, 1)), schedule="sequential")
    case = ahead._Case(ahead.SMALL, 8192, "layer parallelism", layer, "two stages")
    monkeypatch.setattr(ahead, "_CASES", (case,))
    monkeypatch.setattr(ahead, "CANDIDATES", ahead.CANDIDATES[:3])
    ahead.print_ahead(_SmallDevices())
    text = capsys.readouterr().out
    assert (
        "(a V100 has 2)" in text and "fits with spilling: 2x4, " in text and "assumed: two stages; efficiencies" in text
    )
    assert "68 GB/s between a GPU and its host" in text and "scaling to 2,048 V100s" in text
    (one,) = [line for line in text.splitlines() if " 1 H100, " in line]
    assert "GB of maps a rank to the host and back" in one and "55 GB/s between a GPU and its host" in text


def _small() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 32, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
