"""What is found out about a slide whose pixels are not decoded: tissue from a coarse level, the rest from samples.

```
finest level     tiles are copied, none is looked at
about 1 µm       up to 48 blocks of tissue, spread over the slide: blur, stains
about 8 µm       all of the slide: tissue, pen
```
"""

from __future__ import annotations

import numpy as np

from data.store.writer import Mask
from hyfi_core.plan.box import Box
from pathology.ingest.level_reader import LevelReader, choose_level
from pathology.ingest.pyramid import fitted, level_sizes
from pathology.readers.sources import SlideSource
from pathology.readers.threads import run_in_pool
from pathology.tissue.blur import MEASURED_MPP_UM
from pathology.tissue.quality import Quality, Survey, mask_level
from pathology.tissue.tissue import TissueParameters, find_tissue

_SAMPLES = 48
_SAMPLE_PX = 256


def survey_lossless(slide: SlideSource, mpp: tuple[float, float], parameters: TissueParameters) -> Quality:
    """Look at a slide that is to be copied; what cannot be decoded is white here and found by the copy.

    Memory: the slide at about 8 µm per pixel and what is decoded for it.

    Args:
        slide: Open for reading.
        mpp: Microns per pixel (y, x) of its finest level.
        parameters: Of the tissue mask.

    Raises:
        SlideError: A level cannot be read at all.
    """
    base_um = max(MEASURED_MPP_UM, sum(mpp) / 2)
    fine = choose_level(slide, mpp, base_um)
    level = mask_level(base_um, parameters)
    sizes = level_sizes(fine.height_px, fine.width_px, at_least=level + 1)
    survey = Survey(sizes, base_um, parameters)
    coarse = choose_level(slide, mpp, base_um * 2**level)
    overview = LevelReader(slide, coarse, max_bad=1.0).read(Box.of_size(coarse.height_px, coarse.width_px))
    overview = fitted(overview, sizes[level])
    masks = find_tissue(overview, base_um * 2**level, parameters)
    survey.see(level, 0, 0, overview)
    if level > 0:
        reader = LevelReader(slide, fine, max_bad=1.0)

        def look(box: Box) -> None:
            survey.see(0, box.y0, box.x0, reader.read(box))

        # One thread reads a block and measures it: blocks do not touch.
        run_in_pool(look, _samples(masks.tissue, 2**level, Box.of_size(fine.height_px, fine.width_px)))
    return survey.result(masks)


def _samples(tissue: Mask, scale: int, whole: Box) -> list[Box]:
    """Return blocks with tissue in their middle, evenly chosen from all that there are, row by row."""
    step = _SAMPLE_PX // scale
    rows, columns = np.nonzero(tissue[step // 2 :: step, step // 2 :: step])
    chosen = np.unique(np.linspace(0, max(0, len(rows) - 1), _SAMPLES).astype(int)) if len(rows) else []
    corners = [(int(rows[k]) * _SAMPLE_PX, int(columns[k]) * _SAMPLE_PX) for k in chosen]
    return [Box(y, y + _SAMPLE_PX, x, x + _SAMPLE_PX).intersect(whole) for y, x in corners]
