"""What the caller of ``parallelize`` asks for, beside the model, the shape, the plan and the ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from hyfi_core.capture.verify import Output
from hyfi_core.comm.agreement.described import describe_function
from hyfi_core.lowering.compiling.segment_compiler import CompileMode
from hyfi_core.runtime.batch_reader import MemoryFormat
from hyfi_core.runtime.losses.loss_function import Loss, LossOver
from hyfi_core.stored_state import Weights

GraphMode = Literal["auto", "off"]
"""Whether steps are recorded as CUDA graphs where that is possible, or never."""
OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The keyword arguments of ``parallelize``, which documents them.

    Attributes:
        loss: over the whole batch, of (output, labels).
        loss_over: whether the loss is computed over the batch or micro-batches.
        optimizer: creates an optimizer for a list of parameters.
        output: selects the logits from the model's output.
        autocast: dtype of autocast.
        image_dtype: dtype of images; None: that of the parameters.
        memory_format: memory format of feature maps.
        verify: whether rank 0 compares the model with its capture.
        release: whether a rank keeps only what its stages use.
        weights: values of a model on the meta device.
        compile: whether segments are compiled.
        cuda_graphs: whether steps are recorded as CUDA graphs.
    """

    loss: Loss = F.cross_entropy
    loss_over: LossOver = "auto"
    optimizer: OptimizerFactory | None = None
    output: Output | None = None
    autocast: torch.dtype | None = None
    image_dtype: torch.dtype | None = None
    memory_format: MemoryFormat = "auto"
    verify: bool = True
    release: bool = False
    weights: Weights | None = None
    compile: CompileMode = "off"
    cuda_graphs: GraphMode = "auto"

    def described(self, model: nn.Module) -> dict[str, object]:
        """Return name -> description of each setting that must be equal on all ranks.

        Args:
            model: the user's module, whose parts a function may use.
        """
        own = frozenset(model.modules())
        weights = self.weights
        # All fields, so that a new setting is compared, too.
        settings = {field.name: getattr(self, field.name) for field in fields(self)}
        return settings | {
            "loss": describe_function(self.loss, own),
            "optimizer": "given" if self.optimizer is not None else "none",
            "output": describe_function(self.output, own),
            "weights": str(Path(weights)) if isinstance(weights, (str, os.PathLike)) else type(weights).__name__,
        }
