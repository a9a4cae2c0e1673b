"""Where the tissue is, at about 8 µm per pixel: pen, dust, coverslip edges and grey scanners notwithstanding.

All is decided in optical density relative to the slide's own glass, so a scanner's grey or yellowish background is
no tissue. Stained tissue absorbs, in different measure for the three channels, and most in green (haematoxylin and
eosin both do). Dust, shadows and black ink absorb alike in all three; blue and green ink most in red; red ink hardly
in red and as much in blue as in green. How far density and colour must stand out is Otsu's threshold, held between
a floor (an empty slide has no tissue) and a ceiling (dark nuclei do not make pale stroma glass).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from skimage.filters import gaussian, threshold_otsu
from skimage.measure import label
from skimage.morphology import closing, dilation, disk, opening, remove_small_holes, remove_small_objects
from skimage.segmentation import clear_border

Mask = npt.NDArray[np.bool_]
Planes = npt.NDArray[np.uint8]
Float = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TissueParameters:
    """What the mask depends on; kept with every slide.

    Attributes:
        mpp_um: Resolution aimed at; the pyramid's level nearest to it is used.
        smooth_um: Standard deviation of the smoothing, about the size of a cell.
        density: Floor and ceiling of the threshold on optical density.
        colour: Floor and ceiling of the threshold on the channels' difference in optical density.
        close_um: Gaps up to about twice this are bridged.
        smallest_um2: Smaller pieces are specks.
        hole_um2: Smaller holes are filled.
    """

    mpp_um: float = 8.0
    smooth_um: float = 8.0
    density: tuple[float, float] = (0.012, 0.02)
    colour: tuple[float, float] = (0.018, 0.025)
    close_um: float = 24.0
    smallest_um2: float = 30_000.0
    hole_um2: float = 60_000.0

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object of the fields."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class TissueMasks:
    """Tissue and pen of one slide, both ``(h, w)`` bool."""

    tissue: Mask
    pen: Mask


def find_tissue(image: Planes, mpp_um: float, parameters: TissueParameters | None = None) -> TissueMasks:
    """Find the tissue and the pen marks of a slide.

    Args:
        image: ``(3, h, w)`` uint8, the whole slide at a low resolution.
        mpp_um: Its microns per pixel.
        parameters: See there; default values suit H&E.
    """
    p = parameters or TissueParameters()
    density = _optical_density(image, p.smooth_um / mpp_um)
    mean = density.mean(0)
    colour = density.max(0) - density.min(0)
    pen = _pen(density, mean, colour, mpp_um)
    usable = ~pen
    stained = (mean > _threshold(mean[usable], p.density)) & (colour > _threshold(colour[usable], p.colour))
    # What absorbs alike in all channels has no stain: shadows, dust, the coverslip's edge.
    stained &= colour > 0.2 * mean
    stained &= usable
    closed = closing(stained, _disk(p.close_um / mpp_um)) & usable
    tissue = remove_small_objects(closed, max_size=_pixels(p.smallest_um2, mpp_um))
    holes = remove_small_holes(tissue, max_size=_pixels(p.hole_um2, mpp_um)) & ~tissue
    # What reaches the picture's border is no hole: a small slide without tissue would be one.
    return TissueMasks((tissue | clear_border(holes)) & usable, pen)


def _optical_density(image: Planes, sigma_px: float) -> Float:
    """Return ``(3, h, w)``: log10(glass / light), smoothed, not below 0."""
    glass = _glass(image)
    light = np.stack([gaussian(c, sigma_px, preserve_range=True) for c in image.astype(np.float32)])
    density: Float = np.log10((glass[:, None, None] + 1) / (light + 1)).astype(np.float32)
    return np.maximum(density, 0)


def _glass(image: Planes) -> Float:
    """Return the colour of the slide's glass: the mode of the bright pixels of each channel.

    A slide that is tissue all over has no glass in sight: nothing darker than 200 is taken for it unless the
    brightest pixels are darker still (a grey scanner).
    """
    found = []
    for channel in image:
        counts = np.bincount(channel.ravel(), minlength=256).astype(np.float64)
        smooth = np.convolve(counts, np.ones(5), mode="same")
        brightest = int(np.searchsorted(counts.cumsum(), 0.98 * counts.sum()))
        lowest = max(0, min(200, brightest - 20))
        found.append(lowest + int(np.argmax(smooth[lowest:])))
    return np.array(found, np.float32)


def _pen(density: Float, mean: Float, colour: Float, mpp_um: float) -> Mask:
    """Return felt-tip marks: dense, in a colour that stains do not have, no specks; with their faded rims."""
    red, green, blue = density
    bluish = (red > 1.1 * green) & (red > 0.12)
    reddish = (blue > 0.75 * green) & (red < 0.25 * green) & (green > 0.4)
    black = (mean > 0.2) & (colour < 0.25 * mean)
    core = opening(bluish | reddish | black, _disk(8.0 / mpp_um))
    core = remove_small_objects(core, max_size=_pixels(6_000.0, mpp_um))
    if not core.any():
        return core
    # The rim of a mark is ink too, thinner: take what joins it and is not stained like tissue.
    faint = ((red > green) | (colour < 0.2 * mean)) & (mean > 0.02)
    joined = label(faint | core)
    rim = np.isin(joined, np.unique(joined[core])) & dilation(core, _disk(40.0 / mpp_um))
    result: Mask = core | rim
    return result


def _threshold(values: npt.NDArray[np.float32], bounds: tuple[float, float]) -> float:
    if values.size == 0 or float(values.min()) == float(values.max()):
        return bounds[0]
    return float(np.clip(threshold_otsu(np.minimum(values, 0.5)), *bounds))


def _disk(radius_px: float) -> npt.NDArray[np.uint8]:
    element: npt.NDArray[np.uint8] = disk(max(1, round(radius_px)))
    return element


def _pixels(area_um2: float, mpp_um: float) -> int:
    return max(1, round(area_um2 / mpp_um**2))
