"""``hyfi validate``: what a checkpoint is worth on a split, by the same sums as during training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hyfi_core.errors import RequestError
from hyfi_core.runtime.launch import inside_launcher
from workflows.console import emit_json, say, warn


def run(
    checkpoint: Path,
    store: Path,
    labels: Path | None,
    splits: Path | None,
    split: str,
    ranks: int | None,
    as_json: bool,
) -> int:
    """Judge a checkpoint; ``ranks`` of them share each image in columns.

    Args:
        checkpoint: its folder.
        store: the slides.
        labels: a CSV with the checkpoint's target column; None: the store's manifest.
        splits: a CSV of splits; None: a column of the labels.
        split: train, val or test.
        ranks: processes; None: one.
        as_json: print the numbers as one JSON object.

    Returns:
        0.

    Raises:
        RequestError: something is missing or does not fit the checkpoint.
    """
    from workflows.launch import launch, run_as_rank

    if ranks is not None and ranks > 1 and inside_launcher() is None:
        words = ["validate", str(checkpoint), "--store", str(store), "--split", split, *(["--json"] * as_json)]
        words += ["--labels", str(labels)] if labels else []
        words += ["--splits", str(splits)] if splits else []
        return launch(words, ranks)
    return run_as_rank(lambda: validate_rank(checkpoint, store, labels, splits, split, as_json))


def validate_rank(
    checkpoint: Path, store: Path, labels: Path | None, splits: Path | None, split: str, as_json: bool
) -> int:
    """Do this rank's share and return the exit code."""
    import hyfi_core
    from hyfi_core.runtime.checkpoint import load_checkpoint
    from workflows.evaluation import judge_weights
    from workflows.training.start import together

    world = hyfi_core.init()
    loaded = together(world, lambda: load_checkpoint(checkpoint))
    dataset = together(world, lambda: _dataset(loaded.model, store, labels, splits, split))
    engine, exam = together(world, lambda: _engine_and_exam(loaded.model, dataset, world))
    metrics = judge_weights(exam, engine, world, loaded.weights)
    if metrics is None:
        return 0
    least = float(loaded.model["min_coverage"])
    low = [dataset.samples[i].slide_id for i in range(len(dataset)) if dataset.view(i).coverage < least]
    if low:
        warn(f"{len(low)} slides show less than {least:g} of their tissue: {', '.join(low)}")
    _tell(checkpoint, loaded.model, split, len(dataset), metrics, as_json)
    return 0


def _dataset(model: Mapping[str, Any], store: Path, labels: Path | None, splits: Path | None, split: str) -> Any:
    """Return the split's slides as the checkpoint's network sees them."""
    from data.dataset import SlideDataset, select_slides
    from data.labels import load_labels
    from data.manifest import StoreManifest
    from data.splits import SPLITS, load_splits

    if split not in SPLITS:
        raise RequestError(f"--split: given {split!r}; allowed: {', '.join(SPLITS)}")
    rows = StoreManifest.load(store)
    path = labels or store / "manifest.csv"
    known = load_labels(path, model.get("target", "label"), classes=model["class_names"])
    slides = select_slides(rows, known, load_splits(splits or path, rows), split)
    if not slides:
        raise RequestError(f"--split {split}: no slide of {store} is done, labelled in {path} and in {split!r}")
    height, width = model["size_px"]
    return SlideDataset(
        store, slides, size_px=(height, width), mpp=model["mpp"], view=model["view"], align_px=model["align_px"]
    )


def _engine_and_exam(model: Mapping[str, Any], dataset: Any, world: Any) -> tuple[Any, Any]:
    import torch

    from data.normalise import Normalisation
    from hyfi_core.plan.parallel_plan import ParallelPlan
    from hyfi_core.runtime.engine import parallelize
    from workflows.evaluation import Exam, Images
    from workflows.models import DTYPES, FORMATS, build_model, lay_out

    precision, memory_format = model.get("precision", "float32"), model.get("memory_format", "channels_last")
    module = lay_out(build_model(model["model"]), precision, memory_format)
    engine = parallelize(
        module,
        (1, 3, *dataset.size_px),
        ParallelPlan(grids=((1, world.size),)),
        world,
        autocast=torch.bfloat16 if precision == "bfloat16" else None,
    )
    normalisation = Normalisation.from_json(model["normalisation"])
    images = Images(dataset, normalisation, DTYPES[precision], FORMATS[memory_format])
    weights = model.get("class_weights") or [1.0] * len(model["class_names"])
    return engine, Exam(images, tuple(sample.label for sample in dataset.samples), tuple(weights))


def _tell(
    checkpoint: Path, model: Mapping[str, Any], split: str, slides: int, metrics: Mapping[str, Any], as_json: bool
) -> None:
    step = model.get("step")
    say(f"{checkpoint} (step {step}) on {slides} slides of {split}:")
    for name, value in metrics.items():
        say(f"  {name:<18} {'undefined' if value is None else f'{value:.4f}'}")
    if as_json:
        emit_json({"checkpoint": checkpoint, "step": step, "split": split, "slides": slides, **metrics})
