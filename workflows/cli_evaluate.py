"""The options of ``hyfi validate`` and ``hyfi predict``; implemented in :mod:`workflows.commands`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from workflows.cli_exit import exit_with
from workflows.cli_options import (
    AllowPartial,
    Calibrate,
    CellMemory,
    Cells,
    Device,
    Ensemble,
    Evidence,
    EvidenceBlocks,
    Features,
    ForceMpp,
    FromMagnification,
    IdColumn,
    Image,
    Json,
    MergeAlike,
    Part,
    PredictMpp,
    PredictSplit,
    Ranks,
    RanksPerSlide,
    Resume,
    SlideMpp,
    Spill,
    SplitColumn,
    SplitName,
    TargetColumn,
    Tissue,
)

_OPTIONS = (
    "spill",
    "mpp",
    "slide_mpp",
    "force_mpp",
    "mpp_from_magnification",
    "overwrite",
    "image",
    "allow_partial",
    "tissue",
    "features",
    "evidence",
    "evidence_blocks",
)
"""The arguments of `predict` that are passed to fields of `PredictOptions` unchanged."""


def validate(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="RUN/checkpoints/best, for example.")],
    store: Annotated[Path, typer.Option("--store", help="The store with the slides.")],
    labels: Annotated[Path | None, typer.Option("--labels", help="Labels; default: the store's manifest.")] = None,
    splits: Annotated[Path | None, typer.Option("--splits", help="Splits; default: a column of the labels.")] = None,
    id_column: IdColumn = None,
    target: TargetColumn = None,
    split_name: SplitName = "test",
    split_column: SplitColumn = None,
    ranks: Ranks = None,
    cells: Cells = None,
    memory: CellMemory = None,
    spill: Spill = None,
    image: Image = "whole",
    out: Annotated[Path | None, typer.Option("--out", help="Folder for an HTML page and a CSV of all slides.")] = None,
    device: Device = "auto",
    calibrate: Calibrate = False,
    merge_alike: MergeAlike = False,
    features: Features = None,
    resume: Resume = False,  # changes nothing: accepted as in `hyfi train`
    as_json: Json = False,
) -> None:
    """Compute the metrics of a checkpoint on labelled slides."""
    from workflows.commands import validate

    request = validate.EvaluationRequest(
        checkpoint=checkpoint,
        store=store,
        labels=labels,
        splits=splits,
        split=split_name,
        split_column=split_column,
        id_column=id_column,
        target=target,
        features=features,
        ranks=ranks,
        cells=cells,
        memory=memory,
        spill=spill,
        image=image,
        out=out,
        device=device,
        calibrate=calibrate,
        merge_alike=merge_alike,
        as_json=as_json,
    )
    exit_with(partial(validate.run, request), writes=out, as_ranks=True)


def predict(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="RUN/checkpoints/best, for example.")],
    inputs: Annotated[list[Path], typer.Argument(metavar="SLIDE_OR_STORE", help="Slide files, folders, stores.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for predictions, heatmaps and reports.")],
    more: Ensemble = None,
    ranks: Ranks = None,
    ranks_per_slide: RanksPerSlide = None,
    cells: Cells = None,
    memory: CellMemory = None,
    spill: Spill = None,
    mpp: PredictMpp = None,
    slide_mpp: SlideMpp = None,
    force_mpp: ForceMpp = False,
    mpp_from_magnification: FromMagnification = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Process finished slides again.")] = False,
    image: Image = "whole",
    allow_partial: AllowPartial = False,
    tissue: Tissue = None,
    device: Device = "auto",
    part: Part = "1/1",
    labels: Annotated[Path | None, typer.Option("--labels", help="Labels; default: the slides' manifest.")] = None,
    id_column: IdColumn = None,
    target: TargetColumn = None,
    split: PredictSplit = None,
    features: Features = None,
    evidence: Evidence = "map",
    evidence_blocks: EvidenceBlocks = None,
    resume: Resume = False,  # changes nothing: finished slides are always kept
    as_json: Json = False,
) -> None:
    """Predict slides: probabilities, heatmaps, overlays, annotations and reports."""
    values = locals()  # first, so that it has the arguments alone
    from workflows.commands import predict

    arguments = predict.PredictArguments(
        checkpoints=[checkpoint, *(more or ())],
        inputs=inputs,
        out=out,
        ranks=ranks,
        ranks_per_slide=ranks_per_slide,
        cells=cells,
        memory=memory,
        device=device,
        part=part,
        labels=labels,
        id_column=id_column,
        target=target,
        split=split,
        as_json=as_json,
        options={name: values[name] for name in _OPTIONS},
    )
    exit_with(partial(predict.run, arguments), writes=out, as_ranks=True)


def export_model(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="RUN/checkpoints/best, for example.")],
    out: Annotated[Path, typer.Option("--out", help="Folder to make, with a card that describes the model.")],
    to: Annotated[str, typer.Option("--to", metavar="torch|onnx|pt2|torchscript", help="What to write.")] = "torch",
    size_px: Annotated[
        str | None,
        typer.Option("--size-px", metavar="H,W", help="Fixed size of the images, not for torch; default: any size."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a trained model for use elsewhere: weights and a script, or one file, with a model card."""
    from workflows.commands import export_model
    from workflows.option_values import parse_size

    exit_with(lambda: export_model.run(checkpoint, to, out, parse_size(size_px), as_json), writes=out)
