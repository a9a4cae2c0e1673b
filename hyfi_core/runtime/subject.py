"""What all runners of a process share: the model, how it is called, and what was captured of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from hyfi_core.capture.export import capture
from hyfi_core.capture.program import Program
from hyfi_core.capture.state_watch import StateWatch
from hyfi_core.plan.fused_runs import FusedRuns
from hyfi_core.runtime.batch_reader import Shape
from hyfi_core.runtime.bindings import Bindings

Loss = Callable[[Any, torch.Tensor], torch.Tensor]
Output = Callable[[Any], Any]
CAPTURES_KEPT = 16
"""Number of programs that are kept, for different shapes and states of the module."""


@dataclass(frozen=True)
class Subject:
    """The model and settings shared by all runners of a process.

    Attributes:
        model: the user's module.
        shape: of the whole batch of one replica.
        loss: of one micro-batch, a mean over its samples.
        output: selects the logits from the model's output.
        autocast: dtype of autocast.
        device: of the model.
        dtype: of images: that of the parameters by default.
        bindings: the model's tensors by the values of a stage's program.
        programs: captured programs, by shape and flags.
        runs: fused runs chosen by memory, for cells in evaluation mode.
        channels_last: whether images are converted to this format.
    """

    model: nn.Module
    shape: Shape
    loss: Loss
    output: Output | None
    autocast: torch.dtype | None
    device: torch.device
    dtype: torch.dtype
    bindings: Bindings
    programs: dict[Any, Program]
    runs: dict[Any, FusedRuns]
    channels_last: bool = False

    @cached_property
    def watch(self) -> StateWatch:
        """The watch of the model's Python state."""
        return StateWatch(self.model)

    def program(self, shape: Shape) -> Program:
        """Return the captured model for a shape of micro-batches, in its current state."""
        key = (shape, self.watch.state())
        if key not in self.programs:
            while len(self.programs) >= CAPTURES_KEPT:
                self.programs.pop(next(iter(self.programs)))
                self.runs.clear()  # they are keyed by the identity of programs
            self.programs[key] = capture(self.model, shape, self.dtype)
        return self.programs[key]
