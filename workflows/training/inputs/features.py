"""Runs of bags of stored features: an aggregator, trained on vectors that a frozen encoder computed before."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn

from data.tiles.features.bags import FeatureBags
from hyfi_core.runtime.launch import made_current
from hyfi_core.tiles.engine import TilesEngine
from hyfi_core.tiles.settings import BatchNormMode
from workflows.evaluation.feature_models import CHUNK, build_feature_model, feature_model_fields
from workflows.evaluation.models import convert_to_train
from workflows.features.feature_set import FeatureSet
from workflows.finetuning.freezing import Freezing, freeze
from workflows.training.inputs.bags import BagInputs
from workflows.training.inputs.flops import bag_flops
from workflows.training.inputs.run_inputs import Tell, TrainingEngine
from workflows.training.job import TrainingJob
from workflows.training.throughput import Throughput


class FeatureInputs(BagInputs):
    """A run of bags of stored features on one rank."""

    train: FeatureBags
    val: FeatureBags
    chunk = CHUNK

    def __init__(self, job: TrainingJob) -> None:
        super().__init__(job)
        assert job.config.data.features is not None
        self._features = FeatureSet.open(job.config.data.features)
        self.train, self.val = self._features.bags(job.train), self._features.bags(job.val)

    def check(self) -> list[dict[str, Any]]:
        """Return the rows of ``coverage.csv``; check files of features, and that they belong to the slides."""
        self._features.check([self.train, self.val])
        rows = self.checked()
        self._features.check_like(self._stated, self.train.sides_um() | self.val.sides_um())
        return rows

    def advice(self, forecast: Sequence[str]) -> str:
        """Return advice to print if memory runs out."""
        return (
            "to need less memory, let more ranks share the tiles of a slide (plan.tiles), use fewer slides in a step "
            "(data.batch_size, plan.replicas), or another model.aggregator: transmil needs the most"
        )

    def make_model(self, device: str, loads: bool, tell: Tell) -> tuple[nn.Module, Freezing | None]:
        """Return the aggregator, whose parameters are named ``aggregator.*``, and what is frozen in it."""
        run, config = self.job.config.run, self.job.config.model
        # Directly before building: initial weights depend on the seed alone, not on random numbers drawn earlier.
        torch.manual_seed(run.seed)
        model = build_feature_model(self._fields())
        model.train()
        freezing = freeze(model, config)
        if loads:
            encoder = self._features.encoder or "an encoder that the files do not name"
            tell(f"features of {encoder}: vectors of {self._features.features} numbers, {self._features.folder}")
        if freezing is not None:
            tell(str(freezing))
        return convert_to_train(model, run.precision, run.memory_format).to(made_current(device)), freezing

    def tile_shape(self) -> tuple[tuple[int, int, int], torch.dtype]:
        """Return shape and dtype of a vector, as a tile of 1 × 1 pixels."""
        return (self._features.features, 1, 1), torch.float32

    @property
    def batch_norm(self) -> BatchNormMode:
        """There is no encoder."""
        return "frozen"

    def throughput(self, engine: TrainingEngine, peak: float | None, device: str) -> Throughput:
        """Return the converter of slides per second; no pixels are read."""
        assert isinstance(engine, TilesEngine)
        tiles = round(sum(self.counts) / len(self.counts))
        flops = bag_flops(engine.aggregator, tiles, self._features.features)
        return Throughput(0, flops, peak, torch.device(device))

    def model_json(self) -> dict[str, Any]:
        """Return the content of ``model.json``, with ``features``."""
        stated = self._stated
        # Without stated pixels, a tile counts as one pixel.
        size_px = stated["tile_px"] or 1
        mpp = stated["tile_um"] / size_px if stated["tile_um"] and stated["tile_px"] else self.job.train.mpp
        return {
            **self.job.model_json(),
            "model": self._fields(),
            "features": stated,
            "mpp": mpp,
            "size_px": [size_px, size_px],
            "min_coverage": 0.0,  # which tiles hold too little tissue was decided when the features were made
        }

    def warnings(self, engine: TrainingEngine) -> list[str]:
        """Return warnings about slides, and about features without positions or without a stated encoder."""
        warnings = self.job.warnings()
        # Stored features have a unit of their positions, px or µm, if and only if they have positions.
        if any(stored.unit is None for stored in (*self.train.stored, *self.val.stored)):
            warnings.append("some features have no positions (coords): predictions with them will have no heatmap")
        if self._features.encoder is None:
            warnings.append(
                "the features do not name their encoder: predicting with features of another one will not be noticed"
            )
        return warnings

    def _fields(self) -> dict[str, Any]:
        return feature_model_fields(self.job.config.model, self._features.features, self.job.task.outputs)

    @cached_property
    def _stated(self) -> dict[str, Any]:
        """What each checkpoint states of the features; cached, because it looks at every slide."""
        return self._features.to_json([self.train, self.val])
