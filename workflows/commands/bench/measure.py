"""``hyfi doctor --measure``: measures the parameters of a ``MachineModel`` on this machine.

Run as a program, it is one rank of the measurement: first rank 0 measures while the others wait, then as many ranks as
the node has cores measure at the same time, then pairs of ranks exchange rows of a feature map. What cannot be measured
(the network, if there is only one node) is taken from the ``cpu`` machine model, and the file says so.
"""

from __future__ import annotations

import argparse
import os
import platform
import socket
import sys
import tempfile
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hyfi_core.runtime.launch import inside_launcher
from workflows.console import emit_json, say
from workflows.exit_codes import DONE, exit_code_of

if TYPE_CHECKING:
    import torch

    from hyfi_core.comm.base import Communicator
    from hyfi_core.cost.machine import Crowding, DeviceLink, MachineModel, SharedCores
    from workflows.commands.bench.measured_rates import AloneRates, TogetherRates

RANKS = 2
_CHANNELS = 64
_ROW_PX, _SHORT_ROW_PX = 2**12, 16
_ROUNDS = 103
_LATENCY_S = 1e-6  # latency of shared memory; the cost in software is a separate parameter
_DISK_BYTES = 128 << 20
_HOST_BYTES = 256 << 20
_COPIES = 5


def run(target: Path, as_json: bool = False) -> int:
    """Measure this machine and write its model to ``target``, atomically.

    Under a launcher, all of its ranks take part; otherwise two ranks are started, or one on a node with one GPU.

    Args:
        target: The YAML file.
        as_json: Print the machine model as one JSON object.

    Raises:
        RequestError: ``target`` cannot be written.
    """
    from workflows.launch.launch import launch_program, run_as_rank
    from workflows.paths import require_replaceable

    require_replaceable(target, lambda start: b"message_s:" in start, "a machine model")  # before minutes of measuring
    if inside_launcher() is not None:
        return run_as_rank(partial(measure_rank, target, as_json))
    program = [sys.executable, "-m", "workflows.commands.bench.measure", str(target), *["--json"] * as_json]
    return launch_program(program, _ranks_here())


def _ranks_here() -> int:
    import torch

    return min(RANKS, torch.cuda.device_count()) if torch.cuda.is_available() else RANKS


def measure_rank(target: Path, as_json: bool) -> int:
    """Measure as one rank; rank 0 writes the file."""
    from data.files import write_atomically
    from hyfi_core.process_memory import keep_what_is_freed
    from workflows.launch.peer_watch import join

    comm = join()
    keep_what_is_freed()  # else short measurements include the time in which the system maps the same memory again
    machine, notes = measure(comm, target.parent)
    if comm.rank == 0:
        head = "".join(f"# {line}\n" for line in notes)
        write_atomically(target, (head + machine.to_yaml()).encode())
        say(f"{target}: {machine.name}")
        for line in notes:
            say(f"  {line}")
        if as_json:
            emit_json(asdict(machine))
    return DONE


def measure(comm: Communicator, folder: Path) -> tuple[MachineModel, list[str]]:
    """Measure the machine that these ranks run on (collective).

    Args:
        comm: The ranks.
        folder: A folder on the disk to measure.

    Returns:
        The model, and comments for its file. Only rank 0 returns the measured model, other ranks return a default.
    """
    import torch

    from data.cores import usable_cores
    from hyfi_core.cost.machine import SharedCores
    from hyfi_core.cost.machines.machine_file import reference_machine
    from hyfi_core.runtime.launch import made_current
    from workflows.commands.bench.calibration import calibrated
    from workflows.commands.bench.measured_layers import LayerBench
    from workflows.commands.bench.measured_operators import OperatorBench
    from workflows.commands.bench.measured_rates import measured_alone, measured_together

    hosts = comm.broadcast_object(comm.gather_objects(socket.gethostname()))
    local_ranks = [rank for rank, host in enumerate(hosts) if host == hosts[comm.rank]]
    gpus = torch.cuda.device_count()
    device = made_current(f"cuda:{local_ranks.index(comm.rank)}" if gpus else "cpu")
    bench = OperatorBench(device)
    # How many ranks compute at the same time: on GPUs all do.
    cores = comm.size if gpus else max(1, usable_cores() // torch.get_num_threads())
    layers = LayerBench(device)
    # The others wait at the barrier: caches and memory belong to one rank.
    alone = measured_alone(bench, layers) if comm.rank == 0 else None
    comm.barrier()
    # One rank on each core, as in training: they share memory bandwidth and caches. Others are in no group.
    group = comm.split(0 if comm.rank in local_ranks[:cores] else None)
    together = measured_together(bench, layers, group) if group is not None else None
    comm.barrier()
    shared_cores = None
    # More ranks than cores, on one node: they take turns, which costs time beyond the computation.
    if cores < len(local_ranks) == comm.size:
        shared_cores = SharedCores(cores, layers.turn_s(comm, cores), bench.waiting(comm, cores))
    near, far = _links(comm, device, hosts, same=True), _links(comm, device, hosts, same=False)
    disk_bytes_per_s = _disk_bytes_per_s(folder) if comm.rank == 0 else 1.0
    host_bytes_per_s = _host_bytes_per_s(device) if comm.rank == 0 else None
    if alone is None or together is None:
        return reference_machine(), []
    devices = gpus or len(local_ranks)
    machine = _machine(device, devices, alone, together, shared_cores, near, far, disk_bytes_per_s, host_bytes_per_s)
    machine = calibrated(machine, alone.block, together.block)
    notes = [f"Measured by `hyfi doctor --measure` with {comm.size} rank(s) on {len(set(hosts))} node(s)."]
    if near is None:
        notes.append("node: not measured, because no two ranks share a node; taken from the cpu machine.")
    if far is None:
        notes.append("network: not measured, because there is only one node; taken from the cpu machine.")
    return machine, notes


def _machine(
    device: torch.device,
    devices: int,
    alone: AloneRates,
    together: TogetherRates,
    shared_cores: SharedCores | None,
    near: tuple[float, DeviceLink] | None,
    far: tuple[float, DeviceLink] | None,
    disk_bytes_per_s: float,
    host_bytes_per_s: float | None,
) -> MachineModel:
    """Return the machine model with these rates.

    Args:
        device: What computes.
        devices: Number of ranks or GPUs of a node.
        alone: What one rank has measured.
        together: What ranks have measured at the same time.
        shared_cores: How ranks take turns, if there are more than cores.
        near: (Software cost of a message in s, link) within a node; None: not measured.
        far: The same between nodes.
        disk_bytes_per_s: Rate of the disk.
        host_bytes_per_s: Rate of copies between a GPU and its host; None on CPUs.
    """
    from hyfi_core.cost.machine import PRODUCTS, Crowding, MachineModel, UpdateCost
    from hyfi_core.cost.machines.machine_file import reference_machine
    from workflows.commands.bench.measured_layers import WEIGHTS_OF_BLOCK

    peak = max(alone.rates[kind][0] for kind in PRODUCTS)
    crowding = _crowding(alone, together)
    link = near or far
    message_s = _rounded(link[0]) if link else reference_machine().message_s
    strip_s = _rounded_pair(_less(together.strip_s, message_s)) if together.strip_s is not None else (0.0, 0.0)
    return MachineModel(
        name=f"{_device_name(device)}, {socket.gethostname()}",
        device=device.type,
        devices_per_node=devices,
        memory_bytes=_memory_bytes(device, devices),
        peak_flops_per_s={name: _rounded(peak * rate) for name, rate in alone.dtype_shares.items()},
        memory_bytes_per_s=_rounded(alone.copied_bytes_per_s),
        efficiency=_efficiency(alone, together, peak, crowding),
        kernel_s=_rounded(alone.kernel_s),
        message_s=message_s,
        node=near[1] if near else reference_machine().node,
        network=far[1] if far else reference_machine().network,
        disk_bytes_per_s=_rounded(disk_bytes_per_s),
        crowding=Crowding(_rounded(crowding.compute), _rounded(crowding.memory)),
        cores=shared_cores,
        strip_s=strip_s,
        overhead_s=_overhead_s(alone, together),
        weight_bytes_per_s={kind: _rounded_pair(pair) for kind, pair in alone.weight_bytes_per_s.items()},
        half_channels={kind: _rounded_pair(pair) for kind, pair in alone.half_channels.items()},
        update=UpdateCost(
            tensor_s=_rounded(alone.tensor_update_s),
            bytes_per_s=_rounded(1 / alone.update_s_per_byte),
            watch_s=_rounded((together.block or alone.block).rest_s / WEIGHTS_OF_BLOCK),
        ),
        host_bytes_per_s=None if host_bytes_per_s is None else _rounded(host_bytes_per_s),
    )


def _crowding(alone: AloneRates, together: TogetherRates) -> Crowding:
    """Return how much slower operators are when all cores compute."""
    from hyfi_core.cost.machine import Crowding

    times = zip(together.bound_layers_s, alone.bound_layers_s, strict=True)
    slowdowns = [max(1.0, together_s / alone_s) for together_s, alone_s in times]
    return Crowding(*slowdowns)


def _efficiency(
    alone: AloneRates, together: TogetherRates, peak: float, crowding: Crowding
) -> dict[str, tuple[float, float]]:
    """Return kind -> its (forward, backward) rates on one rank, relative to ``peak`` flops/s or to copies in memory."""
    from hyfi_core.cost.machine import PRODUCTS

    # A shared norm is measured on all ranks at once: its rates on one rank alone would be higher.
    shared_norm = together.shared_norm_rates[0] * crowding.memory, together.shared_norm_rates[1] * crowding.memory
    efficiency = {}
    for kind, (forward, backward) in (alone.rates | {"shared_norm": shared_norm}).items():
        best = peak if kind in PRODUCTS else alone.copied_bytes_per_s
        efficiency[kind] = _rounded_pair((forward / best, backward / best))
    return efficiency


def _overhead_s(alone: AloneRates, together: TogetherRates) -> dict[str, tuple[float, float]]:
    """Return kind -> (forward, backward) overhead of an operator in seconds."""
    overheads = {kind: measured_kind.overhead_s for kind, measured_kind in alone.kinds.items()}
    # Not measured in chains, but the same operator.
    overheads["thin_convolution"] = overheads["convolution"]
    # The model adds kernel_s itself, with the all-reduce of the norm's sums.
    overheads["shared_norm"] = _less(together.tiny_shared_norm_s, alone.kernel_s)
    return {kind: _rounded_pair(pair) for kind, pair in overheads.items()}


def _less(pair: tuple[float, float], seconds: float) -> tuple[float, float]:
    """Return both times less ``seconds``, at least 1 µs each: a machine's numbers must be greater than 0."""
    return max(1e-6, pair[0] - seconds), max(1e-6, pair[1] - seconds)


def _rounded_pair(pair: tuple[float, float]) -> tuple[float, float]:
    return _rounded(pair[0]), _rounded(pair[1])


def _links(comm: Communicator, device: torch.device, hosts: list[str], same: bool) -> tuple[float, DeviceLink] | None:
    """Return (software cost of a message in s, link) between rank 0 and one other rank; None if there is no such rank.

    The bandwidth follows from the difference between a long and a short message.

    Args:
        comm: The ranks (collective).
        device: Where the messages are.
        hosts: The host of each rank.
        same: Whether the other rank is on the host of rank 0.
    """
    from hyfi_core.cost.machine import DeviceLink

    partners = [rank for rank, host in enumerate(hosts) if rank and (host == hosts[0]) == same]
    pair_ranks = (0, partners[0]) if partners else ()
    pair = comm.split(0 if comm.rank in pair_ranks else None)
    link = None
    if pair is not None:
        short_s, long_s = _exchange_s(pair, device, _SHORT_ROW_PX), _exchange_s(pair, device, _ROW_PX)
        # Bytes that the long message has more, in float32.
        more_bytes = (_ROW_PX - _SHORT_ROW_PX) * _CHANNELS * 4
        bytes_per_s = _rounded(more_bytes / max(1e-9, long_s - short_s))
        link = max(1e-7, short_s - _LATENCY_S), DeviceLink(_LATENCY_S, bytes_per_s)
    comm.barrier()
    return link


def _exchange_s(comm: Communicator, device: torch.device, width_px: int) -> float:
    """Return the shortest time in seconds of a halo exchange of one row of 64 channels between two ranks."""
    import torch

    from hyfi_core.comm.waits import waited
    from hyfi_core.ops.redistribute import Redistribute
    from hyfi_core.plan.box import Box
    from hyfi_core.plan.transfer import plan_transfer

    # Each rank has two of four rows, and needs one of the other's.
    have = (Box(0, 2, 0, width_px), Box(2, 4, 0, width_px))
    need = (Box(0, 3, 0, width_px), Box(1, 4, 0, width_px))
    op = Redistribute(plan_transfer(have, need, Box(0, 4, 0, width_px), comm.rank))
    own = torch.zeros(1, _CHANNELS, 2, width_px, device=device).contiguous(memory_format=torch.channels_last)
    times = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        strips = waited(op.start(comm, own))
        waited(strips.wait())
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times[3:])  # the first ones allocate buffers


def _disk_bytes_per_s(folder: Path) -> float:
    """Return the rate at which a temporary file of 128 MiB is written and synced."""
    # Random bytes: some disks compress.
    block = os.urandom(1 << 20)
    with tempfile.TemporaryFile(dir=folder) as file:
        begin = time.perf_counter()
        for _ in range(_DISK_BYTES >> 20):
            file.write(block)
        file.flush()
        # Without it, this would be the rate of the page cache.
        os.fsync(file.fileno())
        return _DISK_BYTES / (time.perf_counter() - begin)


def _host_bytes_per_s(device: torch.device) -> float | None:
    """Return the rate of copies between a GPU and pinned memory of its host, in the slower direction; None on a CPU."""
    if device.type != "cuda":
        return None
    host, gpu = _host_buffers(device)
    return min(_copied_bytes_per_s(host, gpu), _copied_bytes_per_s(gpu, host))


def _host_buffers(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a pinned buffer of the host and a buffer of the same size on the GPU."""
    import torch

    host = torch.zeros(_HOST_BYTES, dtype=torch.uint8, pin_memory=True)
    return host, torch.zeros(_HOST_BYTES, dtype=torch.uint8, device=device)


def _copied_bytes_per_s(source: torch.Tensor, target: torch.Tensor) -> float:
    """Return the highest rate of a few copies in bytes/s."""
    import torch

    times = []
    for _ in range(_COPIES):
        begin = time.perf_counter()
        target.copy_(source, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return source.nbytes / min(times)


def _memory_bytes(device: torch.device, ranks: int) -> int:
    """Return the memory that one rank may use: its GPU's, or its share of what the machine has free."""
    import torch

    from hyfi_core.process_memory import available_bytes

    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return available_bytes() // ranks


def _device_name(device: torch.device) -> str:
    """Return the name of the GPU, or of the processor with the number of threads."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{model or platform.processor() or platform.machine()}, {torch.get_num_threads()} thread(s) a rank"


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def main() -> int:
    """Measure as one of the ranks that ``run`` started."""
    from workflows.launch.launch import run_as_rank

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    return run_as_rank(partial(measure_rank, args.target, args.json))


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
