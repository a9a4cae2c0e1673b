"""Construction of a run's feeds and loaders, and their final report."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from data.cores import usable_cores
from data.loading.cell_feed import CellFeed
from data.loading.decode import Samples
from data.loading.feed import BatchPixels, Feed, FeedSpec, InlineFeed
from data.loading.loader import LoaderService
from data.loading.remote_feed import RemoteFeed
from data.loading.worker_growth import WorkerGrowth
from data.store.node_cache import node_cache, share_on_node, user_folder
from hyfi_core.comm.base import Communicator
from hyfi_core.errors import RequestError
from hyfi_core.plan.box import Box
from hyfi_core.plan.input_part import InputPart
from hyfi_core.runtime.engine import Engine
from workflows.config.data import DataConfig
from workflows.console import say
from workflows.evaluation.models import DTYPES, FORMATS
from workflows.paths import require_writable
from workflows.training.job import TrainingJob
from workflows.training.start import Roles

_AHEAD_OF_MEMORY = 0.05
"""Fraction of ``plan.memory_bytes`` for boxes of cells that loaders send ahead."""
_CORES_OF_GPU = 2
"""Cores that a rank with a GPU needs: one thread launches the kernels of forward, another those of backward."""


def make_feed(job: TrainingJob, roles: Roles, engine: Engine, start_step: int, device: torch.device) -> Feed:
    """Return this trainer's feed for the steps after ``start_step``."""
    assert roles.trainers is not None
    accumulate, data = job.config.optimizer.accumulate, job.config.data
    # A turn is one forward and backward: `accumulate` of them make a step.
    turns = (start_step * accumulate, job.steps * accumulate)
    replica = roles.trainers.rank // job.plan.ranks_per_replica
    loaders, cells = roles.loaders_of.get(roles.world.rank, ()), engine.plan.cells is not None
    # Loaders send boxes in this order, and a receiver takes the next one that arrives: cells must read in this order.
    parts = _in_order(engine) if cells else engine.input_parts
    spec = FeedSpec(job.stream, job.batches, replica, tuple(parts), turns)
    if loaders and cells:
        limit = engine.plan.memory_bytes if device.type == "cpu" else None  # on a GPU, the limit is of its own memory
        ahead_bytes = None if limit is None else int(_AHEAD_OF_MEMORY * limit)
        return CellFeed(roles.world, loaders, spec, data.prefetch, ahead_bytes, device)
    if loaders:
        return RemoteFeed(roles.world, loaders, spec, data.prefetch, device)
    return InlineFeed(job.train, spec, data.cache_bytes, device)


def _in_order(engine: Engine) -> list[InputPart]:
    """Return the boxes of a turn in the order in which cells read them: micro-batch after micro-batch."""
    plan = engine.plan
    # Each direction of a pipeline takes half of the micro-batches, with boxes of its own.
    microbatches = plan.microbatches // plan.directions
    ordered = []
    for number in range(microbatches):
        for part in engine.input_parts:
            samples = (part.stop - part.first) // microbatches  # of a micro-batch
            ordered.append(part.microbatch(number * samples, samples))
    return ordered


def preparation(job: TrainingJob) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function from uint8 pixels to the model's input."""
    run = job.config.run
    return partial(job.normalisation, dtype=DTYPES[run.precision], memory_format=FORMATS[run.memory_format])


class BatchImages:
    """The images of one turn for the engine: read, then normalised on the trainer's device.

    Args:
        pixels: The feed's uint8 images.
        prepare: Normalises them, see `preparation`.

    Attributes:
        pixel_dtype: Dtype of the images before normalisation; cells keep these, because they are smaller.
    """

    pixel_dtype: ClassVar[torch.dtype] = torch.uint8

    def __init__(self, pixels: BatchPixels, prepare: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._pixels, self._prepare = pixels, prepare

    def read(self, box: Box, first: int, stop: int) -> torch.Tensor:
        """Return ``(stop − first, 3, h, w)``: a box of the samples ``[first, stop)``, normalised."""
        return self.prepare(self.pixels(box, first, stop))

    def pixels(self, box: Box, first: int, stop: int) -> torch.Tensor:
        """Return the box that `read` returns, before normalisation, uint8."""
        return self._pixels.read(box, first, stop)

    def prepare(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the normalised pixels."""
        return self._prepare(pixels)


@dataclass(frozen=True)
class CoreUse:
    """The cores that a rank may use and needs.

    Attributes:
        host: Host name.
        cores: Numbers of the cores that it may use.
        usable: How many of them it may use at a time; a quota may allow fewer.
        needs: Number of cores on which it computes; None for a loader, which takes the remaining ones.
    """

    host: str
    cores: tuple[int, ...]
    usable: int
    needs: int | None


def most_workers(job: TrainingJob, roles: Roles, device: str) -> int | None:
    """Return how many decoding processes this loader may have (collective).

    Args:
        job: The run.
        roles: Roles of the ranks.
        device: Device of this rank.

    Returns:
        None on other ranks, and if ``data.workers`` is set.
    """
    if not roles.loader_ranks or job.config.data.workers is not None:
        return None
    is_loader = roles.world.rank in roles.loader_ranks
    # Validators count as trainers here: they compute, too.
    needs = None if is_loader else cores_of_trainer(device)
    cores = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
    own = CoreUse(socket.gethostname(), cores, usable_cores(), needs)
    rows = roles.world.broadcast_object(roles.world.gather_objects(astuple(own)))  # messages are JSON
    uses = [CoreUse(host, tuple(numbers), usable, needs) for host, numbers, usable, needs in rows]
    return max(cores_left(own, uses), torch.get_num_threads()) if is_loader else None


def cores_of_trainer(device: str) -> int:
    """Return the cores on which a rank with this device computes."""
    return _CORES_OF_GPU if device.startswith("cuda") else torch.get_num_threads()


def cores_left(own: CoreUse, uses: Sequence[CoreUse]) -> int:
    """Return the cores for a loader: an equal part of those that other ranks with the same cores do not need."""
    # Containers of one host may have different cores; ranks with others do not compete for these.
    mates = [use for use in uses if (use.host, use.cores) == (own.host, own.cores)]
    loaders = sum(use.needs is None for use in mates)
    # Negative if trainers need more cores than there are: `most_workers` allows one process a thread at least.
    return (own.usable - sum(use.needs or 0 for use in mates)) // max(1, loaders)


def make_loader(
    job: TrainingJob, samples: Samples, roles: Roles, check_signals: Callable[[], None], most: int | None
) -> LoaderService:
    """Return this loader rank's service of the training ``samples``.

    Args:
        job: The run.
        samples: The training samples.
        roles: Roles of the ranks.
        check_signals: Called between messages.
        most: Largest number of decoding processes to which the loader may grow, from `most_workers`; None: no growth.
    """
    rank, data = roles.world.rank, job.config.data
    workers = data.workers or max(1, torch.get_num_threads())
    growth = None
    # `most` is None if `data.workers` is set: a number that the user chose does not grow.
    if most is not None and most > workers:
        messages = RaisedWorkers(roles.describe())
        kept_bytes = getattr(samples, "kept_bytes", 0)
        growth = WorkerGrowth(most, on_rise=messages, on_failure=messages.failed, worker_kept_bytes=kept_bytes)
    return LoaderService(
        roles.world,
        [trainer for trainer, loaders in roles.loaders_of.items() if rank in loaders],
        samples,
        job.stream,
        job.batches,
        workers=workers,
        cache_bytes=data.cache_bytes,
        check_signals=check_signals,
        at_a_time=job.train.reads_at_a_time if samples is job.train else 1,  # bags keep what they decode
        growth=growth,
    )


class RaisedWorkers:
    """Says once that a loader raises the number of its decoding processes."""

    def __init__(self, loader: str) -> None:
        self._loader, self._said = loader, False

    def __call__(self, workers: int, most: int) -> None:
        """Say, the first time, how many processes there are now and how many there may be."""
        if not self._said:
            say(
                f"{self._loader}: trainers wait for images, and cores are free: {workers} decoding processes, up to "
                f"{most} while they wait (data.workers sets a fixed number)"
            )
        self._said = True

    def failed(self, workers: int, error: OSError) -> None:
        """Say that the number of processes stays as it is."""
        say(
            f"{self._loader}: one more decoding process cannot be started ({error.strerror or error}); it stays at "
            f"{workers}"
        )


def share_chunks(data: DataConfig) -> str | None:
    """Share decoded chunks with the other processes of this node, as configured.

    Returns:
        A note if the disk has less room than configured; None if it has enough.

    Raises:
        RequestError: The folder cannot be written, or its disk is smaller than the cache may become.
    """
    if data.node_cache is not None:
        require_writable(data.node_cache)
    try:
        share_on_node(data.node_cache_bytes, user_folder(data.node_cache))
        return _lack_of_room(data.node_cache_bytes)
    except OSError as error:
        raise RequestError(
            f"data.node_cache: {error.filename or data.node_cache} cannot be written ({error.strerror}); choose "
            f"another folder"
        ) from error


def _lack_of_room(size_bytes: int) -> str | None:
    """Return a warning if the disk of the node's cache is too full for it; None if it is not.

    Raises:
        RequestError: The disk is too small.
    """
    cache = node_cache()
    if cache is None:
        return None
    room, setting = cache.room(), f"data.node_cache_bytes={size_bytes:,}"
    # Never possible: refused. Full at the moment: only noted, because others may free room while the run goes on.
    if size_bytes > room.disk_bytes:
        raise RequestError(
            f"{setting}: the disk of {cache.folder} on {socket.gethostname()} has {room.disk_bytes:,} bytes in all; "
            f"give at most {room.usable_bytes:,}, which are usable now, or a data.node_cache on a larger disk"
        )
    if size_bytes > room.usable_bytes:
        return (
            f"{setting}: only {room.usable_bytes:,} bytes are usable on the disk of {cache.folder} on "
            f"{socket.gethostname()}; when they are used up, further chunks are not shared"
        )
    return None


def loading_report(trainers: Communicator, reports: Mapping[int, Any]) -> dict[str, Any] | None:
    """Return statistics of the loaders and the bytes sent to each trainer, on trainer 0 (collective).

    None on other trainers, and if there are no loaders.
    """
    mine = [[rank, report] for rank, report in reports.items()]
    gathered = trainers.gather_objects(mine)
    if gathered is None or not any(gathered):
        return None
    # By rank, because a loader that serves several trainers reports to each of them.
    loaders = {rank: report for reports in gathered for rank, report in reports}
    keys = ("samples", "cached", "read_bytes", "store_bytes", "shared_bytes", "sent_bytes", "replaced", "workers")
    return {
        "loaders": len(loaders),
        **{key: sum(report[key] for report in loaders.values()) for key in keys},
        # Of a loader's report to a trainer, ``to_you_bytes`` are those that this trainer got.
        "trainer_bytes": [sum(report["to_you_bytes"] for _, report in reports) for reports in gathered],
    }
