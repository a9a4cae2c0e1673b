"""Which GPU a rank takes: pure rules over what launchers say and what each node has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hyfi_core.errors import RequestError

DeviceRequest = Literal["auto", "cpu", "cuda"]

# torchrun, Slurm, Open MPI, MPICH and Intel MPI (Hydra): a process's number among those of its node.
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK", "SLURM_LOCALID")


@dataclass(frozen=True)
class RankGpus:
    """The GPUs that one rank sees.

    Attributes:
        host: name of its node.
        visible: ``CUDA_VISIBLE_DEVICES``, empty where it is not set: a launcher may give each rank GPUs of its own.
        count: how many PyTorch finds.
    """

    host: str
    visible: str
    count: int


def local_rank(environment: Mapping[str, str]) -> int:
    """Return this process's number among those of its node, 0 where no launcher says it."""
    return next((int(environment[name]) for name in _LOCAL_RANKS if environment.get(name, "").isdigit()), 0)


def gpu_index(environment: Mapping[str, str], count: int) -> int | None:
    """Return the GPU of a rank by its number on the node, as if every rank computed; None where it has none.

    Args:
        environment: of the process.
        count: GPUs that it sees. A rank that is given exactly one takes it, whatever its number.
    """
    number = local_rank(environment)
    if count == 1 and "CUDA_VISIBLE_DEVICES" in environment:
        return 0
    return number if number < count else None


def assign_devices(request: DeviceRequest, trainers: Sequence[RankGpus]) -> list[str]:
    """Return the device of each trainer: ``cpu``, or ``cuda:i`` with a GPU for each.

    Trainers that see the same GPUs take them in the order of their ranks. Loaders and validators on the node take none.

    Args:
        request: ``cuda``: each needs a GPU; ``auto``: GPUs where each has one, else all compute on the CPU.
        trainers: what each sees, in rank order.

    Raises:
        RequestError: ``cuda``, and a node has fewer GPUs than trainers.
    """
    if request == "cpu":
        return ["cpu"] * len(trainers)
    taken: dict[tuple[str, str], int] = {}
    devices = []
    for trainer in trainers:
        key = (trainer.host, trainer.visible)
        devices.append(f"cuda:{taken.get(key, 0)}")
        taken[key] = taken.get(key, 0) + 1
    lacking = next((t for t in trainers if taken[t.host, t.visible] > t.count), None)
    if lacking is None:
        return devices
    if request == "auto":
        return ["cpu"] * len(trainers)
    here = taken[lacking.host, lacking.visible]
    seen = "no GPU" if not lacking.count else f"{lacking.count} GPU{'s' if lacking.count > 1 else ''}"
    raise RequestError(
        f"run.device is cuda and {here} trainer{'s' if here > 1 else ''} on {lacking.host} "
        f"see{'' if here > 1 else 's'} {seen}; start at most one trainer for each GPU, or use run.device=cpu"
    )
