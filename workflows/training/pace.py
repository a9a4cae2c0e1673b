"""Measurement of each replica's speed before the first step, from which the shares of a batch are computed.

It times reading, forward and backward with one slide in each micro-batch, on a separate model, so that the weights,
statistics and random numbers of the run do not change.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

from hyfi_core.comm.agreement.agree import agree
from hyfi_core.comm.base import Communicator
from hyfi_core.errors import RequestError
from hyfi_core.plan.apportion import apportion
from workflows.config.ranks import RolesConfig
from workflows.console import counted
from workflows.training import start
from workflows.training.feeding import BatchImages, make_feed, preparation
from workflows.training.job import TrainingJob
from workflows.training.start import Roles

TIMED_TURNS = 3


def with_shares(job: TrainingJob, roles: Roles) -> TrainingJob:
    """Return the job with shares for ``roles.design: offload_naive``, measured unless given (collective).

    Raises:
        RequestError: On every trainer: the number of ranks is not a multiple of a replica's or does not match the
            shares, the batch is too small, or a trainer cannot build the model.
    """
    trainers, replica_ranks = roles.trainers, job.config.plan.build().ranks_per_replica
    if job.config.roles.design != "offload_naive" or trainers is None:
        return job
    if trainers.size % replica_ranks or (job.shares is not None and len(job.shares) != trainers.size // replica_ranks):
        raise RequestError(
            f"{trainers.size} ranks train ({job.config.plan.ranks} of the plan, the others are spare: roles.spare), "
            f"but a replica has {replica_ranks}; start a multiple of {replica_ranks}, with one replica for each of "
            f"roles.shares if given"
        )
    if job.shares is not None:
        return job
    replica = trainers.rank // replica_ranks
    group = trainers.split(replica, trainers.rank)
    assert group is not None
    # `agree` over all trainers rather than over each replica: if one fails, the others would wait for it below.
    turn = agree(trainers, lambda: _timed_turn(job, replace(roles, trainers=group)))
    pace_s = seconds_of_a_turn(trainers, replica, turn)
    shares = apportion(job.config.data.batch_size, pace_s, job.plan.microbatches)
    return replace(job, shares=shares, pace_s=pace_s)


def seconds_of_a_turn(trainers: Communicator, replica: int, turn: Callable[[int], None]) -> tuple[float, ...]:
    """Return the seconds that each replica takes for a turn, the same on every trainer (collective).

    All replicas are timed at the same time, as in training. The time of a rank is the median of a few turns, without
    the first, which compiles and fills caches; the time of a replica is that of its slowest rank.

    Args:
        trainers: Ranks of all replicas.
        replica: This rank's replica.
        turn: Runs the turn of a given number; called by all ranks of the replica together.
    """
    seconds = []
    # The first turn is not timed, because it compiles and fills caches.
    turn(0)
    # All replicas start the timed turns together: they share disk and memory bandwidth, as in training.
    trainers.barrier()
    for number in range(1, TIMED_TURNS + 1):
        start_s = time.perf_counter()
        turn(number)
        seconds.append(time.perf_counter() - start_s)
    medians = trainers.broadcast_object(trainers.gather_objects((replica, statistics.median(seconds))))
    slowest_s: dict[int, float] = {}
    for of_replica, median_s in medians:
        # A replica is as fast as its slowest rank, which the others wait for.
        slowest_s[of_replica] = max(median_s, slowest_s.get(of_replica, 0.0))
    return tuple(slowest_s[number] for number in sorted(slowest_s))


def describe_pace(job: TrainingJob) -> str:
    """Return the measured times as one line of text; empty if they were not measured."""
    if job.pace_s is None:
        return ""
    slides, paces = job.plan.microbatches, ", ".join(f"{pace_s:.3g}" for pace_s in job.pace_s)
    return f"replicas take {paces} s for {counted(slides, 'slide')}, so batches are divided in proportion to speed\n"


def _timed_turn(job: TrainingJob, roles: Roles) -> Callable[[int], None]:
    """Return the function that runs a turn with this replica only; collective over its ranks.

    ``roles.trainers``: here the ranks of this replica alone.
    """
    single = _single_replica_job(job)
    assert roles.trainers is not None
    # A second model: the turns move its running statistics, but not those of the model that the run trains.
    model, _ = agree(roles.trainers, lambda: start.make_model(single, loads=False))
    engine = start.make_engine(single, model, single.plan, roles.trainers, single.batches.batch_of(0))
    feed = make_feed(single, roles, engine, 0, engine.device)
    prepare = preparation(single)

    def turn(number: int) -> None:
        images = BatchImages(feed.batch(number), prepare)
        engine.accumulate(images, single.batch_labels(number, 0))

    return turn


def _single_replica_job(job: TrainingJob) -> TrainingJob:
    """Return the job of one replica whose micro-batches are single slides."""
    config = job.config
    changed = {
        "data": config.data.model_copy(update={"batch_size": job.plan.microbatches}),
        "plan": config.plan.model_copy(update={"replicas": 1, "sync_batch_norm": False}),
        # No loaders or validators: this rank reads for itself, so that its own speed is measured.
        "roles": RolesConfig(),
    }
    return replace(job, config=config.model_copy(update=changed))
