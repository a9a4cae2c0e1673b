"""Memory check before a run: compares the forecast for the trainers with the free memory of each host and GPU.

trainers on CPUs    process, weights, maps                       the host: its memory, or a limit of the job
trainers on GPUs    weights, maps                                each GPU
                    process, copies of written checkpoints       the host
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from hyfi_core.cost.memory.forecast import MemoryForecast, forecast_memory, rank_peaks
from hyfi_core.cost.search.cuts import with_cuts
from hyfi_core.cost.step.simulator import grown_bytes
from hyfi_core.errors import RequestError
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.plan.placement import Placement
from hyfi_core.runtime.saving.shares import sharing
from workflows.evaluation.programs import ModelPrograms
from workflows.launch.memory_pools import MemoryPool, RankPlace, crowded, gpus_of, hosts_of, short_of_cores
from workflows.out_of_memory import GENERAL_ADVICE

if TYPE_CHECKING:
    from hyfi_core.capture.program import Program
    from workflows.training.job import TrainingJob
    from workflows.training.start import Roles

PROCESS_BYTES = 400_000_000
"""Memory of a rank before its first step: Python, torch and the libraries."""

_PIECES = 8
"""``plan.interleave`` to propose if one stage has too little memory; more pieces save little (benchmarks/LOG.md)."""


def rank_bytes(plan: ParallelPlan, stages: Sequence[MemoryForecast], trainer_bytes: Sequence[int]) -> list[int]:
    """Return the bytes of each trainer's process in the host's memory.

    A rank that writes checkpoints also holds a copy of its share of a stage's weights and moments.

    Args:
        plan: The run's plan.
        stages: Forecast for each stage.
        trainer_bytes: Bytes in the host's memory that training needs on each rank of one plane; planes are alike.
    """
    written = _written_bytes(plan, Placement.of(plan), stages)
    # Ranks count through a plane, then the next plane, then the next replica: all planes need the same.
    return [
        PROCESS_BYTES + trainer_bytes[rank % len(trainer_bytes)] + written.get(rank, 0) for rank in range(plan.ranks)
    ]


def _written_bytes(plan: ParallelPlan, placement: Placement, stages: Sequence[MemoryForecast]) -> dict[int, int]:
    """Return rank -> the bytes that it writes to a checkpoint."""
    written: dict[int, int] = defaultdict(int)
    for stage, forecast in enumerate(stages):
        # Both directions of a stage hold its weights; each replica holds them again. They share the writing.
        groups = (placement.group(stage, direction) for direction in range(placement.directions))
        holders = sorted({rank for group in groups for rank in group})
        copies = [first + rank for first in range(0, plan.ranks, placement.size) for rank in holders]
        writers = sharing(forecast.weight_bytes, copies)
        for rank in writers:
            written[rank] += forecast.written_bytes // len(writers)
    return written


def describe_memory(trainer_bytes: Sequence[int], pools: Sequence[MemoryPool], kind: str = "memory") -> str:
    """Return one line of text: the peak of each trainer, and the total of the fullest pool."""
    totals = {pool.name: sum(trainer_bytes[rank] for rank in pool.trainers) for pool in pools}
    # By the fraction of its memory rather than by bytes: a small host may be full earlier.
    fullest = max(pools, key=lambda pool: totals[pool.name] / max(1, pool.free_bytes))
    most, least = max(trainer_bytes), min(trainer_bytes)
    # A range only if ranks differ by more than the forecast is accurate.
    smallest = f"{_gb(least)} to " if most > 1.1 * least else ""
    return (
        f"{kind}: about {smallest}{_gb(most)} GB for each trainer, {_gb(totals[fullest.name])} GB of "
        f"{_gb(fullest.free_bytes)} GB free on {fullest.name}{_limit_text(fullest)}"
    )


def _limit_text(pool: MemoryPool) -> str:
    """Return the limit of a pool's memory in brackets, such as the job's; empty if it is the size of the memory."""
    return f" ({pool.limit})" if pool.limit else ""


def _gb(count_bytes: float) -> str:
    """Return gigabytes with two digits, or whole ones: 0.46, 1.5, 23, 1523."""
    gb = count_bytes / 1e9
    return f"{gb:.0f}" if gb >= 100 else f"{gb:.2g}"


def check_room(
    trainer_bytes: Sequence[int], pools: Sequence[MemoryPool], cheaper: Mapping[str, Sequence[int]] | None = None
) -> None:
    """Check that every pool has enough memory for its trainers.

    Args:
        trainer_bytes: Least bytes of each trainer.
        pools: Memory of the run's hosts, or of its GPUs.
        cheaper: Change of the configuration, as on the command line -> least bytes of each trainer with it.

    Raises:
        RequestError: A pool has too little. The message names it, both amounts, and the first change that would fit.
    """
    for pool in pools:
        total = sum(trainer_bytes[rank] for rank in pool.trainers)
        if total <= pool.free_bytes:
            continue
        change = next(
            (change for change, bytes_of_change in (cheaper or {}).items() if fits(bytes_of_change, pools)), None
        )
        advice = (
            f"{change} would fit"
            if change is not None
            else "use more machines (plan.grids spreads an image), compute it cell by cell (plan.cells=auto "
            "plan.spill=FOLDER), or use a smaller data.size_px or a coarser data.mpp"
        )
        raise RequestError(
            f"memory: the trainers on {pool.name} ({len(pool.trainers)}) need at least {_gb(total)} GB, but "
            f"{_gb(pool.free_bytes)} GB are free{_limit_text(pool)}; {advice}"
        )


def cheaper_plans(plan: ParallelPlan, batch: int) -> dict[str, ParallelPlan]:
    """Return change on the command line -> plan that needs less memory and gives the same result, to try in order.

    Args:
        plan: The run's plan.
        batch: Images in a replica's batch.
    """
    cheaper = {}
    if plan.schedule in ("1f1b", "sequential") and plan.shares is None:
        group = len(plan.grids) if plan.interleave > 1 else 1  # interleaved stages of several grids need whole groups
        for count in range(plan.microbatches + 1, batch + 1):
            # Only divisors of the batch, as micro-batches have equal sizes.
            if batch % count == 0 and count % group == 0:
                cheaper[f"plan.microbatches={count}"] = replace(plan, microbatches=count)
    if plan.recompute is False and plan.stages > 1:
        cheaper |= {
            f"{change} plan.recompute=true": replace(changed, recompute=True) for change, changed in cheaper.items()
        }
        # To the front: tried before those that change two settings.
        cheaper = {"plan.recompute=true": replace(plan, recompute=True), **cheaper}
    if plan.recompute is False and plan.stages == 1 and plan.schedule == "1f1b":
        pieces = replace(plan, interleave=_PIECES, recompute=True, cuts="auto")
        # The cuts of a single stage may be an empty list, which is too few for its pieces.
        cuts = "" if plan.cuts == "auto" else " plan.cuts=auto"
        cheaper = {f"plan.interleave={_PIECES} plan.recompute=true{cuts}": pieces, **cheaper}
    return cheaper


def fits(trainer_bytes: Sequence[int], pools: Sequence[MemoryPool]) -> bool:
    """Whether every pool has enough memory for its trainers."""
    return all(sum(trainer_bytes[rank] for rank in pool.trainers) <= pool.free_bytes for pool in pools)


def check_memory(job: TrainingJob, roles: Roles, device: str, programs: ModelPrograms | None = None) -> list[str]:
    """Return, on rank 0, messages about memory and cores; empty elsewhere (collective).

    Args:
        job: The run.
        roles: Roles of the ranks.
        device: Device of this rank.
        programs: Captures of the run's model that this rank has made before; None: it captures them.

    Raises:
        RequestError: On rank 0, if a host or a GPU has less memory than the lower bound of what its trainers need.
    """
    import torch

    own_place = RankPlace.here(roles.trainers.rank if roles.trainers is not None else None, device)
    places = roles.world.gather_objects(asdict(own_place))
    threads = roles.world.gather_objects((torch.get_num_threads(), own_place.cores))
    if places is None or threads is None:
        return []
    ranks = [RankPlace(**fields) for fields in places]
    hosts, gpus = hosts_of(ranks), gpus_of(ranks)
    core_warnings = [*crowded(hosts), *short_of_cores(threads)]
    if job.plan.tiles is not None:
        return core_warnings  # chunks of tiles limit memory
    if job.plan.cells is not None:
        return [describe_unchecked(job.plan), *core_warnings]
    # From here on only rank 0: captures and forecasts take seconds, and all ranks' would be equal.
    memories = [host.memory for host in hosts]
    forecast = _Forecaster(job, bool(gpus), programs)
    pools = gpus or memories
    trainer_bytes = forecast.least_bytes(job.plan)
    # Changes are forecast only if needed: each captures the model for another micro-batch.
    cheaper = {} if fits(trainer_bytes, pools) else cheaper_plans(job.plan, _largest_batch(job))
    check_room(trainer_bytes, pools, forecast.of_changes(cheaper))
    lines = [describe_memory(forecast.host_bytes(job.plan), memories, "host memory")] if gpus else []
    return [describe_memory(forecast.device_bytes(job.plan), pools), *lines, *core_warnings]


def describe_unchecked(plan: ParallelPlan) -> str:
    """Return why the memory of a plan with cells is not compared with the free memory, and what limits it."""
    if plan.spill is None:
        limit = "plan.cells without plan.spill keep all maps (`hyfi simulate` forecasts them); a run without room ends"
    elif plan.memory_bytes is None:
        limit = "maps of cells take half of what is free, and others are spilled"
    else:
        limit = f"plan.memory_bytes keeps each trainer within {_gb(plan.memory_bytes)} GB"
    return f"memory is not compared with what is free: {limit}"


def advice_of(job: TrainingJob, forecast: Sequence[str]) -> str:
    """Return the advice to print if memory runs out: the forecast, and changes that need less."""
    cheaper = list(cheaper_plans(job.plan, _largest_batch(job))) if job.plan.cells is None else []
    changes = f"{' or '.join(cheaper[:3])} needs less and gives the same result. Otherwise, " if cheaper else ""
    forecast_text = "".join(f"forecast: {line}. " for line in forecast if line.startswith("memory:"))
    return forecast_text + changes + GENERAL_ADVICE


def _largest_batch(job: TrainingJob) -> int:
    """Return the images in the largest batch of a replica."""
    return max(job.batches.batch_of(replica) for replica in range(job.plan.replicas))


class _Forecaster:
    """Memory forecasts for a run with several plans.

    Args:
        job: The run.
        on_gpus: Whether its trainers compute on GPUs, where their weights and maps are.
        programs: Captures of the run's model; None: new ones are made.
    """

    def __init__(self, job: TrainingJob, on_gpus: bool, programs: ModelPrograms | None = None) -> None:
        self._batch, self._on_gpus = _largest_batch(job), on_gpus
        self._programs = ModelPrograms(job.config, job.task.outputs) if programs is None else programs

    def least_bytes(self, plan: ParallelPlan) -> list[int]:
        """Return a lower bound of the bytes that each trainer needs on its device."""
        plan, _, stages = self._stages(plan)
        return self._of_trainers(plan, rank_peaks(plan, stages, "least"))

    def of_changes(self, plans: Mapping[str, ParallelPlan]) -> dict[str, list[int]]:
        """Return change -> lower bounds of its plan; changes that a small model does not allow are left out."""
        bounds = {}
        for change, plan in plans.items():
            # A model with fewer modules than pieces cannot be cut.
            with contextlib.suppress(RequestError):
                bounds[change] = self.least_bytes(plan)
        return bounds

    def device_bytes(self, plan: ParallelPlan) -> list[int]:
        """Return the bytes that each trainer needs on its device."""
        plan, program, stages = self._stages(plan)
        if self._on_gpus:
            return self._of_trainers(plan, grown_bytes(program, plan, "cuda"))
        return rank_bytes(plan, stages, grown_bytes(program, plan, "cpu"))

    def host_bytes(self, plan: ParallelPlan) -> list[int]:
        """Return the bytes that each trainer on a GPU needs in its host's memory."""
        plan, _, stages = self._stages(plan)
        return rank_bytes(plan, stages, (0,))

    def _of_trainers(self, plan: ParallelPlan, stage_bytes: Sequence[int]) -> list[int]:
        # On a GPU only tensors count; its process is in the host's memory.
        process = 0 if self._on_gpus else PROCESS_BYTES
        return [process + stage_bytes[rank % len(stage_bytes)] for rank in range(plan.ranks)]

    def _stages(self, plan: ParallelPlan) -> tuple[ParallelPlan, Program, tuple[MemoryForecast, ...]]:
        """Return the plan with cuts, the captured model of a micro-batch, and the forecast of each stage."""
        program = self._programs.of(self._batch // plan.microbatches)
        plan = with_cuts(plan, program)
        return plan, program, forecast_memory(program, plan)
