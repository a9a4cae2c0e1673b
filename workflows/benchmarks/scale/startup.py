"""A model of the start of many ranks on a cluster: from the launcher to the first step.

What a rank computes and what it reads is measured on this machine; nodes, network and file system are assumed, with
the figures of ``StartupSite``. The parts follow one another, so their sum is the time until the first step.
"""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import dataclass

from hyfi_core.cost.machine import MachineModel
from hyfi_core.plan.parallel_plan import ParallelPlan

IMPORTS = "import torch, mpi4py.MPI, workflows.commands.train, workflows.training.loop"
_MEASURE = f"""
import os, sys, time
begun_s = time.process_time()
{IMPORTS}
spent_s = time.process_time() - begun_s
paths = [getattr(module, "__cached__", None) or getattr(module, "__file__", None) for module in [*sys.modules.values()]]
files = {{path for path in paths if isinstance(path, str) and os.path.isfile(path)}}
files |= {{line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}}
print(spent_s, len(files), sum(os.path.getsize(path) for path in files if os.path.isfile(path)))
"""


_CALLS_A_GROUP = 3
"""Collective calls to create a group: a barrier of all ranks and two agreements of its members."""
_BYTES_A_RANK = 16
"""Bytes that each rank sends to all others to form a group: a colour and a key. Counted for one group only, as the
latencies of the rounds take much longer."""


@dataclass(frozen=True)
class Imports:
    """What a rank's imports take, without waiting for files.

    Attributes:
        seconds: Seconds of processor time.
        files: Number of modules and shared libraries that are opened.
        file_bytes: Bytes of these files.
    """

    seconds: float
    files: int
    file_bytes: int


@dataclass(frozen=True)
class StartupSite:
    """Assumed properties of a cluster, none of them measured.

    Attributes:
        launch_s: Seconds of one level of the launcher's tree: a message to a node, forking its tasks, and an answer.
        launch_fan_out: Number of nodes that a node starts (``TreeWidth`` of Slurm, default 16 since 23.11).
        file_operations_per_s: Opens and look-ups in a second that the shared file system answers, for all nodes
            together.
        file_bytes_per_s: Bytes in a second that the shared file system delivers to all nodes together.
        look_ups: Failed look-ups of Python for each file that it opens, in folders of the path before the right one.
    """

    launch_s: float = 0.1
    launch_fan_out: int = 16
    file_operations_per_s: float = 50e3
    file_bytes_per_s: float = 10e9
    look_ups: float = 4.0


@dataclass(frozen=True)
class StartupPart:
    """One part of the start.

    Attributes:
        name: Name of the part.
        seconds: Seconds until all ranks have done it.
        source: What the seconds are computed from.
    """

    name: str
    seconds: float
    source: str


def measured_imports() -> Imports:
    """Measure the imports of a rank, in a process of its own."""
    completed = subprocess.run([sys.executable, "-c", _MEASURE], capture_output=True, text=True, check=True)
    seconds, files, size = completed.stdout.split()
    return Imports(float(seconds), int(files), int(size))


def startup(
    plan: ParallelPlan,
    machine: MachineModel,
    imports: Imports,
    planning_s: float,
    weight_bytes: int,
    site: StartupSite | None = None,
) -> list[StartupPart]:
    """Return the parts of the start of a plan's ranks.

    Args:
        plan: The plan, whose ranks fill nodes.
        machine: The machine model, for its network and the devices of a node.
        imports: What a rank's imports take; each node reads the files once, each rank opens them.
        planning_s: Seconds in which one rank captures, lowers and schedules.
        weight_bytes: Bytes that rank 0 sends to all ranks.
        site: Properties of the cluster; None: the defaults.
    """
    site = StartupSite() if site is None else site
    ranks, nodes = plan.ranks, math.ceil(plan.ranks / machine.devices_per_node)
    # A tree: each level starts `launch_fan_out` times as many nodes as the one before.
    levels = max(1, math.ceil(math.log(max(2, nodes), site.launch_fan_out)))
    # Every rank asks for every file, but a node reads each only once: its page cache has it then.
    operations = ranks * imports.files * (1 + site.look_ups)
    read_bytes = nodes * imports.file_bytes
    network = machine.network
    rounds = math.ceil(math.log2(max(2, ranks)))  # of messages, in a collective call of all ranks
    message_s = machine.message_s + network.latency_s
    # An upper bound: 3 of the whole plan; in each direction the rank's stage, once more for batch norms over replicas;
    # 2 for the gradients of each stage.
    groups = 3 + plan.directions * (2 if plan.sync_batch_norm else 1) + 2 * plan.stages
    return [
        StartupPart(
            "launcher", levels * site.launch_s, f"{nodes} nodes, a tree of {levels} levels of {site.launch_s:g} s"
        ),
        StartupPart(
            "imports, files",
            operations / site.file_operations_per_s + read_bytes / site.file_bytes_per_s,
            f"{ranks} × {imports.files} files, read once a node ({imports.file_bytes / 1e6:.0f} MB), {site.look_ups:g} "
            f"look-ups for each; in a container, which is one file, {read_bytes / site.file_bytes_per_s:.0f} s",
        ),
        StartupPart("imports, processor", imports.seconds, "measured here"),
        StartupPart(
            "groups",
            groups * _CALLS_A_GROUP * rounds * message_s + _BYTES_A_RANK * ranks / network.bytes_per_s,
            f"at most {groups} groups: a barrier of all and two agreements of the members, {rounds} rounds each",
        ),
        StartupPart("planning", planning_s, "measured here: capture, lowering, schedule"),
        StartupPart(
            "weights",
            2 * weight_bytes / network.bytes_per_s + rounds * message_s,
            f"a broadcast of {weight_bytes / 1e6:.0f} MB: scattered and gathered",
        ),
    ]
