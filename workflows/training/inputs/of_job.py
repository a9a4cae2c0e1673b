"""The kind of a run, from its configuration."""

from __future__ import annotations

from workflows.training.inputs.images import ImageInputs
from workflows.training.inputs.run_inputs import RunInputs
from workflows.training.inputs.tiles import TileInputs
from workflows.training.job import TrainingJob


def inputs_of(job: TrainingJob) -> RunInputs:
    """Return what a run trains with and reads: tiles with ``data.tiles``, else whole images."""
    return ImageInputs(job) if job.config.data.tiles is None else TileInputs(job)
