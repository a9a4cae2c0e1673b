"""The job of a run: slides, labels, sizes, order. Built on every rank before anything starts; writes nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from data.csv_table import Table, read_table
from data.loading.batches import BatchLayout
from data.loading.normalise import Normalisation
from data.loading.order import SampleStream, balanced_weights, column_weights
from data.samples.augment import Augment
from data.samples.colours.own_colours import try_colours
from data.samples.colours.stain_normalisation import as_scanned_text
from data.samples.dataset import MPP_TOLERANCE, SlideDataset, SlideRef, select_slides
from data.samples.exclusion import ExcludedSlide, flags_to_exclude, refuse_empty
from data.samples.labels import Labels, Target, with_cases
from data.samples.matching import LabelMatch, match_labels
from data.samples.names import with_one_spelling_of_cases
from data.samples.splits import load_splits
from data.store.manifest import load_manifest
from data.tiles.grouping import Grouping
from hyfi_core.errors import RequestError
from hyfi_core.plan.parallel_plan import ParallelPlan
from pathology.tissue.stain_reference import stain_normalisation
from workflows.config.load import Config
from workflows.evaluation.models import model_fields
from workflows.tasks.by_name import task_class
from workflows.tasks.own_task import is_own, try_task
from workflows.tasks.task import LabelSource, Task

_TRIED = 8
"""Number of slides with whose labels a user's own task is tried."""


@dataclass(frozen=True)
class TrainingJob:
    """A run's data and dimensions. A *step* is one update of the weights, counted from 1.

    Attributes:
        config: The resolved configuration.
        task: What is predicted.
        train: Training slides, augmented.
        val: Validation slides, not augmented.
        labels: The match between labels and slides of the store.
        draw_weights: Relative frequency with which each training sample is drawn; None: each once an epoch.
        shares: Slides of one step for each replica, if these differ; spare ranks are replicas, too.
        pace_s: Seconds of each replica for one slide of each micro-batch, if shares were chosen by speed.
        excluded: Slides of both splits that are left out because of their flags.
    """

    config: Config
    task: Task
    train: SlideDataset
    val: SlideDataset
    labels: LabelMatch
    draw_weights: tuple[float, ...] | None = None
    shares: tuple[int, ...] | None = None
    pace_s: tuple[float, ...] | None = None
    excluded: tuple[ExcludedSlide, ...] = ()

    @cached_property
    def plan(self) -> ParallelPlan:
        """The parallel plan of the trainers."""
        plan = self.config.plan.build()
        return plan if self.shares is None else replace(plan, replicas=len(self.shares), shares=self.shares)

    @cached_property
    def batches(self) -> BatchLayout:
        """How the stream of samples is divided into batches."""
        replicas, microbatches = self.plan.replicas, self.plan.microbatches
        if self.plan.shares is None:
            return BatchLayout.uniform(self.config.data.batch_size // replicas, replicas)
        return BatchLayout(tuple(share // microbatches for share in self.plan.shares), microbatches)

    @cached_property
    def stream(self) -> SampleStream:
        """The order of all training samples."""
        return SampleStream(len(self.train_samples), self.config.run.seed, self.draw_weights)

    @cached_property
    def train_samples(self) -> Grouping:
        """The training slides as samples: each slide, or all of a case together."""
        return Grouping.of(self.train.samples, self.config.data.bag)

    @cached_property
    def val_samples(self) -> Grouping:
        """The validation slides as samples."""
        return Grouping.of(self.val.samples, self.config.data.bag)

    @property
    def normalisation(self) -> Normalisation:
        """How pixels become the model's input."""
        model, usual = self.config.model, Normalisation()
        return Normalisation(model.mean or usual.mean, model.std or usual.std)

    @property
    def step_samples(self) -> int:
        """Number of samples in one step, over all replicas and accumulated batches."""
        return self.batches.turn_samples * self.config.optimizer.accumulate

    def steps_of(self, epochs: int) -> int:
        """Return the number of steps of ``epochs`` epochs; the last step may have samples of the next epoch."""
        return math.ceil(epochs * len(self.train_samples) / self.step_samples)

    @cached_property
    def steps(self) -> int:
        """Number of steps of the whole run."""
        return self.config.run.steps or self.steps_of(self.config.run.epochs or 1)

    @cached_property
    def every_steps(self) -> int:
        """Number of steps between two validations."""
        return self.config.validation.every_steps or self.steps_of(1)

    def epoch_of(self, step: int) -> int:
        """Return the epoch, from 0, of the first sample of a step."""
        return (step - 1) * self.step_samples // len(self.train_samples)

    def validates_after(self, step: int) -> bool:
        """Whether the weights after ``step`` are validated."""
        return len(self.val) > 0 and (step % self.every_steps == 0 or step == self.steps)

    def saves_after(self, step: int) -> bool:
        """Whether a checkpoint is saved after ``step``."""
        every = self.config.run.checkpoint_every_steps or self.every_steps
        return self.validates_after(step) or step % every == 0 or step == self.steps

    def batch_labels(self, turn: int, replica: int) -> torch.Tensor:
        """Return the labels of one replica's batch, as the loss takes them."""
        indices = [self.stream.at(number)[1] for number in self.batches.numbers(turn, replica)]
        return self.task.tensor(_label(self.train_samples.samples[index]) for index in indices)

    def step_slides(self, step: int, turns: Sequence[int]) -> list[str]:
        """Return the ids of the slides in some turns of a step, over all replicas; ``turns``: counted from 0."""
        first = (step - 1) * self.config.optimizer.accumulate
        numbers = [
            number
            for turn in turns
            for replica in range(self.plan.replicas)
            for number in self.batches.numbers(first + turn, replica)
        ]
        samples = [self.train_samples.members[sample] for _, sample in map(self.stream.at, numbers)]
        return [self.train.samples[index].slide_id for indices in samples for index in indices]

    def warnings(self) -> list[str]:
        """Return warnings about slides, sampling and frozen parts, for the user."""
        train, val = (list(map(_label, split.samples)) for split in (self.train_samples, self.val_samples))
        warnings = self.task.warnings(train, val)
        warnings += [] if self.task.own_loss else self.task.batch_warnings(self.config.data.batch_size)
        if self.config.data.sampling == "balanced" and self.config.data.class_weights == "balanced":
            warnings.append("sampling and class_weights are both balanced: rare classes are weighted twice")
        if self.draw_weights is not None and 0 in self.draw_weights:
            warnings.append(f"{self.draw_weights.count(0)} training {self.config.data.bag}s have weight 0: never drawn")
        if self.step_samples > (known := len(self.train_samples)):
            warnings.append(f"a step of {self.step_samples} has each of {known} training samples several times")
        as_scanned = {*self.train.as_scanned(), *self.val.as_scanned()}  # not stain-normalised
        warnings += [as_scanned_text(sorted(as_scanned))] if as_scanned else []
        model = self.config.model
        if model.freeze and model.built_in and model.weights is None:
            warnings.append("model.freeze without model.weights: what is frozen keeps random values")
        if not len(self.val):
            split = self.config.validation.split
            warnings.append(f"no labelled slide in {split!r}: no validation, and best is the latest checkpoint")
        return warnings

    def model_json(self) -> dict[str, Any]:
        """Return the content of ``model.json`` for prediction, without the step."""
        data = self.config.data
        return {
            "model": model_fields(self.config.model, self.task.outputs),
            **self.task.to_json(),
            "target": data.target if isinstance(data.target, str) and data.targets is None else list(data.columns),
            "split_column": data.split_column,
            "id_column": data.id_column,
            "merge_alike": data.merge_alike,
            "exclude_flags": list(data.exclude_flags),
            "missing": None if data.missing is None else list(data.missing),
            "task": data.task_name,
            "mpp": self.train.mpp,
            "size_px": list(data.image_px),
            "view": data.view,
            "align_px": data.align_px,
            "min_coverage": data.min_coverage,
            "case_aggregate": data.case_aggregate,
            "bag": data.bag,
            "tissue": _tissue(self.train),
            "normalisation": self.normalisation.to_json(),
            "stain_normalisation": None if self.train.stain is None else self.train.stain.to_json(),
            "precision": self.config.run.precision,
            "tf32": self.config.run.tf32,
            "memory_format": self.config.run.memory_format,
            "thresholds": {},
            "own": {"loss": self.task.own_loss, "metrics": list(self.task.own_metrics)},
            "versions": versions(),
        }


def prepare(config: Config) -> TrainingJob:
    """Read labels, splits and the store's manifest, and select the slides of the run; reads no pixels.

    Raises:
        RequestError: One of them is missing or invalid, or no slide is left to train on.
    """
    data = config.data
    rows, merge, missing = load_manifest(data.store), data.merge_alike, data.missing_words
    rows = with_one_spelling_of_cases(rows, str(data.store / "manifest.csv"), merge=merge, missing=missing)
    labels_path = data.labels or data.store / "manifest.csv"
    # A table that names slides in a column of its own is read once, for its labels and for its splits.
    table = labels_path if data.id_column is None else read_table(labels_path, "labels", id_column=data.id_column)
    labels = read_labels(config, table, rows)
    rows = with_cases(rows, labels, str(labels_path))
    match_labels(rows, labels).check(str(labels_path), data.allow_unmatched)
    splits_path = data.splits or table
    splits = load_splits(splits_path, rows, column=data.split_column, merge_alike=merge, missing=missing)
    excluded: list[ExcludedSlide] = []
    train = _selected(config, rows, labels, splits, "train", excluded)
    val = _selected(config, rows, labels, splits, config.validation.split, excluded)
    if not train:
        raise RequestError(
            f"no slide to train on: none of the {len(rows)} slides of {data.store} is done, has a "
            f"{', '.join(data.columns)} in {labels_path} and is in 'train' of {splits_path}"
        )
    samples = Grouping.of(train, data.bag)
    task = _task_of(config, labels, samples.samples, Grouping.of(val, data.bag).samples)
    return TrainingJob(
        config,
        task,
        dataset_of(config, train, data.augment.build()),
        dataset_of(config, val, None),
        match_labels(rows, labels, splits, str(labels_path)),
        draw_weights=_draw_weights(config, labels, train, samples),
        shares=config.roles.shares,
        excluded=tuple(excluded),
    )


def _selected(
    config: Config,
    rows: Sequence[Mapping[str, str]],
    labels: Labels,
    splits: Mapping[str, str],
    split: str,
    excluded: list[ExcludedSlide],
) -> tuple[SlideRef, ...]:
    """Return the slides of a split without those of ``data.exclude_flags``, which are added to ``excluded``.

    Raises:
        RequestError: That leaves the split, or a class in it, without a slide.
    """
    flags_of = {row["slide_id"]: flags_to_exclude(row, config.data.exclude_flags) for row in rows}
    slides = select_slides(rows, labels, splits, split)
    excluded_ids = {slide.slide_id for slide in excluded}
    excluded += [
        ExcludedSlide(slide.slide_id, slide.case_id, split, flags_of[slide.slide_id])
        for slide in slides
        if flags_of[slide.slide_id] and slide.slide_id not in excluded_ids
    ]
    remaining = tuple(slide for slide in slides if not flags_of[slide.slide_id])
    lost = _classes(labels, slides) - _classes(labels, remaining)
    if slides and (lost or not remaining):
        refuse_empty(split, sorted(lost) if remaining else [], excluded)
    return remaining


def _classes(labels: Labels, slides: Sequence[SlideRef]) -> set[str]:
    """Return the names of the classes, or of the labels, that slides have, none if labels are numbers."""
    return {name for target in map(_label, slides) for name in labels.names_of(target)}


def _task_of(config: Config, labels: Labels, train: Sequence[SlideRef], val: Sequence[SlideRef]) -> Task:
    """Return the task, fitted to the training slides and checked.

    Raises:
        RequestError: The slides do not suffice, or a loss or metric of the user's own does not fit.
    """
    data, train_labels = config.data, [_label(sample) for sample in train]
    if data.augment.own is not None:  # the user's own change of colours
        try_colours(data.augment.own)
    task = task_class(data.task_name).fitted(data, labels, train_labels)
    task = replace(task, own_loss=data.own_loss, own_metrics=config.validation.metrics)
    if not task.own_loss:  # what batches the user's own loss needs is not known
        task.check_batch(data.batch_size)
    task.check_validation([_label(sample) for sample in val])
    batch, evaluated = train_labels[: data.batch_size], [_label(sample) for sample in val] or train_labels
    for single, its_labels in task.with_labels(train_labels):  # one by one, if there are several targets
        if is_own(single):  # a class of the user's
            try_task(single, its_labels[:_TRIED])
    task.try_own(batch, evaluated)  # the user's own loss and metrics
    return task


def dataset_of(config: Config, slides: tuple[SlideRef, ...], augment: Augment | None) -> SlideDataset:
    """Return the dataset of ``slides`` with the run's settings."""
    data = config.data
    return SlideDataset(
        data.store,
        slides,
        size_px=data.image_px,
        mpp=mpp_of(config),
        view=data.view,
        align_px=data.align_px,
        seed=config.run.seed,
        augment=augment,
        stain=stain_normalisation(data.stain_normalisation, data.stain_reference, data.store, "data.stain_reference"),
    )


def mpp_of(config: Config) -> float:
    """Return the microns per pixel of the run's images; with ``data.features`` the coarsest of the store.

    Raises:
        RequestError: ``data.mpp`` is native, and the slides of the store differ in mpp.
    """
    tiles, kind = config.data.tiles, config.data.kind
    mpp: float | Literal["native"] = config.data.mpp if tiles is None else tiles.mpp or "native"
    if mpp != "native" and kind != "features":
        return mpp
    mpps = {row["slide_id"]: float(row["store_mpp"]) for row in load_manifest(config.data.store) if row["store_mpp"]}
    finest, coarsest = min(mpps, key=mpps.__getitem__), max(mpps, key=mpps.__getitem__)
    if kind == "features":  # no pixels are read
        return mpps[coarsest]
    # The geometric mean: both ends differ from it by the same factor.
    middle = (mpps[finest] * mpps[coarsest]) ** 0.5
    if mpps[coarsest] > (1 + MPP_TOLERANCE) * middle:
        setting = "data.mpp: given native" if tiles is None else "data.tiles.mpp: not given"
        raise RequestError(
            f"{setting}; the slides of {config.data.store} differ, from {mpps[finest]:g} ({finest}) to "
            f"{mpps[coarsest]:g} ({coarsest}); ingest them with one --mpp, {mpps[coarsest]:g} or more"
        )
    return float(f"{middle:.6g}")


def read_labels(config: Config, path: Path | Table, rows: Sequence[Mapping[str, str]]) -> Labels:
    """Read the labels of the slides in a manifest's ``rows``, and check their classes against ``model.classes``.

    Raises:
        RequestError: As ``read_labels`` of the task; or there are not as many classes as configured.
    """
    configured, data = config.model.classes, config.data
    classes = configured if isinstance(configured, tuple) else None
    source = LabelSource(path, data.columns, classes, rows, data.merge_alike, data.missing_words)
    source = replace(source, targets=data.targets or ())
    if data.targets is not None and configured is not None:
        raise RequestError(f"model.classes: given {configured!r} beside data.targets; give each target its classes")
    labels = task_class(data.task_name).read_labels(source)
    count = len(labels.classes)
    if configured is not None and not count:
        raise RequestError(f"model.classes: given {configured!r}; task {data.task} has no classes: leave it out")
    if isinstance(configured, int) and configured != count:
        names = ", ".join(labels.classes)
        raise RequestError(f"model.classes: given {configured}; {path} has {count} in {data.target!r}: {names}")
    return labels


def versions() -> dict[str, str]:
    """Return the library versions for a checkpoint."""
    import platform
    from importlib.metadata import version

    return {"hyfi": version("hyfi"), "torch": version("torch"), "python": platform.python_version()}


def _draw_weights(
    config: Config, labels: Labels, train: tuple[SlideRef, ...], samples: Grouping
) -> tuple[float, ...] | None:
    """Return how often each training sample is drawn, relative to others; None: each once an epoch."""
    if config.data.sampling == "balanced":
        return balanced_weights(samples.samples)
    column = config.data.weights_column
    if column is None:
        return None
    weights = column_weights(train, labels, column)
    for indices in samples.members:
        if len({weights[index] for index in indices}) > 1:
            raise RequestError(
                f"data.weights_column: slides of case {train[indices[0]].case_id}, which is one sample (data.bag: "
                f"case), differ in {column!r}; give all slides of a case the same weight"
            )
    return tuple(weights[indices[0]] for indices in samples.members)


def _tissue(dataset: SlideDataset) -> dict[str, Any]:
    """Return the tissue parameters of the store, from the first slide of ``dataset``."""
    attributes = getattr(dataset.slide(0), "attributes", {})
    parameters = attributes.get("parameters", {})
    tissue = parameters.get("tissue", {}) if isinstance(parameters, dict) else {}
    return dict(tissue)


def _label(sample: SlideRef) -> Target:
    if sample.label is None:
        raise ValueError(f"slide {sample.slide_id} has no label")
    return sample.label
