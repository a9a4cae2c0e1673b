"""Construction of aggregators by name: a built-in one, or ``package.module:factory`` of the user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hyfi_core.errors import RequestError

if TYPE_CHECKING:
    from torch import nn

_CLASSES = {
    "mean": "MeanAggregator",
    "max": "MaxAggregator",
    "gated_attention": "GatedAttention",
    "abmilx": "Abmilx",
    "clam_sb": "ClamSb",
    "dsmil": "Dsmil",
    "transmil": "TransMil",
}
AGGREGATORS = {name: f"hyfi_core.models.aggregators.{name}:{kind}" for name, kind in _CLASSES.items()}
"""Class of each built-in aggregator, as ``module:class``."""


def build_aggregator(name: str, features: int, classes: int, options: Mapping[str, Any] | None = None) -> nn.Module:
    """Return an aggregator with random weights: ``(N, features)`` to logits ``(classes,)``.

    Args:
        name: A built-in one, which returns (logits, attention ``(N,)``); or ``package.module:factory``, which is called
            with ``features=…``, ``classes=…`` and the options.
        features: Length of a tile's feature vector.
        classes: Number of logits.
        options: Keyword arguments, such as ``hidden`` or ``dropout``.

    Raises:
        RequestError: There is no such aggregator, or it does not accept these arguments.
    """
    from hyfi_core.models.construct import construct

    if ":" not in name and name not in AGGREGATORS:
        known = ", ".join(AGGREGATORS)
        raise RequestError(
            f"model.aggregator.name: given {name!r}; allowed: {known}, or package.module:factory of your own"
        )
    needed = {"features": features, "classes": classes}
    return construct("model.aggregator", name, AGGREGATORS.get(name, name), needed, options or {})
