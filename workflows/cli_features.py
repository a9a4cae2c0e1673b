"""The options of ``hyfi features``; implemented in :mod:`workflows.commands.features`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hyfi_core.errors import RequestError
from workflows import signals
from workflows.cli_options import Device, Json, Part, Resume
from workflows.console import ignore_closed_stdout
from workflows.exit_codes import exit_code_of

Store = Annotated[Path, typer.Argument(metavar="STORE", help="The store with the slides.")]
Encoder = Annotated[
    str,
    typer.Option(
        "--encoder",
        metavar="NAME",
        help="timm:NAME, timm:FOLDER, transformers:FOLDER, or package.module:factory of your own.",
    ),
]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the features.")]
Weights = Annotated[Path | None, typer.Option("--weights", help="Weights: a local .safetensors or .pth file.")]
Options = Annotated[
    str | None, typer.Option("--encoder-options", metavar="JSON", help='Arguments of the model: {"init_values": 1e-5}.')
]
Mean = Annotated[
    str | None, typer.Option("--mean", metavar="R,G,B", help="Mean of pixels, 0 to 1; default: as the encoder states.")
]
Std = Annotated[
    str | None,
    typer.Option("--std", metavar="R,G,B", help="Standard deviation of pixels; default: as the encoder states."),
]
TilePx = Annotated[int, typer.Option("--tile-px", min=1, help="Height and width of a tile.")]
StridePx = Annotated[
    int | None, typer.Option("--stride-px", min=1, help="Distance between neighbouring tiles; default: the size.")
]
Mpp = Annotated[float | None, typer.Option("--mpp", help="Microns per pixel of tiles; default: the store's finest.")]
MinTissue = Annotated[float, typer.Option("--min-tissue", help="Share of a tile that must be tissue, 0 to 1.")]
Format = Annotated[str, typer.Option("--format", help="trident, clam, stamp or zarr.")]
Precision = Annotated[str, typer.Option("--precision", help="float32 or bfloat16: dtype of the encoder.")]
Batch = Annotated[int, typer.Option("--batch-size", min=1, help="Tiles encoded at a time.")]
Workers = Annotated[
    int | None, typer.Option("--workers", min=1, help="Threads that decode; default: one for each core, up to 8.")
]
RandomWeights = Annotated[bool, typer.Option("--random-weights", help="Accept an encoder without weights, for tests.")]
AllowDownload = Annotated[
    bool, typer.Option("--allow-download", help="Let timm and transformers download weights; default: no downloads.")
]
Stain = Annotated[
    str,
    typer.Option(
        "--stain-normalisation",
        metavar="none|macenko|reinhard",
        help="Give each slide the colours of a reference, as data.stain_normalisation does in a run.",
    ),
]
StainReference = Annotated[
    str | None,
    typer.Option(
        "--stain-reference",
        metavar="SLIDE|PICTURE",
        help="A slide of the store, a stored slide, or a picture of tissue; default: the method's published colours.",
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace features of another encoder, other settings or another file.")
]
_MOST_WORKERS = 8


def features(
    store: Store,
    encoder: Encoder,
    out: Out,
    weights: Weights = None,
    encoder_options: Options = None,
    mean: Mean = None,
    std: Std = None,
    tile_px: TilePx = 224,
    stride_px: StridePx = None,
    mpp: Mpp = None,
    min_tissue: MinTissue = 0.25,
    stain_normalisation: Stain = "none",
    stain_reference: StainReference = None,
    form: Format = "trident",
    precision: Precision = "float32",
    batch: Batch = 64,
    workers: Workers = None,
    device: Device = "auto",
    random_weights: RandomWeights = False,
    allow_download: AllowDownload = False,
    overwrite: Overwrite = False,
    part: Part = "1/1",
    resume: Resume = False,  # changes nothing: finished slides are always kept
    as_json: Json = False,
) -> None:
    """Compute the features of every tissue tile with an encoder, as TRIDENT, CLAM, STAMP or zarr files."""

    def body() -> int:
        from data.cores import usable_cores
        from data.tiles.tiling import Tiling
        from hyfi_core.plan.device import device_request
        from workflows.commands.features import run
        from workflows.features.feature_file import feature_format
        from workflows.features.request import FeatureRequest
        from workflows.option_values import parse_part

        request = FeatureRequest(
            store,
            encoder,
            out,
            weights=weights,
            options=_options(encoder_options),
            **{name: _numbers(f"--{name}", text) for name, text in (("mean", mean), ("std", std))},
            tiling=Tiling(tile_px, stride_px, mpp, min_tissue),
            stain=stain_normalisation,
            stain_reference=stain_reference,
            form=feature_format(form),
            precision=precision,
            batch=batch,
            workers=workers or min(_MOST_WORKERS, usable_cores()),
            device=device_request(device),
            random_weights=random_weights,
            allow_download=allow_download,
            overwrite=overwrite,
            part=parse_part(part),
        )
        return run(request, as_json)

    raise typer.Exit(exit_code_of(body, _prepare))


def _prepare() -> None:
    signals.interrupt_on_request()
    ignore_closed_stdout()


def _options(text: str | None) -> dict[str, Any]:
    """Return the JSON object of ``--encoder-options``."""
    import json

    try:
        value = json.loads(text) if text is not None else {}
    except ValueError as error:
        raise RequestError(
            f'--encoder-options {text}: not JSON ({error}); use an object, as in {{"depth": 12}}'
        ) from error
    if not isinstance(value, dict):
        raise RequestError(f'--encoder-options {text}: not an object; use one as in {{"depth": 12}}')
    return value


def _numbers(flag: str, text: str | None) -> tuple[float, ...] | None:
    """Return the numbers of ``--mean`` or ``--std``, which `load_encoder` checks; None if it was left out."""
    if text is None:
        return None
    try:
        return tuple(float(word) for word in text.split(","))
    except ValueError:
        raise RequestError(f"{flag} {text}: use three numbers, as in {flag} 0.5,0.5,0.5") from None
