"""The tissue search as it is defined: whole pictures, scikit-image and SciPy; what the fast one must equal."""

from __future__ import annotations

import numpy as np
from scipy import ndimage
from skimage.filters import threshold_otsu
from skimage.measure import label
from skimage.morphology import remove_small_holes, remove_small_objects
from skimage.segmentation import clear_border

from pathology.tissue.tissue import TissueMasks, TissueParameters


def find_tissue(image: np.ndarray, mpp_um: float, p: TissueParameters | None = None) -> TissueMasks:
    p = p or TissueParameters()
    glass = glass_colour(image)
    smooth = density(image, glass, p.smooth_um / mpp_um)
    mean, colour = smooth.mean(0), smooth.max(0) - smooth.min(0)
    pen = pen_marks(smooth, density(image, glass, 0).mean(0), mpp_um)  # without thin strokes
    usable = ~pen if p.pen == "mask" else np.ones_like(pen)
    stained = (mean > threshold(mean[usable], p.density)) & (colour > threshold(colour[usable], p.colour))
    stained &= (colour > 0.2 * mean) & usable
    gap, smallest = max(1, round(p.close_um / mpp_um)), pixels(p.smallest_um2, mpp_um)
    tissue = closed(stained, gap) & usable
    if p.fat and mpp_um <= 16:
        known = remove_small_objects(tissue, max_size=smallest)
        strength = float(np.median(mean[known])) if known.any() else 0.0
        fat = find_fat(image, glass, known | ~usable, mpp_um, float(np.clip(0.19 * strength, 0.006, 0.014)))
        tissue = closed(tissue | fat, gap) & usable if fat.any() else tissue
    tissue = remove_small_objects(tissue, max_size=smallest)
    holes = remove_small_holes(tissue, max_size=pixels(p.hole_um2, mpp_um)) & ~tissue
    return TissueMasks((tissue | clear_border(holes)) & usable, pen)


def pixels(area_um2: float, mpp_um: float) -> int:
    return max(1, round(area_um2 / mpp_um**2))


def glass_colour(image: np.ndarray) -> np.ndarray:
    found = []
    for channel in image:
        counts = np.bincount(channel.ravel(), minlength=256).astype(np.float64)
        smooth = np.convolve(counts, np.ones(5), mode="same")
        lowest = max(0, min(200, int(np.searchsorted(counts.cumsum(), 0.98 * counts.sum())) - 20))
        found.append(lowest + int(np.argmax(smooth[lowest:])))
    return np.array(found, np.float32)


def smoothed(values: np.ndarray, sigma: float) -> np.ndarray:
    """Smooth by the binomial weights whose variance is nearest."""
    bell = np.ones(1)
    for _ in range(round(2 * sigma**2)):
        bell = np.convolve(bell, [0.25, 0.5, 0.25])
    down = ndimage.convolve1d(values.astype(np.float64), bell, axis=0, mode="nearest")
    return ndimage.convolve1d(down, bell, axis=1, mode="nearest")


def density(image: np.ndarray, glass: np.ndarray, sigma: float) -> np.ndarray:
    light = [smoothed(c, sigma) for c in image]
    return np.maximum(np.log10((glass[:, None, None] + 1) / (np.stack(light).astype(np.float32) + 1)), 0)


def threshold(values: np.ndarray, bounds: tuple[float, float]) -> float:
    if values.size == 0 or values.min() == values.max():
        return bounds[0]
    return float(np.clip(threshold_otsu(np.minimum(values[:: 1 + values.size // 1_000_000], 0.5)), *bounds))


def pen_marks(smooth: np.ndarray, sharp: np.ndarray, mpp_um: float) -> np.ndarray:
    (red, green, blue), mean, colour = smooth, smooth.mean(0), smooth.max(0) - smooth.min(0)
    bluish = (red > 1.1 * green) & (red > 0.12)
    red_hue = (blue > 0.75 * green) & (red < 0.25 * green)
    black = (mean > 0.2) & (colour < 0.25 * mean)
    faint = ((red > green) | (colour < 0.2 * mean) | red_hue) & (mean > 0.02)
    certain = (red > 0.3) & ((red > 2.5 * green) | ((red > 1.6 * green) & (red > 3.5 * blue)))
    side = 2 * max(1, int(12 / mpp_um)) + 1
    average = ndimage.uniform_filter(sharp, side, mode="nearest")
    even = ndimage.uniform_filter(sharp**2, side, mode="nearest") - average**2 < (0.08 * average) ** 2
    stroke, smallest = max(1, round(8 / mpp_um)), pixels(6000, mpp_um)
    inked = (bluish | (red_hue & (green > 0.4)) | black) & (mean > 0.02)
    wide = 2 * round(36 / mpp_um) + 1
    of_even, of_all = (
        ndimage.uniform_filter(m.astype(np.float32), wide, mode="constant") for m in (inked & even, inked)
    )
    core = dilated(~dilated(~inked, stroke), stroke) & (of_even > np.maximum(0.12 * of_all, 1e-6))
    strokes = remove_small_objects(core, max_size=smallest)
    strokes |= remove_small_objects(certain, max_size=smallest, connectivity=2)
    joined = label(faint | strokes)
    near = dilated(strokes, max(1, round(40 / mpp_um)))
    return strokes | (np.isin(joined, np.unique(joined[strokes])) & near)


def find_fat(image: np.ndarray, glass: np.ndarray, known: np.ndarray, mpp_um: float, least: float) -> np.ndarray:
    block = max(1, round(32 / mpp_um))
    sharp = density(image, glass, 0)
    mean, colour = sharp.mean(0), sharp.max(0) - sharp.min(0)
    width = 2 * round(40 / mpp_um / 2) + 1
    near = dilated(known, 4)
    wall = (mean - ndimage.grey_opening(mean, (width, width)) > least) & ~near
    shown = [wall, np.where(wall, np.minimum(mean, 0.08), 0), np.where(wall, np.minimum(colour, 0.08), 0), ~near]
    *seen, weight = (smoothed(means(v, block), 40 / (block * mpp_um)) for v in shown)
    walls, dense, stained = (v / (weight + 0.15) for v in seen)
    webs = (walls > 0.12) & (stained > 0.2 * dense)
    tissue, cell = means(known, block) >= 0.5, max(1, round(64 / (block * mpp_um)))
    fat = webs | (closed(webs | tissue, cell) & dilated(webs, cell) & ~tissue)
    smooth = between(between(fat.astype(np.float32), block).T, block).T
    return smooth[: known.shape[0], : known.shape[1]] >= 0.5


def means(values: np.ndarray, block: int) -> np.ndarray:
    padded = np.pad(values, ((0, -values.shape[0] % block), (0, -values.shape[1] % block)))
    return padded.reshape(padded.shape[0] // block, block, -1, block).mean((1, 3), dtype=np.float32)


def between(values: np.ndarray, times: int) -> np.ndarray:
    place = np.clip((np.arange(len(values) * times) + 0.5) / times - 0.5, 0, len(values) - 1).astype(np.float32)
    share = (place - np.floor(place))[:, None]
    below = values[np.minimum(place.astype(int) + 1, len(values) - 1)]
    return values[place.astype(int)] * (1 - share) + below * share


def dilated(mask: np.ndarray, radius: int) -> np.ndarray:
    grown = mask
    for step in range(radius):
        grown = ndimage.binary_dilation(grown, ndimage.generate_binary_structure(2, 1 + step % 2))
    return grown


def closed(mask: np.ndarray, radius: int) -> np.ndarray:
    grown = dilated(np.pad(mask, radius), radius)
    return ~dilated(~grown, radius)[radius:-radius, radius:-radius]
