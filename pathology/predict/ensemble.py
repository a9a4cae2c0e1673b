"""Evaluation of slides by the models of an ensemble, distributed over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from data.samples.dataset import SlideDataset
from data.samples.view import BACKGROUND, View
from data.tiles.tissue_tiles import TissueTiles
from hyfi_core.comm.agreement.agree import agree
from hyfi_core.comm.base import Communicator
from hyfi_core.errors import NoMapError, RequestError
from hyfi_core.plan.box import Box
from hyfi_core.runtime.calls.attribution import Explanation
from hyfi_core.runtime.engine import Engine
from pathology.errors import SlideError
from pathology.predict.heatmap import Heatmap, place
from pathology.predict.members import InputSpec, Member
from pathology.predict.options import PredictOptions
from pathology.predict.readout import Readout
from pathology.predict.slide_result import coverage_of
from pathology.predict.whole_tissue import SizedEngines, image_weights, views_of

T = TypeVar("T")
READ_ERRORS = (RequestError, SlideError, OSError, ValueError)
"""Errors of a slide that do not end the run."""


def on_every_rank(comm: Communicator, action: Callable[[], T]) -> T:
    """Run ``action`` on every rank and return its value; if it fails on one rank, the slide fails on all. Collective.

    ``action`` must not be collective: if it failed on one rank, the others would wait in it.

    Raises:
        SlideError: with the reason of the first failing rank.
    """

    def named() -> T:
        try:
            return action()
        except OSError as error:  # the file first, without the error's number
            text = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
            raise SlideError(text) from error

    return agree(comm, named, READ_ERRORS, SlideError)


@dataclass(frozen=True, eq=False)
class Attribution:
    """One member's result for a slide; the same on every rank.

    Attributes:
        logits: (classes,) float64, of all images combined.
        contributions: For each image, (classes, h, w) float32; their sum over all images is the logits minus the bias.
        scores: For each image, (classes, h, w) float32: output of the head at each position, before pooling, as the
            member's readout scores it; 0 to 1.
        mapped: Whether the model has a map whose positions contribute; if not, contributions are 0 and scores NaN.
    """

    logits: NDArray[np.float64]
    contributions: tuple[NDArray[np.float32], ...]
    scores: tuple[NDArray[np.float32], ...]
    mapped: bool = True


@dataclass(frozen=True, eq=False)
class Sight:
    """The part of a slide that the models see.

    Attributes:
        views: The images; for models of tiles, one view without pieces; empty: no tissue was found.
        coverage: Share of the slide's tissue that the images or tiles show, 0 to 1.
        flags: Warnings about the images.
        level: Index of the store's level that is read.
        tiles: The tiles, for models with an encoder of tiles.
        case_slides: All slides of the case, if they are one bag.
    """

    views: tuple[View, ...]
    coverage: float
    flags: tuple[str, ...]
    level: int
    tiles: TissueTiles | None = None
    case_slides: tuple[Path, ...] = ()


class Ensemble:
    """The members' engines on all ranks of a group. Every method is collective.

    Each rank reads and normalises only the part of an image that its part of the network needs. Memory: all members'
    weights, and one image part and its activations at a time.

    Args:
        members: the models.
        spec: the input that all members have in common.
        comm: the ranks among which each slide is divided.
        options: has ``cells``, ``memory_bytes`` and ``spill``, which limit the memory of ranks; None: no cells.

    Raises:
        RequestError: a model cannot be distributed over the ranks, or their messages have no tags, which cells need.
    """

    def __init__(
        self, members: Sequence[Member], spec: InputSpec, comm: Communicator, options: PredictOptions | None = None
    ) -> None:
        options = options or PredictOptions()
        self._comm, self._members, self._spec = comm, tuple(members), spec
        self._engines = [
            SizedEngines(
                member.model,
                None,  # no engine of the trained size exists yet
                spec.size_px,
                comm,
                options.cells,
                verify=not member.built_in,
                memory_bytes=options.memory_bytes,
                spill=options.spill,
            )
            for member in members
        ]

    def look(self, dataset: SlideDataset, all_tissue: bool) -> Sight:
        """Return the images of the dataset's slide: one of the trained size, or as many as show ``all_tissue``.

        Raises:
            SlideError: the slide cannot be read.
        """
        level = on_every_rank(self._comm, lambda: dataset.level(0))
        view = on_every_rank(self._comm, lambda: dataset.view(0))
        if not view.pieces:
            return Sight(views=(), coverage=0.0, flags=view.flags, level=level)
        views = self.views(dataset, 0) if all_tissue else (view,)
        flags = list(dict.fromkeys(flag for view in views for flag in view.flags))
        flags += ["several_images"] if len(views) > 1 else []
        return Sight(views, coverage_of(views), tuple(flags), level)

    def heatmaps(self, dataset: SlideDataset, sight: Sight) -> list[Heatmap]:
        """Return each member's heatmap of the slide, with its logits.

        Raises:
            SlideError: the pixels cannot be read, or a member's output is not finite.
        """
        size = dataset.slide(0).levels[sight.level]
        return [
            replace(
                place(
                    attribution.contributions,
                    attribution.scores,
                    attribution.logits.tolist(),
                    sight.views,
                    align_px=self._spec.align_px,
                    slide_size_px=(size.height_px, size.width_px),
                    mpp=size.mpp,
                    class_names=member.readout.channels,
                ),
                exclusive=member.readout.exclusive,
                mapped=attribution.mapped,
            )
            for member, attribution in zip(self._members, self.attribute(dataset, 0, sight.views), strict=True)
        ]

    def views(self, dataset: SlideDataset, index: int) -> tuple[View, ...]:
        """Return the images that show all tissue of a slide.

        Raises:
            SlideError: the slide cannot be read.
        """
        return views_of(dataset, index, self._engines, lambda action: on_every_rank(self._comm, action))

    @property
    def comm(self) -> Communicator:
        """The ranks among which each slide is divided."""
        return self._comm

    @property
    def members(self) -> tuple[Member, ...]:
        """The models."""
        return self._members

    def image(self, member: int, dataset: SlideDataset, view: View) -> SlideImage:
        """Return an image of the dataset's slide for repeated runs of a member; its pixels are read once."""
        engine = _engine_of(self._engines[member], view)
        return SlideImage(engine, self._members[member], dataset, 0, view, self._comm, keep=True)

    def attribute(self, dataset: SlideDataset, index: int, views: Sequence[View]) -> list[Attribution]:
        """Return the result of each member for a slide.

        Raises:
            SlideError: the pixels cannot be read, or a member's output is not finite.
        """
        return [
            self._of_member(member, engines, dataset, index, views)
            for member, engines in zip(self._members, self._engines, strict=True)
        ]

    def _of_member(
        self, member: Member, engines: SizedEngines, dataset: SlideDataset, index: int, views: Sequence[View]
    ) -> Attribution:
        """Return one member's result for a slide: its outputs combined over all images, and the maps of each image."""
        results = [self._of_image(member, engines, dataset, index, view) for view in views]
        logits = np.stack([result.logits for result in results])
        # (images, classes): how much each image counts in the slide's outputs.
        weights = image_weights(logits, views, member.pooling)
        contributions = tuple(
            (result.contributions[0] * weight[:, None, None]).astype(np.float32)
            for result, weight in zip(results, weights, strict=True)
        )
        scores = tuple(result.scores[0] for result in results)
        mapped = all(result.mapped for result in results)
        return Attribution((weights * logits).sum(axis=0), contributions, scores, mapped)

    def _of_image(
        self, member: Member, engines: SizedEngines, dataset: SlideDataset, index: int, view: View
    ) -> Attribution:
        """Return one member's result for one image."""
        engine = _engine_of(engines, view)
        explanation = SlideImage(engine, member, dataset, index, view, self._comm).run(partial(_explained, engine))
        logits = explanation if isinstance(explanation, torch.Tensor) else explanation.logits
        values = _finite(logits)
        if isinstance(explanation, torch.Tensor):  # logits only: the model has no map of squares
            return self._without_map(values, view)
        contributions = explanation.contributions[0].float().cpu().numpy()
        scores = position_scores(explanation, member.readout).cpu().numpy()
        return Attribution(values, (contributions,), (scores,))

    def _without_map(self, logits: NDArray[np.float64], view: View) -> Attribution:
        """Return the logits of an image by a model without a map: cells are those of the view's alignment."""
        shape = (len(logits), *(-(-side // self._spec.align_px) for side in view.size_px))
        nothing, unknown = np.zeros(shape, np.float32), np.full(shape, np.nan, np.float32)
        return Attribution(logits, (nothing,), (unknown,), mapped=False)


def _engine_of(engines: SizedEngines, view: View) -> Engine:
    """Return the engine for a view of `Ensemble.look`, which has a size that all engines support."""
    engine = engines.at(view.size_px)
    assert engine is not None, "every view has the size of an engine"
    return engine


class SlideImage:
    """One image of a slide for one member's engine; each rank reads only the pixels that it needs. Collective.

    Args:
        engine: The member's engine for images of the view's size.
        member: The member.
        dataset: Dataset of the slide.
        index: Index of the slide.
        view: The composition of the image.
        comm: The engine's ranks.
        keep: Whether to keep this rank's pixels (uint8) for further runs; with cells, each run reads them again.

    Attributes:
        engine: The engine.

    Raises:
        SlideError: The pixels cannot be read.
    """

    def __init__(
        self,
        engine: Engine,
        member: Member,
        dataset: SlideDataset,
        index: int,
        view: View,
        comm: Communicator,
        *,
        keep: bool = False,
    ) -> None:
        self.engine, self._member, self._comm = engine, member, comm
        self._dataset, self._index, self._view = dataset, index, view
        keeps = keep and engine.plan.cells is None
        self._kept_pixels = on_every_rank(comm, lambda: self._read(engine.input_box)) if keeps else None

    def run(self, call: Callable[[Callable[[Box], torch.Tensor]], T], covered: Sequence[Box] = ()) -> T:
        """Return ``call(images)``; ``images`` returns normalised pixels of a box, white inside the boxes ``covered``.

        Raises:
            SlideError: The pixels cannot be read.
        """
        if self.engine.plan.cells is None:  # the engine asks for boxes inside this rank's part of the image
            box = self.engine.input_box
            if self._kept_pixels is not None:
                part = self._normalised(self._kept_pixels, box, covered)
            else:
                part = on_every_rank(self._comm, lambda: self._normalised(self._read(box), box, covered))
            return call(_boxes_of(part, box))
        # With cells: if a box cannot be read, this rank goes on with zeros, because others wait for its borders.
        late = LateErrors(self._comm.size > 1)
        result = call(
            lambda box: late.read_or(
                lambda: torch.zeros((1, 3, *box.shape)), lambda: self._normalised(self._read(box), box, covered)
            )
        )
        on_every_rank(self._comm, late.raise_error)
        return result

    def logits(self, covered: Sequence[Box] = ()) -> NDArray[np.float64]:
        """Return the outputs of the image, (classes,), where the boxes ``covered`` have the background's colour.

        Raises:
            SlideError: The pixels cannot be read, or the output is not finite.
        """
        return _finite(self.run(self.engine.predict, covered))

    def _read(self, box: Box) -> NDArray[np.uint8]:
        return self._dataset.read_view(self._index, self._view, box)

    def _normalised(self, pixels: NDArray[np.uint8], box: Box, covered: Sequence[Box]) -> torch.Tensor:
        """Return ``pixels`` of ``box``, normalised for the member, white inside ``covered`` boxes; in new memory."""
        hidden = [inside for cover in covered if not (inside := cover.intersect(box)).empty]
        if hidden:
            pixels = pixels.copy()
        for inside in hidden:
            rows, columns = inside.relative_to(box).slices()
            pixels[:, rows, columns] = BACKGROUND
        return self._member.normalisation(torch.from_numpy(pixels)[None])


def _finite(logits: torch.Tensor) -> NDArray[np.float64]:
    """Return the outputs of one image, (1, classes), as an array (classes,)."""
    values: NDArray[np.float64] = logits[0].double().cpu().numpy()
    if not bool(np.isfinite(values).all()):
        raise SlideError(f"the network's output is not finite: {values.tolist()}")
    return values


def _explained(engine: Engine, images: Callable[[Box], torch.Tensor]) -> Explanation | torch.Tensor:
    """Return the explanation of an image; of a model that does not pool a map into its logits, these alone."""
    try:
        return engine.explain(images)
    except NoMapError:
        logits: torch.Tensor = engine.predict(images)
        return logits.float()


class LateErrors:
    """Postpones read errors of this rank until all ranks have finished, because others wait for its results.

    Args:
        shared: Whether there are other ranks.
    """

    def __init__(self, shared: bool) -> None:
        self._shared = shared
        self._error: Exception | None = None

    def read_or(self, instead: Callable[[], torch.Tensor], read: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the result of ``read``, or of ``instead`` once ``read`` has failed.

        Raises:
            SlideError: ``read`` failed, and there are no other ranks.
        """
        try:
            if self._error is None:
                return read()
        except READ_ERRORS as error:
            if not self._shared:
                raise SlideError(str(error)) from error
            self._error = error
        return instead()

    def raise_error(self) -> None:
        """Raise the first error of this rank."""
        if self._error is not None:
            raise self._error


def position_scores(explanation: Explanation, readout: Readout) -> torch.Tensor:
    """Return (classes, h, w) float32: the score of each class at each position, which ``readout`` makes of logits.

    If the head cannot be evaluated at single positions, the logits of a position are its contributions times the number
    of positions, plus the bias, as for a mean over positions.
    """
    logits = explanation.positions
    if logits is None:
        maps = explanation.contributions
        bias = explanation.logits - maps.sum(dim=(2, 3))
        logits = bias[:, :, None, None] + maps * (maps.shape[2] * maps.shape[3])
    return readout.position_scores(logits[0].float())


def _boxes_of(part: torch.Tensor, box: Box) -> Callable[[Box], torch.Tensor]:
    """Return a function that returns the pixels of a box inside ``box``, from the tensor ``part`` of that box."""

    def images(requested: Box) -> torch.Tensor:
        if not box.contains(requested):
            raise ValueError(f"the engine requests {requested}, but its input box is {box}")
        rows, columns = requested.relative_to(box).slices()
        return part[:, :, rows, columns]

    return images
