"""Features of the slides of a store: tiles are read ahead, encoded and written. A slide that fails stops no other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from data.errors import StoreError
from data.samples.colours.stain_normalisation import StainNormalisation
from data.store.slide_store import SlideStore, slide_path
from data.tiles.reader import StoreTiles
from data.tiles.tiling import Tiling
from data.tiles.tissue_tiles import TissueTiles, tissue_tiles
from hyfi_core.errors import RequestError
from hyfi_core.tiles.chunks import TileChunk
from hyfi_core.tiles.reading import read_ahead
from workflows.encoders.tile_encoder import TileEncoder
from workflows.features.errors import FeatureError
from workflows.features.feature_file import FeatureFile
from workflows.features.feature_folder import FeatureFolder
from workflows.features.tiled_slide import TiledSlide

AS_SCANNED = "stain_as_scanned"
"""Value of the column ``reason`` for a slide whose colours could not be normalised."""
_AUTOCAST = {"float32": None, "bfloat16": torch.bfloat16}

Say = Callable[[str], None]


@dataclass(frozen=True)
class EncodingRun:
    """How the slides of a store are encoded.

    Attributes:
        store: The store.
        encoder: The encoder, on its device.
        folder: The folder for features.
        tiling: The tiles.
        precision: ``float32`` or ``bfloat16``.
        batch: Tiles encoded at a time.
        workers: Threads that decode.
        stain: Normalisation of each slide's colours; None: none.
    """

    store: Path
    encoder: TileEncoder
    folder: FeatureFolder
    tiling: Tiling
    precision: str
    batch: int
    workers: int
    stain: StainNormalisation | None = None


@dataclass
class FeatureReport:
    """The results of a command.

    Attributes:
        done: Slides that it encoded.
        skipped: Slides that were finished before.
        failed: Failed slides, with the reason.
        tiles: Number of tiles that it encoded.
        as_scanned: Slides that it encoded without the requested stain normalisation, because their stains cannot be
            measured.
    """

    done: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)
    tiles: int = 0
    as_scanned: list[str] = field(default_factory=list)


def encode_slides(
    run: EncodingRun, slide_ids: Sequence[str], report: FeatureReport, advance: Callable[[float, str], None], warn: Say
) -> None:
    """Write the features of slides; those that are finished are skipped.

    Args:
        run: How to encode them.
        slide_ids: The slides.
        report: Filled slide by slide, so that it is complete even if an error ends this function.
        advance: Called with the fraction of a slide that was done, and its name.
        warn: Called with a line about a damaged or outdated slide.

    Raises:
        OSError: The folder cannot be written.
    """
    for slide_id in slide_ids:
        try:
            # Within the try: a damaged slide fails alone.
            slide = SlideStore.open(slide_path(run.store, slide_id))
            tiles = tissue_tiles(slide, run.tiling)
            # "new": it was never encoded; otherwise what is wrong with its files.
            fault = run.folder.fault(slide_id, tiles.digest())
            if fault is None:
                report.skipped.append(slide_id)
                advance(1.0, slide_id)
                continue
            if fault != "new":
                warn(f"{slide_id}: {fault}; it is computed again")
            if not _encode_slide(run, slide, tiles, advance):
                report.as_scanned.append(slide_id)
        except (StoreError, RequestError, FeatureError) as error:
            run.folder.note_failed(slide_id, str(error))
            report.failed.append((slide_id, str(error)))
            continue
        report.done.append(slide_id)
        report.tiles += len(tiles)


def _encode_slide(
    run: EncodingRun, slide: SlideStore, tiles: TissueTiles, advance: Callable[[float, str], None]
) -> bool:
    """Write the features of one slide. Memory: three batches of tiles, and decoded chunks of the reader.

    Returns:
        Whether its colours are normalised as requested.
    """
    tiled = TiledSlide.of(slide, tiles, run.encoder.name)
    colours = None if run.stain is None else run.stain.of_slide(slide, slide.slide_id)
    reader = StoreTiles(slide, tiles, colours=colours, threads=run.workers)
    autocast = _AUTOCAST[run.precision]
    chunks = [TileChunk(0, start, min(start + run.batch, len(tiles))) for start in range(0, len(tiles), run.batch)]
    with FeatureFile(run.folder.path, tiled, run.encoder.features, run.folder.form) as file:
        for chunk, pixels in read_ahead([reader], chunks, ((3, tiles.size_px, tiles.size_px), torch.uint8)):
            vectors = run.encoder.encode(pixels, autocast).cpu().numpy()
            _check_finite(vectors, tiles, chunk.start)
            file.write(chunk.start, vectors)
            advance(len(vectors) / len(tiles), slide.slide_id)
        # Before the record: a slide counts as done only with its files.
        file.publish()
    lacks_colours = run.stain is not None and colours is None
    note = AS_SCANNED if lacks_colours else ""
    run.folder.note_done(slide.slide_id, slide.attributes.get("sha256"), tiles.digest(), len(tiles), note)
    return not lacks_colours


def _check_finite(vectors: np.ndarray, tiles: TissueTiles, start: int) -> None:
    """Refuse vectors that are not finite; ``start``: index of the first vector's tile among the slide's tiles."""
    finite = np.isfinite(vectors).all(axis=1)
    if not finite.all():
        # `argmin` of booleans is the index of the first False.
        y, x = tiles.coords[start + int(np.argmin(finite))].tolist()
        raise FeatureError(
            f"the encoder's vector of the tile at (y, x) = ({y}, {x}) is not finite; use --precision float32, or check "
            f"its weights"
        )
