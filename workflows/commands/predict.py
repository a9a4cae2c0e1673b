"""``hyfi predict``: predicts slides and writes probabilities, heatmaps, overlays, annotations and reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyfi_core.errors import RequestError
from hyfi_core.plan.device import device_request
from pathology.memory import parse_bytes
from workflows import console, signals
from workflows.exit_codes import DONE, SOME_FAILED, STOPPED
from workflows.launch.launch import inside_launcher, launch_body, own_rank, run_as_rank
from workflows.launch.request import left_over_advice
from workflows.option_values import parse_part
from workflows.paths import require_local, require_writable

if TYPE_CHECKING:
    from hyfi_core.comm.base import Communicator
    from pathology.predict.inputs import SlideInput
    from pathology.predict.members import Member
    from pathology.predict.options import PredictOptions
    from pathology.predict.readout import Readout
    from pathology.predict.table import PredictionReport
    from workflows.evaluation.labelled_inputs import InputLabels


@dataclass(frozen=True, kw_only=True)
class PredictArguments:
    """The arguments of ``hyfi predict``, as they are on its command line; see its ``--help``.

    Attributes:
        checkpoints: Several form an ensemble.
        inputs: Slide files, folders, manifests or stores.
        out: The folder of results.
        ranks: Number of processes, which share every slide; None: those of the launcher, else one.
        ranks_per_slide: Ranks that share a slide; others predict other slides.
        cells: "R,C", or auto.
        memory: As in 4GB.
        device: auto, cpu or cuda.
        part: "i/n": the i-th part of the slides; other processes predict the others, into the same ``out``.
        labels: CSV of labels, see `InputLabels`.
        id_column: Column of the labels with the names of the slides.
        target: Column of the labels to compare predictions with.
        split: Split of the labels whose slides are predicted.
        as_json: Print the result as one JSON object.
        options: Further fields of `pathology.predict.options.PredictOptions`, by name.
    """

    checkpoints: Sequence[Path]
    inputs: Sequence[Path]
    out: Path
    ranks: int | None = None
    ranks_per_slide: int | None = None
    cells: str | None = None
    memory: str | None = None
    device: str = "auto"
    part: str = "1/1"
    labels: Path | None = None
    id_column: str | None = None
    target: str | None = None
    split: str | None = None
    as_json: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def request(self) -> PredictionRequest:
        """Return what to predict.

        Raises:
            RequestError: A value is not valid, or does not fit a checkpoint.
        """
        from pathology.predict.options import PredictOptions
        from workflows.evaluation.labelled_inputs import InputLabels
        from workflows.evaluation.tile_evaluator import cells_of

        spill, image = self.options.get("spill"), self.options.get("image", "whole")
        options = PredictOptions(
            **self.options,
            cells=cells_of(self.checkpoints, self.cells, self.memory, spill, image),
            memory_bytes=None if self.memory is None else parse_bytes(self.memory),
            device=device_request(self.device),
            # With --ranks alone, all ranks share each slide.
            ranks_per_slide="auto" if self.ranks_per_slide is None and self.ranks is None else self.ranks_per_slide,
        )
        return PredictionRequest(
            checkpoints=tuple(self.checkpoints),
            inputs=tuple(self.inputs),
            out=self.out,
            ranks=self.ranks,
            options=options,
            part=parse_part(self.part),
            as_json=self.as_json,
            labels=InputLabels(self.labels, self.target, self.split, self.id_column),
        )


@dataclass(frozen=True)
class PredictionRequest:
    """The checked arguments of ``hyfi predict``; ranks that this process starts receive it pickled."""

    checkpoints: Sequence[Path]
    inputs: Sequence[Path]
    out: Path
    ranks: int | None
    options: PredictOptions
    part: tuple[int, int]
    as_json: bool
    labels: InputLabels | None = None


def run(arguments: PredictArguments) -> int:
    """Predict slides as a rank of a launcher, in processes that are started here, or in this process.

    Returns:
        0 if all slides are done; 1 if some failed or got no class (each is named with its reason); 3 if stopped.

    Raises:
        RequestError: A checkpoint, an input or ``out`` cannot be used; nothing was written.
    """
    from pathology.dealing import group_size

    request = arguments.request()
    body = partial(_predict, request)
    if inside_launcher():
        return run_as_rank(body)
    if request.ranks is not None and request.ranks > 1:
        # Here only to refuse what does not divide, before ranks are started.
        group_size(arguments.ranks_per_slide, request.ranks, 1)
        _check(request)
        return launch_body(body, "predict", request.ranks)
    return body()


def _check(request: PredictionRequest) -> list[SlideInput]:
    """Return the slides of this ``--part``, after all checks that take little time; rank 0 prints notes.

    Raises:
        RequestError: The request is not valid.
    """
    from data.location import location
    from data.store.unfinished import unfinished_note
    from hyfi_core.runtime.checkpoint import read_model_json
    from pathology.ingest.discover import part_of_names
    from pathology.ingest.options import IngestOptions
    from pathology.predict.evidence.occlude import check_evidence
    from pathology.predict.inputs import find_inputs
    from pathology.predict.members import InputSpec, check_complete
    from pathology.predict.table import predicted_files
    from pathology.predict.tiles.case_slides import alone_note, with_case_slides
    from workflows.evaluation.labelled_inputs import missing_of

    options, out = request.options, request.out
    for checkpoint in request.checkpoints:
        require_local(checkpoint, "checkpoint")
        config = read_model_json(checkpoint)
        check_complete(config, checkpoint)
        spec = InputSpec.of(config)
        check_evidence(options.evidence, spec, str(checkpoint))
        IngestOptions(mpp=options.mpp or spec.mpp, slide_mpp=options.slide_mpp)  # raises if a value is not valid
    _check_folder(out)
    model = read_model_json(request.checkpoints[0])
    slides = find_inputs(request.inputs, predicted_files(out), missing_of(model))
    if request.labels:
        slides, match_text = request.labels.of(slides, request.inputs, model)
        if own_rank() == 0:
            console.say(match_text)
    of_cases = spec.bag == "case"  # of the last checkpoint; members of an ensemble have the same inputs
    if of_cases:
        slides = with_case_slides(slides)
    names = [slide.slide_id for slide in slides]
    for note in (options.check_tissue(names), alone_note(slides) if of_cases else ""):
        if note and own_rank() == 0:
            console.warn(f"note: {note}")
    for note in map(unfinished_note, map(location, request.inputs)):
        if note and own_rank() == 0:
            console.warn(note)
    require_writable(out)
    # Parts are made of all slides, also of finished ones: else the parts of several processes would overlap.
    names_of_part = part_of_names(names, *request.part)
    return _with_features(request, [slide for slide in slides if slide.slide_id in names_of_part])


def _check_folder(out: Path) -> None:
    """Check that the results do not go among the files of a store or a run.

    Raises:
        RequestError: They would, or ``out`` is a file.
    """
    if out.exists() and not out.is_dir():
        raise RequestError(f"{out} is a file; choose a folder for the results")
    file_of = {"a store": "manifest.csv", "a run": "config.yaml"}
    for kind, name in file_of.items():
        if (out / name).exists() and not (out / "predictions.csv").exists():
            raise RequestError(f"{out} is {kind} (it has {name}); choose another folder for the results")


def _check_ensemble(members: Sequence[Member]) -> None:
    """Check that the models can predict together, before anything is written.

    Raises:
        RequestError: They differ in what they see or predict, or two are the same: the spread would be too small.
    """
    from pathology.predict.members import common_input_spec

    common_input_spec(members)
    path_of: dict[str, str] = {}
    for member in members if len(members) > 1 else ():
        if member.digest in path_of:
            both = f"{path_of[member.digest]} and {member.path}"
            raise RequestError(f"{both} are the same model; give each model of an ensemble once")
        path_of[member.digest] = member.path


def _with_features(request: PredictionRequest, slides: list[SlideInput]) -> list[SlideInput]:
    """Return the slides; if the model reads features, slides without usable features carry the reason.

    Raises:
        RequestError: Features are not given, are of another encoder, or are given for a model that reads pixels.
    """
    from hyfi_core.runtime.checkpoint import read_model_json
    from workflows.evaluation.feature_models import features_for, is_feature_model, with_reasons
    from workflows.evaluation.tile_evaluator import refuse_features

    features = None
    for config in map(read_model_json, request.checkpoints):
        refuse_features(config, request.options.features)
        if is_feature_model(config):
            features = features_for(config, request.options.features)
    # All models of an ensemble read the same features.
    return slides if features is None else with_reasons(slides, features)


def _predict(request: PredictionRequest) -> int:
    """Predict as this rank, or alone; return the exit code."""
    report = predicted(request)
    if report.stopped:
        return STOPPED
    withheld = [slide for slide in report.incomplete if not slide.prediction]
    return SOME_FAILED if report.failed or withheld else DONE


def predicted(request: PredictionRequest) -> PredictionReport:
    """Predict as this rank, or alone; return which slides are done, incomplete, failed or skipped.

    Raises:
        RequestError: As `run`.
    """
    from hyfi_core.comm.agreement.agree import agree
    from pathology.predict.cohort import predict_slides
    from workflows.launch.owner import FolderOwner
    from workflows.launch.peer_watch import join
    from workflows.launch.threads import set_threads

    # Every rank checks again: they may see other files than the process that started them.
    slides, out, ranks = _check(request), request.out, request.ranks
    members = [load_member(path) for path in request.checkpoints]
    _check_ensemble(members)
    comm = join()
    set_threads(comm)
    number, parts = request.part
    part = f"{number}-of-{parts}" if parts > 1 else ""
    advice = "choose another --out, or give each its own --part"
    if ranks is not None and ranks != comm.size:
        raise RequestError(
            f"--ranks {ranks}: {comm.size} were started; give that number, or leave it out{left_over_advice(comm.size)}"
        )
    # Each part locks its own part of the folder, so that several run at the same time.
    owner = agree(comm, lambda: FolderOwner(out, advice, part) if comm.rank == 0 else None)
    with ExitStack() as released, _progress(len(slides), comm) as bar:
        if owner is not None:
            # Also after an error, but after the page is written.
            released.callback(owner.release)
        report = predict_slides(
            members,
            slides,
            out,
            comm,
            request.options,
            begin=bar.skip,
            progress=bar.advance,
            stop_wanted=signals.requested,
            say=console.say,
        )
        page = None
        if owner is not None:
            # Still under the lock, because it reads the table of all slides.
            labels = {slide.slide_id: slide.label for slide in slides if slide.label is not None}
            page = _write_page(out, members, labels)
    if page is not None:
        _report(report, request, page, members[0].readout)
    comm.barrier()  # when a rank exits with a code other than 0, a launcher may kill ranks that still write
    return report


def load_member(checkpoint: Path) -> Member:
    """Load a checkpoint as a member of the ensemble; rank 0 prints a line if its weights are an average."""
    from hyfi_core.runtime.checkpoint import read_model_json
    from pathology.predict.members import Member
    from workflows.evaluation.tile_evaluator import bag_module_of, is_bag_model
    from workflows.tasks.by_name import readout_of

    config = read_model_json(checkpoint)
    module = bag_module_of(config) if is_bag_model(config) else None  # None: `Member` builds it itself
    member = Member.load(checkpoint, module, readout_of=readout_of)
    if member.averaged and own_rank() == 0:
        console.say(f"{checkpoint}: predicting with the average of the weights")
    return member


def _progress(total: int, comm: Communicator) -> AbstractContextManager[console.Progress]:
    """Return a progress bar of ``total`` slides on rank 0, and a silent one on other ranks."""
    return console.progress(total, "predicting") if comm.rank == 0 else nullcontext(console.Silent())


def _write_page(out: Path, members: Sequence[Member], labels: Mapping[str, str]) -> Path:
    """Write ``index.html`` of all slides in the folder, those of earlier runs included; return its path.

    ``labels`` of this run replace the labels of earlier ones.
    """
    from pathology.predict.table import FILE_NAME
    from workflows.evaluation.case_table import predicted_of, write_cases
    from workflows.evaluation.cohort_page import PAGE_FILE, predicted_slides, write_cohort_page
    from workflows.tasks.by_name import task_of

    if not (out / FILE_NAME).exists():
        return out / PAGE_FILE  # nothing has been predicted yet, and this --part has no slides
    readouts = [member.readout for member in members]
    task, readout = task_of(members[0].config), readouts[0].joined(readouts)
    try:
        slides = predicted_slides(out, task, readout.columns, labels)
        write_cases(out, predicted_of(out, slides, task), task, [member.config for member in members])
        title = f"Predictions of {console.counted(len(slides), 'slide')}: {out.absolute()}"
        by_case = members[0].config.get("bag") == "case"
        return write_cohort_page(out, slides, task, readout, title, by_case=by_case)
    except OSError as error:
        console.warn(f"{out / PAGE_FILE} cannot be written: {error.strerror or error}")
        return out / PAGE_FILE


def _report(report: PredictionReport, request: PredictionRequest, page: Path, readout: Readout) -> None:
    """Print the prediction of each slide, and what failed or is incomplete."""
    import numpy as np

    from pathology.readers.mpp import not_used_note

    out = request.out
    for slide in report.failed:
        console.warn(f"{slide.slide_id} ({slide.path}): {slide.reason}")
    for slide in report.incomplete:
        shown = f"; prediction from this part: {slide.prediction}" if slide.prediction else "; no prediction"
        console.warn(f"incomplete: {slide.slide_id} ({slide.path}): {slide.reason}{shown}")
    predicted_slides = (*report.done, *report.incomplete)
    for slide in predicted_slides:
        if not slide.prediction:
            continue
        state = ", incomplete" if slide in report.incomplete else ""
        verdict = f"{readout.brief(np.array(slide.values)) or 'no interval'}{state}"
        # These three have messages of their own.
        flags = [flag for flag in slide.flags if flag not in ("outside_training", "trained_on", "incomplete")]
        shown = f", flags: {', '.join(flags)}" if flags else ""
        console.say(f"{slide.slide_id}: {slide.prediction} ({verdict}){shown}  {out / slide.slide_id / 'report.html'}")
    mpp_of = {} if request.options.force_mpp else {slide.slide_id: slide.source_mpp for slide in predicted_slides}
    if note := not_used_note(request.options.slide_mpp, mpp_of):  # slides that state their mpp keep it
        console.warn(note)
    trained = [slide.slide_id for slide in predicted_slides if "trained_on" in slide.flags]
    if trained:
        console.warn(
            f"{console.counted(len(trained), 'slide')} of the model's training set, or of a case in it (flag "
            f"trained_on): {console.listed(trained)}; these predictions do not show how the model does on new slides"
        )
    for slide in report.done:
        if "outside_training" in slide.flags:
            console.warn(f"{slide.slide_id}: {slide.reason}; the prediction may mean nothing")
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
                "done": [slide.slide_id for slide in report.done],
                "incomplete": [
                    {"slide_id": slide.slide_id, "path": slide.path, "coverage": slide.coverage, "reason": slide.reason}
                    for slide in report.incomplete
                ],
                "failed": [
                    {"slide_id": slide.slide_id, "path": slide.path, "reason": slide.reason} for slide in report.failed
                ],
                "skipped": list(report.skipped),
                "reports": [str(out / slide.slide_id / "report.html") for slide in predicted_slides],
                "stopped": report.stopped,
            }
        )
