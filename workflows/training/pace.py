"""How fast each replica is, measured on its own ranks before the first step; the shares of a batch follow from it.

It times what a step does: read slides, forward, backward, with one slide in each micro-batch. It runs on
a model of its own, which is then forgotten: no weight, statistic or random number of the run is touched.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from hyfi_core.comm.base import Communicator
from hyfi_core.errors import RequestError
from hyfi_core.plan.apportion import apportion
from workflows.config.ranks import RolesConfig
from workflows.training import start
from workflows.training.feeding import BatchImages, make_feed, preparation
from workflows.training.job import TrainingJob
from workflows.training.start import Roles

TIMED = 3


def with_shares(job: TrainingJob, roles: Roles) -> TrainingJob:
    """Return the job with the shares of its replicas, if they are to be chosen by speed (collective).

    Raises:
        RequestError: the ranks are not a multiple of a replica, or do not match the shares; or the batch is too small.
    """
    trainers, of_one = roles.trainers, job.config.plan.build().ranks_per_replica
    if job.config.roles.design != "offload_naive" or trainers is None:
        return job
    if trainers.size % of_one or (job.shares is not None and len(job.shares) != trainers.size // of_one):
        raise RequestError(
            f"{trainers.size} ranks train ({job.config.plan.ranks} of the plan, the others are spare: roles.spare), "
            f"but a replica has {of_one}; start a multiple of {of_one}, with one replica for each of roles.shares if "
            f"given"
        )
    if job.shares is not None:
        return job
    replica = trainers.rank // of_one
    group = trainers.split(replica, trainers.rank)
    assert group is not None
    pace_s = measured(trainers, replica, _timed_turn(job, replace(roles, trainers=group)))
    shares = apportion(job.config.data.batch_size, pace_s, job.plan.microbatches)
    return replace(job, shares=shares, pace_s=pace_s)


def measured(trainers: Communicator, replica: int, turn: Callable[[int], None]) -> tuple[float, ...]:
    """Return the seconds that each replica takes for a turn, the same on every trainer (collective).

    All replicas are timed at once, as they will work. A replica is as fast as its slowest rank, and a rank takes the
    median of a few turns; the first, which compiles and fills caches, does not count.

    Args:
        trainers: all replicas.
        replica: this rank's.
        turn: does the turn of a number; all ranks of the replica together.
    """
    seconds = []
    turn(0)
    trainers.barrier()
    for number in range(1, TIMED + 1):
        start_s = time.perf_counter()
        turn(number)
        seconds.append(time.perf_counter() - start_s)
    found = trainers.broadcast_object(trainers.gather_objects((replica, statistics.median(seconds))))
    count = 1 + max(index for index, _ in found)
    return tuple(max(taken for index, taken in found if index == wanted) for wanted in range(count))


def describe_pace(job: TrainingJob) -> str:
    """Return the measured pace as one line of text, or ""."""
    if job.pace_s is None:
        return ""
    rounds, paces = job.plan.microbatches, ", ".join(f"{pace_s:.3g}" for pace_s in job.pace_s)
    return (
        f"replicas take {paces} s for {rounds} slide{'s' * (rounds > 1)}, so batches are divided in proportion to "
        f"speed\n"
    )


def _timed_turn(job: TrainingJob, roles: Roles) -> Callable[[int], None]:
    """Return what does a turn of a run by this replica alone, one slide in each micro-batch; ``trainers`` are its."""
    alone = _alone(job)
    assert roles.trainers is not None
    model = start.make_model(alone, tell=False)
    engine = start.make_engine(alone, model, alone.plan, roles.trainers, alone.layout.batch_of(0))
    feed = make_feed(alone, roles, engine, 0, next(model.parameters()).device)
    prepare = preparation(alone.config.run)

    def turn(number: int) -> None:
        images = BatchImages(feed.batch(number), prepare)
        engine.accumulate(images, torch.tensor(alone.batch_labels(number, 0)))

    return turn


def _alone(job: TrainingJob) -> TrainingJob:
    """Return the job of one replica whose micro-batches are single slides."""
    config, rounds = job.config, job.plan.microbatches
    changed = {
        "data": config.data.model_copy(update={"batch_size": rounds}),
        "plan": config.plan.model_copy(update={"replicas": 1, "sync_batch_norm": False}),
        "roles": RolesConfig(),
    }
    return replace(job, config=config.model_copy(update=changed))
