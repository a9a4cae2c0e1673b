"""A call of the user's aggregator for the features of one slide."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hyfi_core.errors import RequestError
from hyfi_core.runtime.executor import autocasting, evaluating, without_grad
from hyfi_core.tiles.keyed_draws import DrawKey, KeyedDraws
from hyfi_core.tiles.peak_meter import PeakMeter

_SIZES = (19, 34)
"""Numbers of tiles of the trials; odd ones, which are unlikely to be numbers of features or classes, too."""

_MEASURED = 256
"""Tiles of the smallest trial of memory; attention in blocks pads to multiples of such sizes."""


@dataclass(frozen=True)
class AggregatorCall:
    """How the aggregator is called.

    Attributes:
        aggregator: the user's module.
        autocast: dtype of autocast.
        device: device of the module.
        takes_coords: whether its forward has a parameter ``coords``.
        batched: whether it takes ``(1, N, D)`` instead of ``(N, D)``.
    """

    aggregator: nn.Module
    autocast: torch.dtype | None
    device: torch.device
    takes_coords: bool
    batched: bool

    def __call__(
        self, features: torch.Tensor, coords: Any, key: DrawKey | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (logits ``(K,)``, attention or None) of a slide.

        Args:
            features: ``(N, D)``.
            coords: ``(N, 2)``, None if unknown.
            key: key of random numbers; None: they are torch's own.

        Raises:
            RequestError: it needs coordinates that are unknown, or does not return logits of one slide.
        """
        more: dict[str, Any] = {}
        if self.takes_coords:
            if coords is None:
                raise RequestError(
                    "the aggregator takes coords, but a slide has none; give its TileSource coords (N, 2)"
                )
            more["coords"] = torch.as_tensor(coords, device=self.device)
        draws: AbstractContextManager[Any] = nullcontext() if key is None else KeyedDraws(key, "aggregator")
        with autocasting(self.device, self.autocast), draws:
            return self._unpacked(self.aggregator(features.unsqueeze(0) if self.batched else features, **more))

    def bytes_of(self, features: int, dtype: torch.dtype) -> Callable[[int], int]:
        """Return a function that takes a number of tiles and returns the bytes of a forward and backward.

        The function is fitted to the peaks of three trials.

        Args:
            features: length of a feature vector.
            dtype: dtype of features.
        """
        n, peaks = _MEASURED, []
        for size in (n, 2 * n, 4 * n):
            bag = torch.zeros((size, features), dtype=dtype, device=self.device).requires_grad_()
            with PeakMeter() as meter:
                logits = self(bag, torch.zeros((size, 2), dtype=torch.int64), DrawKey(0, 0, 0))[0]
                # `inputs`: gradients of parameters must not change in a trial.
                logits.sum().backward(inputs=[bag])
            peaks.append(meter.peak_bytes)
            del logits, bag
        # Peaks are fitted by a N² + b N + c. For n, 2n and 4n tiles, peak 2 - 3 peak 1 + 2 peak 0 = 6 a n²: b and c
        # cancel.
        square = (peaks[2] - 3 * peaks[1] + 2 * peaks[0]) / (6 * n * n)
        # A square term below a quarter of the largest peak comes from padded blocks, not from attention between tiles.
        if square * (4 * n) ** 2 <= peaks[2] / 4:
            square = 0.0
        slope = max(0.0, (peaks[2] - peaks[1]) / (2 * n) - square * 6 * n)
        # The peak of the smallest trial instead of c, which is less: the function never returns less than was measured.
        return lambda tiles: int(square * tiles * tiles + slope * tiles) + peaks[0]

    def _unpacked(self, returned: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return logits ``(K,)`` and attention from the aggregator's result."""
        logits, attention = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
        # Logits of one slide; (N, K) would be logits of tiles.
        single = isinstance(logits, torch.Tensor) and (logits.dim() == 1 or (logits.dim() == 2 and len(logits) == 1))
        if not single or not (attention is None or isinstance(attention, torch.Tensor)):
            raise RequestError(
                f"the aggregator returned {_described(returned)}; return logits (K,) or (1, K), or (logits, attention)"
            )
        return logits.reshape(-1), attention


def aggregator_call(
    aggregator: nn.Module, autocast: torch.dtype | None, device: torch.device, features: int, dtype: torch.dtype
) -> AggregatorCall:
    """Return how to call an aggregator; whether it takes a batch is tried on random features.

    Args:
        aggregator: the user's module.
        autocast: dtype of autocast.
        device: device of the module.
        features: length of a feature vector.
        dtype: dtype of features.

    Raises:
        RequestError: it takes neither ``(N, D)`` nor ``(1, N, D)``, or both with different results.
    """
    # By the signature, not by a trial: a call without coords may fail for another reason.
    takes_coords = "coords" in inspect.signature(aggregator.forward).parameters
    calls = [AggregatorCall(aggregator, autocast, device, takes_coords, batched) for batched in (False, True)]
    with evaluating(aggregator, device), without_grad():
        tries = [_tried(call, features, dtype) for call in calls]
    working = [(call, result) for call, result in zip(calls, tries, strict=True) if isinstance(result, torch.Tensor)]
    if not working:
        raise RequestError(
            f"the aggregator takes neither features (N, {features}) [{tries[0]}] nor (1, N, {features}) [{tries[1]}]; "
            f"it must return logits (K,) or (1, K), or (logits, attention), for any number of tiles N"
        )
    # A batch may be multiplied by another kernel, which rounds differently.
    tolerance = max(1e-3, *(8 * torch.finfo(kind).eps for kind in (dtype, autocast or dtype)))
    results = [result.float() for _, result in working]
    if len(results) == 2 and not torch.allclose(results[0], results[1], tolerance, tolerance / 10):
        raise RequestError(
            f"the aggregator takes features (N, {features}) and (1, N, {features}) and returns different logits; wrap "
            f"it in a module that takes one of them"
        )
    return working[0][0]


def _tried(call: AggregatorCall, features: int, dtype: torch.dtype) -> torch.Tensor | str:
    """Return the logits of a trial with random features, or the reason why there are none."""
    logits: list[torch.Tensor] = []
    for size in _SIZES:
        generator = torch.Generator().manual_seed(size)
        bag = torch.randn(size, features, generator=generator).to(call.device, dtype)
        coords = torch.randint(0, 9_999, (size, 2), generator=generator)
        try:
            logits.append(call(bag, coords, None)[0])
        except Exception as error:  # whatever the user's module raises for a shape that it does not take
            return str(error).splitlines()[0] if str(error) else type(error).__name__
    if logits[0].shape != logits[1].shape:
        return f"{len(logits[0])} logits for {_SIZES[0]} tiles, {len(logits[1])} for {_SIZES[1]}"
    return logits[1]


def _described(returned: Any) -> str:
    if isinstance(returned, torch.Tensor):
        return f"a tensor of shape {tuple(returned.shape)}"
    if isinstance(returned, tuple):
        return f"({', '.join(_described(item) for item in returned)})"
    return f"a {type(returned).__name__}"
