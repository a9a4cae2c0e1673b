"""Runs of bags of tiles: an encoder of tiles and an aggregator, trained over all tiles of a slide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from data.loading.normalise import Normalisation
from data.tiles.bags import TileBags
from data.tiles.reader import StoreTiles
from hyfi_core.comm.agree import agree
from hyfi_core.errors import RequestError
from hyfi_core.runtime.launch import made_current
from hyfi_core.tiles.engine import TilesEngine
from hyfi_core.tiles.model import TileModel
from hyfi_core.tiles.parallelize_tiles import parallelize_tiles
from workflows.encoders.tile_encoder import TileEncoder
from workflows.encoders.trained_part import frozen_patterns
from workflows.evaluation.evaluate import EvaluationSet, InferenceEngine
from workflows.evaluation.models import convert_model
from workflows.evaluation.tile_models import build_tile_model, tile_model_fields, with_architecture
from workflows.evaluation.tile_slides import AllTiles, TileInference
from workflows.finetuning.freezing import Freezing, freeze
from workflows.tasks.task import make_loss
from workflows.training.inputs.encoder_flops import tile_flops
from workflows.training.inputs.run_inputs import Batches, RunInputs, Tell, TrainingEngine
from workflows.training.job import TrainingJob
from workflows.training.optimisation import optimizer_factory
from workflows.training.start import Roles
from workflows.training.throughput import Throughput


class BagBatches:
    """The batches of a replica: its slides, whose tiles each of its ranks reads itself.

    Attributes:
        reports: Empty: there are no loaders.

    Args:
        job: The run.
        bags: The training slides.
        replica: Of this trainer.
        engine: Reads the tiles, one chunk ahead.
    """

    def __init__(self, job: TrainingJob, bags: TileBags, replica: int, engine: TilesEngine) -> None:
        self._job, self._bags, self._replica, self._engine = job, bags, replica, engine
        self.reports: Mapping[int, Mapping[str, Any]] = {}

    @property
    def wait_s(self) -> float:
        """The seconds for which the engine has waited for tiles so far."""
        return self._engine.read_wait_s

    def batch(self, turn: int) -> list[StoreTiles]:
        """Return the slides of a turn."""
        stream, numbers = self._job.stream, self._job.layout.numbers(turn, self._replica)
        return [self._bags.of(index, epoch) for epoch, index in map(stream.at, numbers)]

    def close(self, stopped: bool) -> None:
        """Do nothing."""


class TileInputs(RunInputs):
    """A run of bags of tiles on one rank."""

    def __init__(self, job: TrainingJob) -> None:
        super().__init__(job)
        assert job.config.data.tiles is not None
        self._tiles = job.config.data.tiles
        tiling = self._tiles.build(job.train.mpp)
        self.train = TileBags(job.train, tiling, self._tiles.most, job.config.data.augment.build())
        self.val = TileBags(job.val, tiling)
        self._loaded: TileEncoder | None = None

    def check(self) -> list[dict[str, Any]]:
        """Return the rows of ``coverage.csv``: the tissue in each slide's tiles, and as ``pieces`` their number."""
        rows: dict[str, dict[str, Any]] = {}
        for bags in (self.train, self.val):
            bags.dataset.check_files()
            rows |= {row["slide_id"]: row for row in bags.check() if row["slide_id"] not in rows}
        return [*rows.values()]

    def advice(self, forecast: Sequence[str]) -> str:
        """Return what to print if memory runs out."""
        return (
            "to need less memory, set plan.memory_bytes, which bounds the activations of an encoder, let more ranks "
            "share the tiles of a slide (plan.tiles), or freeze parts of the encoder (model.encoder.train)"
        )

    def make_model(self, device: str, loads: bool, tell: Tell) -> tuple[nn.Module, Freezing | None]:
        """Return encoder and aggregator, whose names are ``encoder.*`` and ``aggregator.*``."""
        run, config = self.job.config.run, self.job.config.model
        assert config.encoder is not None
        torch.manual_seed(run.seed)
        fields = tile_model_fields(config, self.job.task.outputs)
        # Whether a model of transformers has a pooler depends on where its weights are from: the same on all ranks.
        reads = loads or config.encoder.name.startswith("transformers:")
        weights = config.encoder.weights if reads else None
        model, loaded = build_tile_model(fields, self._tiles.size_px, weights, self._given())
        model.train()
        self._loaded = loaded
        parts = self._freeze_parts(model, config.encoder.train)
        freezing = freeze(model, config)
        for line in (loaded if loads else None, parts, freezing):
            if line is not None:
                tell(str(line))
        return convert_model(model, run.precision, run.memory_format).to(made_current(device)), freezing

    def make_engine(self, model: nn.Module, roles: Roles) -> TilesEngine:
        """Return the engine of ``parallelize_tiles``."""
        job = self.job
        encoder, optimizer = job.config.model.encoder, job.config.optimizer
        assert isinstance(model, TileModel) and encoder is not None and roles.trainers is not None
        return parallelize_tiles(
            model.encoder,
            model.aggregator,
            job.plan,
            roles.trainers,
            loss=make_loss(job.task, optimizer.accumulate),
            optimizer=optimizer_factory(optimizer, model, job.step_samples),
            autocast=torch.bfloat16 if job.config.run.precision == "bfloat16" else None,
            batch_norm=encoder.batch_norm,
        )

    def reserve(self, engine: TrainingEngine, model: nn.Module, roles: Roles) -> None:
        """Try a prediction and a step for the slides with most tiles."""
        assert isinstance(engine, TilesEngine) and roles.trainers is not None
        batch = max(self.job.layout.batch_of(replica) for replica in range(self.job.plan.replicas))
        first = roles.trainers.rank == 0
        longest = roles.trainers.broadcast_object(
            agree(roles.trainers, lambda: self._longest(batch) if first else None)
        )
        slides = agree(roles.trainers, lambda: [self.train.of(index, 0) for index in longest])
        engine.reserve(slides)
        logits, _ = engine.predict([_FirstTiles(slides[-1], 2)])
        if logits.shape[1] != self.job.task.outputs:
            raise RequestError(
                f"model.aggregator returns {logits.shape[1]} outputs, but the task needs {self.job.task.outputs} "
                f"({self.job.task.describe()})"
            )

    def throughput(self, engine: TrainingEngine, peak: float | None, device: str) -> Throughput:
        """Return what converts slides per second, from the mean number of tiles."""
        tiles = sum(self._counts) / len(self._counts)
        assert isinstance(engine, TilesEngine)
        size = self._tiles.size_px
        return Throughput(round(tiles * size**2), tiles * tile_flops(engine.encoder, size), peak, torch.device(device))

    def batches(self, roles: Roles, engine: TrainingEngine, start: int) -> Batches:
        """Return the slides of this trainer's replica."""
        assert isinstance(engine, TilesEngine) and roles.trainers is not None
        return BagBatches(self.job, self.train, roles.trainers.rank // self.job.plan.ranks_per_replica, engine)

    def evaluation_set(self) -> EvaluationSet:
        """Return the validation slides with all of their tiles."""
        return EvaluationSet.of(
            AllTiles(self.val), self.job.val.samples, self.job.task, self.job.config.data.case_aggregate
        )

    def inference(self, engine: TrainingEngine) -> InferenceEngine:
        """Return the engine without its attention."""
        assert isinstance(engine, TilesEngine)
        return TileInference(engine)

    def step_record(self, engine: TrainingEngine) -> dict[str, Any]:
        """Return how attention was spread over the tiles of the last batch of trainer 0's replica."""
        assert isinstance(engine, TilesEngine)
        spread = engine.spread
        if spread is None:
            return {}
        return {"attention_peak": spread.peak, "effective_tiles": spread.effective_tiles}

    def model_json(self) -> dict[str, Any]:
        """Return the content of ``model.json``, with ``tiles``."""
        assert self._loaded is not None, "the model is made before a checkpoint"
        tiling = self.train.tiling
        return {
            **self.job.model_json(),
            "model": with_architecture(tile_model_fields(self.job.config.model, self.job.task.outputs), self._loaded),
            "tiles": {"size_px": tiling.size_px, "stride_px": tiling.step_px, "min_tissue": tiling.min_tissue},
            "mpp": tiling.mpp,
            "normalisation": self._loaded.normalisation.to_json(),
            "min_coverage": 0.0,  # what tiles leave out is said by data.tiles.min_tissue
        }

    def warnings(self, engine: TrainingEngine) -> list[str]:
        """Return warnings about slides, and about batch norm whose statistics are not those of tissue."""
        encoder = self.job.config.model.encoder
        assert encoder is not None
        assert self._loaded is not None, "the model is made before warnings"
        found = self.job.warnings()
        random = self._loaded.untrained
        if random and encoder.train != "all":
            found.append(f"model.encoder.train: {encoder.train}: what is not trained has random weights")
        norms = any(isinstance(module, _BatchNorm) for module in self._loaded.module.modules())
        if norms and random and encoder.batch_norm == "frozen":
            found.append(
                "the encoder has batch norm and random weights: its running statistics are not those of tissue, "
                "and are not updated; use model.encoder.batch_norm=exact for small slides, or another norm"
            )
        return found

    @cached_property
    def _counts(self) -> list[int]:
        return [self.train.count(index) for index in range(len(self.train))]

    def _freeze_parts(self, model: TileModel, train: str) -> Freezing | None:
        """Freeze the parts of the encoder that are not trained; without trained parts it has no dropout either."""
        patterns = frozen_patterns(model.encoder, train)
        if not patterns:
            return None
        if train == "none":
            model.encoder.eval()
        named = tuple("encoder" if pattern == "*" else f"encoder.{pattern}" for pattern in patterns)
        return freeze(model, self.job.config.model.model_copy(update={"freeze": named, "freeze_epochs": None}))

    def _longest(self, slides: int) -> list[int]:
        """Return the slides with most tiles, the longest first."""
        return sorted(range(len(self._counts)), key=lambda index: -self._counts[index])[:slides]

    def _given(self) -> Normalisation | None:
        """Return the normalisation that the configuration states in place of the encoder's; None: it does not."""
        config = self.job.config.model
        return None if config.mean is None and config.std is None else self.job.normalisation


class _FirstTiles:
    """The first tiles of a slide, for trials.

    Args:
        tiles: All of them.
        most: Their number.
    """

    def __init__(self, tiles: StoreTiles, most: int) -> None:
        self._tiles, self._count = tiles, min(most, len(tiles))
        self.name, self.coords = tiles.name, tiles.coords[: self._count]

    def __len__(self) -> int:
        return self._count

    def read(self, indices: Sequence[int]) -> torch.Tensor:
        return self._tiles.read(indices)
