"""Captures of a configuration's model, for forecasts before ranks start."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from hyfi_core.capture.autocast import under_autocast
from hyfi_core.capture.export import capture
from hyfi_core.capture.program import Ref
from hyfi_core.errors import RequestError
from hyfi_core.models.by_name import build_model
from workflows.config.run import Config
from workflows.evaluation.models import DTYPES, model_fields, set_training
from workflows.finetuning.freezing import freeze

if TYPE_CHECKING:
    from hyfi_core.capture.program import Program


class ModelPrograms:
    """Captures a model once for each micro-batch size, and checks that it returns a logit for each class.

    Args:
        config: The run's configuration.
        classes: Number of classes.

    Attributes:
        last_operator: Name of the operator that computes the outputs, such as ``softmax``; empty before a capture.

    Raises:
        RequestError: The model cannot be built, or ``model.freeze`` does not fit it.
    """

    def __init__(self, config: Config, classes: int) -> None:
        self._config, self._classes = config, classes
        with torch.device("meta") if config.model.built_in else nullcontext():  # a built-in one needs no values
            model = build_model(model_fields(config.model, classes))
        set_training(model)
        if config.model.freeze_epochs is None:  # else all of the model is trained later, which needs most memory
            freeze(model, config.model)
        self._model = model.to(DTYPES[config.run.precision])
        self._programs: dict[int, Program] = {}
        self.last_operator = ""

    @property
    def autocast_dtype(self) -> str | None:
        """Dtype of autocast; None without autocast."""
        return "bfloat16" if self._config.run.precision == "bfloat16" else None

    def of(self, images: int) -> Program:
        """Return the captured model for micro-batches of ``images`` images, with the dtypes of autocast if it is on.

        Raises:
            RequestError: It cannot be captured, or does not return one logit for each class.
        """
        if images not in self._programs:
            shape = (images, 3, *self._config.data.image_px)
            program = capture(self._model, shape, DTYPES[self._config.run.precision])
            _check_output(program, images, self._classes, self._config.model.name)
            self.last_operator = _last_operator(program)  # whether it is a softmax: logits are expected
            autocast = self.autocast_dtype
            # Autocast changes dtypes, and so bytes and operations; the CPU's rules are used for all devices.
            self._programs[images] = under_autocast(program, getattr(torch, autocast), "cpu") if autocast else program
        return self._programs[images]


def _last_operator(program: Program) -> str:
    """Return the name of the operator that computes the output, such as ``softmax``; casts do not count."""
    output = program.unflatten(list(program.outputs))
    value = output.name if isinstance(output, Ref) else None
    for op in reversed(program.operators):
        if value in op.outputs:
            name = op.text.split(".")[1].strip("_")  # of "aten._softmax.default"
            if name != "to_copy":
                return name
            value = op.inputs[0]
    return ""


def _check_output(program: Program, images: int, classes: int, name: str) -> None:
    """Check that the model returns one logit for each class.

    Raises:
        RequestError: It returns something else.
    """
    output = program.unflatten(list(program.outputs))
    info = program.values.get(output.name) if isinstance(output, Ref) else None
    # Checked at the capture: the loss would fail only after all slides are checked and memory is reserved.
    if info is not None and info.shape == (images, classes) and info.dtype.is_floating_point:
        return
    if classes == 1:
        raise RequestError(
            f"model {name}: the task needs one output for each image, a tensor of shape ({images}, 1); it returns "
            f"{'something else' if info is None else f'shape {tuple(info.shape)}'}: let the factory use its argument "
            "`classes`, here 1, for the size of the last layer, and forward return the outputs alone"
        )
    if info is None:
        description = f"a {type(output).__name__}" if not isinstance(output, Ref) else "a constant"
    elif info.shape == (images, 1) and classes == 2:
        description = "1 output, as for a sigmoid; for a softmax over two classes it needs 2"
    else:
        description = f"a tensor of shape {tuple(info.shape)} and dtype {str(info.dtype).removeprefix('torch.')}"
    raise RequestError(
        f"model {name}: for {images} image{'s' * (images > 1)} and {classes} classes it returns {description}; it must "
        f"return floating-point logits of shape ({images}, {classes}), one for each class: let the factory use its "
        f"argument `classes` for the size of the last layer, and forward return the logits alone"
    )
