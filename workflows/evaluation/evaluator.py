"""A checkpoint's network on a group of ranks, and the slides that it is evaluated on: the same for every command.

Trainers evaluate with the engine that they train with; validators' children and ``hyfi validate`` build this from a
checkpoint's ``model.json``. The sums are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from data.loading.normalise import Normalisation
from data.samples.dataset import SlideDataset, SlideRef
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.comm.base import Communicator
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.process_memory import return_what_is_freed
from hyfi_core.runtime.parallelize import parallelize
from pathology.predict.whole_tissue import Pooling, SizedEngines
from workflows.evaluation.evaluate import (
    DatasetImages,
    EvaluationSet,
    InferenceEngine,
    Logits,
    Metrics,
    gather_logits,
    predict_slides,
)
from workflows.evaluation.models import DTYPES, FORMATS, build_model, lay_out
from workflows.evaluation.whole import WholeSlides


def dataset_of(model: Mapping[str, Any], store: Path, slides: Sequence[SlideRef]) -> SlideDataset:
    """Return slides as the network of a ``model.json`` sees them."""
    height, width = model["size_px"]
    return SlideDataset(
        store, slides, size_px=(height, width), mpp=model["mpp"], view=model["view"], align_px=model["align_px"]
    )


def evaluation_set_of(model: Mapping[str, Any], dataset: SlideDataset) -> EvaluationSet:
    """Return what weights of the network of a ``model.json`` are evaluated by; slides must be labelled."""
    images = DatasetImages(
        dataset,
        Normalisation.from_json(model["normalisation"]),
        DTYPES[model.get("precision", "float32")],
        FORMATS[model.get("memory_format", "channels_last")],
    )
    weights = model.get("class_weights") or [1.0] * len(model["class_names"])
    return EvaluationSet.of(images, dataset.samples, tuple(weights), model.get("case_aggregate", "mean"))


@dataclass(frozen=True)
class Evaluator:
    """Judges weights on all ranks of a group; every method is collective.

    Attributes:
        evaluation_set: the slides.
        engine: of this rank's replica, for images of the trained size; its module has the weights evaluated last.
        module: the network.
        plan: how the group is divided.
        group: the ranks.
        whole: evaluates all tissue of slides that do not fit the trained size; None: only what fits is evaluated.
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
        cells: tuple[int, int] | None = None,
        *,
        whole: bool = False,
        device: torch.device | None = None,
    ) -> Evaluator:
        """Build the model of a ``model.json``, distributed by ``plan``, with arbitrary weights.

        Args:
            model: content of ``model.json``.
            dataset: the slides.
            plan: how the group is divided.
            group: the ranks.
            cells: rows and columns, where every rank is a replica of the plan and evaluates images cell by cell,
                spilling as the plan says.
            whole: whether to show all tissue of slides that do not fit the trained size.
            device: where this rank computes; None: on the CPU.

        Raises:
            RequestError: the plan cannot run it.
        """
        precision = model.get("precision", "float32")
        module = lay_out(build_model(model["model"]), precision, model.get("memory_format", "channels_last"))
        module.to(device or torch.device("cpu"))
        autocast = torch.bfloat16 if precision == "bfloat16" else None
        shape = (1, 3, *dataset.size_px)
        engine: InferenceEngine
        if cells is None:
            engine = parallelize(module, shape, plan, group, autocast=autocast, verify=False)  # by training
        else:
            return_what_is_freed()  # else the heap keeps as much again as a cell needs
            alone = ParallelPlan(((1, 1),), cells=cells, spill=plan.spill, memory_bytes=plan.memory_bytes)
            engine = parallelize(module, shape, alone, AloneCommunicator(), autocast=autocast)
        slides = evaluation_set_of(model, dataset)
        if not whole:
            return cls(slides, engine, module, plan, group)
        replica = group if cells is None else AloneCommunicator()
        engines = SizedEngines(module, engine, dataset.size_px, replica, cells, autocast=autocast, grid=plan.grids[0])
        pooling: Pooling = "max" if model["model"].get("pool") == "max" else "mean"
        return cls(slides, engine, module, plan, group, WholeSlides(dataset, slides.images, engines, replica, pooling))

    def evaluate(
        self,
        weights: Mapping[str, torch.Tensor],
        interrupted: Callable[[], bool] = lambda: False,
        seen: Callable[[Logits], None] = lambda logits: None,
    ) -> Metrics | None:
        """Return the metrics of weights, on rank 0; None elsewhere.

        Args:
            weights: of the network.
            interrupted: asked before each slide.
            seen: called on rank 0 with the slides' logits.

        Raises:
            Interrupted: ``interrupted`` returned True, on all ranks alike.
        """
        self.engine.load_state_dict(dict(weights))
        replica, place = divmod(self.group.rank, self.plan.ranks_per_replica)
        share = (replica, self.plan.replicas)
        slides = self.evaluation_set
        engine, images = (self.engine, slides.images) if self.whole is None else (self.whole, self.whole)
        mine = predict_slides(engine, images, len(slides.targets), share, interrupted)
        logits = gather_logits(self.group, mine if place == 0 else None)
        if logits is None:
            return None
        seen(logits)
        return self.evaluation_set.metrics_of(logits)
