"""A run's throughput in pixels and operations per second, and the memory of rank 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hyfi_core.errors import RequestError
from hyfi_core.process_memory import resident_bytes
from workflows.console import plain_number
from workflows.run_machine import machine_of

if TYPE_CHECKING:  # `hyfi status` needs no torch
    import torch

    from workflows.config.data import DataConfig
    from workflows.config.run import Config

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Throughput:
    """Converts a run's images per second.

    Attributes:
        image_px: Pixels of an image; 0 if none are read.
        image_flops: Operations of the model for an image, forward and backward.
        peak_flops_per_s: Peak of all trainers together; None: unknown, and so is utilisation.
        device: Device of this rank, for its memory.
    """

    image_px: int
    image_flops: float
    peak_flops_per_s: float | None
    device: torch.device

    def of(self, images_per_s: float) -> dict[str, float | None]:
        """Return the keys of a step's record: rates, share of the peak (None: unknown), bytes of memory."""
        flops_per_s = self.image_flops * images_per_s
        return {
            "gigapixels_per_second": self.image_px * images_per_s / 1e9,
            "flops_per_second": flops_per_s,
            "utilisation": None if self.peak_flops_per_s is None else flops_per_s / self.peak_flops_per_s,
            "memory_bytes": memory_bytes(self.device),
        }


def unit_of(data: DataConfig) -> str:
    """Return what a run counts: ``images``, or the ``slides`` or ``cases`` that are bags."""
    return "images" if data.kind == "images" else f"{data.bag}s"


def describe_speed(images_per_s: float, throughput: Mapping[str, Any], unit: str) -> str:
    """Return the speed as text: ``0.8 images/s, 170 MP/s, …``; ``unit``: see `unit_of`."""
    return f"{plain_number(images_per_s, 3)} {unit}/s, {describe_throughput(throughput)}"


def describe_throughput(throughput: Mapping[str, Any]) -> str:
    """Return the values of ``Throughput.of`` as text: ``170 MP/s, 1.2 TFLOP/s (34 % of peak), 3.1 GB``."""
    share = throughput["utilisation"]
    # Without `run.machine` the peak is unknown, and so is the share.
    peak = "" if share is None else f" ({plain_number(100 * share, 2)} % of peak)"
    pixels, flops = (
        _with_prefix(1e9 * throughput["gigapixels_per_second"]),
        _with_prefix(throughput["flops_per_second"]),
    )
    read = f"{pixels}P/s, " if throughput["gigapixels_per_second"] else ""  # runs of features read none
    return f"{read}{flops}FLOP/s{peak}, {plain_number(throughput['memory_bytes'] / 1e9, 2)} GB"


def _with_prefix(value: float) -> str:
    """Return a number and the prefix of its unit: ``1.2 T``."""
    size, prefix = next(((size, prefix) for size, prefix in _PREFIXES if value >= size), (1.0, ""))
    return f"{plain_number(value / size, 3)} {prefix}"


def memory_bytes(device: torch.device) -> int:
    """Return the memory of this rank's process now; on a GPU, the peak of its tensors so far."""
    if device.type != "cuda":
        return resident_bytes()
    import torch

    # The peak, because the memory of a moment between two steps says little about a GPU.
    return torch.cuda.max_memory_allocated(device)


def peak_flops_per_s(config: Config, trainers: int, device: str) -> float | None:
    """Return the peak of all trainers by ``run.machine``; None if that is not set.

    Raises:
        RequestError: There is no such machine, or it computes on another kind of device than the run.
    """
    if config.run.machine is None:
        return None
    machine = machine_of(config, config.run.machine)
    if machine.device != device.partition(":")[0]:
        raise RequestError(
            f"run.machine: given {config.run.machine}, which has the peak of a {machine.device} device, but trainers "
            f"compute on {device}; give a file of `hyfi doctor --measure FILE.yaml`, or null"
        )
    return trainers * machine.peak_flops_per_s[config.run.precision]


def describe_loading(report: Mapping[str, Any], of_tiles: bool = False) -> str:
    """Return the report of all loaders as one line of text.

    Args:
        report: From ``loading_report``.
        of_tiles: Whether loaders read tiles. All loaders read tiles of each slide, so no number of images is stated.
    """
    stored, shared, replaced = (report[key] for key in ("store_bytes", "shared_bytes", "replaced"))
    node = f" ({stored / 1e6:.1f} MB of chunks from the store, {shared / 1e6:.1f} MB from the nodes' caches)"
    read = f"{report['read_bytes'] / 1e6:.1f} MB"
    if not of_tiles:
        read = f"{report['samples']} images, {report['cached']} of them from memory, {read} of pixels"
    return (
        f"{report['loaders']} loader{'s' * (report['loaders'] > 1)}: {read} read"
        f"{node if stored or shared else ''}, {report['sent_bytes'] / 1e6:.1f} MB sent, at most "
        f"{max(report['trainer_bytes']) / 1e6:.1f} MB to one trainer, "
        f"{report['workers']} decoding process{'es' * (report['workers'] > 1)}"
        + (f"; {replaced} worker(s) replaced" if replaced else "")
    )
