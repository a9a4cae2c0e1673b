"""The data of a run, slide by slide: kept in every checkpoint, and compared when the run is resumed.

A run reads labels, splits and slides by their paths, so files that were edited in place would change it silently. The
content of a slide is recorded as the digest of its list of shards, which includes their digests: no pixel is read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from data.samples.dataset import SlideDataset
from data.samples.trained.trained_slides import TrainedSlides
from hyfi_core.errors import RequestError
from hyfi_core.runtime.checkpoint import STATE_FILE
from workflows.console import listed
from workflows.training.job import TrainingJob

DATA_KEY = "data"
"""The key of the record in ``state.json``."""
_NAMED = 8
"""Largest number of slides that a message names for each kind of change."""


@dataclass(frozen=True)
class RecordedSlide:
    """The facts of a slide that affect a run.

    Attributes:
        content: Digest of its files in the store.
        split: Its split.
        weight: How often it is drawn, relative to others; empty if each is drawn once an epoch.
        label: Its label as text, such as the name of its class.
    """

    content: str
    split: str
    weight: str
    label: str

    def __str__(self) -> str:
        """Return one line, with the label last because it may have any character."""
        # `of` splits at the first three tabs only.
        return "\t".join(getattr(self, field.name) for field in fields(self))

    @classmethod
    def of(cls, line: str) -> RecordedSlide:
        """Return the facts of a line."""
        return cls(*line.split("\t", 3))


DataRecord = dict[str, str]
"""Facts of each slide as a line, by the slide's name, in the order of the run."""


@dataclass(frozen=True)
class SlideTables:
    """Tables of a run's slides, made before it starts; empty on ranks other than 0.

    Attributes:
        coverage: Rows of ``coverage.csv``.
        data: The record of the slides.
        trained: The training slides, as checkpoints name them.
    """

    coverage: Sequence[Mapping[str, Any]] | None = None
    data: DataRecord | None = None
    trained: TrainedSlides = field(default_factory=TrainedSlides)


def data_record(job: TrainingJob) -> DataRecord:
    """Return the record of a run's slides; opens each, and reads no pixels."""
    weights = [""] * len(job.train)
    if job.draw_weights is not None:
        weights = job.train_samples.to_slides([f"{weight:.9g}" for weight in job.draw_weights])
    validation = _facts(job, job.val, job.config.validation.split, [""] * len(job.val))
    return {
        **_facts(job, job.train, "train", weights),
        **(validation if job.config.validation.split != "train" else {}),
    }


def _facts(job: TrainingJob, dataset: SlideDataset, split: str, weights: list[str]) -> DataRecord:
    """Return slide id -> its `RecordedSlide` as a line; ``weights``: the draw weight of each slide as text."""
    facts = {}
    for index, (sample, weight) in enumerate(zip(dataset.samples, weights, strict=True)):
        # Sorted: shards may be listed in another order, with the same pixels.
        shards = getattr(dataset.slide(index), "attributes", {}).get("shards", {})
        content = hashlib.sha256(json.dumps(shards, sort_keys=True).encode()).hexdigest()[:16]
        label = "" if sample.label is None else job.task.text(sample.label)
        facts[sample.slide_id] = str(RecordedSlide(content, split, weight, label))
    return facts


def check_data(job: TrainingJob, state: Mapping[str, Any], after: DataRecord, accepts: bool) -> str | None:
    """Compare the data of a resumed run with that of its checkpoint; return a note for the user.

    Args:
        job: The run.
        state: The checkpoint's ``state.json``.
        after: The record of the present data.
        accepts: Whether changes are accepted.

    Raises:
        RequestError: The data have changed, and this is not accepted.
    """
    before = state.get(DATA_KEY)
    # Checkpoints from before the record existed can still be resumed.
    if before is None:
        return "the checkpoint does not record its slides and labels: changes of them since then are not noticed"
    changes = changes_of(before, after)
    if not changes:
        return None
    lines = "\n".join(f"  {line}" for line in changes)
    text = f"run.dir {job.config.run.dir}: its data have changed since step {state['step']} was saved:\n{lines}"
    if not accepts:
        raise RequestError(
            f"{text}\nRestore them, use another run.dir, or continue with the present data with --accept-data-changes"
        )
    return f"{text}\nThe run goes on with them from step {int(state['step']) + 1}"


def check_finished(job: TrainingJob, accepts: bool) -> str | None:
    """Compare the present data with that of a finished run, whose model is kept; return a note for the user.

    Args:
        job: The run, with the present data.
        accepts: Whether changes are accepted.

    Raises:
        RequestError: The data have changed, and this is not accepted.
    """
    folder = job.config.run.dir
    try:
        state = json.loads((folder / "checkpoints" / "latest" / STATE_FILE).read_text(encoding="utf-8"))
        before, step = state[DATA_KEY], state["step"]
    except (OSError, ValueError, KeyError):
        return None  # of an older version, or not whole: what reads the checkpoint says so
    changes = changes_of(before, data_record(job))
    if not changes:
        return None
    text = "\n".join(
        [
            f"run.dir {folder}: its data have changed since it finished (step {step}):",
            *(f"  {line}" for line in changes),
        ]
    )
    if not accepts:
        raise RequestError(
            f"{text}\nRestore them, use another run.dir to train with the present data, or keep this run's model with "
            "--accept-data-changes"
        )
    return f"{text}\nIts model is kept"


def changes_of(before: DataRecord, after: DataRecord) -> list[str]:
    """Return the differences between two records, one line for each kind; empty if there are none."""
    kinds: dict[str, list[str]] = {}
    for slide in before:
        if slide not in after:
            kinds.setdefault("removed", []).append(f"{slide} ({RecordedSlide.of(before[slide]).split})")
    for slide in after:
        if slide not in before:
            kinds.setdefault("added", []).append(f"{slide} ({RecordedSlide.of(after[slide]).split})")
    for slide in before:
        if slide not in after:
            continue
        before_slide, after_slide = RecordedSlide.of(before[slide]), RecordedSlide.of(after[slide])
        if before_slide.split != after_slide.split:
            kinds.setdefault("moved to another split", []).append(
                f"{slide} (from {before_slide.split} to {after_slide.split})"
            )
        if before_slide.label != after_slide.label:
            kinds.setdefault("relabelled", []).append(f"{slide} (from {before_slide.label} to {after_slide.label})")
        if before_slide.content != after_slide.content:
            kinds.setdefault("other content in the store", []).append(slide)
        # A move to another split changes the weight, too, and is reported above.
        if before_slide.weight != after_slide.weight and before_slide.split == after_slide.split:
            kinds.setdefault("drawn more or less often", []).append(slide)
    # The order of epochs is drawn over positions: the same slides in another order are another run.
    if not kinds and [*before] != [*after]:
        kinds["in another order in the store's manifest"] = [
            slide for slide, former in zip(after, before, strict=True) if slide != former
        ]
    return [f"{kind} ({len(slides)}): {listed(slides, _NAMED)}" for kind, slides in kinds.items()]
