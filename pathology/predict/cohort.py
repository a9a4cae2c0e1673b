"""Prediction of slides: each slide is computed by a group of ranks, whose first writes its results.

A slide that fails does not affect others.

```
first rank        slide file ── ingest ──> OUT/.ingest.tmp-…/<slide_id>.zarr   (removed when the slide is done)
every rank        makes the same view of it, and reads only the box of the image that its part of the network needs
first rank        OUT/<slide_id>/ …, then the slide's row in OUT/predictions.csv
```
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from data.samples.dataset import SlideDataset, SlideRef
from data.samples.trained.trained_notes import OUTSIDE, TRAINED_ON
from data.samples.trained.trained_range import SlideFigures
from data.samples.trained.trained_slides import TrainedSlides, source_sha256
from data.store.manifest import SlideRecord
from data.store.slide_store import SlideStore, slide_path
from hyfi_core.arithmetic import set_arithmetic
from hyfi_core.comm.base import Communicator
from hyfi_core.runtime.launch import own_device
from pathology.dealing import SlideQueue, gathered, group_size, on_first_rank, own_group, shared_folder
from pathology.errors import SlideError
from pathology.predict.ensemble import Ensemble, Sight, on_every_rank
from pathology.predict.evidence.gradient import gradient_evidence
from pathology.predict.evidence.occlude import OcclusionStoppedError, check_evidence, occlude
from pathology.predict.heatmap import Heatmap, average
from pathology.predict.inputs import SlideInput
from pathology.predict.members import InputSpec, Member, common_input_spec
from pathology.predict.options import PredictOptions, ingest_options
from pathology.predict.out_folder import OutFolder
from pathology.predict.readout import percent
from pathology.predict.slide_result import SlideResult
from pathology.predict.table import DONE, FAILED, INCOMPLETE, Prediction, PredictionReport
from pathology.predict.tiles.case_slides import with_case_slides
from pathology.predict.tiles.feature_ensemble import FeatureEnsemble
from pathology.predict.tiles.tile_ensemble import TileEnsemble
from pathology.predict.whole_tissue import combination_text

T = TypeVar("T")


def predict_slides(
    members: Sequence[Member],
    inputs: Sequence[SlideInput],
    out: Path,
    comm: Communicator,
    options: PredictOptions | None = None,
    *,
    begin: Callable[[int], None] = lambda finished: None,
    progress: Callable[[int, str], None] = lambda slides, note: None,
    stop_wanted: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] = lambda note: None,
) -> PredictionReport:
    """Predict ``inputs`` and write their results under ``out``. Collective over ``comm``.

    A slide that cannot be read, has no tissue or cannot be written does not affect others. A slide with existing
    results of the same checkpoints and file is skipped unless ``options.overwrite``.

    Args:
        members: the model, or the models of an ensemble; the same on every rank.
        inputs: slides from :func:`pathology.predict.inputs.find_inputs`; the same on every rank.
        out: folder of the results, created if it does not exist; on a file system that all ranks share.
        comm: ranks that predict; ``options.ranks_per_slide`` of them share a slide.
        options: see `PredictOptions`.
        begin: called on rank 0, before the first slide, with the number of slides that are already finished.
        progress: called on rank 0 with (number of slides that all groups have finished since the last call, text).
        stop_wanted: called on every rank between slides; if it returns True on any rank, the run stops.
        say: called on rank 0 with sentences about slow steps on a slide of its group.

    Raises:
        RequestError: checkpoints are not compatible or cannot give the evidence, ``out`` has other contents, or the
            number of ranks is not a multiple of ``ranks_per_slide``; nothing is written.
    """
    options, spec = options or PredictOptions(), common_input_spec(members)
    check_evidence(options.evidence, spec, members[0].path)
    flags = ("mpp_changed",) if options.mpp is not None and options.mpp != spec.mpp else ()
    spec = replace(spec, mpp=options.mpp if options.mpp is not None else spec.mpp)
    folder = OutFolder(out, members, spec, options=options)
    ingest_options(members[0].config, spec.mpp, options)  # refuses a wrong mpp before anything is written
    options.check_tissue([slide.slide_id for slide in inputs])
    inputs = with_case_slides(inputs) if spec.bag == "case" else inputs  # the slides of a case are one bag of tiles
    set_arithmetic(all(member.config.get("tf32", False) for member in members))  # as in training
    device = own_device(options.device, comm)
    to_predict = on_first_rank(comm, lambda: folder.open(inputs))
    if comm.rank == 0:
        begin(len(inputs) - len(to_predict))
    group = own_group(comm, group_size(options.ranks_per_slide, comm.size, len(to_predict)))
    for member in members:
        member.model.to(device)
    ensemble = _ensemble_of(members, spec, group, options) if any(not inputs[k].failure for k in to_predict) else None
    with _scratch(folder, comm, is_needed=bool(to_predict)) as scratch:
        if group.rank == 0 and comm.rank != 0:
            folder.open(inputs)  # on rank 0 done above; the first rank of each group writes results
        caller = _Caller(say, progress, stop_wanted) if comm.rank == 0 else _Caller(stop_wanted=stop_wanted)
        run = _Run(folder, members, spec, options, group, scratch, flags, caller)
        queue = SlideQueue(to_predict, scratch, group, alone=group.size == comm.size)
        of_group, stopped = run.predict_all(queue, inputs, ensemble)
        outcomes = _all_outcomes(comm, group, of_group)
        stopped = any(comm.broadcast_object(comm.gather_objects(stopped)))
    skipped = tuple(slide.slide_id for k, slide in enumerate(inputs) if k not in set(to_predict))
    return PredictionReport.of(outcomes, skipped, stopped and len(outcomes) < len(to_predict))


def _ensemble_of(
    members: Sequence[Member], spec: InputSpec, comm: Communicator, options: PredictOptions
) -> Ensemble | TileEnsemble:
    """Return what evaluates models with this input on the ranks of a group. Collective."""
    if spec.features is not None:
        return FeatureEnsemble(members, spec, comm, options)
    return (Ensemble if spec.tiles is None else TileEnsemble)(members, spec, comm, options)


def _all_outcomes(comm: Communicator, group: Communicator, of_group: Mapping[int, Prediction]) -> list[Prediction]:
    """Return the outcomes of all groups, sorted by the index of their slide, on every rank. Collective."""
    as_json = {index: asdict(outcome) for index, outcome in of_group.items()}
    return [Prediction.of_json(values) for values in gathered(comm, leads=group.rank == 0, results=as_json)]


_PROVENANCE = ("affine", "source", "sha256")
"""Attributes of a stored slide that place results on its file, and name it."""


@dataclass(frozen=True)
class _Caller:
    """The caller's functions that a run calls; see `predict_slides`. The defaults do nothing."""

    say: Callable[[str], None] = lambda note: None
    progress: Callable[[int, str], None] = lambda slides, note: None
    stop_wanted: Callable[[], bool] = lambda: False


class _Run:
    """A run on one rank; ``comm`` are the ranks of its group."""

    def __init__(
        self,
        folder: OutFolder,
        members: Sequence[Member],
        spec: InputSpec,
        options: PredictOptions,
        comm: Communicator,
        scratch: Path,
        flags: tuple[str, ...],
        caller: _Caller,
    ) -> None:
        self._caller = caller
        self._folder, self._members, self._spec, self._options = folder, members, spec, options
        self._comm, self._scratch, self._flags = comm, scratch, flags
        self._ingest_options = ingest_options(members[0].config, spec.mpp, options)
        self._min_coverage = max(member.min_coverage for member in members)
        self._trained = TrainedSlides.union(
            TrainedSlides.of_json(member.config.get("trained_on")) for member in members
        )

    def predict_all(
        self, queue: SlideQueue, inputs: Sequence[SlideInput], ensemble: Ensemble | TileEnsemble | None
    ) -> tuple[dict[int, Prediction], bool]:
        """Predict the slides that this group takes; return (index -> prediction, whether it stopped). Collective."""
        predicted: dict[int, Prediction] = {}
        # All ranks stop together: after a rank that stopped alone, the others would wait for its messages for ever.
        while not (stopped := self._stops()):
            index = queue.take()
            if index is None:
                break
            try:
                predicted[index] = outcome = self.predict(inputs[index], ensemble)
            except OcclusionStoppedError:  # nothing of this slide was written: the next run predicts it
                return predicted, True
            if self._comm.rank == 0:
                # The row first: a slide counts as finished only if it is in the table.
                self._folder.note(outcome)
                queue.finish(index)
                note = f"{outcome.slide_id}: {outcome.prediction or outcome.status}"
                self._caller.progress(len(queue.newly_finished()), note)
        return predicted, stopped

    def _stops(self) -> bool:
        """Whether a stop is requested on any rank of the group. Collective."""
        return any(self._comm.broadcast_object(self._comm.gather_objects(self._caller.stop_wanted())))

    def predict(self, slide: SlideInput, ensemble: Ensemble | TileEnsemble | None) -> Prediction:
        """Predict a slide and write its results. Collective."""
        prediction = Prediction(slide.slide_id, slide.case_id, str(slide.path), FAILED)
        if slide.failure or ensemble is None:
            return replace(prediction, reason=slide.failure)
        try:
            with self._prepared(slide) as (store, flags):
                # `on_every_rank`: if one rank cannot read something, the slide fails on all, and none waits for it.
                given_tissue = on_every_rank(self._comm, lambda: self._options.tissue_given(slide.slide_id))
                prediction = replace(
                    prediction, flags=_merged(flags, self._flags, ("tissue_given",) * (given_tissue is not None))
                )
                dataset = on_every_rank(self._comm, lambda: self._dataset(store, slide))
                prediction = prediction if slide.stored else replace(prediction, source_mpp=_source_mpp(dataset))
                outside = self._trained.ranges.describe_outside(SlideFigures.of(dataset, 0))
                if outside:
                    flags = _merged(prediction.flags, (OUTSIDE,))
                    prediction = replace(prediction, flags=flags, reason=f"{OUTSIDE}: {'; '.join(outside)}")
                if on_every_rank(self._comm, lambda: dataset.stain is not None and dataset.colour_map(0) is None):
                    prediction = replace(prediction, flags=_merged(prediction.flags, ("stain_as_scanned",)))
                if self._trained.has(slide.slide_id, slide.case_id, source_sha256(dataset, 0)):
                    prediction = replace(prediction, flags=_merged(prediction.flags, (TRAINED_ON,)))
                sight = ensemble.look(dataset, all_tissue=self._options.image == "whole")
                if not sight.views:
                    flags = _merged(prediction.flags, sight.flags)
                    return replace(prediction, coverage=0.0, flags=flags, reason="no tissue was found on this slide")
                prediction = self._with_coverage(prediction, sight)
                sight = replace(sight, case_slides=slide.case_slides)
                result = self._result(slide, prediction, dataset, sight, ensemble.heatmaps(dataset, sight))
                result = self._with_evidence(result, ensemble, dataset, sight)
                self._on_rank_0(lambda: self._folder.write(slide, result))
        # Only this slide fails; the run goes on.
        except SlideError as error:
            return replace(prediction, status=FAILED, reason=str(error))
        if result.withheld:  # too little tissue was seen: the outputs are not reported
            return replace(prediction, flags=result.flags)
        return replace(
            prediction,
            prediction=result.readout.prediction(result.mean),
            values=tuple(result.mean.tolist()),
            spread=None if result.spread is None else float(result.spread[result.readout.main(result.mean)]),
            flags=result.flags,
        )

    def _with_evidence(
        self, result: SlideResult, ensemble: Ensemble | TileEnsemble, dataset: SlideDataset, sight: Sight
    ) -> SlideResult:
        """Return the result with the evidence of blocks, if it is requested and there is a prediction."""
        kind = self._options.evidence
        if kind == "map" or result.withheld:
            return result
        assert isinstance(ensemble, Ensemble), "models of tiles are refused before"
        if kind == "gradient":
            blocks = gradient_evidence(ensemble, dataset, sight, self._spec.align_px)
            return replace(result, blocks=blocks, flags=_merged(result.flags, (kind,)))

        def stops(done: int, forwards: int) -> bool:
            self._caller.progress(0, f"{result.slide_id}: occlusion {done} of {forwards}")
            return self._stops()

        most = self._options.most_forwards
        blocks = occlude(ensemble, dataset, sight, self._spec.align_px, most, self._caller.say, stops)
        return replace(result, blocks=blocks, flags=_merged(result.flags, (kind,)))

    def _with_coverage(self, prediction: Prediction, sight: Sight) -> Prediction:
        """Return the prediction with coverage and flags of ``sight``, and the status that follows from the coverage."""
        coverage, flags = sight.coverage, _merged(prediction.flags, sight.flags)
        if coverage >= self._min_coverage:
            return replace(prediction, status=DONE, coverage=coverage, flags=flags)
        reason = (
            f"only {percent(coverage)} of the tissue was seen, {percent(self._min_coverage)} are required; --image "
            f"whole shows all of it"
        )
        reason = "; ".join(filter(None, (reason, prediction.reason)))
        return replace(prediction, status=INCOMPLETE, coverage=coverage, flags=(*flags, INCOMPLETE), reason=reason)

    @contextmanager
    def _prepared(self, slide: SlideInput) -> Iterator[tuple[Path, tuple[str, ...]]]:
        """Context that yields (folder of a store with the slide, flags of the slide).

        A slide file is ingested into the temporary store, and removed from it at the end.
        """
        if slide.stored:
            yield slide.path.parent, _flags_of(slide.row.get("flags", ""))
            return
        try:
            record = self._on_rank_0(lambda: self._ingested(slide))
            yield self._scratch, tuple(self._comm.broadcast_object(list(record.flags) if record else []))
        finally:
            if self._comm.rank == 0:
                # Also after a failure: otherwise temporary slides would fill the disk.
                shutil.rmtree(slide_path(self._scratch, slide.slide_id), ignore_errors=True)

    def _ingested(self, slide: SlideInput) -> SlideRecord:
        """Ingest a slide file into the temporary store."""
        from pathology.ingest.slide import ingest_slide

        record = ingest_slide(slide.path, self._scratch, self._ingest_options, dict(slide.row), slide.slide_id)
        if record.status != DONE:
            raise SlideError(record.reason)
        return record

    def _on_rank_0(self, action: Callable[[], T]) -> T | None:
        """Run ``action`` on rank 0; if it fails, the slide fails on all ranks. Collective."""
        return on_every_rank(self._comm, lambda: action() if self._comm.rank == 0 else None)

    def _dataset(self, store: Path, slide: SlideInput) -> SlideDataset:
        """Return a dataset of one slide.

        Raises:
            SlideError: The store was written by another program: it does not state where its pixels are in the file.
        """
        spec = self._spec
        dataset = SlideDataset(
            store,
            [SlideRef(slide.slide_id, slide.case_id)],
            size_px=spec.size_px,
            mpp=spec.mpp,
            view=spec.view,
            align_px=spec.align_px,
            stain=spec.stain,
            opener=self._options.opened,
        )
        attributes = getattr(dataset.slide(0), "attributes", {})  # opens the slide: an error here fails only this slide
        missing = [name for name in _PROVENANCE if name not in attributes]
        if missing:
            raise SlideError(
                f"{slide.path}: it has no {', '.join(missing)} among its hyfi attributes, which hyfi ingest writes and "
                "which place a heatmap on the slide; ingest the slide file, or predict the file itself"
            )
        return dataset

    def _result(
        self,
        slide_input: SlideInput,
        prediction: Prediction,
        dataset: SlideDataset,
        sight: Sight,
        heatmaps: Sequence[Heatmap],
    ) -> SlideResult:
        """Return all that is written about a slide; several members are averaged."""
        slide = dataset.slide(0)
        assert isinstance(slide, SlideStore)
        readouts = [member.readout for member in self._members]
        logits = [np.array(heatmap.logits, np.float64) for heatmap in heatmaps]
        # Each member's outputs become values by its own calibration, and are averaged later.
        members = list(zip(readouts, logits, strict=True))
        heatmap = average(heatmaps) if len(heatmaps) > 1 else heatmaps[0]
        return SlideResult(
            slide_id=slide_input.slide_id,
            case_id=slide_input.case_id,
            path=str(slide_input.path),
            slide=slide,
            level=sight.level,
            views=sight.views,
            tiles=sight.tiles,
            combined=combination_text(sight.views, self._members[0].pooling),
            label=label_of(slide_input.row, self._members[0].config)
            if slide_input.label is None
            else slide_input.label,
            withheld=prediction.reason if prediction.status == INCOMPLETE and not self._options.allow_partial else "",
            heatmap=heatmap,
            readout=readouts[0].joined(readouts),
            outputs=np.stack(logits),
            values=np.stack([readout.values(member_logits) for readout, member_logits in members]),
            uncalibrated=np.stack([readout.uncalibrated(member_logits) for readout, member_logits in members]),
            flags=(*prediction.flags, *heatmap.flags),
            outside=prediction.reason.partition(f"{OUTSIDE}: ")[2],  # "" unless the reason says it
        )


def label_of(row: Mapping[str, str], config: Mapping[str, Any]) -> str:
    """Return the label of a slide from its row of a manifest, with ``;`` between columns; empty if it has none."""
    target = config.get("target", "label")
    values = [row.get(column, "") for column in ([target] if isinstance(target, str) else target)]
    return ";".join(values) if any(values) else ""


def _source_mpp(dataset: SlideDataset) -> float:
    """Return the microns per pixel, the mean of both axes, that were used for the file of the first slide."""
    slide = dataset.slide(0)
    assert isinstance(slide, SlideStore)
    y, x = slide.attributes["source"]["mpp"]
    return float(y + x) / 2


def _flags_of(text: str) -> tuple[str, ...]:
    return tuple(flag for flag in text.split(";") if flag)


def _merged(*groups: Sequence[str]) -> tuple[str, ...]:
    """Return all flags without duplicates, in order of their first occurrence."""
    return tuple(dict.fromkeys(flag for group in groups for flag in group))


@contextmanager
def _scratch(folder: OutFolder, comm: Communicator, is_needed: bool) -> Iterator[Path]:
    """Context that yields a temporary store inside the folder of results, the same on every rank. Collective.

    If none is needed, it yields the folder of results, and creates nothing.
    """
    if not is_needed:
        yield folder.path
        return
    on_first_rank(comm, folder.begin)
    # Inside the folder of results, because all ranks see it, unlike a node's temporary folder.
    with shared_folder(folder.path / "ingest", comm) as path:
        yield path
