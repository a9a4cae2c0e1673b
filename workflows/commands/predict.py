"""``hyfi predict``: predicts slides and writes probabilities, heatmaps, overlays, annotations and reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hyfi_core.errors import RequestError
from hyfi_core.plan.device import device_request
from pathology.memory import parse_bytes
from workflows import console, signals
from workflows.exit_codes import DONE, SOME_FAILED, STOPPED
from workflows.launch.launch import inside_launcher, launch, own_rank, run_as_rank
from workflows.option_values import Cells, parse_part
from workflows.paths import require_local, require_writable

if TYPE_CHECKING:
    from hyfi_core.comm.base import Communicator
    from pathology.predict.cohort import PredictionReport
    from pathology.predict.inputs import SlideInput
    from pathology.predict.members import Member
    from pathology.predict.options import PredictOptions
    from pathology.predict.readout import Readout
    from workflows.evaluation.labelled_inputs import InputLabels


def run(
    checkpoints: list[Path],
    inputs: list[Path],
    out: Path,
    ranks: int | None,
    mpp: float | None,
    slide_mpp: float | None,
    force_mpp: bool,
    overwrite: bool,
    as_json: bool,
    cells: str | None = None,
    memory: str | None = None,
    spill: str | None = None,
    image: str = "whole",
    allow_partial: bool = False,
    tissue: str | None = None,
    device: str = "auto",
    part: str = "1/1",
    ranks_per_slide: int | None = None,
    mpp_from_magnification: bool = False,
    labels: Path | None = None,
    target: str | None = None,
    split: str | None = None,
    features: Path | None = None,
) -> int:
    """Predict ``inputs`` with one checkpoint, or with several as an ensemble, into ``out``.

    The arguments are the options of ``hyfi predict``; for most see `pathology.predict.options.PredictOptions`. With
    ``ranks`` above 1 and no launcher, that many processes are started, which share every slide. Processes of a launcher
    predict different slides if there are enough; ``ranks_per_slide`` of them share one. ``cells`` is "R,C" or auto,
    ``memory`` as in 4GB, ``part`` is "i/n": predict only the i-th part of the slides, while other processes do the
    others, into the same ``out``. ``labels``, ``target`` and ``split`` as for `InputLabels`.

    Returns:
        0 if all slides are done; 1 if some failed or got no class (each is named with its reason); 3 if stopped.

    Raises:
        RequestError: A checkpoint, an input or ``out`` cannot be used; nothing was written.
    """
    from pathology.predict.options import PredictOptions
    from workflows.evaluation.labelled_inputs import InputLabels

    options = PredictOptions(
        mpp=mpp,
        slide_mpp=slide_mpp,
        force_mpp=force_mpp,
        mpp_from_magnification=mpp_from_magnification,
        overwrite=overwrite,
        cells=_cells(checkpoints, cells, memory, spill, image),
        memory_bytes=None if memory is None else parse_bytes(memory),
        spill=spill,
        image=image,  # type: ignore[arg-type]
        allow_partial=allow_partial,
        tissue=tissue,
        device=device_request(device),
        ranks_per_slide="auto" if ranks_per_slide is None and ranks is None else ranks_per_slide,
        features=features,
    )
    where, known = (checkpoints, inputs, out, ranks), InputLabels(labels, target, split)
    return _start(PredictionRequest(*where, options, parse_part(part), as_json, known), ranks_per_slide)


def _cells(checkpoints: Sequence[Path], cells: str | None, memory: str | None, spill: str | None, image: str) -> Cells:
    """Return the cells of the request; see `cells_of`."""
    from workflows.evaluation.tile_evaluator import cells_of

    return cells_of(checkpoints, cells, memory, spill, image)


@dataclass(frozen=True)
class PredictionRequest:
    """The arguments of a prediction; see :func:`run`."""

    checkpoints: Sequence[Path]
    inputs: Sequence[Path]
    out: Path
    ranks: int | None
    options: PredictOptions
    part: tuple[int, int]
    as_json: bool
    labels: InputLabels | None = None


def _start(request: PredictionRequest, ranks_per_slide: int | None) -> int:
    """Predict as a rank of a launcher, in processes that are started here, or in this process."""
    from pathology.dealing import group_size

    if inside_launcher():
        return run_as_rank(partial(_predict, request))
    if request.ranks is not None and request.ranks > 1:
        group_size(ranks_per_slide, request.ranks, 1)
        _check(request)
        return launch(_arguments(request, request.ranks), request.ranks)
    return _predict(request)


def _check(request: PredictionRequest) -> list[SlideInput]:
    """Check everything that can be checked quickly, and return the slides of this part.

    Raises:
        RequestError: The request is not valid.
    """
    from hyfi_core.runtime.checkpoint import read_model_json
    from pathology.ingest.discover import part_of_names
    from pathology.ingest.options import IngestOptions
    from pathology.predict.inputs import find_inputs
    from pathology.predict.members import InputSpec, check_complete
    from pathology.predict.table import predicted_files

    options, out = request.options, request.out
    for checkpoint in request.checkpoints:
        require_local(checkpoint, "checkpoint")
        config = read_model_json(checkpoint)
        check_complete(config, checkpoint)
        spec = InputSpec.of(config)
        IngestOptions(mpp=options.mpp or spec.mpp, slide_mpp=options.slide_mpp)
    if out.exists() and not out.is_dir():
        raise RequestError(f"{out} is a file; choose a folder for the results")
    found = find_inputs(request.inputs, predicted_files(out))
    if request.labels:
        found, matched = request.labels.of(found, request.inputs, read_model_json(request.checkpoints[0]))
        if own_rank() == 0:
            console.say(matched)
    names = [one.slide_id for one in found]
    if (note := options.check_tissue(names)) and own_rank() == 0:
        console.warn(f"note: {note}")
    require_writable(out)
    mine = part_of_names(names, *request.part)
    return _with_features(request, [one for one in found if one.slide_id in mine])


def _with_features(request: PredictionRequest, slides: list[SlideInput]) -> list[SlideInput]:
    """Return the slides, with the reason why some have no features that can be used, if the model needs them.

    Raises:
        RequestError: Features are not given, are of another encoder, or are given for a model that reads pixels.
    """
    from hyfi_core.runtime.checkpoint import read_model_json
    from workflows.evaluation.feature_models import features_for, is_feature_model, with_reasons
    from workflows.evaluation.tile_evaluator import refuse_features

    for checkpoint in request.checkpoints:
        config = read_model_json(checkpoint)
        refuse_features(config, request.options.features)
        if is_feature_model(config):
            slides = with_reasons(slides, features_for(config, request.options.features), config["features"])
    return slides


def _arguments(request: PredictionRequest, ranks: int) -> list[str]:
    """Return the command line of the same request, for the ranks."""
    options = request.options
    words = ["predict", "--out", str(request.out), "--ranks", str(ranks), "--part", "{}/{}".format(*request.part)]
    for checkpoint in request.checkpoints[1:]:
        words += ["--checkpoint", str(checkpoint)]
    for flag, value in (("--mpp", options.mpp), ("--slide-mpp", options.slide_mpp)):
        words += [] if value is None else [flag, repr(value)]
    words += ["--device", options.device, *(request.labels.words() if request.labels else ())]
    words += [] if options.ranks_per_slide is None else ["--ranks-per-slide", str(options.ranks_per_slide)]
    if options.cells is not None:
        words += ["--cells", "auto" if options.cells == "auto" else "{},{}".format(*options.cells)]
    words += [] if options.memory_bytes is None else ["--memory", str(options.memory_bytes)]
    words += [] if options.spill is None else ["--spill", options.spill]
    words += ["--tissue", options.tissue] if options.tissue is not None else []
    words += ["--features", str(options.features)] if options.features is not None else []
    words += ["--overwrite"] * options.overwrite + ["--json"] * request.as_json
    words += ["--force-mpp"] * options.force_mpp
    words += ["--mpp-from-magnification"] * options.mpp_from_magnification
    words += ["--image", options.image] + ["--allow-partial"] * options.allow_partial
    return [*words, "--", str(request.checkpoints[0]), *(str(path) for path in request.inputs)]


def _predict(request: PredictionRequest) -> int:
    """Predict as this rank, or alone; return the exit code."""
    from hyfi_core.comm.agree import agree
    from pathology.predict.cohort import predict_slides
    from workflows.launch.owner import FolderOwner
    from workflows.launch.peer_watch import join
    from workflows.launch.threads import set_threads

    slides, out, ranks = _check(request), request.out, request.ranks
    members = [load_member(path) for path in request.checkpoints]
    comm = join()
    set_threads(comm)
    number, parts = request.part
    part = f"{number}-of-{parts}" if parts > 1 else ""
    advice = "choose another --out, or give each its own --part"
    owner = agree(comm, lambda: FolderOwner(out, advice, part) if comm.rank == 0 else None)
    if ranks is not None and ranks != comm.size:
        raise RequestError(
            f"--ranks {ranks}: {comm.size} ranks were started; give the same number, or leave --ranks out"
        )
    with _progress(len(slides), comm) as bar:
        report = predict_slides(
            members,
            slides,
            out,
            comm,
            request.options,
            begin=bar.skip,
            progress=bar.advance,
            stop_wanted=signals.requested,
        )
    if owner is not None:
        page = _write_page(out, members, {one.slide_id: one.label for one in slides if one.label is not None})
        owner.release()
        _report(report, request, page, members[0].readout)
    comm.barrier()  # when one rank exits with a code other than 0, a launcher may kill the one that still writes
    if report.stopped:
        return STOPPED
    withheld = [one for one in report.incomplete if not one.prediction]
    return SOME_FAILED if report.failed or withheld else DONE


def load_member(checkpoint: Path) -> Member:
    """Return `Member.load` of a checkpoint; says so if its weights are a moving average."""
    from hyfi_core.runtime.checkpoint import read_model_json
    from pathology.predict.members import Member
    from workflows.evaluation.tile_evaluator import bag_module_of, is_bag_model
    from workflows.tasks.by_name import readout_of

    config = read_model_json(checkpoint)
    module = bag_module_of(config) if is_bag_model(config) else None
    member = Member.load(checkpoint, module, readout_of=readout_of)
    if member.averaged and own_rank() == 0:
        console.say(f"{checkpoint}: predicting with the moving average of the weights (EMA)")
    return member


def _progress(total: int, comm: Communicator) -> AbstractContextManager[console.Progress]:
    """Return the progress of ``total`` slides, shown on rank 0; only there is it reported to."""
    return console.progress(total, "predicting") if comm.rank == 0 else nullcontext(console.Silent())


def _write_page(out: Path, members: Sequence[Member], labels: Mapping[str, str]) -> Path:
    """Write ``index.html`` of all slides of the folder, those of earlier runs included; return its path.

    ``labels`` are those of this run, which replace those of an earlier one.
    """
    from pathology.predict.table import FILE_NAME
    from workflows.evaluation.cohort_page import PAGE_FILE, predicted_slides, write_cohort_page
    from workflows.tasks.by_name import task_of

    if not (out / FILE_NAME).exists():
        return out / PAGE_FILE  # nothing predicted yet: this --part has no slides
    readouts = [member.readout for member in members]
    task, readout = task_of(members[0].config), readouts[0].joined(readouts)
    try:
        slides = predicted_slides(out, task, readout.columns, labels)
        title = f"Predictions of {console.counted(len(slides), 'slide')}: {out.absolute()}"
        return write_cohort_page(out, slides, task, readout, title)
    except OSError as error:
        console.warn(f"{out / PAGE_FILE} cannot be written: {error.strerror or error}")
        return out / PAGE_FILE


def _report(report: PredictionReport, request: PredictionRequest, page: Path, readout: Readout) -> None:
    import numpy as np

    from pathology.readers.mpp import not_used_note

    out = request.out
    for one in report.failed:
        console.warn(f"{one.slide_id} ({one.path}): {one.reason}")
    for one in report.incomplete:
        shown = f"; prediction from this part: {one.prediction}" if one.prediction else "; no prediction"
        console.warn(f"incomplete: {one.slide_id} ({one.path}): {one.reason}{shown}")
    for one in (*report.done, *report.incomplete):
        if not one.prediction:
            continue
        partial = ", incomplete" if one in report.incomplete else ""
        verdict = f"{readout.brief(np.array(one.values)) or 'no interval'}{partial}"
        console.say(f"{one.slide_id}: {one.prediction} ({verdict})  {out / one.slide_id / 'report.html'}")
    used = (
        {}
        if request.options.force_mpp
        else {one.slide_id: one.source_mpp for one in (*report.done, *report.incomplete)}
    )
    if note := not_used_note(request.options.slide_mpp, used):
        console.warn(note)
    trained = [one.slide_id for one in (*report.done, *report.incomplete) if "trained_on" in one.flags]
    if trained:
        console.warn(
            f"{console.counted(len(trained), 'slide')} of the model's training set, or of a case in it (flag "
            f"trained_on): {console.listed(trained)}; these predictions do not show how the model does on new slides"
        )
    for one in report.done:
        if "outside_training" in one.flags:
            console.warn(f"{one.slide_id}: {one.reason}; the prediction may mean nothing")
    skipped = f", {len(report.skipped)} finished before" if report.skipped else ""
    stopped = "; stopped on request, run the same command to continue" if report.stopped else ""
    table = out / "predictions.csv"
    counts = f"{len(report.done)} predicted, {len(report.incomplete)} incomplete, {len(report.failed)} failed"
    console.say(f"{counts}{skipped}{stopped}: {table}, {page}")
    if request.as_json:
        console.emit_json(
            {
                "predictions": str(table),
                "page": str(page),
                "done": [one.slide_id for one in report.done],
                "incomplete": [
                    {"slide_id": one.slide_id, "path": one.path, "coverage": one.coverage, "reason": one.reason}
                    for one in report.incomplete
                ],
                "failed": [{"slide_id": one.slide_id, "path": one.path, "reason": one.reason} for one in report.failed],
                "skipped": list(report.skipped),
                "reports": [str(out / one.slide_id / "report.html") for one in (*report.done, *report.incomplete)],
                "stopped": report.stopped,
            }
        )
