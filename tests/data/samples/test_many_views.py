"""Several images of one size show all tissue of a slide, each part of it once."""

from __future__ import annotations

import numpy as np
import pytest

from data.samples.view import ViewKind, make_view, make_views
from data.store.tissue_grid import TissueGrid


@pytest.mark.parametrize("kind", ["pack", "crop"])
@pytest.mark.parametrize("size_px", [(256, 256), (192, 320)])
def test_all_tissue_is_shown_once(kind: ViewKind, size_px: tuple[int, int]) -> None:
    rng = np.random.default_rng(1)
    mask = np.zeros((150, 170), bool)
    mask[10:90, 20:70] = True
    mask[100:140, 110:165] = rng.random((40, 55)) > 0.5
    slide_px = (1195, 1352)
    views = make_views(TissueGrid.under(mask, (8.0, 8.0), slide_px, (1.0, 1.0)), size_px, kind, 32)
    shown = np.zeros(slide_px, int)
    for view in views:
        assert view.size_px == size_px and view.flags == ()
        targets = np.zeros(size_px, int)
        for piece in view.pieces:
            shown[piece.source.slices()] += 1
            targets[piece.target.slices()] += 1
            assert not any(edge % 32 for edge in (piece.source.y0, piece.source.x0, piece.target.y0, piece.target.x0))
        assert targets.max() == 1
    tissue = mask.repeat(8, 0).repeat(8, 1)[: slide_px[0], : slide_px[1]]
    assert shown.max() == 1 and (shown[tissue] == 1).all()
    assert sum(view.coverage for view in views) == pytest.approx(1.0) and len(views) > 1


def test_one_image_is_enough_where_all_fits() -> None:
    mask = np.zeros((40, 40), bool)
    mask[5:20, 5:20] = True
    arguments = (TissueGrid.under(mask, (8.0, 8.0), (320, 320), (1.0, 1.0)), (256, 256))
    assert make_views(*arguments, "pack", 32) == (make_view(*arguments, "pack", 32),)
