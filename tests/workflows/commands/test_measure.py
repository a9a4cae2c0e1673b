from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.comm.base import Communicator
from hyfi_core.comm.threads import run_ranks
from hyfi_core.cost.machine import KINDS
from hyfi_core.cost.machines.machine_file import load_machine, reference_machine
from tests.conftest import Hyfi
from workflows.benchmarks.reduction import sleep
from workflows.commands.bench import calibration, measure, measured_layers, measured_operators
from workflows.commands.bench.measured_layers import HEAVY, LAYERS, LayerBench, LayerTimes, half_channels
from workflows.commands.bench.measured_operators import CASES, OperatorBench


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little maps, at most two layers of a kind, and little time for each."""
    for name, cases in CASES.items():
        smaller = [replace(c, side_px=max(1, c.side_px // 16), flops=c.flops / 256) for c in cases]
        monkeypatch.setitem(CASES, name, tuple(smaller))
    for table, factor in ((LAYERS, 16), (HEAVY, 1)):
        for name, found in table.items():
            layers = found[:2] if isinstance(found, tuple) else (found,)
            shrunk = tuple(replace(c, channels=c.channels // 4, side_px=max(8, c.side_px // factor)) for c in layers)
            monkeypatch.setitem(table, name, shrunk if isinstance(found, tuple) else shrunk[0])
    monkeypatch.setattr(measured_layers, "STEPS", 1)
    for module in (measured_layers, calibration):
        monkeypatch.setattr(module, "LENGTHS", (1, 2))
    monkeypatch.setattr(measured_layers, "TINY_STEPS", 2)
    monkeypatch.setattr(measured_operators, "ROUNDS", 1)
    monkeypatch.setattr(measured_operators, "_LAYERS", (1, 2))
    monkeypatch.setattr(measured_operators, "_COPIED_VALUES", 2**20)
    monkeypatch.setattr(measure, "_ROUNDS", 8)
    monkeypatch.setattr(measure, "_DISK_BYTES", 1 << 20)
    monkeypatch.setattr(measure, "_HOST_BYTES", 1 << 20)


def test_a_measured_machine_is_one_that_can_be_read(
    small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workflows.launch.peer_watch.join", AloneCommunicator)
    target = tmp_path / "machine.yaml"
    assert measure.measure_rank(target, as_json=True) == 0
    machine = load_machine(target)
    assert machine.device == ("cuda" if torch.cuda.is_available() else "cpu")
    assert set(machine.efficiency) == set(KINDS)
    assert max(forward for kind, (forward, _) in machine.efficiency.items() if "convolution" in kind) <= 1.0
    assert (machine.host_bytes_per_s is None) == (machine.device == "cpu")
    assert machine.node == reference_machine().node and "node: not measured" in target.read_text()
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["kernel_s"] == machine.kernel_s
    assert [path.name for path in tmp_path.iterdir()] == ["machine.yaml"]


def test_two_ranks_measure_what_is_between_them(small: None, tmp_path: Path) -> None:
    def body(comm: Communicator) -> object:
        return measure._links(comm, torch.device("cpu"), ["a", "a"], True)

    first, second = run_ranks(2, body)
    assert first is not None and second is not None
    message_s, link = first
    assert 0 < message_s < 1 and link.bytes_per_s > 0


def test_the_link_to_the_host_is_as_fast_as_its_slower_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, other memory stands for its memory, and copies into it take longer."""
    here, there = torch.ones(1 << 20, dtype=torch.uint8), torch.zeros(1 << 20, dtype=torch.uint8)
    monkeypatch.setattr(measure, "_host_buffers", lambda device: (here, there))
    copy, taken_s = torch.Tensor.copy_, {here.data_ptr(): 0.002, there.data_ptr(): 0.01}

    def slow(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        time.sleep(taken_s[target.data_ptr()])
        return copy(target, source)

    monkeypatch.setattr(torch.Tensor, "copy_", slow)
    rate = measure._host_bytes_per_s(torch.device("cuda"))
    assert rate is not None and 0 < rate <= (1 << 20) / 0.01  # a busy machine only makes it slower
    assert there.sum() == 1 << 20
    assert measure._host_bytes_per_s(torch.device("cpu")) is None


def test_ranks_on_two_hosts_share_no_node(small: None) -> None:
    found = run_ranks(2, lambda comm: measure._links(comm, torch.device("cpu"), ["a", "b"], True))
    assert found == [None, None]


def test_a_slow_operator_has_a_low_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(40):
                x = torch.exp(-x)
            return x

    bench = OperatorBench(torch.device("cpu"), rounds=3)
    (case,) = CASES["elementwise"]
    monkeypatch.setitem(CASES, "elementwise", (replace(case, side_px=64),))
    quick = bench.rates("elementwise")
    monkeypatch.setitem(CASES, "elementwise", (replace(case, side_px=64, make=Slow),))
    slow = bench.rates("elementwise")
    assert slow[0] < quick[0] / 4 and slow[1] < quick[1] / 4


def test_more_ranks_than_cores_measure_how_they_take_turns(small: None) -> None:
    found = run_ranks(3, lambda comm: OperatorBench(torch.device("cpu"), rounds=1).waiting(comm, 2))
    assert 0 < found[0] <= 1
    turns = run_ranks(3, lambda comm: LayerBench(torch.device("cpu")).turn_s(comm, 2))
    assert all(0 < turn_s < 1 for turn_s in turns)


def test_half_channels_are_those_of_two_rates() -> None:
    rate = {channels: 100.0 * channels / (channels + 12) for channels in (16, 128)}
    assert half_channels(rate[16], 16, rate[128], 128) == pytest.approx(12.0)
    assert half_channels(100.0, 16, 90.0, 128) == pytest.approx(0.0, abs=0.01)
    assert half_channels(1.0, 16, 90.0, 128) == 128


def test_overheads_are_scaled_until_the_model_agrees_with_a_block(small: None) -> None:
    kinds = {kind: (1e-5, 2e-5) for kind in KINDS if kind != "product"}
    machine = replace(reference_machine(), overhead_s=kinds, strip_s=(1e-5, 1e-5))
    alone, together = LayerTimes(2e-3, 5e-3, 0.0, 0.0), LayerTimes(4e-3, 9e-3, 0.0, 0.0)
    found = calibration.calibrated(machine, alone, together)
    assert calibration._modelled(found, 1) == pytest.approx((2e-3, 5e-3), rel=0.02)
    assert calibration._modelled(found, 2) == pytest.approx((4e-3, 9e-3), rel=0.02)
    assert calibration.calibrated(machine, LayerTimes(0.0, 0.0, 0.0, 0.0), None).overhead_s == kinds


def test_layers_that_rest_take_their_time(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Resting(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + sleep(x, 0.01 / x.shape[2] ** 2)

    case = replace(LAYERS["elementwise"][0], make=lambda width: Resting(), side_px=8)
    monkeypatch.setattr(measured_layers, "LENGTHS", (1, 3))
    found = LayerBench(torch.device("cpu")).times(case)
    assert found.forward_s > 0.004  # without the sleep, some microseconds; a busy machine makes it longer or shorter


def test_large_weights_are_what_is_left_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, known = LayerBench(torch.device("cpu")), measured_layers.MeasuredKind((1e-3, 2e-3), (1e12, 1e12), 1e-3)
    case = HEAVY["convolution"]
    weight_bytes, flops_s = 512 * 512 * 9 * 4, case.flops / 1e12
    times = LayerTimes(1e-3 + flops_s + 0.01, 4e-3 + 2 * flops_s + 0.02, 0.003, 0.001)
    monkeypatch.setattr(bench, "times", lambda case: times)
    rates, update_s = bench.heavy("convolution", known)
    assert rates == pytest.approx((weight_bytes / 0.01, weight_bytes / 0.02))
    assert update_s == pytest.approx(0.003 / weight_bytes)


@pytest.mark.soak
def test_the_command_measures_on_two_ranks(hyfi: Hyfi, tmp_path: Path) -> None:
    done = hyfi("doctor", "--measure", str(tmp_path / "m.yaml"))
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "m.yaml").read_text()
    assert "with 2 rank(s) on 1 node(s)" in text and "node: not measured" not in text
    assert load_machine(tmp_path / "m.yaml").devices_per_node == 2


@pytest.mark.mpi
def test_a_file_that_cannot_be_written_is_refused_at_once(hyfi_here: Hyfi, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = hyfi_here("doctor", "--measure", str(tmp_path / "file" / "m.yaml"))
    assert done.returncode == 2 and "cannot be written" in done.stderr
