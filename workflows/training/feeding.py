"""Construction of a run's feeds and loaders, and their final report."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch

from data.loading.cell_feed import CellFeed
from data.loading.decode import Samples
from data.loading.feed import BatchPixels, Feed, FeedSpec, InlineFeed
from data.loading.loader import LoaderService
from data.loading.remote_feed import RemoteFeed
from data.store.node_cache import node_cache, share_on_node, user_folder
from hyfi_core.comm.base import Communicator
from hyfi_core.errors import RequestError
from hyfi_core.plan.box import Box
from hyfi_core.plan.input_part import InputPart
from hyfi_core.runtime.engine import Engine
from workflows.config.data import DataConfig
from workflows.evaluation.models import DTYPES, FORMATS
from workflows.paths import require_writable
from workflows.training.job import TrainingJob
from workflows.training.start import Roles

_AHEAD_OF_MEMORY = 0.05
"""Of ``plan.memory_bytes``: boxes of cells that loaders send ahead."""


def make_feed(job: TrainingJob, roles: Roles, engine: Engine, start_step: int, device: torch.device) -> Feed:
    """Return this trainer's feed for the steps after ``start_step``."""
    assert roles.trainers is not None
    accumulate, data = job.config.optimizer.accumulate, job.config.data
    turns = (start_step * accumulate, job.steps * accumulate)
    replica = roles.trainers.rank // job.plan.ranks_per_replica
    loaders, cells = roles.loaders_of.get(roles.world.rank, ()), engine.plan.cells is not None
    parts = _in_order(engine) if cells else engine.input_parts
    spec = FeedSpec(job.stream, job.layout, replica, tuple(parts), turns)
    if loaders and cells:
        limit = engine.plan.memory_bytes if device.type == "cpu" else None  # else that of the GPU
        ahead_bytes = None if limit is None else int(_AHEAD_OF_MEMORY * limit)
        return CellFeed(roles.world, loaders, spec, data.prefetch, ahead_bytes, device)
    if loaders:
        return RemoteFeed(roles.world, loaders, spec, data.prefetch, device)
    return InlineFeed(job.train, spec, data.cache_bytes, device)


def _in_order(engine: Engine) -> list[InputPart]:
    """Return the boxes of a turn in the order in which cells read them: micro-batch after micro-batch."""
    plan = engine.plan
    rounds = plan.microbatches // plan.directions
    sizes = [(part, (part.stop - part.first) // rounds) for part in engine.input_parts]
    return [part.microbatch(k * size, size) for k in range(rounds) for part, size in sizes]


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
        pixel_dtype: Of the images before normalisation, which a cell keeps instead of the normalised ones.
    """

    pixel_dtype: ClassVar[torch.dtype] = torch.uint8

    def __init__(self, pixels: BatchPixels, prepare: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._pixels, self._prepare = pixels, prepare

    def read(self, box: Box, first: int, stop: int) -> torch.Tensor:
        """Return ``(stop − first, 3, h, w)``: a box of the samples ``[first, stop)``, normalised."""
        return self.prepare(self.pixels(box, first, stop))

    def pixels(self, box: Box, first: int, stop: int) -> torch.Tensor:
        """Return the same before normalisation, uint8."""
        return self._pixels.read(box, first, stop)

    def prepare(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the normalised pixels."""
        return self._prepare(pixels)


def make_loader(job: TrainingJob, samples: Samples, roles: Roles, watch: Callable[[], None]) -> LoaderService:
    """Return this loader rank's service of the training ``samples``; ``watch`` is called between messages."""
    rank = roles.world.rank
    return LoaderService(
        roles.world,
        [trainer for trainer, loaders in roles.loaders_of.items() if rank in loaders],
        samples,
        job.stream,
        job.layout,
        workers=job.config.data.workers or max(1, torch.get_num_threads()),
        cache_bytes=job.config.data.cache_bytes,
        watch=watch,
        at_a_time=job.train.reads_at_a_time if samples is job.train else 1,  # bags keep what they decode
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
    cache = node_cache()
    if cache is None:
        return None
    room, setting = cache.room(), f"data.node_cache_bytes={size_bytes:,}"
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
    loaders = {rank: report for reports in gathered for rank, report in reports}
    keys = ("samples", "cached", "read_bytes", "store_bytes", "shared_bytes", "sent_bytes", "replaced")
    return {
        "loaders": len(loaders),
        **{key: sum(report[key] for report in loaders.values()) for key in keys},
        "trainer_bytes": [sum(report["to_you_bytes"] for _, report in reports) for reports in gathered],
    }
