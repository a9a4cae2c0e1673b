"""Slides of one piece of pink tissue with discs of two colours, and labels drawn from the areas of these discs."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tifffile
from numpy.typing import NDArray

SIDE_PX = 512
MPP_UM = 1.0
COLOURS = ((70, 45, 120), (125, 75, 40))
"""Blue and brown discs."""
GRADE_CUTS = (-1.0, 0.0, 1.0)
SLOPE = 3.0
"""Of the log-odds of labels, and of the latent value of grades, for a standard deviation of the area."""
NUMBER = (50.0, 10.0, 3.0)
"""Mean, slope and noise of the numbers."""
MEDIAN_MONTHS, FOLLOWED_MONTHS = 24.0, (12.0, 96.0)
_MOST_DISCS, _RADII_PX = 40, (9.0, 15.0)


@dataclass(frozen=True)
class DrawnLabels:
    """Labels of N drawn slides.

    Attributes:
        areas: (N, 2) area of the blue and of the brown discs, each standardised over all slides; all labels depend on
            them.
        marked: (N, 2) whether the slide has each of two labels, with log-odds of `SLOPE` × area.
        grade: (N,) 0 to 3: how many of `GRADE_CUTS` the blue area exceeds, with logistic noise of scale 1 / `SLOPE`.
        number: (N,) linear in the brown area, with normal noise.
        months: (N,) time to an event, or to the end of following. The first is exponential, with a hazard of
            exp(blue area) times that of a mean slide.
        died: (N,) whether the time ended with the event.
    """

    areas: NDArray[np.float64]
    marked: NDArray[np.bool_]
    grade: NDArray[np.int64]
    number: NDArray[np.float64]
    months: NDArray[np.float64]
    died: NDArray[np.bool_]

    @classmethod
    def of(cls, areas: NDArray[np.float64], rng: np.random.Generator) -> DrawnLabels:
        """Draw the labels of slides whose (blue, brown) discs have these areas, (N, 2)."""
        areas = (areas - areas.mean(0)) / areas.std(0)
        blue, brown = areas.T
        mean, slope, noise = NUMBER
        latent = blue + rng.logistic(0, 1 / SLOPE, len(blue))
        # The median of an exponential time is its mean · log 2.
        event = rng.exponential(MEDIAN_MONTHS / np.log(2) / np.exp(blue))
        # The end of the follow-up does not depend on the areas: censoring carries no information.
        end = rng.uniform(*FOLLOWED_MONTHS, len(blue))
        return cls(
            areas=areas,
            marked=rng.random(areas.shape) < 1 / (1 + np.exp(-SLOPE * areas)),
            grade=(latent[:, None] > np.array(GRADE_CUTS)).sum(1),
            number=mean + slope * brown + noise * rng.standard_normal(len(brown)),
            months=np.minimum(event, end),
            died=event <= end,
        )


def draw_slide(path: Path, discs: tuple[int, int], seed: tuple[int, ...]) -> tuple[float, float]:
    """Write a slide with ``discs`` (blue, brown); return the fractions of the tissue that (blue, brown) discs cover."""
    rng = np.random.default_rng(seed)
    image = np.full((SIDE_PX, SIDE_PX, 3), 243, np.uint8)
    margin = SIDE_PX // 16
    inner = SIDE_PX - 2 * margin
    grain = rng.integers(0, 50, (inner, inner))
    tissue = np.stack([205 - grain // 2, 130 - grain, 185 - grain // 2], -1).astype(np.uint8)
    y, x = np.mgrid[:inner, :inner]
    kind = np.full((inner, inner), -1)
    for colour in rng.permutation(np.repeat([0, 1], discs)):
        (centre_y, centre_x), radius = rng.uniform(0, inner, 2), rng.uniform(*_RADII_PX)
        # Later discs cover earlier ones, so areas are counted at the end rather than added up.
        kind[np.hypot(y - centre_y, x - centre_x) < radius] = colour
    for colour, rgb in enumerate(COLOURS):
        tissue[kind == colour] = np.array(rgb, np.uint8) + (grain[kind == colour, None] // 4).astype(np.uint8)
    image[margin:-margin, margin:-margin] = tissue
    tifffile.imwrite(
        path,
        image,
        photometric="rgb",
        tile=(256, 256),
        compression="jpeg",
        resolution=(1e4 / MPP_UM, 1e4 / MPP_UM),
        resolutionunit="CENTIMETER",
        metadata=None,
    )
    return float((kind == 0).mean()), float((kind == 1).mean())


def draw_archive(folder: Path, counts: dict[str, int], seed: int) -> tuple[DrawnLabels, list[str]]:
    """Write slides and their ``manifest.csv``; return their labels and splits.

    Args:
        folder: An existing folder.
        counts: Number of slides of each split.
        seed: Seed of all that is drawn.
    """
    # Another sequence than those of the slides, (seed, 2, k).
    rng = np.random.default_rng([seed, 1])
    splits = [split for split, count in counts.items() for _ in range(count)]
    numbers = rng.integers(0, _MOST_DISCS + 1, (len(splits), 2))
    areas = [
        draw_slide(folder / f"slide-{k:04d}.tiff", (int(blue), int(brown)), (seed, 2, k))
        for k, (blue, brown) in enumerate(numbers)
    ]
    labels = DrawnLabels.of(np.array(areas), rng)
    with (folder / "manifest.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(("path", "slide_id", "split", "blue", "brown", "grade", "number", "months", "died"))
        for k, split in enumerate(splits):
            row = (*labels.marked[k].astype(int), labels.grade[k], f"{labels.number[k]:.4f}")
            times = (f"{labels.months[k]:.4f}", int(labels.died[k]))
            table.writerow((f"slide-{k:04d}.tiff", f"slide-{k:04d}", split, *row, *times))
    return labels, splits
