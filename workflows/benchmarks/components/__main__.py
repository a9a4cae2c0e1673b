"""Benchmark of connected components of masks: ours, SciPy's and cc3d's, on tissue and on specks.

    python -m workflows.benchmarks.components [--size 4096] [--rounds 5]

Masks are smooth noise above a threshold: coarse like tissue, and fine like specks of dust. Each library removes
components of at most 64 pixels, and the results must be equal. Libraries take turns in each round; prints the shortest
milliseconds of each. cc3d (connected-components-3d) is left out if it is not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable

import numpy as np
from scipy import ndimage

from data.arrays import Mask
from data.components import without_small

SMALL_PX = 64
Removal = Callable[[Mask], Mask]


def masks(side_px: int) -> dict[str, Mask]:
    """Return masks of this height and width by name."""
    rng = np.random.default_rng(0)
    drawn = {}
    for name, sigma in (("tissue", side_px / 100), ("specks", 2.0)):
        # A larger sigma gives fewer and larger components.
        noise = ndimage.gaussian_filter(rng.standard_normal((side_px, side_px), dtype=np.float32), sigma)
        drawn[name] = noise > np.median(noise) if name == "tissue" else noise > np.quantile(noise, 0.9)
    return drawn


def of_scipy(mask: Mask) -> Mask:
    """Return the mask without small components, by SciPy's labels and their sizes."""
    labels, count = ndimage.label(mask)
    large = np.bincount(labels.ravel(), minlength=count + 1) > SMALL_PX
    large[0] = False  # the background
    kept: Mask = large[labels]
    return kept


def of_cc3d(mask: Mask) -> Mask:
    """Return the mask without small components, by cc3d's labels and their sizes."""
    import cc3d

    labels = cc3d.connected_components(mask, connectivity=4)
    large = np.bincount(labels.ravel()) > SMALL_PX
    large[0] = False  # the background
    kept: Mask = large[labels]
    return kept


def main() -> None:
    """Print, for each mask, the milliseconds in which each way removes its small components."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=4096, help="height and width of the masks in pixels")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    ways: dict[str, Removal] = {"ours": lambda mask: without_small(mask, SMALL_PX), "scipy": of_scipy}
    if importlib.util.find_spec("cc3d") is not None:
        ways["cc3d"] = of_cc3d
    for name, mask in masks(args.size).items():
        least_s = dict.fromkeys(ways, float("inf"))
        for _ in range(args.rounds):
            for way, remove in ways.items():
                begun = time.perf_counter()
                kept = remove(mask)
                least_s[way] = min(least_s[way], time.perf_counter() - begun)
                # Checked after the clock has stopped.
                assert np.array_equal(kept, ways["ours"](mask)), f"{way} keeps other pixels"
        times = "  ".join(f"{way} {seconds * 1e3:.1f}" for way, seconds in least_s.items())
        print(f"{name:<8} {args.size} px, {ndimage.label(mask)[1]} components, ms: {times}")


if __name__ == "__main__":
    main()
