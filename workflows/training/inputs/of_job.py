"""The kind of a run, from its configuration."""

from __future__ import annotations

from workflows.training.inputs.features import FeatureInputs
from workflows.training.inputs.images import ImageInputs
from workflows.training.inputs.run_inputs import RunInputs
from workflows.training.inputs.tiles import TileInputs
from workflows.training.job import TrainingJob


def inputs_of(job: TrainingJob) -> RunInputs:
    """Return the inputs of a run: whole images, tiles, or features that are computed already."""
    kinds: dict[str, type[RunInputs]] = {"images": ImageInputs, "tiles": TileInputs, "features": FeatureInputs}
    return kinds[job.config.data.kind](job)
