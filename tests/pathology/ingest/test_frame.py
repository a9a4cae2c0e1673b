from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from data.store.slide_store import SlideStore, slide_path
from hyfi_core.plan.box import Box
from pathology.ingest.archive import IngestOptions, ingest_slide
from pathology.predict.regions import Level0
from pathology.predict.slide_result import level0_of, origin_um
from tests.pathology.tiffs import stained, write_slide


@pytest.fixture(scope="module")
def slide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A slide of 4300 × 5000 px with one piece of tissue of 700 × 900 px away from the corner."""
    image = np.full((4300, 5000, 3), 243, np.uint8)
    image[2200:2900, 3100:4000] = stained(1400, 1800, 3)[350:1050, 450:1350]
    return write_slide(tmp_path_factory.mktemp("slide") / "a.tiff", image, mpp=0.5, levels=3, compression="jpeg")


def store_of(slide: Path, folder: Path, **how: object) -> SlideStore:
    record = ingest_slide(slide, folder, IngestOptions(**how))  # type: ignore[arg-type]
    assert record.status == "done", record.reason
    return SlideStore.open(slide_path(folder, "a"))


@pytest.mark.parametrize("mpp", [0.5, 1.0])
def test_a_crop_is_the_part_of_the_whole_that_its_affine_says(tmp_path: Path, slide: Path, mpp: float) -> None:
    whole = store_of(slide, tmp_path / "whole", mpp=mpp)
    crop = store_of(slide, tmp_path / "crop", mpp=mpp, crop_tissue=True)
    box = crop.attributes["crop"]
    assert box["y0"] % 512 == 0 and box["x0"] % 512 == 0 and box["of"]["height_px"] == whole.levels[0].height_px
    assert crop.levels[0].height_px <= 0.72 * whole.levels[0].height_px
    # The tissue with its margin of 100 µm is inside.
    scale = 0.5 / mpp
    assert box["y0"] <= (2200 - 200) * scale and (2900 + 200) * scale <= box["y1"]
    assert box["x0"] <= (3100 - 200) * scale and (4000 + 200) * scale <= box["x1"]
    for k in range(4):
        size = crop.levels[k]
        y0, x0 = box["y0"] >> k, box["x0"] >> k
        inside = Box(0, min(size.height_px, whole.levels[k].height_px - y0) - 1, 0, size.width_px - 1)
        assert np.array_equal(crop.read(inside, k), whole.read(inside.shift(y0, x0), k)), k
    mask, _ = crop.tissue()
    full, mask_mpp = whole.tissue()
    y0, x0 = round(box["y0"] * mpp / mask_mpp[0]), round(box["x0"] * mpp / mask_mpp[1])
    assert np.array_equal(mask, full[y0 : y0 + mask.shape[0], x0 : x0 + mask.shape[1]]) and mask.any()


def test_what_is_found_on_a_crop_is_put_where_it_is_on_the_slide(tmp_path: Path, slide: Path) -> None:
    crop = store_of(slide, tmp_path / "crop", mpp=1.0, crop_tissue=True)
    pixels = crop.read(Box.of_size(crop.levels[1].height_px, crop.levels[1].width_px), 1)
    rows, columns = np.nonzero(pixels[1] < 200)
    side = 16
    seen = SimpleNamespace(
        square_px=side, slide_size_px=(crop.levels[1].height_px, crop.levels[1].width_px), mpp=crop.levels[1].mpp
    )  # what `Level0.point` asks of a heatmap
    level0 = level0_of(SimpleNamespace(slide=crop, heatmap=seen))  # type: ignore[arg-type]
    corners = [(rows.min(), columns.min()), (rows.max() + 1, columns.max() + 1)]
    found = [level0.point(x / side, y / side, seen) for y, x in corners]  # type: ignore[arg-type]
    assert np.abs(np.array(found) - [(3100, 2200), (4000, 2900)]).max() <= 4
    assert isinstance(level0, Level0)
    box = crop.attributes["crop"]
    assert origin_um(SimpleNamespace(slide=crop)) == (box["y0"], box["x0"])  # type: ignore[arg-type]


def test_a_slide_without_tissue_is_kept_whole(tmp_path: Path) -> None:
    path = write_slide(tmp_path / "a.tiff", np.full((1200, 1300, 3), 243, np.uint8), mpp=0.5)
    store = store_of(path, tmp_path / "store", mpp=0.5, crop_tissue=True)
    assert (store.levels[0].height_px, store.levels[0].width_px) == (1200, 1300) and "crop" not in store.attributes
    assert store.attributes["flags"] == ["no_tissue"]


def test_glass_is_left_out_and_tissue_is_not(tmp_path: Path, slide: Path) -> None:
    whole = store_of(slide, tmp_path / "whole", mpp=0.5)
    blank = store_of(slide, tmp_path / "blank", mpp=0.5, glass="blank")
    both = store_of(slide, tmp_path / "both", mpp=0.5, glass="blank", crop_tissue=True)
    tissue = Box(2200, 2900, 3100, 4000)
    assert np.array_equal(blank.read(tissue), whole.read(tissue))
    assert (blank.read(Box(0, 512, 0, 512)) == 255).all() and (whole.read(Box(0, 512, 0, 512)) == 243).all()
    shift = both.attributes["crop"]
    assert np.array_equal(both.read(tissue.shift(-shift["y0"], -shift["x0"])), whole.read(tissue))
    size = [sum(s["size"] or 0 for s in store.attributes["shards"].values()) for store in (whole, blank)]
    assert size[1] < size[0]
