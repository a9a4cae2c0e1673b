"""A call of the user's encoder for some tiles of one slide."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm

from hyfi_core.capture.verify import Output
from hyfi_core.comm.base import Communicator
from hyfi_core.errors import RequestError
from hyfi_core.runtime.executor import autocasting
from hyfi_core.tiles.encoding.exact_norms import exact_norms
from hyfi_core.tiles.keyed_draws import DrawKey, DrawnShape, KeyedDraws


@dataclass(frozen=True)
class EncoderCall:
    """How the encoder is called.

    Attributes:
        encoder: the user's module.
        output: picks the features out of what it returns; None: it returns them.
        autocast: dtype of autocast.
        device: device of the module.
        dtype: dtype of tiles as the encoder takes them.
        exact: whether batch norms in training mode take their statistics over all tiles of a slide; else they use and
            keep their running statistics.
    """

    encoder: nn.Module
    output: Output | None
    autocast: torch.dtype | None
    device: torch.device
    dtype: torch.dtype
    exact: bool

    @property
    def live_norms(self) -> list[str]:
        """Names of the batch norms in training mode."""
        return [name for name, m in self.encoder.named_modules() if isinstance(m, _BatchNorm) and m.training]

    @contextmanager
    def norms(self) -> Iterator[None]:
        """Context of a step: batch norms use their running statistics, unless they are exact."""
        live = [] if self.exact else [m for m in self.encoder.modules() if isinstance(m, _BatchNorm) and m.training]
        # Flags of the norms alone: dropout beside them stays in training mode.
        for module in live:
            module.training = False
        try:
            yield
        finally:
            for module in live:
                module.training = True

    def __call__(
        self,
        tiles: torch.Tensor,
        key: DrawKey,
        numbers: Sequence[int],
        single: Sequence[DrawnShape] | None,
        group: tuple[Communicator, int] | None = None,
    ) -> torch.Tensor:
        """Return the features of tiles, ``(n, D)``.

        Args:
            tiles: ``(n, 3, T, T)`` as the encoder takes them.
            key: key of random numbers.
            numbers: numbers of these tiles in their slide.
            single: the shapes of random numbers that a call for one tile draws, in order; empty: it draws none; None:
                not known yet.
            group: with exact norms (the ranks that share the slide, its number of tiles); None in evaluation mode.

        Raises:
            RequestError: it returns something else, or draws numbers that are not keyed.
        """
        draws: AbstractContextManager[Any] = nullcontext()
        # If the encoder draws nothing, no dispatch mode, which would be called for every operator.
        if single is None or single:
            # The dim of tiles is where the shape of a draw differs from that for a single tile; one tile needs none.
            draws = KeyedDraws(key, "encoder", numbers, single if len(numbers) > 1 else None)
        with ExitStack() as stack:
            stack.enter_context(draws)
            stack.enter_context(autocasting(self.device, self.autocast))
            if self.exact and group is not None:
                stack.enter_context(exact_norms(self.encoder, *group, own=len(tiles)))
            return self._picked(self.encoder(tiles), len(tiles))

    def _picked(self, returned: Any, count: int) -> torch.Tensor:
        """Return the features ``(count, D)`` from the encoder's result."""
        features = returned if self.output is None else self.output(returned)
        if not isinstance(features, torch.Tensor) or features.dim() != 2 or len(features) != count:
            is_tensor = isinstance(features, torch.Tensor)
            shown = f"a tensor of shape {tuple(features.shape)}" if is_tensor else f"a {type(features).__name__}"
            raise RequestError(
                f"the encoder's features are {shown} for {count} tiles; select ({count}, D) with output=, for instance "
                f"lambda out: out.pooler_output, or lambda out: out.last_hidden_state[:, 0]"
            )
        return features


def keeping_nothing() -> saved_tensors_hooks:
    """Return a context for a forward without backward: the same kernels as with a graph, but nothing is saved."""
    return saved_tensors_hooks(lambda tensor: None, _lost)


def _lost(_: Any) -> torch.Tensor:
    raise AssertionError("this forward keeps nothing for a backward")
