"""``hyfi features``: features of every tissue tile, as other tools read them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyfi_core.errors import RequestError
from workflows import console
from workflows.exit_codes import DONE, SOME_FAILED, STOPPED
from workflows.features.request import FeatureRequest
from workflows.paths import require_writable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from data.samples.colours.stain_normalisation import StainNormalisation
    from data.store.slide_store import StoreLevel
    from workflows.encoders.tile_encoder import TileEncoder
    from workflows.features.compute import FeatureReport

_SETTINGS_VERSION = 1
_LARGEST_DIFFERENCE = 0.02  # between the microns per pixel of slides, as a fraction


def run(request: FeatureRequest, as_json: bool) -> int:
    """Write the features of the slides of a store.

    Returns:
        0 if all slides are done, also before; 1 if some failed (each is named on standard error and in
        ``DIR/features.csv``); 3 if stopped on request: the same command continues.

    Raises:
        RequestError: The store, the encoder or the folder cannot be used; nothing was written.
    """
    from data.location import location
    from data.store.unfinished import unfinished_note
    from pathology.tissue.stain_reference import stain_normalisation
    from workflows.features.compute import EncodingRun, FeatureReport, encode_slides
    from workflows.features.feature_folder import FeatureFolder
    from workflows.launch.owner import FolderOwner

    store = location(request.store)
    if note := unfinished_note(store):
        console.warn(note)
    sources = _sources(store, request)
    encoder = _encoder(request)
    stain = stain_normalisation(request.stain, request.stain_reference, store, "--stain-reference")  # type: ignore[arg-type]
    folder = FeatureFolder(request.out, request.form, _settings(request, encoder, stain))
    # Refuses a folder with other settings, before the lock and before anything is written.
    folder.check(sources, request.overwrite)
    require_writable(request.out)
    console.say(str(encoder))
    if encoder.untrained:
        console.warn(f"{encoder.describe_untrained()}; accepted with --random-weights, but its features mean nothing")
    number, parts = request.part
    advice = "choose another --out, or give each its own --part"
    # Parts share the folder, each with its own lock.
    owner = FolderOwner(request.out, advice, f"{number}-of-{parts}" if parts > 1 else "")
    folder.begin()
    encoding = EncodingRun(
        store, encoder, folder, request.tiling, request.precision, request.batch, request.workers, stain
    )
    report, stopped = FeatureReport(), False
    try:
        with console.progress(len(sources), "features") as bar:
            encode_slides(encoding, list(sources), report, bar.advance, console.warn)
    except KeyboardInterrupt:
        console.warn("hyfi: stopped on request")
        stopped = True
    finally:
        # Also after an error: the table lists what is there. Before the release, as another process may write after it.
        table = folder.write_table()
        owner.release()
    _report(report, table, request, encoder, stopped, as_json)
    if stopped:
        return STOPPED
    return SOME_FAILED if report.failed else DONE


def _sources(store: Path, request: FeatureRequest) -> dict[str, str | None]:
    """Return slide -> SHA-256 of the file that it was ingested from (None: unknown), for the slides of this part.

    Raises:
        RequestError: There is no store, it has no finished slides, or a slide has no level for the tiles' resolution.
    """
    from data import slide_ids
    from data.errors import StoreError
    from data.location import each, is_remote
    from data.store.slide_store import SlideStore, slide_path
    from data.tiles.tiling import plane_of
    from pathology.ingest.discover import part_of_names

    if not is_remote(store) and not store.is_dir():
        raise RequestError(f"{store}: no such folder; give a store, the --out of `hyfi ingest`")
    try:
        names = slide_ids(store)
    except StoreError as error:
        raise RequestError(str(error)) from error
    if not names:
        raise RequestError(f"{store}: no slide of this store is done; run `hyfi ingest` first")

    def facts_of(name: str) -> tuple[Sequence[StoreLevel], str | None]:
        """Return (levels of a slide, SHA-256 of its file); not the slide, whose attributes would fill memory."""
        try:
            slide = SlideStore.open(slide_path(store, name), check_files=False)
        except StoreError:
            return (), None  # encode_slides names it as failed
        return slide.levels, slide.attributes.get("sha256")

    facts = dict(zip(names, each(facts_of, names, store), strict=True))
    levels_by_name = {name: levels for name, (levels, _) in facts.items() if levels}
    # `plane_of` refuses a slide without a level for the tiles. Slides that cannot be opened are not among these: they
    # fail one by one, and do not refuse the request.
    for name, levels in levels_by_name.items():
        plane_of(levels, request.tiling.mpp, name)
    if request.tiling.mpp is None and levels_by_name:
        mpp_of = {name: sum(levels[0].mpp) / 2 for name, levels in levels_by_name.items()}  # of the finest level
        finest, coarsest = min(mpp_of, key=mpp_of.__getitem__), max(mpp_of, key=mpp_of.__getitem__)
        # Scanners of one kind differ by less; with more, the encoder would see tissue at different scales.
        if mpp_of[coarsest] / mpp_of[finest] - 1 > _LARGEST_DIFFERENCE:
            raise RequestError(
                f"{store}: its slides have different resolutions ({finest}: {mpp_of[finest]:g} µm/px, {coarsest}: "
                f"{mpp_of[coarsest]:g} µm/px); give that of the tiles, as in --mpp {mpp_of[coarsest]:g}"
            )
    return {name: facts[name][1] for name in sorted(part_of_names(names, *request.part))}


def _encoder(request: FeatureRequest) -> TileEncoder:
    """Return the encoder on its device.

    Raises:
        RequestError: It cannot be loaded, its weights are random and ``random_weights`` is off, or there is no such
            device.
    """
    import torch

    from workflows.encoders.load import load_encoder

    if request.device == "cuda" and not torch.cuda.is_available():
        raise RequestError("--device cuda: PyTorch finds no GPU; use --device cpu or auto")
    encoder = load_encoder(
        request.encoder,
        request.weights,
        size_px=request.tiling.size_px,
        options=request.options,
        mean=request.mean,
        std=request.std,
        allow_download=request.allow_download,
    )
    if not request.random_weights:
        encoder.check_trained("give all of them with --weights FILE, or accept random ones with --random-weights")
    on_gpu = request.device != "cpu" and torch.cuda.is_available()
    encoder.module.to("cuda" if on_gpu else "cpu")
    return encoder


def _settings(request: FeatureRequest, encoder: TileEncoder, stain: StainNormalisation | None) -> dict[str, Any]:
    """Return everything that features depend on, apart from the slide."""
    return {
        "version": _SETTINGS_VERSION,
        "encoder": request.encoder,
        "weights_sha256": encoder.digest(),
        "options": dict(request.options),
        "features": encoder.features,
        "normalisation": encoder.normalisation.to_json(),
        "size_px": request.tiling.size_px,
        "stride_px": request.tiling.step_px,
        "mpp": request.tiling.mpp,
        "min_tissue": request.tiling.min_tissue,
        "precision": request.precision,
        "format": request.form,
        **({} if stain is None else {"stain_normalisation": stain.to_json()}),
    }


def _report(
    report: FeatureReport, table: Path, request: FeatureRequest, encoder: TileEncoder, stopped: bool, as_json: bool
) -> None:
    """Print what was done and what failed."""
    from data.samples.colours.stain_normalisation import as_scanned_text

    if report.as_scanned:
        console.warn(as_scanned_text(report.as_scanned))
    for slide_id, reason in report.failed:
        console.warn(f"failed: {slide_id}: {reason}")
    ended = "; stopped on request, run the same command to continue" if stopped else ""
    console.say(
        f"{len(report.done)} done ({console.counted(report.tiles, 'tile')}), {len(report.failed)} failed, "
        f"{len(report.skipped)} finished before{ended}: {table}"
    )
    if as_json:
        console.emit_json(
            {
                "out": str(request.out),
                "table": str(table),
                "format": request.form,
                "features": encoder.features,
                "tiles": report.tiles,
                "done": report.done,
                "skipped": report.skipped,
                "failed": [{"slide_id": slide_id, "reason": reason} for slide_id, reason in report.failed],
                "stopped": stopped,
            }
        )
