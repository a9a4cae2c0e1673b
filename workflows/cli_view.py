"""The options of ``hyfi view``; implemented in :mod:`workflows.commands.view`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from workflows import signals
from workflows.cli_options import Resume, SlideMpp
from workflows.exit_codes import exit_code_of

Paths = Annotated[list[Path], typer.Argument(metavar="PATH", help="Stores, slide files, folders of predictions.")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="Port on this machine; 0: any free one.")]
NoBrowser = Annotated[bool, typer.Option("--no-browser", help="Only print the address.")]
Annotations = Annotated[
    Path | None, typer.Option("--annotations", metavar="DIR", help="Folder for annotations, one file for each slide.")
]


def view(
    paths: Paths,
    port: Port = 0,
    no_browser: NoBrowser = False,
    annotations: Annotations = None,
    slide_mpp: SlideMpp = None,
    resume: Resume = False,  # changes nothing: accepted as in `hyfi train`
) -> None:
    """Show slides in the browser: deep zoom, tissue, heatmaps, regions, annotations. Ctrl-C ends it."""

    def body() -> int:
        from workflows.commands.view import run

        return run(paths, port, not no_browser, annotations, slide_mpp)

    raise typer.Exit(exit_code_of(body, signals.interrupt_on_request))
