"""Stain normalisation of Macenko et al., "A method for normalizing histology slides for quantitative analysis" (2009).

::

    density of (red, green, blue)
        │  pseudo-inverse of the slide's stains
    amounts of (haematoxylin, eosin)
        │  × strength in the reference / strength in the slide
        │  the reference's stains
    density of (red, green, blue)

All of this is one 3 × 3 matrix for each slide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.arrays import Pixels
from data.samples.colours.density_mix import density_table, mixed_densities, value_table

REFERENCE = {
    "haematoxylin": (0.5626, 0.7201, 0.4062),
    "eosin": (0.2159, 0.8012, 0.5581),
    "strength": (1.9705, 1.0308),
}
"""Density vectors, and 99th percentiles of the amounts (natural logarithm), of the authors' code; torchstain and cuCIM
have the same."""


@dataclass(frozen=True, eq=False)
class MacenkoMap:
    """The change of one slide's colours.

    Attributes:
        identity: Text of the method and its reference.
        glass: ``(3,)``, the colour of the slide's glass; it becomes white.
        mix: ``(3, 3)``: new densities are densities @ mix.
    """

    identity: str
    glass: NDArray[np.float32]
    mix: NDArray[np.float32]

    @classmethod
    def of(
        cls,
        stains: Mapping[str, Any],
        glass: NDArray[np.float32],
        reference: Mapping[str, Sequence[float]],
        identity: str = "",
    ) -> MacenkoMap:
        """Return the map from a slide's stains and glass to those of the reference.

        Args:
            stains: ``haematoxylin`` and ``eosin``: the density of (red, green, blue) of one unit of the stain in the
                slide; ``strength``: a high percentile of the amounts of both stains.
            glass: ``(3,)``, the colour of the slide's glass.
            reference: The same values as ``stains``, of the reference.
            identity: Text of the method and its reference.
        """
        own, target = (np.array([one["haematoxylin"], one["eosin"]], np.float64) for one in (stains, reference))
        factors = np.asarray(reference["strength"], np.float64) / np.asarray(stains["strength"], np.float64)
        # Densities @ `to_amounts` are the amounts of both stains, and amounts @ `target` densities in the reference.
        to_amounts = np.linalg.pinv(own)
        return cls(identity, glass, (to_amounts @ np.diag(factors) @ target).astype(np.float32))

    def __call__(self, pixels: Pixels) -> Pixels:
        """Return pixels (3, …) uint8 in the reference's colours, a new array; glass and brighter pixels become 255."""
        # Densities relative to the glass of each channel: glass has density 0 and becomes white.
        tables = np.stack([density_table(float(value)) for value in self.glass])
        return mixed_densities(pixels, tables, self.mix, value_table())
