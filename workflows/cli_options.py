"""The options that several commands share, or whose words are long."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
    float | None,
    typer.Option(
        "--slide-mpp", min=0.01, help="Microns per pixel of slides whose files do not state it, or state nonsense."
    ),
]

Measure = Annotated[
    Path | None,
    typer.Option("--measure", metavar="FILE.yaml", help="Measure this machine for plan and simulate; take no checks."),
]
IngestMpp = Annotated[
    str,
    typer.Option("--mpp", help="Microns per pixel of the store's finest level, or native: each slide's own."),
]
ForceMpp = Annotated[
    bool, typer.Option("--force-mpp", help="The given mpp replaces a file's own, even a sensible one.")
]
Pen = Annotated[
    str, typer.Option("--pen", help="Pen marks: flag only tells, mask takes them out of the tissue, off ignores them.")
]
Image = Annotated[
    str, typer.Option("--image", help="whole: all tissue of a slide; trained: as much as one image of that size holds.")
]
Cache = Annotated[
    Path | None, typer.Option("--cache", metavar="DIR", help="Copy each slide to this local disk while it is read.")
]
Memory = Annotated[
    str | None, typer.Option("--memory", help="What all workers may use, as in 8GB; default: most of what is free.")
]
Pseudonyms = Annotated[
    Path | None,
    typer.Option("--pseudonyms", metavar="KEY.csv", help="Give random names; real ones stay in this file."),
]
MaxBad = Annotated[
    float, typer.Option("--max-bad", min=0.0, max=1.0, help="Share of unreadable tiles that a slide may have.")
]
Lossless = Annotated[bool, typer.Option("--lossless", help="Keep the scanner's JPEG tiles and levels as they are.")]
Glass = Annotated[
    str, typer.Option("--glass", help="keep writes the whole slide, blank leaves out what has no tissue near.")
]
Unsharded = Annotated[bool, typer.Option("--unsharded", help="Every chunk is a file; default: shards of 64.")]
Icc = Annotated[str, typer.Option("--icc", help="keep leaves colours and profile as they are, apply converts to sRGB.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue where a run stopped; finished work is kept without it, too.")
]
Tissue = Annotated[
    str | None,
    typer.Option(
        "--tissue",
        metavar="GEOJSON|off",
        help="Where the tissue is: a GeoJSON, or a folder of <slide_id>.geojson; off: everywhere.",
    ),
]
TissueOut = Annotated[
    Path | None,
    typer.Option("--tissue", metavar="GEOJSON", help="Write a stored slide's tissue as polygons that QuPath opens."),
]
Device = Annotated[
    str,
    typer.Option("--device", help="cuda: each rank on a GPU of its own; auto: so where each has one; cpu."),
]
TissueSet = Annotated[
    list[str] | None,
    typer.Option(
        "--tissue-set", metavar="NAME=VALUE", help="Another threshold of the tissue mask, as density=0.01,0.015."
    ),
]
