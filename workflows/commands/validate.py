"""``hyfi validate``: what a checkpoint is worth on a split, by the same sums as during training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyfi_core.errors import RequestError
from hyfi_core.runtime.launch import inside_launcher
from workflows.console import emit_json, say, warn
from workflows.evaluation.cells import parse_cells

if TYPE_CHECKING:
    from workflows.evaluation.whole import WholeSlides


def run(
    checkpoint: Path,
    store: Path,
    labels: Path | None,
    splits: Path | None,
    split: str,
    ranks: int | None,
    as_json: bool,
    cells: str | None = None,
    split_column: str | None = None,
    image: str = "whole",
) -> int:
    """Judge a checkpoint; ``ranks`` of them share each image in columns, or, with ``cells``, share the slides.

    Args:
        checkpoint: its folder.
        store: the slides.
        labels: a CSV with the checkpoint's target column; None: the store's manifest.
        splits: a CSV of splits; None: a column of the labels.
        split: train, val or test.
        ranks: processes; None: one.
        as_json: print the numbers as one JSON object.
        cells: "R,C": rows and columns in which a process looks at an image, one after the other; None: at once.
        split_column: the column of splits; None: the one that the checkpoint was trained by.
        image: ``whole``: all tissue of every slide is shown; ``trained``: what an image of the trained size holds.

    Returns:
        0.

    Raises:
        RequestError: something is missing or does not fit the checkpoint.
    """
    from workflows.launch.launch import launch, run_as_rank

    if image not in ("whole", "trained"):
        raise RequestError(f"--image {image}: whole or trained are expected")
    grid = parse_cells(cells)
    if ranks is not None and ranks > 1 and inside_launcher() is None:
        words = ["validate", str(checkpoint), "--store", str(store), "--split", split, *(["--json"] * as_json)]
        words += ["--labels", str(labels)] if labels else []
        words += ["--splits", str(splits)] if splits else []
        words += ["--split-column", split_column] if split_column else []
        words += ["--cells", cells] if cells else []
        words += ["--image", image]
        return launch(words, ranks)
    return run_as_rank(
        lambda: validate_rank(checkpoint, store, labels, splits, split, as_json, grid, split_column, image)
    )


def validate_rank(
    checkpoint: Path,
    store: Path,
    labels: Path | None,
    splits: Path | None,
    split: str,
    as_json: bool,
    cells: tuple[int, int] | None = None,
    split_column: str | None = None,
    image: str = "whole",
) -> int:
    """Do this rank's share and return the exit code."""
    import hyfi_core
    from hyfi_core.comm.agree import agree
    from hyfi_core.plan.parallel_plan import ParallelPlan
    from hyfi_core.runtime.checkpoint import load_checkpoint
    from workflows.evaluation.judge import Judge

    world = hyfi_core.init(supervised=False)
    loaded = agree(world, lambda: load_checkpoint(checkpoint))
    dataset = agree(world, lambda: _dataset(loaded.model, store, labels, splits, split, split_column))
    apart = ParallelPlan(grids=((1, 1),), replicas=world.size)
    plan = ParallelPlan(grids=((1, world.size),)) if cells is None else apart
    judge = agree(world, lambda: Judge.of(loaded.model, dataset, plan, world, cells, whole=image == "whole"))
    metrics = judge.judge(loaded.judged)
    if metrics is None:
        return 0
    least = float(loaded.model["min_coverage"])
    low = [dataset.samples[i].slide_id for i in range(len(dataset)) if dataset.view(i).coverage < least]
    if judge.whole is not None:
        _say_enlarged(judge.whole, loaded.model)
    elif low:
        warn(f"{len(low)} slides show less than {least:g} of their tissue (--image whole shows all): {', '.join(low)}")
    kind = "weights" if loaded.averaged is None else "moving average of the weights (EMA)"
    _tell(checkpoint, loaded.model, split, kind, metrics, as_json)
    return 0


def _say_enlarged(whole: WholeSlides, model: Mapping[str, Any]) -> None:
    """Say which slides did not fit the trained size, and how they were shown nevertheless."""
    height, width = model["size_px"]
    for how, indices in (("one larger image each", whole.enlarged), ("several images each", whole.several)):
        if indices:
            names = ", ".join(whole.dataset.samples[index].slide_id for index in sorted(indices))
            say(f"{len(indices)} slides have more tissue than {height} × {width} px hold; in {how}: {names}")


def _dataset(
    model: Mapping[str, Any],
    store: Path,
    labels: Path | None,
    splits: Path | None,
    split: str,
    split_column: str | None,
) -> Any:
    """Return the split's slides as the checkpoint's network sees them."""
    from data.samples.dataset import select_slides
    from data.samples.labels import load_labels
    from data.samples.splits import SPLITS, load_splits
    from data.store.manifest import load_manifest
    from workflows.evaluation.judge import dataset_of

    if split not in SPLITS:
        raise RequestError(f"--split: given {split!r}; allowed: {', '.join(SPLITS)}")
    rows = load_manifest(store)
    path = labels or store / "manifest.csv"
    known = load_labels(path, model.get("target", "label"), classes=model["class_names"])
    column = split_column or model.get("split_column", "split")
    slides = select_slides(rows, known, load_splits(splits or path, rows, column=column), split)
    if not slides:
        raise RequestError(f"--split {split}: no slide of {store} is done, labelled in {path} and in {split!r}")
    return dataset_of(model, store, slides)


def _tell(
    checkpoint: Path, model: Mapping[str, Any], split: str, kind: str, metrics: Mapping[str, Any], as_json: bool
) -> None:
    step = model.get("step")
    say(
        f"{checkpoint} (step {step}), {kind}, on {metrics['slides']} slides of {split} "
        "(in brackets: 95 % intervals, cases resampled):"
    )
    _tell_numbers(metrics)
    if metrics["case"] is not None:
        say(f"by case ({metrics['case']['cases']} cases; {model.get('case_aggregate', 'mean')} of their slides):")
        _tell_numbers(metrics["case"])
    if as_json:
        emit_json({"checkpoint": checkpoint, "step": step, "split": split, **metrics})


def _tell_numbers(metrics: Mapping[str, Any]) -> None:
    from workflows.training.recorder import numbers_in_words

    for name, words in numbers_in_words(metrics).items():
        say(f"  {name:<18} {words}")
