"""The machine model: the cost of computation and communication, used by all cost models.

A *device* is what one rank computes on: a CPU core, or a GPU. ``machines.machine_file`` reads machines from files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

import yaml

PRODUCTS = ("convolution", "pointwise_convolution", "thin_convolution", "grouped_convolution", "product")
"""Kinds of operators that may be bound by arithmetic.

Pointwise convolutions have a 1 x 1 kernel, thin ones fewer than 16 input channels; a product is a matrix product.
"""
KINDS = (*PRODUCTS, "norm", "shared_norm", "pool", "elementwise")
"""Kinds of operators; the last four are bound by memory. A shared norm computes statistics over several ranks."""
KNOWN_NORM = "elementwise"
"""The kind by which a batch norm is priced whose statistics are known: it reads its map once and writes it once."""
PAIRS = ("scalar_efficiency", "overhead_s", "weight_bytes_per_s", "half_channels")
"""Optional sections with two numbers, for forward and backward, for each kind of operator."""
OPTIONAL = ("crowding", "rail_bytes_per_s", "cores", "strip_s", *PAIRS, "update", "host_bytes_per_s")
UPDATE_PASSES = 7
"""Memory passes of an update, each over the size of the weights: four are read and three written back."""
SCALAR_DTYPES = ("float32", "float64")
"""What GPUs do not compute with tensor cores, except for float32 whose operands are rounded to TF32."""
_PCIE_3_BYTES_PER_S = 12e9
"""For a GPU without ``host_bytes_per_s``: copies over the slowest link in use, PCIe 3 x16."""


@dataclass(frozen=True, slots=True)
class DeviceLink:
    """A link between two devices.

    Attributes:
        latency_s: of the link; software overhead is in ``MachineModel.message_s``.
        bytes_per_s: in one direction.
    """

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Crowding:
    """Slowdown of operators when all devices of a node compute at once.

    Attributes:
        compute: of operators bound by arithmetic.
        memory: of operators bound by memory.
    """

    compute: float = 1.0
    memory: float = 1.0


@dataclass(frozen=True, slots=True)
class UpdateCost:
    """Time of the optimizer's update.

    Attributes:
        tensor_s: overhead of one tensor of weights.
        bytes_per_s: bytes of weights that are updated in a second.
        watch_s: for each tensor of the whole model: every rank checks whether anything but the engine changed it.
    """

    tensor_s: float
    bytes_per_s: float
    watch_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SharedCores:
    """The cores of a node that may have more ranks than cores.

    Attributes:
        count: cores of a node; ranks that compute at the same time have equal parts of them.
        turn_s: time for which an exchange waits until other ranks have had the core.
        waiting: fraction of a core that a waiting rank uses, relative to a rank that computes.
    """

    count: int
    turn_s: float
    waiting: float


@dataclass(frozen=True)
class MachineModel:
    """The properties of a type of node.

    Attributes:
        name: shown in messages.
        device: ``cpu`` or ``cuda``.
        devices_per_node: largest number of ranks of a node.
        memory_bytes: of one device.
        peak_flops_per_s: dtype -> peak of one device; a multiply-add counts as two operations. ``tf32``: of float32
            whose operands are rounded to TF32; see ``with_tf32``.
        memory_bytes_per_s: of one device, reading and writing together.
        efficiency: kind of operator -> fraction of the peak that (forward, backward) reach: of arithmetic for
            ``PRODUCTS``, of memory bandwidth for others, with each map counted once. Convolutions may reach more
            than 1, by algorithms with fewer products.
        kernel_s: overhead of one operator.
        message_s: software overhead of one message.
        node: link between devices of a node.
        network: link between nodes, for one device if all devices of its node use it.
        disk_bytes_per_s: of a node's local disk.
        crowding: slowdown when all devices of a node compute.
        rail_bytes_per_s: bandwidth between nodes, in one direction, of a device that is the only one of its node to use
            it; None: as ``network``.
        cores: what ranks wait for if a node has more of them than cores. None: each device computes for itself.
        strip_s: work on a strip of a neighbour in the (forward, backward) of a window operator, besides its message.
        overhead_s: kind of operator -> overhead of its forward, and of each gradient of its backward, instead of
            ``kernel_s``.
        weight_bytes_per_s: kind of operator -> bytes of weights per second that (forward, backward) rearrange for the
            library's kernels, in addition to the arithmetic; for other kinds this takes no time.
        scalar_efficiency: ``efficiency`` of ``SCALAR_DTYPES`` where tensor cores compute the others: kernels keep
            scalar units busy more easily. For other kinds, as ``efficiency``.
        half_channels: kind of convolution -> channels with which (forward, backward) reach half of the efficiency: with
            few channels, vector lanes and caches are used badly. For other kinds, any number of channels is enough.
        update: of the optimizer; None: ``UPDATE_PASSES`` over the weights.
        host_bytes_per_s: of copies between one GPU and pinned memory of its host, in one direction; None on CPUs, whose
            memory is the host's.
    """

    name: str
    device: str
    devices_per_node: int
    memory_bytes: int
    peak_flops_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    efficiency: Mapping[str, tuple[float, float]]
    kernel_s: float
    message_s: float
    node: DeviceLink
    network: DeviceLink
    disk_bytes_per_s: float
    crowding: Crowding = field(default_factory=Crowding)
    rail_bytes_per_s: float | None = None
    cores: SharedCores | None = None
    strip_s: tuple[float, float] = (0.0, 0.0)
    overhead_s: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    weight_bytes_per_s: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    half_channels: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    scalar_efficiency: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    update: UpdateCost | None = None
    host_bytes_per_s: float | None = None

    def with_tf32(self) -> MachineModel:
        """Return the machine with the rates of float32 if operands may be rounded to TF32; unchanged without TF32."""
        if "tf32" not in self.peak_flops_per_s:
            return self
        peaks = {**self.peak_flops_per_s, "float32": self.peak_flops_per_s["tf32"]}
        return replace(self, peak_flops_per_s=peaks, scalar_efficiency={})

    def shared(self, ranks: int) -> bool:
        """Whether ``ranks`` ranks are more than the cores of their nodes."""
        nodes = -(-ranks // self.devices_per_node)
        return self.cores is not None and nodes * self.cores.count < ranks

    def core_wait_s(self, ranks: int) -> float:
        """Return the seconds that an exchange waits for other ranks on its core; ``on_shared_cores`` scales them up."""
        if self.cores is None or not self.shared(ranks):
            return 0.0
        return self.cores.turn_s * self.cores.count / min(ranks, self.devices_per_node)

    def call_s(self, kind: str, backward: bool = False) -> float:
        """Return the seconds of overhead of an operator's forward, or of one gradient of its backward."""
        return self.overhead_s.get(kind, (self.kernel_s, self.kernel_s))[backward]

    def weights_s(self, weight_bytes: float, kind: str, backward: bool = False, crowded: bool = False) -> float:
        """Return the seconds in which kernels rearrange weights; 0 for kinds without ``weight_bytes_per_s``."""
        if kind not in self.weight_bytes_per_s:
            return 0.0
        return (self.crowding.memory if crowded else 1.0) * weight_bytes / self.weight_bytes_per_s[kind][backward]

    def update_s(self, tensors: int, weight_bytes: float, crowded: bool = False) -> float:
        """Return the seconds of the optimizer's update of ``tensors`` weights with ``weight_bytes`` in total."""
        slower = self.crowding.memory if crowded else 1.0
        if self.update is None:
            return slower * UPDATE_PASSES * weight_bytes / self.memory_bytes_per_s
        return tensors * self.update.tensor_s + slower * weight_bytes / self.update.bytes_per_s

    def watch_s(self, tensors: int) -> float:
        """Return the seconds per step in which a rank checks ``tensors`` weights for changes; see ``UpdateCost``."""
        return 0.0 if self.update is None else tensors * self.update.watch_s

    def operator_s(
        self,
        flops: float,
        touched_bytes: float,
        kind: str = "convolution",
        dtype: str = "float32",
        backward: bool = False,
        crowded: bool = False,
        channels: int = 0,
    ) -> float:
        """Return the time of an operator, bound by either arithmetic or memory (the roofline model).

        Args:
            flops: number of operations.
            touched_bytes: bytes that it reads and writes.
            kind: one of ``KINDS``.
            dtype: of the computation.
            backward: whether it is the operator's backward.
            crowded: whether all devices of its node compute.
            channels: the smaller of a convolution's input and output channels; 0: so many that it does not matter.
        """
        scalar = self.scalar_efficiency if dtype in SCALAR_DTYPES else {}
        efficiency = scalar.get(kind, self.efficiency[kind])[backward]
        if channels and kind in self.half_channels:
            # n / (n + half): half of the efficiency with ``half_channels``, nearly all of it with many channels.
            efficiency *= channels / (channels + self.half_channels[kind][backward])
        compute, memory = (self.crowding.compute, self.crowding.memory) if crowded else (1.0, 1.0)
        if kind in PRODUCTS:
            # Products also read and write maps, at the rate of elementwise operators.
            moved_s = memory * touched_bytes / (self.efficiency["elementwise"][backward] * self.memory_bytes_per_s)
            return max(compute * flops / (efficiency * self.peak_flops_per_s[dtype]), moved_s)
        return memory * touched_bytes / (efficiency * self.memory_bytes_per_s)

    def recomputes(self, flops: float, map_bytes: float) -> bool:
        """Whether computing a map by a convolution takes less time than writing it to disk and reading it back."""
        return self.operator_s(flops, map_bytes, "thin_convolution") <= self.spill_s(map_bytes)

    def spill_s(self, moved_bytes: float, ranks: int = 1, to_disk: bool = True) -> float:
        """Return the time to move maps out of memory and back, once each.

        Args:
            moved_bytes: bytes that each rank moves.
            ranks: number of ranks that do so at the same time; those of a node share its disk.
            to_disk: True: to the disk; False: to the memory of the host.
        """
        return 2 * self.move_s(moved_bytes, ranks, to_disk)

    def move_s(self, moved_bytes: float, ranks: int = 1, to_disk: bool = True) -> float:
        """Return the time to move maps out of memory, or back.

        Maps of a GPU reach the disk through the memory of its host; both ways are used at the same time. Each device
        has its link for itself. On a CPU, a copy in memory is read and written.

        Args:
            moved_bytes: bytes that each rank moves.
            ranks: number of ranks that do so at the same time; those of a node share its disk.
            to_disk: True: to the disk; False: to the memory of the host.
        """
        disk_s = moved_bytes * min(ranks, self.devices_per_node) / self.disk_bytes_per_s if to_disk else 0.0
        if self.device == "cpu":
            return disk_s if to_disk else 2 * moved_bytes / self.memory_bytes_per_s
        return max(disk_s, moved_bytes / (self.host_bytes_per_s or _PCIE_3_BYTES_PER_S))

    def link(self, ranks: int) -> DeviceLink:
        """Return the slowest link among this number of neighbouring ranks."""
        return self.node if ranks <= self.devices_per_node else self.network

    def messages_s(self, messages: float, received_bytes: float, link: DeviceLink | None = None) -> float:
        """Return the time to receive messages with ``received_bytes`` in total; link None: that within a node."""
        link = link or self.node
        return messages * (self.message_s + link.latency_s) + received_bytes / link.bytes_per_s

    def all_reduce_s(self, ranks: int, length_bytes: float, link: DeviceLink | None = None) -> float:
        """Return the time of an all-reduce: latencies of a tree, bytes of a ring (Thakur et al., IJHPCA 2005).

        Args:
            ranks: number of ranks of the group.
            length_bytes: size of the tensor.
            link: the slowest in the group; None: that within a node if the ranks fit into one.
        """
        if ranks == 1:
            return 0.0
        link = link or self.link(ranks)
        # A tree has log2 levels; a ring sends nearly twice the tensor, whatever the number of ranks.
        waited_s = self.kernel_s + math.ceil(math.log2(ranks)) * link.latency_s
        return waited_s + self.messages_s(0, 2 * (ranks - 1) / ranks * length_bytes, link)

    def leaders_s(self, nodes: int, length_bytes: float, together: int) -> float:
        """Return the time of an all-reduce between one rank of each node.

        Args:
            nodes: number of nodes.
            length_bytes: size of the tensor.
            together: number of devices of each node whose tensors that rank has summed; they use the network only so.
        """
        # While the others of its node wait, one rank has the bandwidth of all, up to what a rail carries.
        rate = min(self.rail_bytes_per_s or self.network.bytes_per_s, together * self.network.bytes_per_s)
        waited_s = self.kernel_s + 2 * math.ceil(math.log2(nodes)) * self.network.latency_s  # scatter, gather
        return waited_s + 2 * (nodes - 1) / nodes * length_bytes / rate

    def to_yaml(self) -> str:
        """Return the text of a file that ``load_machine`` reads."""
        tree = asdict(self)
        tree["efficiency"] = {kind: list(pair) for kind, pair in self.efficiency.items()}
        tree["peak_flops_per_s"] = dict(self.peak_flops_per_s)
        for key in PAIRS:
            tree[key] = {kind: list(pair) for kind, pair in tree[key].items()}
        tree["strip_s"] = list(self.strip_s) if any(self.strip_s) else None
        tree["update"] = tree["update"] and {key: value for key, value in tree["update"].items() if value}
        for key in OPTIONAL:
            if not tree[key]:
                del tree[key]
        return yaml.safe_dump(tree, sort_keys=False, default_flow_style=None, width=100)
