"""The one entry point: declares every command, turns what happens into an exit code.

Nothing heavy is imported here: a command imports what it needs when it runs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from hyfi_core.errors import RequestError
from workflows.console import warn
from workflows.paths import require_writable

DONE, SOME_FAILED, WRONG_REQUEST, STOPPED, FAULT = 0, 1, 2, 3, 70

EPILOG = (
    "Exit codes: 0 all done, 1 finished but some inputs failed, 2 the request is wrong (nothing was written), "
    "3 stopped on request (go on with --resume), anything else a fault."
)

app = typer.Typer(
    name="hyfi",
    help="Train and run classifiers on whole gigapixel slides.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Print one machine-readable object last on standard output.")]
PlanRanks = Annotated[
    int | None, typer.Option("--ranks", min=1, help="Processes to start; default: as many as the plan needs.")
]
Ranks = Annotated[int | None, typer.Option("--ranks", min=1, help="Processes to start; default: one.")]
Cells = Annotated[
    str | None,
    typer.Option("--cells", metavar="R,C", help="Cut an image into R x C cells, one after the other: less memory."),
]
SlideMpp = Annotated[
    float | None, typer.Option("--slide-mpp", min=0.01, help="Microns per pixel of slides whose files do not say it.")
]

Image = Annotated[
    str, typer.Option("--image", help="whole: all tissue of a slide; trained: what an image of the trained size holds.")
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on where a run stopped; what is finished is kept without it, too.")
]


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what works here, what is missing, and the command that mends it."""
    _run("doctor", as_json=as_json)


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder for everything the demo makes.")] = Path("demo"),
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Do the whole job on a small synthetic archive: slides, store, training, prediction, report."""
    _run("demo", out=out, as_json=as_json)


@app.command()
def synth(
    out: Annotated[Path, typer.Argument(metavar="DIR", help="Folder for the slides and their manifest.csv.")],
    slides: Annotated[int, typer.Option("--slides", min=1, help="Number of slides.")],
    size_px: Annotated[int, typer.Option("--size", min=256, help="Height and width of a slide in pixels.")],
    seed: Annotated[int, typer.Option("--seed", min=0, help="The same seed gives the same slides.")] = 0,
    pen: Annotated[bool, typer.Option("--pen", help="Put pen marks on some.")] = False,
    blur: Annotated[bool, typer.Option("--blur", help="Put some out of focus in places.")] = False,
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Make synthetic H&E-like slides with labels and cases."""
    _run("synth", out=out, slides=slides, size_px=size_px, seed=seed, pen=pen, blur=blur, as_json=as_json)


@app.command()
def ingest(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH", help="Slides, folders, or a manifest CSV.")],
    out: Annotated[Path, typer.Option("--out", help="The store; made where it does not exist.")],
    mpp: Annotated[float, typer.Option("--mpp", min=0.01, help="Microns per pixel of the store's finest level.")] = 1.0,
    workers: Annotated[int, typer.Option("--workers", min=0, help="Processes; 0: one for each core.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Do finished slides again.")] = False,
    slide_mpp: SlideMpp = None,
    codec: Annotated[str, typer.Option("--codec", help="zstd:1 … zstd:22, or jpeg:1 … jpeg:100 (lossy).")] = "zstd:1",
    lossless: Annotated[
        bool, typer.Option("--lossless", help="Keep the scanner's JPEG tiles and levels as they are.")
    ] = False,
    glass: Annotated[
        str, typer.Option("--glass", help="keep writes the whole slide, blank leaves out what has no tissue near.")
    ] = "keep",
    unsharded: Annotated[
        bool, typer.Option("--unsharded", help="Every chunk is a file; default: shards of 64.")
    ] = False,
    crop_tissue: Annotated[bool, typer.Option("--crop-tissue", help="Write the box around the tissue only.")] = False,
    icc: Annotated[
        str, typer.Option("--icc", help="keep leaves colours and profile as they are, apply converts to sRGB.")
    ] = "keep",
    cache: Annotated[
        Path | None, typer.Option("--cache", metavar="DIR", help="Copy each slide to this local disk while it is read.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option("--memory", help="What all workers may use, as in 8GB; default: most of what is free.")
    ] = None,
    part: Annotated[str, typer.Option("--part", help="i/n: do the i-th of n parts, one on each node.")] = "1/1",
    pseudonyms: Annotated[
        Path | None,
        typer.Option("--pseudonyms", metavar="KEY.csv", help="Give random names; real ones stay in this file."),
    ] = None,
    max_bad: Annotated[
        float, typer.Option("--max-bad", min=0.0, max=1.0, help="Share of unreadable tiles that a slide may have.")
    ] = 0.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done; write nothing.")] = False,
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Turn slides into a store. Safe to run again: finished slides are skipped."""
    options = {"mpp": mpp, "workers": workers, "overwrite": overwrite, "slide_mpp": slide_mpp, "codec": codec}
    pixels = {"glass": glass, "sharded": not unsharded, "crop_tissue": crop_tissue, "max_bad": max_bad}
    pixels |= {"lossless": lossless, "icc": icc}
    archive = {
        "cache": cache,
        "memory": memory,
        "part": part,
        "pseudonyms": pseudonyms,
        "dry_run": dry_run,
        "as_json": as_json,
    }
    _run("ingest", paths=paths, out=out, **options, **pixels, **archive)


@app.command()
def verify(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="A store, or a slide of a store.")],
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Re-check every digest, size and checksum of a store."""
    _run("verify", store=store, as_json=as_json)


@app.command()
def export(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="A store, or a slide of a store.")],
    ngff: Annotated[str, typer.Option("--ngff", help="Version of OME-NGFF to write: 0.4.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the copies.")],
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Copy slides of a store for viewers that know only an older format."""
    _run("export", store=store, ngff=ngff, out=out, as_json=as_json)


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(metavar="STORE_OR_SLIDE", help="A store, a slide of a store, or a file.")],
    png: Annotated[Path | None, typer.Option("--png", help="Write a thumbnail with the tissue outline.")] = None,
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Show levels, microns per pixel, tissue share and provenance."""
    _run("inspect", path=path, png=png, as_json=as_json)


@app.command()
def split(
    labels: Annotated[Path, typer.Argument(metavar="LABELS.csv", help="One row for each slide.")],
    out: Annotated[Path, typer.Option("--out", help="The CSV to write.")],
    folds: Annotated[int | None, typer.Option("--folds", min=2, help="Cross-validation folds.")] = None,
    group: Annotated[str, typer.Option("--group", help="Column that is never in two splits.")] = "case_id",
    stratify: Annotated[str | None, typer.Option("--stratify", help="Column to balance over the splits.")] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="The same seed gives the same splits.")] = 0,
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Divide slides into train, val and test, or into folds; no case in two of them."""
    _run("split", labels=labels, out=out, folds=folds, group=group, stratify=stratify, seed=seed, as_json=as_json)


@app.command()
def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="Sections data, model, plan, … of the run.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[section.key=value]", help="Values put over the file's.")
    ] = None,
    ranks: PlanRanks = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where the run stopped; start it if new.")] = False,
    as_json: Json = False,
) -> None:
    """Train a classifier; starts mpiexec itself where it is not already under mpiexec, srun or torchrun."""
    _run("train", config=config, overrides=list(overrides or ()), ranks=ranks, resume=resume, as_json=as_json)


@app.command()
def validate(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="RUN/checkpoints/best, for example.")],
    store: Annotated[Path, typer.Option("--store", help="The store with the slides.")],
    labels: Annotated[Path | None, typer.Option("--labels", help="Labels; default: the store's manifest.")] = None,
    splits: Annotated[Path | None, typer.Option("--splits", help="Splits; default: a column of the labels.")] = None,
    split_name: Annotated[str, typer.Option("--split", help="Which split to judge.")] = "test",
    split_column: Annotated[
        str | None, typer.Option("--split-column", help="The column of splits; default: the one trained by.")
    ] = None,
    ranks: Ranks = None,
    cells: Cells = None,
    image: Image = "whole",
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Compute a checkpoint's metrics: the same numbers as during training."""
    paths = {"checkpoint": checkpoint, "store": store, "labels": labels, "splits": splits}
    options = {"split": split_name, "split_column": split_column, "ranks": ranks, "cells": cells, "image": image}
    _run("validate", as_json=as_json, **paths, **options)


@app.command()
def predict(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="RUN/checkpoints/best, for example.")],
    inputs: Annotated[list[Path], typer.Argument(metavar="SLIDE_OR_STORE", help="Slide files, folders, stores.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for predictions, heatmaps and reports.")],
    more: Annotated[
        list[Path] | None, typer.Option("--checkpoint", help="Once more for each further member of an ensemble.")
    ] = None,
    ranks: Ranks = None,
    cells: Cells = None,
    mpp: Annotated[
        float | None, typer.Option("--mpp", min=0.01, help="Microns per pixel to look at, if not the checkpoint's.")
    ] = None,
    slide_mpp: SlideMpp = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Do finished slides again.")] = False,
    image: Image = "whole",
    allow_partial: Annotated[
        bool, typer.Option("--allow-partial", help="Give a class, marked, even where too little tissue was seen.")
    ] = False,
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Predict slides: probabilities, heatmaps, overlays, annotations and reports."""
    options = {"ranks": ranks, "cells": cells, "mpp": mpp, "slide_mpp": slide_mpp}
    options |= {"overwrite": overwrite, "image": image, "allow_partial": allow_partial, "as_json": as_json}
    _run("predict", checkpoints=[checkpoint, *(more or ())], inputs=inputs, out=out, **options)


def _run(module: str, **arguments: Any) -> NoReturn:
    """Run ``workflows.<module>.run`` and leave with its exit code."""

    def body() -> int:
        if "out" in arguments and not arguments.get("dry_run"):
            require_writable(arguments["out"])
        code: int = import_module(f"workflows.commands.{module}").run(**arguments)
        return code

    raise typer.Exit(exit_code_of(body))


def exit_code_of(body: Callable[[], int]) -> int:
    """Run ``body``; return its exit code, or that of the exception which ended it, said on standard error."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _stop)
    try:
        return body()
    except RequestError as error:
        warn(f"hyfi: {error}")
        return WRONG_REQUEST
    except KeyboardInterrupt:
        warn("hyfi: stopped on request")
        return STOPPED
    except BrokenPipeError:
        # The reader of our output has gone (as in `hyfi … | head`); say nothing more into the closed pipe.
        sys.stdout = None
        return FAULT
    except Exception:
        warn(traceback.format_exc().rstrip())
        return FAULT


def _stop(number: int, frame: object) -> NoReturn:
    """Answer SIGTERM and SIGUSR1 as Ctrl-C is answered; ranks put their own, gentler handler in its place."""
    raise KeyboardInterrupt


def main() -> None:
    """Run the command line; never returns."""
    app()


if __name__ == "__main__":
    main()
