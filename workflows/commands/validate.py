"""``hyfi validate``: metrics of a checkpoint on a split, computed as during training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.files import write_atomically
from hyfi_core.errors import RequestError
from hyfi_core.plan.device import device_request
from hyfi_core.runtime.launch import inside_launcher
from pathology.memory import parse_bytes
from workflows import signals
from workflows.console import counted, emit_json, plain_json, say, warn
from workflows.evaluation.slide_warnings import warn_of_low_coverage, warn_of_slides, warn_of_unmeasured
from workflows.exit_codes import DONE, STOPPED
from workflows.option_values import Cells
from workflows.paths import require_local

ALL = "all"
"""As ``--split``: every labelled slide."""
METRICS_FILE = "metrics.json"
"""In the folder of ``--out``: the object of ``--json``."""

if TYPE_CHECKING:
    import torch

    from data.csv_table import Table
    from data.samples.dataset import SlideDataset
    from data.samples.matching import LabelMatch
    from data.tiles.bags import Bags
    from hyfi_core.comm.base import Communicator
    from workflows.evaluation.evaluate import Logits
    from workflows.evaluation.evaluator import Evaluator
    from workflows.evaluation.whole import WholeSlides


@dataclass(frozen=True)
class EvaluationRequest:
    """The arguments of an evaluation.

    Attributes:
        checkpoint: Folder of the checkpoint.
        store: The store with the slides.
        labels: A CSV with the checkpoint's target column; None: the store's manifest.
        splits: A CSV of splits; None: a column of the labels.
        split: train, val or test; all: every labelled slide, whatever its split, as for an external test set.
        split_column: The column of splits; None: the one used in training.
        cells: "R,C": rows and columns of cells that a process computes one after the other; auto: as many as
            ``memory`` requires; None: whole images.
        memory: Memory limit of a process, as in 4GB, with ``spill``.
        spill: Folder, or memory, for maps that no cell currently needs.
        image: ``whole``: show all tissue of every slide; ``trained``: what one image of the trained size shows.
        out: Folder for ``index.html``, ``predictions.csv`` and ``metrics.json``; None: they are not written.
        as_json: Print the metrics as one JSON object.
        calibrate: Fit the temperature on these slides and store it in the checkpoint.
        device: ``auto``, ``cpu`` or ``cuda``.
        merge_alike: Whether names that are written in several ways are joined; otherwise as in training.
        target: The column of the labels, or several with commas; None: as in training.
        id_column: The column of the labels that has the names of the slides; None: as in training, of their labels.
        ranks: Number of processes: each image is divided among them in columns or, with cells, each process evaluates
            its own slides. None: one.
        features: Folder of the slides' features, for a model that was trained on features.
    """

    checkpoint: Path
    store: Path
    labels: Path | None = None
    splits: Path | None = None
    split: str = "test"
    split_column: str | None = None
    cells: str | None = None
    memory: str | None = None
    spill: str | None = None
    image: str = "whole"
    out: Path | None = None
    as_json: bool = False
    calibrate: bool = False
    device: str = "auto"
    merge_alike: bool = False
    target: str | None = None
    id_column: str | None = None
    ranks: int | None = None
    features: Path | None = None


def run(request: EvaluationRequest) -> int:
    """Evaluate a checkpoint and print its metrics.

    Returns:
        0, or 3 if stopped on request.

    Raises:
        RequestError: The request is not valid, or does not match the checkpoint.
    """
    from workflows.launch.launch import launch_body, run_as_rank

    if request.image not in ("whole", "trained"):
        raise RequestError(f"--image {request.image}: expected whole or trained")
    require_local(request.checkpoint, "checkpoint")
    device_request(request.device)  # raises if it names no device
    if request.calibrate and request.split != "val":
        raise RequestError(
            f"--calibrate --split {request.split}: slides used to fit the temperature cannot be used to evaluate it; "
            f"use --split val"
        )
    if request.out is not None:
        _refuse_folder_of_predictions(request.out)
    _cells_of(request)  # raises if its options do not fit together, before ranks are started
    body = partial(validate_rank, request)
    if request.ranks is not None and request.ranks > 1 and inside_launcher() is None:
        return launch_body(body, "validate", request.ranks)
    return run_as_rank(body)


def _refuse_folder_of_predictions(out: Path) -> None:
    from pathology.predict.out_folder import RUN_FILE

    if (out / RUN_FILE).exists():
        raise RequestError(f"--out {out}: has predictions of hyfi predict, whose table would be lost; choose another")


def validate_rank(request: EvaluationRequest) -> int:
    """Evaluate as one rank, or alone; return the exit code."""
    from data.samples.trained.trained_notes import OUTSIDE, TRAINED_ON, TrainedNotes
    from hyfi_core.arithmetic import set_arithmetic
    from hyfi_core.comm.agreement.agree import agree
    from hyfi_core.runtime.checkpoint import amend_model_json, load_checkpoint
    from hyfi_core.runtime.launch import own_device
    from hyfi_core.runtime.saving.engine_folder import check_names
    from hyfi_core.stored_state import fill_buffers
    from pathology.predict.members import check_complete
    from workflows.evaluation.evaluate import Interrupted
    from workflows.evaluation.tile_evaluator import bags_of
    from workflows.evaluation.validation_page import write_validation
    from workflows.launch.peer_watch import join
    from workflows.launch.stop import StopFlag
    from workflows.launch.threads import set_threads

    stop, world = StopFlag(signals.requested), join()
    set_threads(world)
    loaded = agree(world, lambda: load_checkpoint(request.checkpoint))
    check_complete(loaded.model, request.checkpoint)
    set_arithmetic(loaded.model.get("tf32", False))  # as in training, so that metrics are the same
    dataset = agree(world, lambda: _dataset(loaded.model, request))
    device = own_device(device_request(request.device), world)
    bags = agree(world, lambda: bags_of(loaded.model, dataset, request.features))
    evaluator = agree(world, lambda: _evaluator(request, loaded.model, dataset, bags, world, device))
    check_names(request.checkpoint, loaded.inference_weights, evaluator.module.state_dict())
    fill_buffers(evaluator.module, loaded.buffers or {})
    logits: Logits = {}
    try:
        metrics = evaluator.evaluate(loaded.inference_weights, lambda: stop.requested_on_any(world), logits.update)
    except Interrupted:
        return STOPPED
    if metrics is None:  # rank 0 has them
        return DONE
    if evaluator.whole is not None:
        _print_enlarged(evaluator.whole, loaded.model, len(dataset))
    elif bags is None:  # bags have all tiles
        warn_of_low_coverage(loaded.model, dataset)
    # A calibration fitted to these slides is stored with --calibrate, but never reported as a result on them.
    fitted = metrics.pop("calibration")
    if request.calibrate and fitted is not None:
        loaded.model["calibration"] = {**fitted, "split": request.split, "image": request.image}
        amend_model_json(request.checkpoint, {"calibration": loaded.model["calibration"]})
    elif request.calibrate:
        task = loaded.model.get("task", "multiclass")
        warn(f"--calibrate: nothing is stored, because task {task} has no calibration or outputs are not finite")
    metrics["calibration"] = _calibration(loaded.model, evaluator, logits)
    notes = TrainedNotes.of(loaded.model, dataset)
    metrics["flagged_slides"] = {TRAINED_ON: len(notes.trained), OUTSIDE: len(notes.outside)}
    weights = "weights" if loaded.averaged is None else "average of the weights"
    page = None
    if request.out is not None:
        page = write_validation(
            request.out, loaded.model, evaluator, dataset, logits, bags, request.store, request.split, notes
        )
    _report(request, loaded.model, weights, metrics, page)
    return DONE


def _cells_of(request: EvaluationRequest) -> Cells:
    """Check the request's memory limit, and return its cells."""
    from workflows.evaluation.tile_evaluator import cells_of

    if request.memory is not None:
        parse_bytes(request.memory)
    return cells_of([request.checkpoint], request.cells, request.memory, request.spill, request.image)


def _evaluator(
    request: EvaluationRequest,
    model: Mapping[str, Any],
    dataset: SlideDataset,
    bags: Bags | None,
    world: Communicator,
    device: torch.device,
) -> Evaluator:
    """Return the evaluator of bags, of images divided among the ranks, or of images in cells (collective)."""
    from hyfi_core.comm.agreement.agree import agree
    from hyfi_core.plan.parallel_plan import ParallelPlan
    from workflows.evaluation.evaluator import Evaluator
    from workflows.evaluation.tile_evaluator import bag_evaluator

    memory_bytes = None if request.memory is None else parse_bytes(request.memory)
    if bags is not None:
        plan = ParallelPlan(tiles=world.size, memory_bytes=memory_bytes)
        return bag_evaluator(model, bags, world, plan, device)
    cells = agree(world, lambda: _cells_of(request))
    if cells is None:
        # Columns: an image is divided among all ranks.
        plan = ParallelPlan(grids=((1, world.size),))
    else:
        plan = ParallelPlan(((1, 1),), replicas=world.size, cells=cells, memory_bytes=memory_bytes, spill=request.spill)
    return Evaluator.of(model, dataset, plan, world, cells, all_tissue=request.image == "whole", device=device)


def _calibration(model: Mapping[str, Any], evaluator: Evaluator, logits: Logits) -> dict[str, Any] | None:
    """Print and return the effect of the checkpoint's calibration on these slides; None if it has none."""
    import torch

    if not model.get("calibration"):
        return None
    task = evaluator.evaluation_set.task
    values = torch.tensor([logits[index] for index in range(len(logits))], dtype=torch.float64)
    effect = task.describe_calibration(values, task.tensor(evaluator.evaluation_set.targets), model["calibration"])
    if effect is None:
        return None
    text, numbers = effect
    samples = counted(len(values), "case" if evaluator.evaluation_set.of_cases else "slide")
    say(f"calibrated on {model['calibration'].get('split', 'val')}; on {samples} here, {text}")
    return evaluator.evaluation_set.counted(numbers)


def _print_enlarged(slides_shown: WholeSlides, model: Mapping[str, Any], slides: int) -> None:
    """Print which slides did not fit the trained size and how they were shown."""
    height, width = model["size_px"]
    cropped = sum("cropped" in slides_shown.dataset.view(index).flags for index in range(slides))
    if cropped:
        warn(
            f"{cropped} of {slides} slides do not fit {height} × {width} px and are shown whole here; validation "
            f"during training saw only what fits, so these numbers differ from the run's (--image trained gives the "
            f"same)"
        )
    for how, indices in (
        ("as one larger image each", slides_shown.enlarged),
        ("as several images each", slides_shown.several),
    ):
        if indices:
            names = ", ".join(slides_shown.dataset.samples[index].slide_id for index in sorted(indices))
            have = "slide has" if len(indices) == 1 else "slides have"
            say(f"{len(indices)} {have} more tissue than fits {height} × {width} px; shown {how}: {names}")


def _dataset(model: Mapping[str, Any], request: EvaluationRequest) -> SlideDataset:
    """Return a dataset of the split's slides with the checkpoint's image size, mpp and view."""
    from data.location import location
    from data.missing import MISSING
    from data.samples.dataset import select_slides
    from data.samples.exclusion import without_flags
    from data.samples.labels import with_cases
    from data.samples.matching import match_labels
    from data.samples.names import with_one_spelling_of_cases
    from data.samples.splits import SPLITS, load_splits
    from data.store.manifest import load_manifest
    from workflows.evaluation.evaluator import dataset_of
    from workflows.evaluation.labelled_inputs import keyed_table
    from workflows.launch.launch import own_rank
    from workflows.tasks.by_name import task_of

    store, split = location(request.store), request.split
    if split not in (*SPLITS, ALL):
        raise RequestError(f"--split: given {split!r}; allowed: {', '.join((*SPLITS, ALL))}")
    merge = request.merge_alike or bool(model.get("merge_alike", False))
    missing = MISSING if model.get("missing") is None else tuple(model["missing"])
    rows = with_one_spelling_of_cases(load_manifest(store), str(store / "manifest.csv"), merge=merge, missing=missing)
    label_source: Path | Table = location(request.labels or store / "manifest.csv")
    if request.labels is not None:
        label_source = keyed_table(location(request.labels), request.id_column, model)
    elif request.id_column is not None:
        raise RequestError("--id-column: give the table with this column, too: --labels CSV")
    task = task_of(model)
    task = task if request.target is None else task.with_target(request.target)
    labels = task.read_again(label_source, rows, merge, missing)  # with the classes of training, in their order
    rows = with_cases(rows, labels, str(label_source))
    column = request.split_column or model.get("split_column", "split")
    if split == ALL:
        splits = {row["slide_id"]: ALL for row in rows}
    else:
        splits = load_splits(
            location(request.splits) if request.splits else label_source,
            rows,
            column=column,
            merge_alike=merge,
            missing=missing,
        )
    match = match_labels(rows, labels, splits, str(label_source))
    match.check(str(label_source), allow_unmatched=True)
    if own_rank() == 0:
        _say_slides(match, store)
    flags = model.get("exclude_flags", ()) if split in ("train", "val") else ()
    slides = select_slides(without_flags(rows, flags), labels, splits, split)
    left_out = len(select_slides(rows, labels, splits, split)) - len(slides)
    if left_out and own_rank() == 0:
        say(f"as in training, {left_out} slides with one of the flags {', '.join(flags)} are left out")
    if not slides:
        raise RequestError(f"--split {split}: no slide of {store} is done, labelled in {label_source} and in {split!r}")
    dataset = dataset_of(model, store, slides)
    dataset.check_files()
    if own_rank() == 0:
        warn_of_unmeasured(dataset)
        warn_of_slides(task, model, dataset, None if split == ALL else split)
    return dataset


def _say_slides(match: LabelMatch, store: Path) -> None:
    """Print how the labels match the store's slides, and which slides an ingest has not finished."""
    from data.store.unfinished import unfinished_note

    say(match.describe())
    if note := unfinished_note(store):
        warn(note)


def _report(
    request: EvaluationRequest, model: Mapping[str, Any], weights: str, metrics: Mapping[str, Any], page: Path | None
) -> None:
    """Print the metrics by slide and by case, and write them beside the page."""
    step = model.get("step")
    say(
        f"{request.checkpoint} (step {step}), {weights}, on {metrics['slides']} slides of {request.split} "
        "(in brackets: 95 % intervals, cases resampled):"
    )
    if model.get("bag") != "case":
        _print_metrics(metrics)
    if metrics["case"] is not None:
        combined = f"{model.get('case_aggregate', 'mean')} of their slides"
        if model.get("bag") == "case":
            combined = "each one bag of all its slides"
        say(f"by case ({counted(metrics['case']['cases'], 'case')}; {combined}):")
        _print_metrics(metrics["case"])
    if page is not None:
        say(f"all slides: {page}")
    numbers = {"checkpoint": request.checkpoint, "step": step, "split": request.split, **metrics}
    if page is not None:
        numbers["page"] = page
        write_atomically(page.with_name(METRICS_FILE), (json.dumps(plain_json(numbers), indent=1) + "\n").encode())
    if request.as_json:
        emit_json(numbers)


def _print_metrics(metrics: Mapping[str, Any]) -> None:
    """Print a line for each metric, with their values below each other."""
    from workflows.training.recorder import format_metrics

    texts = format_metrics(metrics)
    width = max(18, *map(len, texts))
    for name, text in texts.items():
        say(f"  {name:<{width}} {text}")
