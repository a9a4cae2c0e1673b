"""Evaluation of a checkpoint's model on a group of ranks.

The child processes of validators and ``hyfi validate`` build an `Evaluator` from a checkpoint's ``model.json``.
Trainers evaluate with the engine that they train with; the computation is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from data.loading.normalise import Normalisation
from data.samples.colours.stain_normalisation import StainNormalisation
from data.samples.dataset import SlideDataset, SlideRef
from hyfi_core.comm.agreement.agree import agree
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.comm.base import Communicator
from hyfi_core.models.by_name import build_model
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.process_memory import return_what_is_freed
from hyfi_core.runtime.parallelize import parallelize
from pathology.predict.whole_tissue import Pooling, SizedEngines
from workflows.evaluation.evaluate import (
    DatasetImages,
    EvaluatedMetrics,
    EvaluationSet,
    InferenceEngine,
    Logits,
    gather_logits,
    predict_slides,
)
from workflows.evaluation.models import DTYPES, FORMATS, convert_model
from workflows.evaluation.whole import WholeSlides
from workflows.tasks.by_name import task_of


def dataset_of(model: Mapping[str, Any], store: Path, slides: Sequence[SlideRef]) -> SlideDataset:
    """Return a dataset of slides with the image size, mpp, view and stain normalisation of a ``model.json``."""
    height, width = model["size_px"]
    return SlideDataset(
        store,
        slides,
        size_px=(height, width),
        mpp=model["mpp"],
        view=model["view"],
        align_px=model["align_px"],
        stain=StainNormalisation.from_json(model.get("stain_normalisation")),
    )


def dataset_images_of(model: Mapping[str, Any], dataset: SlideDataset) -> DatasetImages:
    """Return the images of a dataset as the model of a ``model.json`` takes them."""
    return DatasetImages(
        dataset,
        Normalisation.from_json(model["normalisation"]),
        DTYPES[model.get("precision", "float32")],
        FORMATS[model.get("memory_format", "channels_last")],
    )


def evaluation_set_of(model: Mapping[str, Any], dataset: SlideDataset) -> EvaluationSet:
    """Return the evaluation set of a dataset for the model of a ``model.json``; all slides must be labelled."""
    return EvaluationSet.of(
        dataset_images_of(model, dataset), dataset.samples, task_of(model), model.get("case_aggregate", "mean")
    )


def _module_of(model: Mapping[str, Any], device: torch.device | None) -> nn.Module:
    """Return the model of a ``model.json`` with arbitrary weights, on a device; None: the CPU."""
    precision, memory_format = model.get("precision", "float32"), model.get("memory_format", "channels_last")
    module = convert_model(build_model(model["model"]), precision, memory_format)
    return module.to(device or torch.device("cpu"))


@dataclass(frozen=True)
class Evaluator:
    """Evaluates weights on all ranks of a group; every method is collective.

    Attributes:
        evaluation_set: The slides.
        engine: Engine of this rank's replica, for images of the trained size.
        module: The model; it has the weights that were evaluated last.
        plan: How images and layers are divided among the group.
        group: The ranks.
        whole: Evaluates all tissue of slides that do not fit the trained size; None: only what fits is evaluated.
    """

    evaluation_set: EvaluationSet
    engine: InferenceEngine
    module: torch.nn.Module
    plan: ParallelPlan
    group: Communicator
    whole: WholeSlides | None = None

    @classmethod
    def of(
        cls,
        model: Mapping[str, Any],
        dataset: SlideDataset,
        plan: ParallelPlan,
        group: Communicator,
        cells: tuple[int, int] | Literal["auto"] | None = None,
        *,
        all_tissue: bool = False,
        device: torch.device | None = None,
    ) -> Evaluator:
        """Build the model of a ``model.json``, distributed by ``plan``, with arbitrary weights.

        Args:
            model: Content of ``model.json``.
            dataset: The slides.
            plan: How images and layers are divided among the group.
            group: The ranks.
            cells: Rows and columns of cells: each rank evaluates its own images, cell by cell, spilling as the plan
                says; ``auto``: as many as its memory limit requires. None: without cells.
            all_tissue: Whether to evaluate all tissue of slides that do not fit the trained size; without cells, only
                with a plan of one replica.
            device: Device of this rank; None: the CPU.

        Raises:
            RequestError: On every rank: one of them cannot build the model, or the plan cannot run it.
        """
        # One rank alone may fail to build the model: agree before the engine's first message, or the others wait.
        module = agree(group, lambda: _module_of(model, device))
        autocast = torch.bfloat16 if model.get("precision") == "bfloat16" else None
        shape = (1, 3, *dataset.size_px)
        engine: InferenceEngine
        if cells is None:
            engine = parallelize(module, shape, plan, group, autocast=autocast, verify=False)  # verified in training
        else:
            return_what_is_freed()  # else freed maps stay in the heap, as much memory again as a cell needs
            one_rank = ParallelPlan(((1, 1),), cells=cells, spill=plan.spill, memory_bytes=plan.memory_bytes)
            in_cells = parallelize(module.eval(), shape, one_rank, AloneCommunicator(), autocast=autocast)
            in_cells.reserve(trains=False)  # refused now, not with the first weights
            engine = in_cells
        slides = evaluation_set_of(model, dataset)
        if not all_tissue:
            return cls(slides, engine, module, plan, group)
        # The ranks that compute a slide together. Without cells that is the group: `hyfi validate`, the only caller
        # that asks for all tissue, then plans one replica.
        replica = group if cells is None else AloneCommunicator()
        engines = SizedEngines(
            module,
            engine,
            dataset.size_px,
            replica,
            cells,
            autocast=autocast,
            grid=plan.grids[0],
            memory_bytes=plan.memory_bytes if cells is not None else None,
            spill=plan.spill if cells is not None else None,
        )
        pooling: Pooling = "max" if model["model"].get("pool") == "max" else "mean"
        images = dataset_images_of(model, dataset)
        return cls(slides, engine, module, plan, group, WholeSlides(dataset, images, engines, replica, pooling))

    def evaluate(
        self,
        weights: Mapping[str, torch.Tensor],
        interrupted: Callable[[], bool] = lambda: False,
        on_logits: Callable[[Logits], None] = lambda logits: None,
    ) -> EvaluatedMetrics | None:
        """Return the metrics of weights on rank 0, None elsewhere.

        Args:
            weights: The model's weights.
            interrupted: See :func:`workflows.evaluation.evaluate.predict_slides`.
            on_logits: Called on rank 0 with the logits of all slides.

        Raises:
            Interrupted: On all ranks, if ``interrupted`` returned True.
        """
        # Each rank takes its stages' weights from the whole model.
        self.engine.load_state_dict(dict(weights))
        replica, position = divmod(self.group.rank, self.plan.ranks_per_replica)
        share = (replica, self.plan.replicas)
        slides = self.evaluation_set
        # `whole` is both: it chooses the size of each slide's image, and an engine for it.
        engine, images = (self.engine, slides.images) if self.whole is None else (self.whole, self.whole)
        # All ranks of a replica have the same logits: only its first hands them in.
        mine = predict_slides(engine, images, len(slides.targets), share, interrupted)
        logits = gather_logits(self.group, mine if position == 0 else None)
        if logits is None:
            return None
        on_logits(logits)
        return self.evaluation_set.metrics_of(logits)
