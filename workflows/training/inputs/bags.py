"""Runs of bags: slides as tiles for an encoder and an aggregator, or as features for an aggregator alone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import torch
from torch import nn

from data.loading.tile_feed import TileFeed, TileSpan, spans
from data.tiles.bags import Bags, BagSource
from data.tiles.case_bags import grouped
from data.tiles.rows import BagRows, TileRow
from hyfi_core.comm.agreement.agree import agree
from hyfi_core.errors import RequestError
from hyfi_core.process_memory import return_what_is_freed
from hyfi_core.tiles.engine import TilesEngine
from hyfi_core.tiles.memory_budget import LARGE_BLOCK_BYTES
from hyfi_core.tiles.model import TileModel
from hyfi_core.tiles.parallelize_tiles import parallelize_tiles
from hyfi_core.tiles.settings import BatchNormMode
from workflows.evaluation.evaluate import EvaluationSet, InferenceEngine
from workflows.evaluation.tile_slides import AllTiles, TileInference
from workflows.tasks.task import make_loss
from workflows.training.inputs.run_inputs import Batches, RunInputs, TrainingEngine
from workflows.training.job import TrainingJob
from workflows.training.optimisation import optimizer_factory
from workflows.training.start import Roles


class BagBatches:
    """The batches of a replica: slides whose tiles each rank reads itself or receives from loaders.

    Args:
        job: The run.
        bags: The training slides.
        replica: Replica of this trainer.
        engine: Reads the tiles ahead.
        feed: Receives tiles from loaders for the engine; None: the engine reads them.
    """

    def __init__(
        self, job: TrainingJob, bags: Bags, replica: int, engine: TilesEngine, feed: TileFeed | None = None
    ) -> None:
        self._job, self._bags, self._replica, self._engine, self._feed = job, bags, replica, engine, feed
        if feed is not None:
            # The engine then asks the feed for tiles, instead of reading them from the store.
            engine.reader = feed

    @property
    def wait_s(self) -> float:
        """The seconds for which the engine has waited for tiles so far."""
        return self._engine.read_wait_s

    @property
    def reports(self) -> Mapping[int, Mapping[str, Any]]:
        """What each loader rank has read and sent."""
        return {} if self._feed is None else self._feed.reports

    def batch(self, turn: int) -> list[BagSource]:
        """Return the slides of a turn."""
        numbers = self._numbers(turn)  # of samples in the stream, counted from the start of the run
        # The epoch belongs to the sample, not to the turn: a turn may hold the end of one epoch and the start of the
        # next.
        slides = [self._bags.of(index, epoch) for epoch, index in map(self._job.stream.at, numbers)]
        if self._feed is not None:
            # Loaders get the order of the whole turn, and the first spans of the next one, which would otherwise begin
            # with a wait.
            chunks = self._engine.own_chunks([len(slide) for slide in slides])
            self._feed.begin(numbers, chunks, self._first_spans(turn + 1))
        return slides

    def close(self, stopped: bool) -> None:
        """Release the loaders."""
        if self._feed is not None:
            self._feed.close(stopped)

    def _numbers(self, turn: int) -> list[int]:
        return list(self._job.batches.numbers(turn, self._replica))

    def _first_spans(self, turn: int) -> list[TileSpan]:
        """Return the spans that the engine is expected to read first in a turn; none after the last turn."""
        assert self._feed is not None
        if turn >= self._job.steps * self._job.config.optimizer.accumulate:
            return []
        numbers = self._numbers(turn)
        counts = [self._bags.count(self._job.stream.at(number)[1]) for number in numbers]
        return spans(self._engine.own_chunks(counts), numbers)[: self._feed.ahead]


class BagInputs(RunInputs):
    """A run of bags on one rank.

    Attributes:
        train: The training slides.
        val: The validation slides.
    """

    train: Bags
    val: Bags
    chunk: int | Literal["auto"] = "auto"
    """Number of tiles that are read and encoded at once."""
    shard: bool = False
    """Whether the ranks that share tiles divide the encoder's weights."""

    @abstractmethod
    def tile_shape(self) -> tuple[tuple[int, int, int], torch.dtype]:
        """Return shape and dtype of a tile as it is read."""

    @property
    @abstractmethod
    def batch_norm(self) -> BatchNormMode:
        """Statistics of the encoder's batch norm in training."""

    def make_engine(self, model: nn.Module, roles: Roles) -> TilesEngine:
        """Return the engine of ``parallelize_tiles``."""
        job, optimizer = self.job, self.job.config.optimizer
        assert isinstance(model, TileModel) and roles.trainers is not None
        return_what_is_freed(LARGE_BLOCK_BYTES)  # the forecast does not count freed memory that a process keeps
        return parallelize_tiles(
            model.encoder,
            model.aggregator,
            job.plan,
            roles.trainers,
            loss=make_loss(job.task, optimizer.accumulate),
            optimizer=optimizer_factory(optimizer, model, job.step_samples),
            autocast=torch.bfloat16 if job.config.run.precision == "bfloat16" else None,
            batch_norm=self.batch_norm,
            chunk=self.chunk,
            shard=self.shard,
        )

    def reserve(self, engine: TrainingEngine, model: nn.Module, roles: Roles) -> None:
        """Try a prediction and a step for the slides with most tiles."""
        assert isinstance(engine, TilesEngine) and roles.trainers is not None
        batch = max(self.job.batches.batch_of(replica) for replica in range(self.job.plan.replicas))
        # Counting tiles reads the masks of all slides: rank 0 does it for all.
        first = roles.trainers.rank == 0
        longest = roles.trainers.broadcast_object(
            agree(roles.trainers, lambda: self._longest(batch) if first else None)
        )
        # `agree`: a slide that one rank cannot open must not leave the others waiting in `reserve`.
        slides = agree(roles.trainers, lambda: [self.train_bags.of(index, 0) for index in longest])
        engine.reserve(slides)
        # Two tiles are enough to see the number of outputs; the whole slide was tried in `reserve`.
        logits, _ = engine.predict([_FirstTiles(slides[-1], 2)])
        if logits.shape[1] != self.job.task.outputs:
            raise RequestError(
                f"model.aggregator returns {logits.shape[1]} outputs, but the task needs {self.job.task.outputs} "
                f"({self.job.task.describe()})"
            )

    def batches(self, roles: Roles, engine: TrainingEngine, start: int) -> Batches:
        """Return the batches of this trainer's replica, whose tiles loaders send if there are any."""
        assert isinstance(engine, TilesEngine) and roles.trainers is not None
        replica = roles.trainers.rank // self.job.plan.ranks_per_replica
        loaders, feed = roles.loaders_of.get(roles.world.rank, ()), None
        if loaders:
            # Pinned host memory, because only from there can a GPU copy while it computes.
            pinned, ahead = engine.device.type == "cuda", self.job.config.data.prefetch * len(loaders)
            feed = TileFeed(roles.world, loaders, replica, self._row, ahead, pinned)
        return BagBatches(self.job, self.train_bags, replica, engine, feed)

    def loader_samples(self) -> BagRows:
        """Return the training samples, a row for each tile."""
        return BagRows(self.train_bags, self._row)

    @property
    def _row(self) -> TileRow:
        return TileRow(*self.tile_shape())

    def evaluation_set(self) -> EvaluationSet:
        """Return the validation slides with all of their tiles."""
        bags, data = grouped(self.val, self.job.val_samples), self.job.config.data
        of_cases = len(self.val) if data.bag == "case" else None
        return EvaluationSet.of(AllTiles(bags), bags.samples, self.job.task, data.case_aggregate, of_cases)

    def inference(self, engine: TrainingEngine) -> InferenceEngine:
        """Return the engine without its attention."""
        assert isinstance(engine, TilesEngine)
        return TileInference(engine)

    def step_record(self, engine: TrainingEngine) -> dict[str, Any]:
        """Return ``attention_peak`` and ``effective_tiles`` of the last batch of trainer 0's replica, if it has any."""
        assert isinstance(engine, TilesEngine)
        spread = engine.spread
        if spread is None:
            return {}
        return {"attention_peak": spread.peak, "effective_tiles": spread.effective_tiles}

    @cached_property
    def train_bags(self) -> Bags:
        """The training samples: slides, or cases."""
        return grouped(self.train, self.job.train_samples)

    @cached_property
    def counts(self) -> list[int]:
        """Number of tiles of each training sample (a slide or a case) in an epoch."""
        return [self.train_bags.count(index) for index in range(len(self.train_bags))]

    @cached_property
    def kept_bytes(self) -> int:
        """Bytes that a trainer's longest sample keeps between reads; 0 with loaders."""
        if self.job.config.roles.loaders:
            return 0
        return int(getattr(self.train_bags.of(self._longest(1)[0], 0), "kept_bytes", 0))

    def checked(self) -> list[dict[str, Any]]:
        """Return the rows of ``coverage.csv`` of both splits: the tissue in each slide's tiles, and their number."""
        rows: dict[str, dict[str, Any]] = {}
        for bags in (self.train, self.val):
            rows |= {row["slide_id"]: row for row in bags.check() if row["slide_id"] not in rows}
        return [*rows.values()]

    def _longest(self, samples: int) -> list[int]:
        """Return the indices of the ``samples`` training samples with the most tiles, the longest first."""
        return sorted(range(len(self.counts)), key=lambda index: -self.counts[index])[:samples]


class _FirstTiles:
    """The first tiles of a slide, for trials.

    Args:
        tiles: All tiles of the slide.
        most: Largest number of tiles to take.
    """

    def __init__(self, tiles: BagSource, most: int) -> None:
        self._tiles, self._count = tiles, min(most, len(tiles))
        self.name = tiles.name
        self.coords = None if tiles.coords is None else tiles.coords[: self._count]

    def __len__(self) -> int:
        return self._count

    def read(self, indices: Sequence[int]) -> torch.Tensor:
        return self._tiles.read(indices)
