from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from hyfi_core.cost.machine import Crowding, SharedCores, UpdateCost
from hyfi_core.cost.machines.machine_file import MACHINES, load_machine, machine_names, reference_machine
from hyfi_core.errors import RequestError


@pytest.mark.parametrize("name", machine_names())
def test_machines_of_the_package_are_whole(name: str, tmp_path: Path) -> None:
    machine = load_machine(name)
    limits = {kind: 2.25 if kind == "convolution" else 1.0 for kind in machine.efficiency}  # Winograd's fewer products
    assert all(0 < share <= limits[kind] for kind, shares in machine.efficiency.items() for share in shares)
    assert machine.network.bytes_per_s <= machine.node.bytes_per_s or machine.device == "cpu"
    copy = tmp_path / "copy.yaml"
    copy.write_text(machine.to_yaml())
    assert load_machine(copy) == machine


_SOURCED = ("memory_bytes_per_s", "host_bytes_per_s", "disk_bytes_per_s")


def test_every_number_of_a_machine_of_the_package_says_where_it_is_from() -> None:
    for path in MACHINES.glob("*.yaml"):
        for line in path.read_text().splitlines():
            key = line.strip().partition(":")[0]
            if key in (*_SOURCED, "memory_bytes", "kernel_s", "message_s", "node", "network", "float32"):
                assert "#" in line, f"{path.name}: {line}"


def test_arithmetic_or_memory_bounds_an_operator() -> None:
    machine = reference_machine()
    assert machine.operator_s(1e9, 1.0) == pytest.approx(0.01)
    assert machine.operator_s(1.0, 16e9) == pytest.approx(1.0)
    assert machine.operator_s(1e9, 1.0, dtype="float64") == pytest.approx(0.02)
    assert machine.operator_s(1e9, 16e9, kind="norm", backward=True) == pytest.approx(2.0)
    crowded = replace(machine, crowding=Crowding(compute=2.0, memory=3.0))
    assert crowded.operator_s(1e9, 1.0, crowded=True) == pytest.approx(0.02)
    assert crowded.operator_s(0.0, 16e9, kind="elementwise", crowded=True) == pytest.approx(3.0)
    assert crowded.operator_s(1e9, 1.0) == machine.operator_s(1e9, 1.0)


def test_what_a_measured_machine_knows_more_is_added_and_written(tmp_path: Path) -> None:
    plain = reference_machine()
    assert plain.call_s("norm") == plain.kernel_s and plain.weights_s(1e9, "convolution") == 0.0
    assert plain.update_s(10, 16e9) == pytest.approx(7.0)
    machine = replace(
        plain,
        devices_per_node=4,
        cores=SharedCores(2, 0.004, 0.5),
        strip_s=(1e-4, 2e-4),
        overhead_s={"norm": (1e-5, 2e-5)},
        weight_bytes_per_s={"convolution": (1e9, 5e8)},
        update=UpdateCost(1e-5, 1e9),
    )
    assert machine.call_s("norm", backward=True) == 2e-5 and machine.call_s("pool") == plain.kernel_s
    assert machine.weights_s(1e9, "convolution", backward=True) == pytest.approx(2.0)
    assert machine.update_s(10, 1e9) == pytest.approx(1.0001)
    assert machine.watch_s(10) == 0.0 and plain.watch_s(10) == 0.0
    watching = replace(machine, update=UpdateCost(1e-5, 1e9, watch_s=3e-5))
    assert watching.watch_s(10) == pytest.approx(3e-4) and "watch_s: 3.0e-05" in watching.to_yaml()
    assert "watch_s" not in machine.to_yaml()
    assert machine.core_wait_s(2) == 0.0 and machine.core_wait_s(4) == pytest.approx(0.002)  # four on two cores: 0.004
    path = tmp_path / "machine.yaml"
    path.write_text(machine.to_yaml())
    assert load_machine(path) == machine


@pytest.mark.parametrize(("name", "slower"), [("h100", 494 / 67), ("a100", 156 / 19.5)])
def test_float32_takes_tensor_cores_only_where_its_operands_may_be_rounded(name: str, slower: float) -> None:
    machine = load_machine(name)
    kernels, tensor_kernels = machine.scalar_efficiency["convolution"][0], machine.efficiency["convolution"][0]
    plain_s, rounded_s = (one.operator_s(1e13, 1.0) for one in (machine, machine.with_tf32()))
    assert plain_s / rounded_s == pytest.approx(slower * tensor_kernels / kernels) and plain_s > 1.9 * rounded_s
    assert machine.with_tf32().operator_s(1e13, 1.0, dtype="bfloat16") == machine.operator_s(
        1e13, 1.0, dtype="bfloat16"
    )
    assert machine.operator_s(1e13, 1.0, dtype="float64") > plain_s
    without = load_machine("v100-lassen")
    assert without.with_tf32() == without


def test_maps_of_a_gpu_leave_over_its_link_to_the_host() -> None:
    """Not over its own memory, which is 60 times as fast."""
    gpus = [load_machine(name) for name in machine_names() if load_machine(name).device == "cuda"]
    assert all(gpu.host_bytes_per_s is not None and gpu.host_bytes_per_s < gpu.memory_bytes_per_s / 10 for gpu in gpus)
    assert all(
        load_machine(name).host_bytes_per_s is None for name in machine_names() if load_machine(name) not in gpus
    )
    h100 = load_machine("h100")
    assert h100.spill_s(55e9, to_disk=False) == pytest.approx(2.0) == 2 * h100.move_s(55e9, 8, to_disk=False)
    assert h100.move_s(10e9) == pytest.approx(1.0) and h100.move_s(10e9, 16) == pytest.approx(8.0)  # the node's disk
    fast_disk = replace(h100, disk_bytes_per_s=1e15)
    assert fast_disk.move_s(55e9) == pytest.approx(1.0)  # maps reach it through the host's memory
    unknown = replace(h100, host_bytes_per_s=None)
    assert unknown.move_s(12e9, to_disk=False) == pytest.approx(1.0)


def test_host_memory_is_a_processors_own() -> None:
    assert reference_machine().move_s(8e9, to_disk=False) == pytest.approx(1.0)  # 16 GB/s, of reading and writing
    assert reference_machine().spill_s(5e8, 2) == pytest.approx(4.0)


def test_messages_leave_the_node_when_the_ranks_do() -> None:
    machine = load_machine("v100-lassen")
    assert machine.messages_s(1, 68e9) == pytest.approx(1.0, rel=1e-3)
    assert machine.messages_s(1, 5.5e9, machine.network) == pytest.approx(1.0, rel=1e-3)
    assert machine.all_reduce_s(1, 1e9) == 0.0
    assert machine.all_reduce_s(4, 68e9) == pytest.approx(1.5, rel=1e-3)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kernel_s": None}, "kernel_s: given None"),
        ({"kernel_s": -1.0}, "kernel_s: given -1.0"),
        ({"speed": 3}, "speed: unknown"),
        ({"device": "tpu"}, "device: given 'tpu'; allowed: cpu or cuda"),
        ({"efficiency": {"convolution": 0.5}}, "efficiency.convolution: given 0.5"),
        ({"node": 3}, "node: given 3"),
        ({"devices_per_node": 0.5}, "devices_per_node: given 0.5; allowed: a whole number from 1"),
        ({"cores": {"count": 1.5, "turn_s": 1e-3, "waiting": 0.1}}, "count: given 1.5; allowed: a whole number"),
        ({"overhead_s": {"mist": [1.0, 1.0]}}, "overhead_s.mist: unknown"),
        ({"cores": {"count": 2, "turn_s": 1e-3}}, "waiting: given None"),
        ({"peak_flops_per_s": {"float32": "fast"}}, "float32: given 'fast'"),
    ],
)
def test_a_wrong_number_is_named(change: dict[str, object], named: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(reference_machine().to_yaml()), **change}))
    with pytest.raises(RequestError, match=named):
        load_machine(path)


def test_a_machine_that_is_not_there_is_answered_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"use one of .*h100.*, or a file of `hyfi doctor --measure"):
        load_machine("h200")
    path = tmp_path / "machine.yaml"
    path.write_text("- 1")
    with pytest.raises(RequestError, match="given list; allowed: the keys name, device"):
        load_machine(path)
    tree = yaml.safe_load(reference_machine().to_yaml())
    del tree["network"]
    path.write_text(yaml.safe_dump(tree))
    with pytest.raises(RequestError, match="network: missing"):
        load_machine(path)
