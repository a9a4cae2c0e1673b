"""Memory and cores of a run's hosts and GPUs, as its ranks see them."""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from data.cores import describe_excess_threads, usable_cores
from hyfi_core.job_limits import available_memory


@dataclass(frozen=True)
class RankPlace:
    """Where a rank runs, and what it may use there.

    Attributes:
        host: Host name.
        trainer: Its rank in the group of trainers; None if it is no trainer.
        cores: Number of cores that it may use.
        free_bytes: Memory that all ranks of the job together may still take on the host.
        limit: What limits ``free_bytes``, if it is not the memory of the host; see ``MemoryLimit``.
        own_bytes: Memory that this process may still take; None without a limit for each process.
        own_limit: What limits ``own_bytes``.
        device: Its GPU, ``cuda:i``; None on a CPU.
        device_bytes: Free memory of that GPU.
    """

    host: str
    trainer: int | None
    cores: int
    free_bytes: int
    limit: str = ""
    own_bytes: int | None = None
    own_limit: str = ""
    device: str | None = None
    device_bytes: int = 0

    @classmethod
    def here(cls, trainer: int | None, device: str) -> RankPlace:
        """Return the place of this process."""
        import torch

        of_job, own = available_memory(process=False), available_memory()
        rank_place = cls(
            socket.gethostname(), trainer, usable_cores(), free_bytes=of_job.free_bytes, limit=of_job.source
        )
        # `own` is the lowest limit: of this process, or of the whole job again.
        if own.per_process:
            rank_place = replace(rank_place, own_bytes=own.free_bytes, own_limit=own.source)
        if trainer is None or not device.startswith("cuda"):
            return rank_place
        return replace(rank_place, device=device, device_bytes=int(torch.cuda.mem_get_info(device)[0]))


@dataclass(frozen=True)
class MemoryPool:
    """Memory that trainers share: of a host, or of a GPU.

    Attributes:
        name: Host name, or GPU and host name.
        trainers: Ranks, in the group of trainers, of the trainers that take from it.
        free_bytes: Free memory.
        limit: What limits it, if that is not its size.
    """

    name: str
    trainers: tuple[int, ...]
    free_bytes: int
    limit: str = ""


@dataclass(frozen=True)
class Host:
    """One machine of a run.

    Attributes:
        memory: Its memory.
        ranks: Number of all its ranks.
        cores: Number of cores that its ranks may use.
    """

    memory: MemoryPool
    ranks: int
    cores: int


def hosts_of(ranks: Sequence[RankPlace]) -> list[Host]:
    """Return the hosts of a run from the places of all ranks."""
    by_name: dict[str, list[RankPlace]] = defaultdict(list)
    for rank in ranks:
        by_name[rank.host].append(rank)
    return [Host(_host_memory(name, group), len(group), max(r.cores for r in group)) for name, group in by_name.items()]


def _host_memory(name: str, ranks: Sequence[RankPlace]) -> MemoryPool:
    """Return the memory of a host: the free memory of the job, or the sum of its processes' limits if that is less."""
    trainers = tuple(rank.trainer for rank in ranks if rank.trainer is not None)
    # Ranks measure at different moments: this much was free at each of them.
    least = min(ranks, key=lambda rank: rank.free_bytes)
    # A rank without a limit of its own may take all that is free.
    own_bytes = sum(least.free_bytes if rank.own_bytes is None else rank.own_bytes for rank in ranks)
    if own_bytes < least.free_bytes:
        source = next(rank.own_limit for rank in ranks if rank.own_limit)
        return MemoryPool(name, trainers, own_bytes, f"{source} of {len(ranks)} ranks")
    return MemoryPool(name, trainers, least.free_bytes, least.limit)


def gpus_of(ranks: Sequence[RankPlace]) -> list[MemoryPool]:
    """Return the GPUs of a run's trainers; each trainer has its own."""
    return [
        MemoryPool(f"{rank.device} of {rank.host}", (rank.trainer,), rank.device_bytes)
        for rank in ranks
        if rank.device is not None and rank.trainer is not None
    ]


def crowded(hosts: Sequence[Host]) -> list[str]:
    """Return warnings about hosts with more ranks than cores."""
    return [
        f"{host.ranks} ranks share {host.cores} cores on {host.memory.name}: they slow each other down, and fewer "
        f"ranks would be as fast"
        for host in hosts
        if host.ranks > host.cores
    ]


def short_of_cores(ranks: Sequence[tuple[int, int]]) -> list[str]:
    """Return a warning if ranks have more threads than cores; it names the worst. ``ranks``: (threads, cores)."""
    texts: dict[int, str] = {}
    excess: dict[int, float] = {}
    for rank, (threads, cores) in enumerate(ranks):
        text = describe_excess_threads(threads, cores)
        if text is not None:
            texts[rank], excess[rank] = text, threads / cores
    if not texts:
        return []
    worst = max(excess, key=excess.__getitem__)
    more = f" (and {len(texts) - 1} more)" if len(texts) > 1 else ""
    return [f"rank {worst}{more} has {texts[worst]}"]
