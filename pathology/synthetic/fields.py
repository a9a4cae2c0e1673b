"""Smooth random fields that can be evaluated at any position, so that each box of a slide is rendered on its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Field = NDArray[Any]

_PERIOD = 64  # number of knots after which a field repeats


@dataclass(frozen=True)
class Noise:
    """A cubic B-spline through random knots, mean 0, standard deviation 1, periodic after 64 knots.

    Attributes:
        knots: (64, 64) float32.
        wavelength_um: Distance between two knots.
    """

    knots: Field
    wavelength_um: float

    @classmethod
    def make(cls, rng: np.random.Generator, wavelength_um: float) -> Noise:
        """Draw the knots from ``rng``."""
        knots = rng.standard_normal((_PERIOD, _PERIOD)).astype(np.float32)
        return cls(knots / np.float32(0.48), wavelength_um)  # the spline reduces the standard deviation to 0.48

    def grid(self, ys_um: Field, xs_um: Field) -> Field:
        """Return the field on the grid ``ys_um × xs_um`` of coordinates, (len(ys), len(xs)) float32."""
        first_row, row_weights = _four_knots(ys_um / self.wavelength_um)
        first_column, column_weights = _four_knots(xs_um / self.wavelength_um)
        # First along rows, then along columns: 4 products a pixel instead of 16.
        rows = sum(row_weights[k][:, None] * self.knots[(first_row + k) % _PERIOD] for k in range(4))
        result: Field = sum(column_weights[k][None, :] * rows[:, (first_column + k) % _PERIOD] for k in range(4))
        return result

    def at(self, y_um: Field, x_um: Field) -> Field:
        """Return the field at n points, (n,) float32: the sum of 4 × 4 knots around each, by B-spline weights."""
        first_row, row_weights = _four_knots(np.asarray(y_um) / self.wavelength_um)
        first_column, column_weights = _four_knots(np.asarray(x_um) / self.wavelength_um)
        result = np.zeros(first_row.shape, np.float32)
        for j in range(4):
            for k in range(4):
                knots = self.knots[(first_row + j) % _PERIOD, (first_column + k) % _PERIOD]
                result += row_weights[j] * column_weights[k] * knots
        return result


def _four_knots(position: Field) -> tuple[Field, Field]:
    """Return, for each position, the first of four knots and the B-spline weights of the four, (4, n) float32."""
    first = np.floor(position)
    t = (position - first).astype(np.float32)
    weights = np.stack([(1 - t) ** 3, 3 * t**3 - 6 * t**2 + 4, -3 * t**3 + 3 * t**2 + 3 * t + 1, t**3]) / np.float32(6)
    # The spline's four knots begin one before the position.
    return first.astype(np.int64) - 1, weights


def enlarge(nodes: Field, factor: int) -> Field:
    """Interpolate linearly from nodes ``(n + 1, m + 1)`` to pixels ``(n * factor, m * factor)``."""
    t = (np.arange(factor, dtype=np.float32) / np.float32(factor))[None, :, None]
    down = nodes[:-1, None, :] + (nodes[1:] - nodes[:-1])[:, None, :] * t
    down = down.reshape(-1, nodes.shape[1])
    right = down[:, :-1, None] + (down[:, 1:] - down[:, :-1])[:, :, None] * t.reshape(1, 1, factor)
    result: Field = right.reshape(down.shape[0], -1)
    return result
