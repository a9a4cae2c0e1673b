"""The command line: declares every command; each imports its modules when it runs, so that ``--help`` is fast."""

from __future__ import annotations

from workflows import signals

if __name__ == "__main__":  # signal handlers first: a signal before this ends the process without a word
    signals.listen_from_start()
    from data.children import import_safely, open_closed_streams
    from hyfi_core.collection import start_quickly

    open_closed_streams()
    import_safely()
    start_quickly()

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from data.location import is_address
from workflows.cli_evaluate import export_model, predict, validate
from workflows.cli_exit import exit_with
from workflows.cli_features import features
from workflows.cli_launch import launch
from workflows.cli_options import (
    AcceptDataChanges,
    Cache,
    Config,
    FocalPlane,
    FoldColumn,
    ForceMpp,
    FromMagnification,
    Glass,
    Icc,
    IngestMpp,
    Json,
    Lossless,
    MaxBad,
    Measure,
    Memory,
    MergeAlike,
    Overrides,
    Part,
    Pen,
    PlanRanks,
    Pseudonyms,
    Resume,
    ResumeFrom,
    Scene,
    SlideMpp,
    StoreOrSlide,
    Tissue,
    TissueOut,
    TissueSet,
    TrainFolds,
    Unsharded,
)
from workflows.cli_plan import plan, simulate
from workflows.cli_split import split
from workflows.cli_view import view
from workflows.sweep.options import sweep

EPILOG = (
    "Exit codes: 0 success, 1 finished but some inputs failed, 2 invalid request (nothing was written), 3 stopped on "
    "request (continue with --resume), any other code is a bug or a crash."
)

app = typer.Typer(
    name="hyfi",
    help="Train and run classifiers on whole gigapixel slides.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # with rich, --help takes twice as long, more than half a second
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(requested: bool) -> None:
    if requested:
        from importlib.metadata import version

        typer.echo(f"hyfi {version('hyfi')}")
        raise typer.Exit


@app.callback()
def hyfi(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train and run classifiers on whole gigapixel slides."""


@app.command()
def doctor(measure: Measure = None, as_json: Json = False) -> None:
    """Check this installation; for each problem, print the command that fixes it."""
    from workflows.commands import doctor
    from workflows.commands.bench.measure import run

    command = partial(doctor.run, as_json) if measure is None else partial(run, measure, as_json)
    exit_with(command, as_ranks=measure is not None)


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder for all output of the demo.")] = Path("demo"),
    resume: Resume = False,  # changes nothing: finished work is always kept
    as_json: Json = False,
) -> None:
    """Run everything on a few synthetic slides: store, training, prediction, report."""
    from workflows.commands import demo

    exit_with(partial(demo.run, out, as_json), writes=out)


@app.command()
def synth(
    out: Annotated[Path, typer.Argument(metavar="DIR", help="Folder for the slides and their manifest.csv.")],
    slides: Annotated[int, typer.Option("--slides", min=1, help="Number of slides.")],
    size_px: Annotated[int, typer.Option("--size", min=256, help="Height and width of a slide in pixels.")],
    seed: Annotated[int, typer.Option("--seed", min=0, help="The same seed gives the same slides.")] = 0,
    pen: Annotated[bool, typer.Option("--pen", help="Add pen marks to some slides.")] = False,
    blur: Annotated[bool, typer.Option("--blur", help="Add out-of-focus areas to some slides.")] = False,
    resume: Resume = False,  # changes nothing: finished work is always kept
    as_json: Json = False,
) -> None:
    """Make synthetic H&E-like slides with labels and cases."""
    from workflows.commands import synth

    exit_with(partial(synth.run, out, slides, size_px, seed, pen, blur, as_json), writes=out)


@app.command()
def ingest(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH", help="Slides, OME-Zarr, folders, or a manifest CSV.")],
    out: Annotated[Path, typer.Option("--out", help="The store; a folder, or s3://bucket/store, gs://bucket/store.")],
    mpp: IngestMpp = "1.0",
    workers: Annotated[int, typer.Option("--workers", min=0, help="Worker processes; 0: one for each core.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Process finished slides again.")] = False,
    slide_mpp: SlideMpp = None,
    force_mpp: ForceMpp = False,
    mpp_from_magnification: FromMagnification = False,
    scene: Scene = "all",
    plane: FocalPlane = 0,
    pen: Pen = "flag",
    tissue_set: TissueSet = None,
    tissue: Tissue = None,
    codec: Annotated[str, typer.Option("--codec", help="zstd:1 … zstd:22, or jpeg:1 … jpeg:100 (lossy).")] = "zstd:1",
    lossless: Lossless = False,
    glass: Glass = "keep",
    unsharded: Unsharded = False,
    crop_tissue: Annotated[bool, typer.Option("--crop-tissue", help="Write the tissue's bounding box only.")] = False,
    icc: Icc = "keep",
    cache: Cache = None,
    memory: Memory = None,
    part: Part = "1/1",
    pseudonyms: Pseudonyms = None,
    max_bad: MaxBad = 0.0,
    merge_alike: MergeAlike = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done, without writing.")] = False,
    resume: Resume = False,  # changes nothing: finished work is always kept
    as_json: Json = False,
) -> None:
    """Convert slides into a store. Safe to run again: finished slides are skipped."""
    from workflows.commands import ingest

    arguments = ingest.IngestArguments(
        paths=paths,
        out=out,
        mpp=mpp,
        workers=workers,
        overwrite=overwrite,
        opening=ingest.OpeningArguments(slide_mpp, force_mpp, mpp_from_magnification, scene, plane),
        pen=pen,
        tissue_set=tissue_set or [],
        tissue=tissue,
        codec=codec,
        glass=glass,
        sharded=not unsharded,
        crop_tissue=crop_tissue,
        lossless=lossless,
        icc=icc,
        cache=cache,
        max_bad=max_bad,
        memory=memory,
        part=part,
        pseudonyms=pseudonyms,
        merge_alike=merge_alike,
        dry_run=dry_run,
        as_json=as_json,
    )
    exit_with(partial(ingest.run, arguments), writes=None if dry_run or is_address(out) else out, as_ranks=True)


@app.command()
def verify(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="A store, or a slide of a store.")],
    resume: Resume = False,  # changes nothing: finished work is always kept
    as_json: Json = False,
) -> None:
    """Check every digest, size and checksum of a store."""
    from workflows.commands import verify

    exit_with(partial(verify.run, store, as_json))


@app.command()
def export(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="A store, or a slide of a store.")],
    ngff: Annotated[str, typer.Option("--ngff", help="Version of OME-NGFF to write: 0.4.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the copies.")],
    resume: Resume = False,  # changes nothing: finished work is always kept
    as_json: Json = False,
) -> None:
    """Copy slides of a store into an older format, for viewers that need it."""
    from workflows.commands import export

    exit_with(partial(export.run, store, ngff, out, as_json), writes=out)


@app.command()
def inspect(
    path: StoreOrSlide,
    png: Annotated[Path | None, typer.Option("--png", help="Write a thumbnail with the tissue outline.")] = None,
    tissue: TissueOut = None,
    slide_mpp: SlideMpp = None,
    resume: Resume = False,  # changes nothing: finished work is always kept
    as_json: Json = False,
) -> None:
    """Show levels, microns per pixel, tissue fraction and provenance."""
    from workflows.commands import inspect

    exit_with(partial(inspect.run, path, png, as_json, slide_mpp, tissue))


app.command()(split)


@app.command()
def train(
    config: Config,
    overrides: Overrides = None,
    ranks: PlanRanks = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a stopped run, or start it.")] = False,
    resume_from: ResumeFrom = None,
    accepts_changes: AcceptDataChanges = False,
    folds: TrainFolds = None,
    fold_column: FoldColumn = None,
    as_json: Json = False,
) -> None:
    """Train a classifier; starts mpiexec itself if it is not already under mpiexec, srun or torchrun."""
    from workflows.commands import train
    from workflows.launch.resumption import Resumption

    def body() -> int:
        resumption = Resumption.of(resume, resume_from, accepts_changes)
        if folds is not None:
            from workflows.commands import train_folds
            from workflows.cross_validation.fold_runs import FoldRuns

            runs = FoldRuns(config, tuple(overrides or ()), ranks, resumption, folds, fold_column)
            return train_folds.run(runs, as_json)
        if fold_column is not None:
            from hyfi_core.errors import RequestError

            raise RequestError(f"--fold-column {fold_column}: needs --folds")
        arguments = train.TrainArguments(
            config=config, overrides=overrides or (), ranks=ranks, resumption=resumption, as_json=as_json
        )
        return train.run(arguments)

    exit_with(body, as_ranks=True)


app.command()(sweep)
app.command()(validate)
app.command()(predict)
app.command("export-model")(export_model)


@app.command()
def status(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run (run.dir).")],
    as_json: Json = False,
) -> None:
    """Show the progress of a run."""
    from workflows.commands import status as command

    exit_with(partial(command.run, run, as_json))


for command in (view, plan, simulate, features):
    app.command()(command)


@app.command(hidden=True)
def rank(command: str) -> None:
    """Run one rank of a command, as the launcher of this process asks for."""
    from workflows.launch.launch import run_as_rank
    from workflows.launch.status import RunStatus

    status = RunStatus.from_environment()
    if status is None:
        raise typer.BadParameter(f"hyfi {command} starts its ranks by itself; give it --ranks")
    exit_with(lambda: run_as_rank(status.body()), as_ranks=True)


app.add_typer(launch)


if __name__ == "__main__":
    app()
