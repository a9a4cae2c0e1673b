"""An encoder of tiles that is ready for use."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from data.loading.normalise import Normalisation
from hyfi_core.capture.verify import Output
from hyfi_core.errors import RequestError
from workflows.console import listed

_NAMED = 5


@dataclass(frozen=True, eq=False)
class TileEncoder:
    """An encoder of tiles.

    Attributes:
        name: Its name for the user: ``timm:NAME``, ``transformers:FOLDER``, ``package.module:factory``.
        module: The user's module, in evaluation mode; takes tiles ``(n, 3, T, T)``.
        output: Picks the vectors ``(n, D)`` out of what the module returns; None: the module returns them.
        features: D, the length of a vector.
        normalisation: Mean and standard deviation of the pixels that it was trained with.
        normalisation_from: Source of the normalisation, for messages.
        weights: Source of the weights, for messages.
        untrained: Names of tensors that are in no file and therefore random.
    """

    name: str
    module: nn.Module
    output: Output | None
    features: int
    normalisation: Normalisation
    normalisation_from: str
    weights: str
    untrained: tuple[str, ...] = ()

    def encode(self, pixels: torch.Tensor, autocast: torch.dtype | None = None) -> torch.Tensor:
        """Return the vectors of tiles, ``(n, D)`` float32 on the module's device, without a graph.

        Args:
            pixels: ``(n, 3, T, T)`` uint8, on any device.
            autocast: Dtype of autocast; None: the dtype of the weights.
        """
        parameter = next(self.module.parameters(), torch.empty(0))
        device, dtype = parameter.device, parameter.dtype if parameter.is_floating_point() else torch.float32
        # Normalised on the device: uint8 pixels are a quarter of the bytes to copy.
        with torch.inference_mode(), torch.autocast(device.type, autocast, enabled=autocast is not None):
            return self.vectors(self.module(self.normalisation(pixels.to(device), dtype))).float()

    def vectors(self, returned: Any) -> torch.Tensor:
        """Return the vectors ``(n, D)`` in what the module returned.

        Raises:
            RequestError: It returned something else.
        """
        vectors = returned if self.output is None else self.output(returned)
        if not isinstance(vectors, torch.Tensor) or vectors.dim() != 2 or not vectors.is_floating_point():
            description = (
                f"{tuple(vectors.shape)} {vectors.dtype}" if isinstance(vectors, torch.Tensor) else type(vectors)
            )
            raise RequestError(
                f"encoder {self.name}: it returns {description}, not one vector for each tile, (n, D); use a factory "
                f"of your own, package.module:factory, whose module returns that"
            )
        return vectors

    def digest(self) -> str:
        """Return the SHA-256 of all weights and buffers with their names, in hexadecimal digits."""
        summed = hashlib.sha256()
        for name, tensor in self.module.state_dict().items():
            if isinstance(tensor, torch.Tensor):
                # Bytes as in memory of a dense tensor: neither device nor strides count.
                plain = tensor.detach().cpu().contiguous()
                # With dtype and shape: the same bytes may be another tensor.
                summed.update(f"{name} {plain.dtype} {tuple(plain.shape)}\n".encode())
                summed.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
        return summed.hexdigest()

    def check_trained(self, advice: str) -> None:
        """Refuse random weights.

        Raises:
            RequestError: Some of its tensors are random; the message ends with ``advice``.
        """
        if self.untrained:
            raise RequestError(f"{self.describe_untrained()}; {advice}")

    def describe_untrained(self) -> str:
        """Return how many of its tensors are random, and the names of some if not all are."""
        total = len(self.module.state_dict())
        untrained = "all"
        if len(self.untrained) < total:
            untrained = f"{len(self.untrained)} of {total}: {listed(self.untrained, _NAMED)}"
        return f"encoder {self.name}: its weights are random ({untrained})"

    def __str__(self) -> str:
        """Return one line for the user."""
        mean, std = (
            ", ".join(f"{value:g}" for value in values) for values in (self.normalisation.mean, self.normalisation.std)
        )
        total = len(self.module.state_dict())
        lacking = ""
        if 0 < len(self.untrained) < total:
            lacking = f", which lack {len(self.untrained)} of {total} tensors ({listed(self.untrained, _NAMED)})"
        return (
            f"encoder {self.name}: {self.features} features; weights: {self.weights}{lacking}; "
            f"mean {mean}, std {std} ({self.normalisation_from})"
        )
