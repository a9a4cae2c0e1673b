"""Assignment of GPUs to ranks, from the launcher's environment and the GPUs of each node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

from hyfi_core.errors import RequestError

DeviceRequest = Literal["auto", "cpu", "cuda"]


def device_request(text: str) -> DeviceRequest:
    """Parse ``--device``.

    Raises:
        RequestError: the value is not allowed.
    """
    if text not in get_args(DeviceRequest):
        raise RequestError(f"--device {text}: use one of {', '.join(get_args(DeviceRequest))}")
    return cast(DeviceRequest, text)


# Variables of Open MPI, MPICH, Intel MPI (Hydra) and Slurm. Slurm's is last, because ranks of an mpiexec within its job
# have it, too.
_OF_MPI = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK", "SLURM_LOCALID")
_OF_TORCHRUN = ("LOCAL_RANK",)


@dataclass(frozen=True)
class RankGpus:
    """The GPUs that one rank sees.

    Attributes:
        host: name of its node.
        visible: ``CUDA_VISIBLE_DEVICES``, empty if not set: a launcher may give each rank its own GPUs.
        count: number of GPUs that PyTorch finds.
    """

    host: str
    visible: str
    count: int


def local_rank(environment: Mapping[str, str], by_torchrun: bool) -> int:
    """Return the local rank of this process, 0 if no launcher sets it.

    Args:
        environment: environment variables of the process.
        by_torchrun: whether torchrun started it: then its variable counts before those of MPI, and otherwise after
            them, since a shell may have variables of an earlier launcher.
    """
    names = (*_OF_TORCHRUN, *_OF_MPI) if by_torchrun else (*_OF_MPI, *_OF_TORCHRUN)
    return next((int(environment[name]) for name in names if environment.get(name, "").isdigit()), 0)


def gpu_index(environment: Mapping[str, str], by_torchrun: bool, count: int) -> int | None:
    """Return the number of this rank's GPU: its local rank; None if it sees too few GPUs.

    Ranks that do not compute, such as loaders, are counted as well, because no rank knows the others' roles yet.

    Args:
        environment: environment variables of the process.
        by_torchrun: whether torchrun started it.
        count: GPUs that it sees. A rank that sees exactly one uses it.
    """
    # The launcher has chosen a GPU for this rank; the only GPU of a process has the number 0.
    if count == 1 and "CUDA_VISIBLE_DEVICES" in environment:
        return 0
    number = local_rank(environment, by_torchrun)
    return number if number < count else None


def assign_devices(
    request: DeviceRequest, trainers: Sequence[RankGpus], option: str = "run.device=", role: str = "trainer"
) -> list[str]:
    """Return the device of each trainer: ``cpu``, or ``cuda:i`` with a GPU for each.

    Trainers that see the same GPUs use them in rank order. Loaders and validators use none.

    Args:
        request: ``cuda``: each needs a GPU; ``auto``: GPUs if each has one, else all use the CPU.
        trainers: the GPUs that each trainer sees, in rank order.
        option: name of the option, for messages.
        role: name of the ranks, for messages.

    Raises:
        RequestError: ``cuda``, and a node has fewer GPUs than trainers.
    """
    if request == "cpu":
        return ["cpu"] * len(trainers)
    users = Counter[tuple[str, str]]()  # (host, visible GPUs) -> trainers that see these GPUs
    devices = []
    for trainer in trainers:
        devices.append(f"cuda:{users[trainer.host, trainer.visible]}")
        users[trainer.host, trainer.visible] += 1
    # All or none: ranks on different kinds of devices would wait for the slowest.
    lacking = next((t for t in trainers if users[t.host, t.visible] > t.count), None)
    if lacking is None:
        return devices
    if request == "auto":
        return ["cpu"] * len(trainers)
    sharing = users[lacking.host, lacking.visible]
    gpus = "no GPU" if not lacking.count else f"{lacking.count} GPU{'s' if lacking.count > 1 else ''}"
    raise RequestError(
        f"{option.rstrip('= ')} is cuda, but {sharing} {role}{'s' if sharing > 1 else ''} on {lacking.host} "
        f"see{'' if sharing > 1 else 's'} {gpus}; start at most one {role} for each GPU, or use {option}cpu"
    )


def spare_devices(request: DeviceRequest, trainers: Sequence[RankGpus], extra_ranks: Sequence[RankGpus]) -> list[str]:
    """Return the device of each rank that computes beside trainers: a GPU that they leave free, or ``cpu``.

    Args:
        request: with ``cpu`` none uses a GPU.
        trainers: GPUs of the trainers, which use them if there are enough.
        extra_ranks: GPUs of the other ranks, in rank order.
    """
    if request == "cpu":
        return ["cpu"] * len(extra_ranks)
    users = Counter((trainer.host, trainer.visible) for trainer in trainers)  # ranks that see the same GPUs
    if any(users[trainer.host, trainer.visible] > trainer.count for trainer in trainers):
        users.clear()  # too few GPUs for the trainers, which all use the CPU then
    devices = []
    for rank in extra_ranks:
        number = users[rank.host, rank.visible]
        users[rank.host, rank.visible] += 1
        devices.append(f"cuda:{number}" if number < rank.count else "cpu")
    return devices
