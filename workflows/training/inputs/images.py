"""Runs of whole images: each slide is one image, which ranks divide."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from data.loading.decode import Samples
from data.loading.feed import Feed
from hyfi_core.errors import RequestError
from hyfi_core.initial_weights import InitialWeights
from hyfi_core.runtime.engine import Engine
from hyfi_core.runtime.executor import evaluating
from hyfi_core.runtime.launch import made_current
from workflows.evaluation.evaluate import EvaluationSet, InferenceEngine
from workflows.evaluation.programs import ModelPrograms
from workflows.finetuning.freezing import Freezing
from workflows.finetuning.optimizers.switching import SwitchingOptimizer, statistics_warning
from workflows.training import start as starting
from workflows.training.feeding import BatchImages, make_feed, preparation
from workflows.training.inputs.run_inputs import Batches, RunInputs, Tell, TrainingEngine
from workflows.training.job import TrainingJob
from workflows.training.memory import check_memory
from workflows.training.start import Roles, SavedRun
from workflows.training.throughput import Throughput

_PROBABILITIES = (
    "the model ends in a softmax or sigmoid, but its outputs are taken for logits, so that loss and predictions apply "
    "it once more: probabilities stay close to each other, and the model learns little; return the logits"
)


class ImageBatches:
    """The batches of a feed, normalised where the engine reads them.

    Args:
        feed: The feed of this trainer.
        job: The run.
    """

    def __init__(self, feed: Feed, job: TrainingJob) -> None:
        self._feed, self._prepare = feed, preparation(job)

    @property
    def wait_s(self) -> float:
        """The seconds for which ``batch`` has waited so far."""
        return self._feed.wait_s

    @property
    def reports(self) -> Mapping[int, Mapping[str, Any]]:
        """What each loader rank has read and sent."""
        return self._feed.reports

    def batch(self, turn: int) -> BatchImages:
        """Return the images of a turn."""
        return BatchImages(self._feed.batch(turn), self._prepare)

    def close(self, stopped: bool) -> None:
        """Release the loaders."""
        self._feed.close(stopped)


class ImageInputs(RunInputs):
    """A run of whole images on one rank."""

    def __init__(self, job: TrainingJob) -> None:
        super().__init__(job)
        self._drawn: InitialWeights | None = None
        self._programs: ModelPrograms | None = None
        self._last_operator = ""

    @property
    def outputs_to_place(self) -> int | None:
        """The model's outputs."""
        return self.job.task.outputs

    def check(self) -> list[dict[str, Any]]:
        """Return the rows of ``coverage.csv``, see `check_images`."""
        # Kept for `check_memory`, which needs the same captures.
        self._programs = ModelPrograms(self.job.config, self.job.task.outputs)
        rows = starting.check_images(self.job, self._programs)
        self._last_operator = self._programs.last_operator
        return rows

    def check_memory(self, roles: Roles, device: str) -> list[str]:
        """Return messages about memory; uses, and then releases, the model that ``check`` captured."""
        # Captures hold a model of their own: dropped before the run's model takes its memory.
        programs, self._programs = self._programs, None
        return check_memory(self.job, roles, device, programs)

    def make_model(self, device: str, loads: bool, tell: Tell) -> tuple[nn.Module, Freezing | None]:
        """Return the initial model; on the meta device if the engine draws the weights of each stage."""
        self._drawn = starting.drawn_by_stage(self.job, device)
        model, freezing = starting.make_model(self.job, loads=loads, drawn=self._drawn, tell=tell)
        torch_device = made_current(device)
        if self._drawn is None:
            model = model.to(torch_device)
        # Otherwise it is on the meta device, with nothing to move: the engine draws each stage on its rank.
        return model, freezing

    def make_engine(self, model: nn.Module, roles: Roles) -> Engine:
        """Return the engine of ``parallelize``."""
        assert roles.trainers is not None
        replica = roles.trainers.rank // self.job.plan.ranks_per_replica
        batch = self.job.batches.batch_of(replica)
        return starting.make_engine(self.job, model, self.job.plan, roles.trainers, batch, self._drawn)

    def reserve(self, engine: TrainingEngine, model: nn.Module, roles: Roles) -> None:
        """Reserve memory and disk for a step, and for a validation by the trainers."""
        assert isinstance(engine, Engine)
        # A validation has other maps than a step: one image, and nothing is kept for a backward.
        engine.reserve(pixels=BatchImages.pixel_dtype)
        if not len(self.job.val) or roles.validator_ranks:
            return
        try:
            with evaluating(model, engine.device):
                engine.reserve((1, 3, *self.job.config.data.image_px), trains=False)
        except RequestError as error:
            raise RequestError(f"validation between training steps (roles.validators=0): {error}") from error

    def describe_change(self, saved: SavedRun, engine: TrainingEngine) -> str | None:
        """Return how batch norm changes with another plan."""
        assert isinstance(engine, Engine)
        return saved.describe_norm_change(self.job.config) if engine.normalises_batches else None

    def warnings(self, engine: TrainingEngine) -> list[str]:
        """Return warnings of the run, about running statistics beside an average, and about missing heatmaps.

        ``run.ema`` averages running statistics, too; a schedule-free optimizer knows only parameters.
        """
        assert isinstance(engine, Engine)
        no_heatmap = (
            "the model pools no feature map into its output: predictions with it will have no heatmap; "
            "`hyfi predict --evidence occlusion` shows which parts of a slide matter to it"
        )
        statistics = statistics_warning(self.job.config.optimizer.name, "model.norm=group or frozen")
        averages_weights_alone = isinstance(engine.optimizer, SwitchingOptimizer) and engine.normalises_batches
        return [
            *self.job.warnings(),
            *([_PROBABILITIES] if self._returns_probabilities() else []),
            *([statistics] if averages_weights_alone else []),
            *([no_heatmap] if engine.pools_a_map is False else []),  # None: unknown
        ]

    def _returns_probabilities(self) -> bool:
        """Whether the model ends in a softmax or sigmoid, which loss and predictions would apply once more."""
        kind = self.job.task.facts.name
        return kind in ("multiclass", "multilabel") and self._last_operator in ("softmax", "sigmoid")

    def throughput(self, engine: TrainingEngine, peak: float | None, device: str) -> Throughput:
        """Return the converter of images per second."""
        assert isinstance(engine, Engine)
        height, width = self.job.config.data.image_px
        return Throughput(height * width, engine.flops_per_image(), peak, torch.device(device))

    def batches(self, roles: Roles, engine: TrainingEngine, start: int) -> Batches:
        """Return the batches of this trainer's feed."""
        assert isinstance(engine, Engine)
        return ImageBatches(make_feed(self.job, roles, engine, start, engine.device), self.job)

    def loader_samples(self) -> Samples:
        """Return the training images."""
        return self.job.train

    def evaluation_set(self) -> EvaluationSet:
        """Return the validation slides as one image each."""
        return starting.make_evaluation_set(self.job)

    def inference(self, engine: TrainingEngine) -> InferenceEngine:
        """Return the engine itself."""
        assert isinstance(engine, Engine)
        return engine
