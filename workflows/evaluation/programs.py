"""Captures of a configuration's model, for forecasts before ranks start."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from hyfi_core.capture.autocast import under_autocast
from hyfi_core.capture.export import capture
from hyfi_core.models.by_name import build_model
from workflows.config.run import Config
from workflows.evaluation.models import DTYPES, model_fields, set_training

if TYPE_CHECKING:
    from hyfi_core.capture.program import Program


class ModelPrograms:
    """The captured model for several micro-batch sizes; each is captured once.

    Args:
        config: The run's configuration.
        classes: Number of classes.

    Raises:
        RequestError: The model cannot be built.
    """

    def __init__(self, config: Config, classes: int) -> None:
        self._config = config
        with torch.device("meta") if config.model.built_in else nullcontext():  # a built-in one needs no values
            model = build_model(model_fields(config.model, classes))
        set_training(model)
        self._model = model.to(DTYPES[config.run.precision])
        self._programs: dict[int, Program] = {}

    @property
    def autocast_dtype(self) -> str | None:
        """Dtype of autocast; None without autocast."""
        return "bfloat16" if self._config.run.precision == "bfloat16" else None

    def of(self, images: int) -> Program:
        """Return the captured model for micro-batches of ``images`` images, with the dtypes of autocast if it is on."""
        if images not in self._programs:
            shape = (images, 3, *self._config.data.size_px)
            program = capture(self._model, shape, DTYPES[self._config.run.precision])
            autocast = self.autocast_dtype
            self._programs[images] = under_autocast(program, getattr(torch, autocast), "cpu") if autocast else program
        return self._programs[images]
