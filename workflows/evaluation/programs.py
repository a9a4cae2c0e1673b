"""Captures of a configuration's model, for what is to be known before ranks start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workflows.config.run import Config
from workflows.evaluation.models import DTYPES, build_model

if TYPE_CHECKING:
    from hyfi_core.capture.program import Program


class ModelPrograms:
    """The captured model for micro-batches of the sizes that plans have, each captured once.

    Args:
        config: of the run.
        classes: of the model.

    Raises:
        RequestError: the model cannot be built.
    """

    def __init__(self, config: Config, classes: int) -> None:
        self._config = config
        model = config.model
        described = {
            "name": model.name,
            "classes": classes,
            "norm": model.norm,
            "pool": model.pool,
            "options": model.options,
        }
        self._model = build_model(described).to(DTYPES[config.run.precision]).train()
        self._programs: dict[int, Program] = {}

    @property
    def computed_in(self) -> str | None:
        """The type that products compute in under autocast; None without."""
        return "bfloat16" if self._config.run.precision == "bfloat16" else None

    def of(self, images: int) -> Program:
        """Return the captured model for a micro-batch of so many images."""
        from hyfi_core.capture.export import capture

        if images not in self._programs:
            shape = (images, 3, *self._config.data.size_px)
            self._programs[images] = capture(self._model, shape, DTYPES[self._config.run.precision])
        return self._programs[images]
