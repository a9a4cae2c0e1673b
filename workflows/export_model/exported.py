"""A trained model with its normalisation: from pixels as a slide has them to outputs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from data.loading.normalise import Normalisation
from hyfi_core.errors import RequestError
from hyfi_core.runtime.checkpoint import read_model_json
from pathology.predict.members import Member, temperature_of
from workflows.evaluation.tile_evaluator import bag_module_of, is_bag_model
from workflows.tasks.by_name import readout_of


@dataclass(frozen=True, eq=False)
class ExportSource:
    """The checkpoint to export.

    Attributes:
        member: Its model and ``model.json``.
        normalisation: Normalisation of its images.
        temperature: Temperature by which logits are divided; None for tasks other than multiclass.
    """

    member: Member
    normalisation: Normalisation
    temperature: float | None

    @classmethod
    def load(cls, checkpoint: Path) -> ExportSource:
        """Load a checkpoint, with the average of its weights if it has one.

        Raises:
            RequestError: It is damaged, or does not say how to build its model.
        """
        config = read_model_json(checkpoint)
        module = bag_module_of(config) if is_bag_model(config) else None  # None: `Member` builds it itself
        member = Member.load(checkpoint, module, readout_of=readout_of)
        is_multiclass = member.config.get("task", "multiclass") == "multiclass"
        normalisation = Normalisation.from_json(member.config["normalisation"])
        return cls(member, normalisation, temperature_of(member.config) if is_multiclass else None)

    @property
    def config(self) -> dict[str, Any]:
        """Its ``model.json``."""
        return dict(self.member.config)

    @property
    def of_bags(self) -> bool:
        """Whether the model takes tiles or their features."""
        return is_bag_model(self.config)

    @property
    def align_px(self) -> int:
        """Height and width of an image are multiples of this."""
        return int(self.config.get("align_px", 1))


class PixelModel(nn.Module):
    """The model on uint8 pixels (B, 3, H, W): returns outputs (B, K) and, for multiclass, probabilities.

    Args:
        source: The checkpoint; its module is used, not copied.
    """

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, source: ExportSource) -> None:
        super().__init__()
        self.model = source.member.model
        self.temperature = source.temperature
        for name, values in (("mean", source.normalisation.mean), ("std", source.normalisation.std)):
            # Buffers, so that they are in the exported file.
            self.register_buffer(name, torch.tensor(values).view(3, 1, 1))

    @property
    def output_names(self) -> list[str]:
        """Names of the tensors that it returns."""
        return ["outputs"] if self.temperature is None else ["outputs", "probabilities"]

    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return (outputs,) or (outputs, probabilities)."""
        outputs = self.model((pixels.to(torch.float32) / 255 - self.mean) / self.std)
        if not isinstance(outputs, torch.Tensor):
            raise RequestError(f"the model returns {type(outputs).__name__}, not a tensor of outputs (B, classes)")
        if self.temperature is None:
            return (outputs,)
        return outputs, torch.softmax(outputs / self.temperature, 1)
