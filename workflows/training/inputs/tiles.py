"""Runs of bags of tiles: an encoder of tiles and an aggregator, trained over all tiles of a slide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from data.loading.normalise import Normalisation
from data.tiles.bags import TileBags
from hyfi_core.runtime.launch import made_current
from hyfi_core.tiles.encoding.kept_vectors import KeptVectors
from hyfi_core.tiles.engine import TilesEngine
from hyfi_core.tiles.model import TileModel
from hyfi_core.tiles.settings import BatchNormMode
from workflows.encoders.tile_encoder import TileEncoder
from workflows.encoders.trained_part import frozen_patterns
from workflows.evaluation.models import convert_to_train
from workflows.evaluation.tile_models import build_tile_model, tile_model_fields, with_architecture
from workflows.finetuning.freezing import Freezing, freeze
from workflows.finetuning.optimizers.switching import SwitchingOptimizer, statistics_warning
from workflows.training.inputs.bags import BagInputs
from workflows.training.inputs.flops import tile_flops
from workflows.training.inputs.run_inputs import Tell, TrainingEngine
from workflows.training.job import TrainingJob
from workflows.training.start import Roles
from workflows.training.throughput import Throughput


class TileInputs(BagInputs):
    """A run of bags of tiles on one rank."""

    def __init__(self, job: TrainingJob) -> None:
        super().__init__(job)
        assert job.config.data.tiles is not None
        self._tiles = job.config.data.tiles
        self._tiling = self._tiles.build(job.train.mpp)
        augment = job.config.data.augment
        # Validation takes all tiles, as they are: neither `most` nor `augment`.
        self.train = TileBags(job.train, self._tiling, self._tiles.most, None if augment.off else augment.build())
        self.val = TileBags(job.val, self._tiling)
        self._loaded: TileEncoder | None = None
        self._flops = 0.0  # of the encoder for one tile, counted before its weights are sharded; 0: not counted
        encoder = job.config.model.encoder
        self.shard = encoder is not None and encoder.shard

    def check(self) -> list[dict[str, Any]]:
        """Return the rows of ``coverage.csv``: the tissue in each slide's tiles, and as ``pieces`` their number."""
        for bags in (self.train, self.val):
            bags.dataset.check_files()
        return self.checked()

    def advice(self, forecast: Sequence[str]) -> str:
        """Return advice to print if memory runs out."""
        return (
            "to need less memory, set plan.memory_bytes, which bounds the activations of an encoder, let more ranks "
            "share the tiles of a slide (plan.tiles), or freeze parts of the encoder (model.encoder.train)"
        )

    def make_model(self, device: str, loads: bool, tell: Tell) -> tuple[nn.Module, Freezing | None]:
        """Return encoder and aggregator, with parameters ``encoder.*`` and ``aggregator.*``, and what is frozen."""
        run, config = self.job.config.run, self.job.config.model
        assert config.encoder is not None
        torch.manual_seed(run.seed)
        fields = tile_model_fields(config, self.job.task.outputs)
        # Whether a transformers model has a pooler depends on its files of weights, so every rank reads them.
        reads = loads or config.encoder.name.startswith("transformers:")
        weights = config.encoder.weights if reads else None
        model, loaded = build_tile_model(fields, self._tiles.size_px, weights, self._stated_normalisation())
        model.train()
        self._loaded = loaded
        # Before `freeze`, which leaves out parts that are frozen already: `model.freeze_epochs` never releases these.
        parts = self._freeze_parts(model, config.encoder.train)
        freezing = freeze(model, config)
        for line in (loaded if loads else None, parts, freezing):
            if line is not None:
                tell(str(line))
        return convert_to_train(model, run.precision, run.memory_format).to(made_current(device)), freezing

    def make_engine(self, model: nn.Module, roles: Roles) -> TilesEngine:
        """Return the engine, which keeps the vectors of a frozen encoder if they are the same in each epoch."""
        encoder = self.job.config.model.encoder
        assert encoder is not None and isinstance(model, TileModel)
        if self.shard:  # counted before: later, every call of the encoder needs all ranks
            self._flops = tile_flops(model.encoder, self._tiles.size_px)
        engine = super().make_engine(model, roles)
        # Vectors can be kept only if tiles, weights and dropout are the same in each epoch.
        if encoder.train == "none" and not self._why_computed_anew():
            engine.vectors = KeptVectors(encoder.keep_bytes, self.job.plan.memory_bytes)
        return engine

    def tile_shape(self) -> tuple[tuple[int, int, int], torch.dtype]:
        """Return shape and dtype of an RGB tile."""
        return (3, self._tiles.size_px, self._tiles.size_px), torch.uint8

    @property
    def batch_norm(self) -> BatchNormMode:
        """As ``model.encoder.batch_norm``."""
        assert self.job.config.model.encoder is not None
        return self.job.config.model.encoder.batch_norm

    def throughput(self, engine: TrainingEngine, peak: float | None, device: str) -> Throughput:
        """Return the converter of slides per second, for the mean number of tiles."""
        tiles = sum(self.counts) / len(self.counts)
        assert isinstance(engine, TilesEngine)
        size = self._tiles.size_px
        flops = self._flops or tile_flops(engine.encoder, size)
        return Throughput(round(tiles * size**2), tiles * flops, peak, torch.device(device))

    def step_record(self, engine: TrainingEngine) -> dict[str, Any]:
        """Return how attention was spread; with vectors that are kept, also how many tiles trainer 0 encoded so far."""
        assert isinstance(engine, TilesEngine)
        encoded = {} if engine.vectors is None else {"tiles_encoded": engine.vectors.encoded}
        return super().step_record(engine) | encoded

    def model_json(self) -> dict[str, Any]:
        """Return the content of ``model.json``, with ``tiles``."""
        if self._loaded is None:  # on a validator
            self.make_model("cpu", loads=False, tell=lambda line: None)
        assert self._loaded is not None
        tiling = self._tiling
        return {
            **self.job.model_json(),
            "model": with_architecture(tile_model_fields(self.job.config.model, self.job.task.outputs), self._loaded),
            "tiles": {"size_px": tiling.size_px, "stride_px": tiling.step_px, "min_tissue": tiling.min_tissue},
            "mpp": tiling.mpp,
            "normalisation": self._loaded.normalisation.to_json(),
            "min_coverage": 0.0,  # data.tiles.min_tissue decides which tissue tiles leave out
        }

    def warnings(self, engine: TrainingEngine) -> list[str]:
        """Return warnings about slides, recomputed vectors, sharding without effect, random weights and batch norm."""
        encoder = self.job.config.model.encoder
        assert encoder is not None
        assert self._loaded is not None, "the model is made before warnings"
        warnings = self.job.warnings()
        warnings += self._warn_of_recomputed_vectors() if encoder.train == "none" else []
        if encoder.shard and self.job.plan.tiles == 1:
            warnings.append(
                "model.encoder.shard: plan.tiles is 1: no ranks share the tiles of a slide, weights stay whole"
            )
        random = self._loaded.untrained
        if random and encoder.train != "all":
            warnings.append(f"model.encoder.train: {encoder.train}: what is not trained has random weights")
        norms = any(isinstance(module, _BatchNorm) for module in self._loaded.module.modules())
        if norms and random and encoder.batch_norm == "frozen":
            warnings.append(
                "the encoder has batch norm and random weights: its running statistics are not those of tissue, "
                "and are not updated, so that it normalises nothing; if the loss does not fall, use weights that "
                "were trained, or an encoder with another norm"
            )
        updates = norms and encoder.batch_norm == "exact" and encoder.train != "none"
        if updates:
            # Slides of a class may have statistics of their own: when it was tried, attention learned from these, and
            # `max` did not (docs/tiles.md).
            remedy = "an encoder with another norm, or the aggregator max" if random else "frozen, or another norm"
            warnings.append(
                "model.encoder.batch_norm: exact: training normalises each slide by its own tiles, validation by an "
                "average of slides; if validation is far worse than the loss of training, the model has learned the "
                f"class from these statistics: use {remedy}"
            )
        # A schedule-free optimizer validates with averaged weights, but running statistics are of the trained ones.
        if updates and isinstance(engine.optimizer, SwitchingOptimizer):
            warnings.append(statistics_warning(self.job.config.optimizer.name, "an encoder with another norm"))
        return warnings

    def _freeze_parts(self, model: TileModel, train: str) -> Freezing | None:
        """Freeze the parts of the encoder that ``train`` leaves out; with ``none``, switch its dropout off, too."""
        patterns = frozen_patterns(model.encoder, train)
        if not patterns:
            return None
        if train == "none":
            # Without dropout, a tile has the same vector in each epoch.
            model.encoder.eval()
        named = tuple("encoder" if pattern == "*" else f"encoder.{pattern}" for pattern in patterns)
        # Only these parts, for good: `make_model` applies the user's `model.freeze` and `freeze_epochs` afterwards.
        return freeze(model, self.job.config.model.model_copy(update={"freeze": named, "freeze_epochs": None}))

    def _why_computed_anew(self) -> str:
        """Return why vectors of a frozen encoder differ between epochs; empty if they do not."""
        augment = self.job.config.data.augment
        if self._tiles.most is not None:
            return "data.tiles.most draws other tiles in each epoch"
        if not augment.off:
            return "data.augment changes tiles in each epoch; data.augment=false keeps vectors"
        return ""

    def _warn_of_recomputed_vectors(self) -> list[str]:
        """Return a warning if vectors of a frozen encoder are computed more than once."""
        encoder, why = self.job.config.model.encoder, self._why_computed_anew()
        assert encoder is not None and self._loaded is not None
        if why:
            return [f"model.encoder.train: none: vectors are computed anew in each epoch: {why}"]
        # Validation reads each slide in every epoch, too.
        tiles = sum(self.counts) + sum(self.val.count(index) for index in range(len(self.val)))
        # Vectors are kept in float32.
        needed = tiles * self._loaded.features * 4
        if needed <= encoder.keep_bytes:
            return []
        return [
            f"model.encoder.train: none: {needed / 1e9:.3g} GB of vectors, but {encoder.keep_bytes / 1e9:.3g} GB are "
            f"kept (model.encoder.keep_bytes); the others are computed anew in each epoch. `hyfi features` keeps all "
            f"on disk, for data.features"
        ]

    def _stated_normalisation(self) -> Normalisation | None:
        """Return the normalisation of the configuration, which replaces the encoder's; None if it states none."""
        config = self.job.config.model
        return None if config.mean is None and config.std is None else self.job.normalisation
