"""Memory check before a run: compares the forecast for the trainers with the free memory of each host."""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from data.cores import describe_excess_threads, usable_cores
from hyfi_core.errors import RequestError
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.plan.placement import Placement
from hyfi_core.runtime.saving.shares import sharing
from workflows.evaluation.programs import ModelPrograms
from workflows.out_of_memory import GENERAL_ADVICE

if TYPE_CHECKING:
    from hyfi_core.cost.memory import MemoryForecast
    from workflows.training.job import TrainingJob
    from workflows.training.start import Roles

PROCESS_BYTES = 400_000_000
"""Memory of a rank before its first step: Python, torch and the libraries."""


@dataclass(frozen=True)
class Host:
    """One machine of a run.

    Attributes:
        name: Host name.
        trainers: Ranks, in the group of trainers, of its trainers.
        ranks: Number of all its ranks.
        cores: Number of cores that its ranks may use.
        free_bytes: Its free memory.
    """

    name: str
    trainers: tuple[int, ...]
    ranks: int
    cores: int
    free_bytes: int


def hosts_of(ranks: Sequence[tuple[str, int | None, int, int]]) -> list[Host]:
    """Return the hosts of a run from (host, rank among the trainers or None, cores, free bytes) of each rank."""
    by_name: dict[str, list[tuple[str, int | None, int, int]]] = defaultdict(list)
    for rank in ranks:
        by_name[rank[0]].append(rank)
    return [
        Host(name, tuple(r[1] for r in group if r[1] is not None), len(group), max(r[2] for r in group), group[0][3])
        for name, group in by_name.items()
    ]


def rank_bytes(plan: ParallelPlan, stages: Sequence[MemoryForecast], needed: Sequence[int]) -> list[int]:
    """Return the bytes of each trainer's process.

    A rank that writes checkpoints also has a copy of what it writes: its share of a stage's weights and moments.

    Args:
        plan: The run's plan.
        stages: Forecast for each stage.
        needed: What each rank of a plane needs for training.
    """
    written = _written_bytes(plan, Placement.of(plan), stages)
    return [PROCESS_BYTES + needed[rank % len(needed)] + written.get(rank, 0) for rank in range(plan.ranks)]


def _written_bytes(plan: ParallelPlan, placement: Placement, stages: Sequence[MemoryForecast]) -> dict[int, int]:
    """Return rank -> the bytes that it writes to a checkpoint."""
    found: dict[int, int] = defaultdict(int)
    for stage, forecast in enumerate(stages):
        holders = sorted({rank for way in range(placement.directions) for rank in placement.group(stage, way)})
        copies = [first + rank for first in range(0, plan.ranks, placement.size) for rank in holders]
        writers = sharing(forecast.weight_bytes, copies)
        for rank in writers:
            found[rank] += forecast.written_bytes // len(writers)
    return found


def describe_memory(needed: Sequence[int], hosts: Sequence[Host]) -> str:
    """Return one line of text: the peak of each trainer, and the total of the fullest host."""
    totals = {host.name: sum(needed[rank] for rank in host.trainers) for host in hosts}
    fullest = max(hosts, key=lambda host: totals[host.name] / max(1, host.free_bytes))
    spread = f"{_gb(min(needed))} to " * (max(needed) > 1.1 * min(needed))
    return (
        f"memory: about {spread}{_gb(max(needed))} GB for each trainer, {_gb(totals[fullest.name])} GB of "
        f"{_gb(fullest.free_bytes)} GB free on {fullest.name}"
    )


def _gb(count_bytes: float) -> str:
    """Return gigabytes with two digits, or whole ones: 0.46, 1.5, 23, 1523."""
    gb = count_bytes / 1e9
    return f"{gb:.0f}" if gb >= 100 else f"{gb:.2g}"


def crowded(hosts: Sequence[Host]) -> list[str]:
    """Return warnings about hosts with more ranks than cores."""
    return [
        f"{host.ranks} ranks share {host.cores} cores on {host.name}: they slow each other down, and fewer ranks "
        f"would be as fast"
        for host in hosts
        if host.ranks > host.cores
    ]


def short_of_cores(ranks: Sequence[tuple[int, int]]) -> list[str]:
    """Return a warning if ranks have more threads than cores, from (threads, cores) of each; with the worst of them."""
    texts = {rank: describe_excess_threads(*found) for rank, found in enumerate(ranks)}
    short = [rank for rank, text in texts.items() if text is not None]
    if not short:
        return []
    worst = max(short, key=lambda rank: ranks[rank][0] / ranks[rank][1])
    others = f" (and {len(short) - 1} more)" if len(short) > 1 else ""
    return [f"rank {worst}{others} has {texts[worst]}"]


def check_room(needed: Sequence[int], hosts: Sequence[Host], others: Mapping[str, Sequence[int]] | None = None) -> None:
    """Check that every host has enough memory for its trainers.

    Args:
        needed: Least bytes of each trainer.
        hosts: Hosts of the run.
        others: Changes of the configuration, as on the command line, to the bytes of each trainer with them.

    Raises:
        RequestError: A host does not. The message names it, both amounts, and the first change that would fit.
    """
    for host in hosts:
        total = sum(needed[rank] for rank in host.trainers)
        if total <= host.free_bytes:
            continue
        change = next((change for change, found in (others or {}).items() if fits(found, hosts)), None)
        advice = (
            f"{change} would fit"
            if change is not None
            else "use more machines (plan.grids spreads an image), compute it cell by cell (plan.cells=auto "
            "plan.spill=FOLDER), or use a smaller data.size_px or a coarser data.mpp"
        )
        raise RequestError(
            f"memory: the trainers on {host.name} ({len(host.trainers)}) need at least {_gb(total)} GB, but "
            f"{_gb(host.free_bytes)} GB are free; {advice}"
        )


def cheaper_plans(plan: ParallelPlan, batch: int) -> dict[str, ParallelPlan]:
    """Return plans that need less memory and give the same result, by their change on the command line.

    Args:
        plan: The run's plan.
        batch: Images in a replica's batch.
    """
    found = {}
    counts = [n for n in range(plan.microbatches + 1, batch + 1) if batch % n == 0]
    for count in counts if plan.schedule in ("1f1b", "sequential") and plan.shares is None else []:
        found[f"plan.microbatches={count}"] = replace(plan, microbatches=count)
    if plan.recompute is False and plan.stages > 1:
        found |= {f"{change} plan.recompute=true": replace(one, recompute=True) for change, one in found.items()}
        found = {"plan.recompute=true": replace(plan, recompute=True), **found}
    return found


def fits(needed: Sequence[int], hosts: Sequence[Host]) -> bool:
    """Whether every host has enough memory for its trainers."""
    return all(sum(needed[rank] for rank in host.trainers) <= host.free_bytes for host in hosts)


def check_memory(job: TrainingJob, roles: Roles) -> list[str]:
    """Return, on rank 0, messages about memory and cores; empty elsewhere (collective).

    Raises:
        RequestError: On rank 0, if a host has less memory than the lower bound of what its trainers need.
    """
    import torch

    from hyfi_core.process_memory import available_bytes

    number, cores = roles.trainers.rank if roles.trainers is not None else None, usable_cores()
    ranks = roles.world.gather_objects((socket.gethostname(), number, cores, available_bytes()))
    threads = roles.world.gather_objects((torch.get_num_threads(), cores))
    if ranks is None or threads is None:
        return []
    hosts = hosts_of(ranks)
    slow = [*crowded(hosts), *short_of_cores(threads)]
    if job.plan.cells is not None:
        return slow  # the forecast does not apply: cells limit memory
    forecast = _Forecaster(job)
    needed = forecast.bytes_of(job.plan, least=True)
    cheaper = {} if fits(needed, hosts) else cheaper_plans(job.plan, _largest_batch(job))
    check_room(needed, hosts, {change: forecast.bytes_of(plan, least=True) for change, plan in cheaper.items()})
    return [describe_memory(forecast.bytes_of(job.plan), hosts), *slow]


def advice_of(job: TrainingJob, forecast: Sequence[str]) -> str:
    """Return the advice to print if memory runs out: the forecast, and changes that need less."""
    cheaper = list(cheaper_plans(job.plan, _largest_batch(job))) if job.plan.cells is None else []
    changes = f"{' or '.join(cheaper[:3])} needs less and gives the same result. Otherwise, " if cheaper else ""
    forecast_text = "".join(f"forecast: {line}. " for line in forecast if line.startswith("memory:"))
    return forecast_text + changes + GENERAL_ADVICE


def _largest_batch(job: TrainingJob) -> int:
    """Return the images in the largest batch of a replica."""
    return max(job.layout.batch_of(replica) for replica in range(job.plan.replicas))


class _Forecaster:
    """Memory forecasts for a run with several plans."""

    def __init__(self, job: TrainingJob) -> None:
        self._batch = _largest_batch(job)
        self._programs = ModelPrograms(job.config, len(job.classes))

    def bytes_of(self, plan: ParallelPlan, least: bool = False) -> list[int]:
        from hyfi_core.cost.cuts import with_cuts
        from hyfi_core.cost.memory import forecast_memory, rank_peaks
        from hyfi_core.cost.simulator import grown_bytes

        program = self._programs.of(self._batch // plan.microbatches)
        plan = with_cuts(plan, program)
        stages = forecast_memory(program, plan)
        if least:
            needed = rank_peaks(plan, stages, "least")
            return [PROCESS_BYTES + needed[rank % len(needed)] for rank in range(plan.ranks)]
        return rank_bytes(plan, stages, grown_bytes(program, plan, "cpu"))
