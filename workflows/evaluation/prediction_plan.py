"""Plans for ``hyfi predict`` and ``hyfi validate``: their model, and plans as text and command lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hyfi_core.capture.export import capture
from hyfi_core.errors import RequestError
from hyfi_core.models.by_name import build_model, is_built_in
from hyfi_core.runtime.checkpoint import read_model_json
from pathology.predict.members import check_complete
from workflows.evaluation.models import DTYPES

if TYPE_CHECKING:
    from hyfi_core.capture.program import Program
    from hyfi_core.cells.prediction_plans import PredictionForecast, PredictionNeeds, PredictionSearch

_SIZE = "data.size_px="


@dataclass(frozen=True)
class EvaluatedModel:
    """A model whose predictions are to be planned.

    Attributes:
        source: What it was read from, as the user gave it.
        fields: The section ``model`` of a ``model.json``.
        size_px: (height, width) of the images.
        precision: ``run.precision`` of the training.
        tf32: ``run.tf32`` of the training.
        checkpoint: The folder of its weights, if it was read from one.
    """

    source: Path
    fields: Mapping[str, Any]
    size_px: tuple[int, int]
    precision: str
    tf32: bool
    checkpoint: Path | None = None

    @classmethod
    def of_checkpoint(cls, checkpoint: Path, overrides: Sequence[str]) -> EvaluatedModel:
        """Return the model of a checkpoint, for images of the trained size or of another one.

        Args:
            checkpoint: Its folder.
            overrides: ``data.size_px=N`` or ``data.size_px=[H, W]``, for slides of another size than in training.

        Raises:
            RequestError: The folder is no checkpoint, or an override sets something other than ``data.size_px``.
        """
        import yaml

        model = read_model_json(checkpoint)
        check_complete(model, checkpoint)
        size = model["size_px"]
        for override in overrides:
            if not override.startswith(_SIZE):
                raise RequestError(f"{override}: with a checkpoint, only data.size_px can be set, as in {_SIZE}16384")
            try:
                value = yaml.safe_load(override.removeprefix(_SIZE))
            except yaml.YAMLError:
                value = None
            size = [value, value] if isinstance(value, int) else value
            # `type`, not isinstance: True is an int.
            is_size = isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)
            if not is_size:
                raise RequestError(f"{override}: use one or two whole numbers, as in {_SIZE}16384 or [8192, 16384]")
        precision = str(model.get("precision", "float32"))
        tf32 = bool(model.get("tf32", False))
        return cls(checkpoint, model["model"], (size[0], size[1]), precision, tf32, checkpoint=checkpoint)

    def rounds_to_tf32(self, command: str) -> bool:
        """Whether GPUs round the operands of float32 to TF32 in ``predict`` or ``validate``.

        Both take ``run.tf32`` of the training. Only ``validate`` computes in bfloat16, if training did.
        """
        return self.tf32 and self.precision in (("float32", "bfloat16") if command == "predict" else ("float32",))

    def program(self) -> Program:
        """Return the captured model in evaluation mode, for one image.

        Raises:
            RequestError: The model cannot be built or captured.
        """
        # A built-in model is captured without weights; a user's factory may compute with them.
        with torch.device("meta") if is_built_in(str(self.fields["name"])) else nullcontext():
            model = build_model(self.fields)
        return capture(model.to(DTYPES[self.precision]).eval(), (1, 3, *self.size_px), DTYPES[self.precision])


def command_line(model: EvaluatedModel, needs: PredictionNeeds, forecast: PredictionForecast) -> list[str]:
    """Return the command line that predicts by this plan; the user replaces its words in capitals."""
    words = ["hyfi", needs.command, str(model.checkpoint or "CHECKPOINT")]
    words += ["SLIDES", "--out", "OUT"] if needs.command == "predict" else ["--store", "STORE"]
    if needs.ranks > 1:
        words += ["--ranks", str(needs.ranks)]
        words += ["--ranks-per-slide", str(forecast.grid[0] * forecast.grid[1])] if needs.command == "predict" else []
    if forecast.spills:
        spill = "memory" if needs.machine.device == "cuda" else "FOLDER"
        return [*words, "--memory", str(needs.memory_bytes), "--spill", spill]
    return [*words, "--cells", "{},{}".format(*forecast.cells)] if forecast.cells else words


def description(forecast: PredictionForecast, needs: PredictionNeeds) -> list[str]:
    """Return the forecast of a plan as lines of text: how slides are shared, times, memory."""
    rows, columns = forecast.grid
    shared = "1 rank a slide" if rows * columns == 1 else f"{rows * columns} ranks a slide ({rows} x {columns})"
    at_once = f"{forecast.groups} slides at a time" if forecast.groups > 1 else "one slide at a time"
    cells = f", each part in {forecast.cells[0]} x {forecast.cells[1]} cells" if forecast.cells else ""
    spills = ", maps that no cell needs are moved out of memory" if forecast.spills else ""
    parts = ", ".join(
        f"{kind} {seconds / forecast.slide_s:.0%}" for kind, seconds in forecast.parts_s.items() if seconds
    )
    return [
        f"{shared}, {at_once}{cells}{spills}",
        f"{forecast.each_s:.3g} s per slide, {forecast.slide_s:.3g} s from its pixels to its result; bound by "
        f"{forecast.bound_by} ({parts})",
        f"memory: {forecast.memory_bytes / 1e9:.2g} GB for each rank, of {needs.memory_bytes / 1e9:.2g} GB",
    ]


def plans_json(model: EvaluatedModel, needs: PredictionNeeds, search: PredictionSearch, top: int) -> dict[str, Any]:
    """Return plans as one JSON object."""
    plans = [
        {
            "ranks_per_slide": forecast.grid[0] * forecast.grid[1],
            "cells": forecast.cells,
            "spills": forecast.spills,
            # Less than `slide_s` if several slides are computed at a time.
            "seconds_per_slide": forecast.each_s,
            "slide_s": forecast.slide_s,
            "memory_bytes": forecast.memory_bytes,
            "bound_by": forecast.bound_by,
            "parts_s": forecast.parts_s,
            "command": command_line(model, needs, forecast),
        }
        for forecast in search.plans[:top]
    ]
    return {
        "machine": needs.machine.name,
        "for": needs.command,
        "ranks": needs.ranks,
        "size_px": list(model.size_px),
        "plans": plans,
        "refused": search.refused,
    }
