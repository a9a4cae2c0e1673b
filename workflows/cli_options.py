"""Options of the command line that several commands share, or that have long help texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one machine-readable object last on standard output.")]
TrainFolds = Annotated[
    str | None,
    typer.Option(
        "--folds",
        metavar="all|K,K",
        help="Cross-validation: train a run for each of these folds of `hyfi split --folds`, and pool their results.",
    ),
]
FoldColumn = Annotated[
    str | None, typer.Option("--fold-column", help="The column with the folds, such as repeat_1; default: fold.")
]
PlanRanks = Annotated[
    int | None, typer.Option("--ranks", min=1, help="Processes to start; default: as many as the plan needs.")
]
Ranks = Annotated[int | None, typer.Option("--ranks", min=1, help="Processes to start; default: one.")]
Cells = Annotated[
    str | None,
    typer.Option(
        "--cells",
        metavar="R,C",
        help="Compute each image (or each process's part of it) in R x C cells, one after the other, to save memory; "
        "auto: as many as --memory requires.",
    ),
]
CellMemory = Annotated[
    str | None,
    typer.Option("--memory", help="Memory limit of a process that computes in cells, as in 4GB; needs --spill."),
]
Spill = Annotated[
    str | None,
    typer.Option(
        "--spill",
        metavar="FOLDER|memory",
        help="Where maps go that no cell currently needs: a folder on a fast local disk, or, from a GPU, memory.",
    ),
]
SlideMpp = Annotated[
    float | None,
    typer.Option(
        "--slide-mpp", min=0.01, help="Microns per pixel of slides whose files do not state a plausible value."
    ),
]
FromMagnification = Annotated[
    bool,
    typer.Option(
        "--mpp-from-magnification",
        help="For slides that state only a magnification, use its usual microns per pixel, such as 0.25 for 40x.",
    ),
]
Scene = Annotated[
    str,
    typer.Option(
        "--scene",
        metavar="N|largest|all",
        help="Files with several scenes of tissue: all as slides of their own, the largest, or the N-th, from 1.",
    ),
]
FocalPlane = Annotated[
    int, typer.Option("--plane", min=0, help="Focal plane of files with several, from 1; 0: refuse such files.")
]

Measure = Annotated[
    Path | None,
    typer.Option(
        "--measure", metavar="FILE.yaml", help="Measure this machine for plan and simulate, instead of the checks."
    ),
]
MachineName = Annotated[
    str | None,
    typer.Option(
        "--machine",
        metavar="M.yaml",
        help="Machine model: cpu, v100-lassen, p40, a100, h100, bluefield2, or a file of doctor --measure; default: "
        "h100 if run.device is cuda, else cpu.",
    ),
]
Config = Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="The run's YAML, see docs/config.md.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[section.key=value]", help="Values that override the file's.")
]
IngestMpp = Annotated[
    str,
    typer.Option("--mpp", help="Microns per pixel of the store's finest level; native: each slide's own."),
]
ForceMpp = Annotated[
    bool, typer.Option("--force-mpp", help="Use the given mpp even if the file states a plausible one.")
]
Pen = Annotated[
    str,
    typer.Option("--pen", help="Pen marks: flag reports them, mask removes them from the tissue, off ignores them."),
]
Image = Annotated[
    str,
    typer.Option("--image", help="whole: all tissue of a slide; trained: what one image of the trained size shows."),
]
Cache = Annotated[
    Path | None, typer.Option("--cache", metavar="DIR", help="Copy each slide to this local folder before reading it.")
]
Memory = Annotated[
    str | None,
    typer.Option("--memory", help="Memory of all workers together, as in 8GB; default: most of the free memory."),
]
Part = Annotated[
    str, typer.Option("--part", metavar="i/n", help="Process the i-th of n parts, for example one on each node.")
]
Pseudonyms = Annotated[
    Path | None,
    typer.Option(
        "--pseudonyms",
        metavar="KEY.csv",
        help="Replace slide names by random ones; this CSV file keeps the real names.",
    ),
]
MaxBad = Annotated[
    float, typer.Option("--max-bad", min=0.0, max=1.0, help="Largest fraction of unreadable tiles in a slide.")
]
MergeAlike = Annotated[
    bool,
    typer.Option("--merge-alike", help="Join names written in several ways (P1, p1; 7, 007) instead of refusing them."),
]
Lossless = Annotated[bool, typer.Option("--lossless", help="Copy the scanner's JPEG tiles and levels unchanged.")]
Glass = Annotated[
    str,
    typer.Option("--glass", help="Background: keep writes the whole slide, blank omits chunks without tissue nearby."),
]
Unsharded = Annotated[
    bool, typer.Option("--unsharded", help="Write each chunk to its own file; default: shards of 64.")
]
Icc = Annotated[
    str, typer.Option("--icc", help="ICC profile: keep stores it with unchanged colours, apply converts to sRGB.")
]
ResumeFrom = Annotated[
    str | None,
    typer.Option(
        "--resume-from",
        metavar="previous|step-N",
        help="Continue a run from this checkpoint instead of the latest; removes everything later from the run.",
    ),
]
AcceptDataChanges = Annotated[
    bool, typer.Option("--accept-data-changes", help="Continue although labels, splits or slides have changed.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Accepted as in `hyfi train`; finished work is always kept.")]
"""Of commands that always continue, and do not read it: any stopped command may be repeated with ``--resume``."""
RanksPerSlide = Annotated[
    int | None,
    typer.Option(
        "--ranks-per-slide",
        min=1,
        help="Ranks that share a slide; the others predict other slides. Default: all with --ranks; under mpiexec or "
        "srun as few as keep all ranks busy.",
    ),
]
AllowPartial = Annotated[
    bool,
    typer.Option("--allow-partial", help="Also predict slides where too little tissue was seen; marked as incomplete."),
]
Tissue = Annotated[
    str | None,
    typer.Option(
        "--tissue",
        metavar="GEOJSON|off",
        help="Tissue outlines: a GeoJSON file, or a folder of <slide_id>.geojson; off: use the whole slide.",
    ),
]
TissueOut = Annotated[
    Path | None,
    typer.Option("--tissue", metavar="GEOJSON", help="Write a stored slide's tissue outlines as GeoJSON for QuPath."),
]
Features = Annotated[
    Path | None,
    typer.Option("--features", metavar="DIR", help="The slides' features, for a model that was trained on features."),
]
Device = Annotated[
    str,
    typer.Option("--device", help="cuda: one GPU for each rank; cpu; auto: cuda if there are enough GPUs."),
]
TissueSet = Annotated[
    list[str] | None,
    typer.Option(
        "--tissue-set",
        metavar="NAME=VALUE",
        help="Override a threshold of the tissue mask, as density=0.01,0.015; repeatable.",
    ),
]
Ensemble = Annotated[
    list[Path] | None, typer.Option("--checkpoint", help="Another checkpoint, for an ensemble; repeatable.")
]
Evidence = Annotated[
    str,
    typer.Option(
        "--evidence",
        metavar="map|occlusion|gradient",
        help="What shows where an answer comes from: the model's own map, if it has one; occlusion: also how much the "
        "outputs drop without each block of tissue, by many forwards; gradient: an estimate of that, by one backward "
        "for each output.",
    ),
]
EvidenceBlocks = Annotated[
    int | None,
    typer.Option("--evidence-blocks", min=1, help="Most forwards of a slide for --evidence occlusion; default: 256."),
]
PredictMpp = Annotated[
    float | None, typer.Option("--mpp", min=0.01, help="Microns per pixel to predict at; default: the checkpoint's.")
]
TargetColumn = Annotated[
    str | None, typer.Option("--target", help="The column of the labels, or several as a,b; default: as in training.")
]
IdColumn = Annotated[
    str | None,
    typer.Option("--id-column", help="The column of the labels with the slides' names; default: slide_id."),
]
SplitName = Annotated[str, typer.Option("--split", help="Which split to evaluate on; all: every labelled slide.")]
PredictSplit = Annotated[
    str | None, typer.Option("--split", help="Predict only slides of this split of the labels; all: every slide.")
]
SplitColumn = Annotated[
    str | None, typer.Option("--split-column", help="The column of splits; default: the one used in training.")
]
Calibrate = Annotated[
    bool, typer.Option("--calibrate", help="Fit the temperature of the probabilities and store it in CHECKPOINT.")
]
StoreOrSlide = Annotated[
    Path, typer.Argument(metavar="STORE_OR_SLIDE", help="A store, a slide of a store, or a slide file.")
]
