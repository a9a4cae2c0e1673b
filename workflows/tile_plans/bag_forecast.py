"""Seconds and memory of a step with bags, for a plan.

::

    rank 0    ├ encode its tiles ┤├gather┤├ aggregator ┤├ encode what was not kept ┤├ backward ┤├reduce┤├update┤
    rank 1    ├ encode its tiles ┤├gather┤├ aggregator ┤├ encode what was not kept ┤├ backward ┤├reduce┤├update┤
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from math import ceil

from hyfi_core.cost.machine import MachineModel
from hyfi_core.errors import RequestError
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.tiles.memory_budget import SLACK, chunk_size
from workflows.tile_plans.bag_costs import BagCosts

_DRAWS = 64
"""Number of random batches over which the tiles of the slowest replica are averaged."""


@dataclass(frozen=True)
class BagForecast:
    """The forecast of a step.

    Attributes:
        plan: The plan, with ``memory_bytes``.
        step_s: Seconds of a step.
        parts_s: Seconds of each part of a step, by name.
        memory_bytes: Bytes of the rank that needs most, for the slides with most tiles.
        least_bytes: Bytes that this rank needs if no chunk keeps its activations.
        chunk: Number of tiles that are encoded at once.
        kept: Share of the tiles whose activations are kept, 0 to 1; 1 if the encoder is not trained.
        slides: Number of slides of a step.
    """

    plan: ParallelPlan
    step_s: float
    parts_s: dict[str, float]
    memory_bytes: int
    least_bytes: int
    chunk: int
    kept: float
    slides: int

    @property
    def bound_by(self) -> str:
        """The part that takes most of the step."""
        return max(self.parts_s, key=lambda name: self.parts_s[name])


def forecast_bags(costs: BagCosts, plan: ParallelPlan, slides: int, machine: MachineModel) -> BagForecast:
    """Return the forecast of a step.

    Args:
        costs: Costs of the run.
        plan: The plan, with ``tiles`` and ``replicas``; without ``memory_bytes`` the machine's memory is the limit.
        slides: Number of slides of a step, over all replicas.
        machine: The machine model.

    Raises:
        RequestError: The slides with most tiles do not fit into memory; the message has both amounts.
    """
    ranks_of_slide, slides_of_replica = plan.tiles or 1, slides // plan.replicas
    limit_bytes = machine.memory_bytes if plan.memory_bytes is None else plan.memory_bytes
    chunk = chunk_size(costs.facts, limit_bytes, costs.chunk)
    # Memory must suffice for the slides with most tiles; the time is that of a mean batch.
    longest = sorted(costs.tiles, reverse=True)[:slides_of_replica]
    # Chunks and tiles of one rank, over the slides of its replica.
    chunks = sum(ceil(ceil(n / ranks_of_slide) / chunk) for n in longest)
    tiles = sum(ceil(n / ranks_of_slide) for n in longest)
    least_bytes = _least_bytes(costs, plan, longest, chunk, machine)
    kept_chunk_bytes = int(costs.facts.kept.of(chunk) * SLACK)
    trains = bool(costs.facts.trained)
    if least_bytes > limit_bytes:
        raise RequestError(
            f"memory: a step of slides with {max(longest):,} tiles needs at least {least_bytes / 1e9:.3g} GB for each "
            f"rank, but {limit_bytes / 1e9:.3g} GB are allowed; use more ranks for a slide (plan.tiles), or freeze "
            f"parts of the encoder (model.encoder.train)"
        )
    kept_chunks = min(chunks, (limit_bytes - least_bytes) // max(1, kept_chunk_bytes)) if trains else 0
    kept = kept_chunks / max(1, chunks) if trains else 1.0
    parts = _parts_s(costs, plan, slides, machine, kept)
    mean_chunk = ceil(tiles / max(1, chunks))
    # Without the chunk that is worked on, which is in `least_bytes`.
    kept_bytes = max(0, kept_chunks - 1) * costs.facts.kept.of(mean_chunk)
    # What a forward frees stays with the process: it lies between the blocks of chunks that are kept.
    freed_bytes = costs.facts.forward.of(chunk) if kept_chunks < chunks and trains else 0
    return BagForecast(
        plan=replace(plan, memory_bytes=limit_bytes),
        step_s=sum(parts.values()),
        parts_s=parts,
        memory_bytes=min(limit_bytes, least_bytes + int((kept_bytes + freed_bytes) * SLACK)),
        least_bytes=least_bytes,
        chunk=chunk,
        kept=kept,
        slides=slides,
    )


def bag_plans(costs: BagCosts, ranks: int, slides: int, machine: MachineModel) -> tuple[list[BagForecast], list[str]]:
    """Return (forecasts of all plans with ``ranks`` ranks, the fastest first; why each other plan does not work)."""
    fitting, refused = [], []
    for ranks_of_slide in (n for n in range(1, ranks + 1) if ranks % n == 0):
        plan = ParallelPlan(tiles=ranks_of_slide, replicas=ranks // ranks_of_slide)
        if slides % plan.replicas:
            refused.append(f"replicas {plan.replicas}: {slides} slides of a step cannot be divided among them")
            continue
        try:
            fitting.append(forecast_bags(costs, plan, slides, machine))
        except RequestError as error:
            refused.append(f"tiles {ranks_of_slide}, replicas {plan.replicas}: {error}")
    return sorted(fitting, key=lambda forecast: forecast.step_s), refused


def _least_bytes(costs: BagCosts, plan: ParallelPlan, longest: list[int], chunk: int, machine: MachineModel) -> int:
    """Return the bytes that a rank needs if it keeps no activations; ``longest``: tiles of the longest slides."""
    # Ranks that reduce gradients have them twice: in the parameters and in the buckets of messages.
    gradient_copies, moments = 2 if plan.ranks > 1 else 1, 2
    state = costs.weight_bytes + costs.trained_bytes * (gradient_copies + moments)
    ranks_of_slide = plan.tiles or 1
    if costs.shard and ranks_of_slide > 1:
        state = state // ranks_of_slide + costs.gathered_bytes
    work = costs.facts.peak if costs.facts.trained else costs.facts.forward
    # The chunk at work, and the tiles of it and of the next one.
    working = work.of(chunk) + 2 * costs.tile_bytes * chunk
    process = costs.process_bytes if machine.device == "cpu" else 0
    return process + state + costs.lasting_bytes(longest) + int(working * SLACK)


def _parts_s(costs: BagCosts, plan: ParallelPlan, slides: int, machine: MachineModel, kept: float) -> dict[str, float]:
    """Return the seconds of each part of a step; the messages that gather divided weights are not counted."""
    ranks_of_slide, slides_of_replica = plan.tiles or 1, slides // plan.replicas
    tiles = _mean_longest(costs.tiles, plan.replicas, slides_of_replica)
    own_tiles = tiles / ranks_of_slide
    crowded = plan.ranks > 1  # other devices of the node compute, too, which slows this one
    forward_s, backward_s = (_tile_s(costs, machine, backward, crowded) for backward in (False, True))
    trains = bool(costs.facts.trained)
    link = machine.link(plan.ranks)
    vector_bytes = costs.facts.features * costs.facts.dtype.itemsize
    # All vectors but the rank's own.
    gathered_bytes = tiles * vector_bytes * (ranks_of_slide - 1) / ranks_of_slide
    head_s = machine.operator_s(costs.bag_flops * slides_of_replica, 0.0, "product", costs.dtype, crowded=crowded)
    read_s = own_tiles * costs.file_bytes / machine.disk_bytes_per_s
    return {
        "reading": read_s,
        "encoding": own_tiles * forward_s,
        "encoding again": own_tiles * forward_s * (1 - kept) if trains else 0.0,
        "backward": own_tiles * backward_s if trains else 0.0,
        "aggregator": head_s,
        "gathering": machine.messages_s(
            slides_of_replica * (ranks_of_slide - 1), gathered_bytes, machine.link(ranks_of_slide)
        ),
        "reducing": machine.all_reduce_s(plan.ranks, costs.trained_bytes, link) if plan.ranks > 1 else 0.0,
        "update": machine.update_s(costs.tensors, costs.trained_bytes, crowded),
    }


def _tile_s(costs: BagCosts, machine: MachineModel, backward: bool, crowded: bool) -> float:
    """Return the seconds of a tile: products, and activations that are written and read."""
    flops = costs.backward_flops if backward else costs.forward_flops
    products = sum(machine.operator_s(n, 0.0, kind, costs.dtype, backward, crowded) for kind, n in flops.items())
    moved_bytes = costs.facts.kept.each * (3 if backward else 2)
    return products + machine.operator_s(0.0, moved_bytes, "elementwise", costs.dtype, backward, crowded)


def _mean_longest(tiles: tuple[int, ...], replicas: int, slides: int) -> float:
    """Return the number of tiles of the replica that has most, for which the others wait: a mean over random batches.

    Args:
        tiles: Tiles of each slide.
        replicas: Number of replicas.
        slides: Slides of each replica in a batch.
    """
    rng = random.Random(0)  # a fixed seed, so that a forecast repeats
    batches = [[sum(rng.choices(tiles, k=slides)) for _ in range(replicas)] for _ in range(_DRAWS)]
    return sum(map(max, batches)) / _DRAWS
