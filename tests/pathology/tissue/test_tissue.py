from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from hyfi_core.errors import RequestError
from pathology.ingest.thumbnail import thumbnail_of_source
from pathology.readers.sources import open_source
from pathology.tissue.tissue import TissueParameters, find_tissue

MPP = 8.0
GLASS = np.array([242, 240, 241], np.float32)


def scene(glass: np.ndarray = GLASS, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return a slide ``(3, 256, 320)`` with two grainy pieces of tissue, and where they are."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:256, :320]
    truth = ((y - 90) / 60) ** 2 + ((x - 90) / 50) ** 2 < 1
    truth |= ((y - 170) / 45) ** 2 + ((x - 230) / 55) ** 2 < 1
    density = np.array([0.10, 0.28, 0.12], np.float32)[:, None, None] * rng.uniform(0.4, 1.6, truth.shape)
    light = np.where(truth, 10.0 ** -density.astype(np.float32), 1.0)
    image = glass[:, None, None] * light + rng.normal(0, 1.5, (3, *truth.shape))
    return image.clip(0, 255).astype(np.uint8), truth


def dice(found: np.ndarray, truth: np.ndarray) -> float:
    return float(2 * (found & truth).sum() / (found.sum() + truth.sum()))


@pytest.mark.parametrize("glass", [(242, 240, 241), (255, 255, 255), (205, 203, 204), (238, 232, 215)])
def test_tissue_is_found_on_white_grey_and_yellow_glass(glass: tuple[int, int, int]) -> None:
    image, truth = scene(np.array(glass, np.float32))
    assert dice(find_tissue(image, MPP).tissue, truth) > 0.95


@pytest.mark.parametrize("ink", [(40, 60, 170), (20, 130, 60), (25, 25, 28), (200, 30, 40)])
def test_pen_is_no_tissue(ink: tuple[int, int, int]) -> None:
    image, truth = scene()
    image[:, 10:22, 20:300] = np.array(ink, np.uint8)[:, None, None]
    masks = find_tissue(image, MPP, TissueParameters(pen="mask"))
    assert dice(masks.tissue, truth) > 0.95
    assert masks.pen[10:22, 20:300].mean() > 0.8
    assert not find_tissue(scene()[0], MPP).pen.any()


def test_dust_edges_and_shadows_are_no_tissue() -> None:
    image, truth = scene()
    image[:, :, 3:5] = 190  # the coverslip's edge
    image[:, 220:250, 10:60] = 225  # a shadow
    image[:, 30:32, 250:253] = np.array([180, 90, 150], np.uint8)[:, None, None]  # a stained speck
    assert dice(find_tissue(image, MPP).tissue, truth) > 0.95


@pytest.mark.parametrize("value", [255, 243, 128])
def test_an_empty_slide_has_no_tissue(value: int) -> None:
    rng = np.random.default_rng(0)
    image = (value + rng.normal(0, 1.5, (3, 128, 128))).clip(0, 255).astype(np.uint8)
    assert find_tissue(image, MPP).tissue.sum() == 0
    assert find_tissue(np.full((3, 16, 16), value, np.uint8), MPP).tissue.sum() == 0


def test_holes_smaller_than_a_vessel_are_filled() -> None:
    image, _ = scene()
    image[:, 85:95, 85:95] = GLASS.astype(np.uint8)[:, None, None]
    assert find_tissue(image, MPP).tissue[85:95, 85:95].all()
    image[:, 60:120, 65:115] = GLASS.astype(np.uint8)[:, None, None]
    assert not find_tissue(image, MPP).tissue[75:105, 80:100].any()


@pytest.mark.slides
def test_fat_of_a_real_biopsy_is_tissue_and_its_dust_is_not(real_slides: Path) -> None:
    with closing(open_source(real_slides / "atlas_breast-lobular_HE_10x.svs")) as slide:
        thumbnail, share = thumbnail_of_source(slide, slide.mpp, 400)
    found = thumbnail.tissue
    assert found is not None and share is not None and 0.10 < share < 0.115
    for lobule in (found[960:1040, 470:570], found[375:440, 290:345], found[430:480, 370:430]):
        assert lobule.mean() > 0.85
    for glass in (found[900:1300, 1000:1800], found[540:640, 100:580], found[1300:1700, 0:500]):
        assert glass.mean() < 0.005


def test_thresholds_are_set_by_name_and_what_is_wrong_is_named() -> None:
    p = TissueParameters(pen="off").with_settings(["density=0.01,0.015", "fat=false", "close_um=12"])
    assert (p.density, p.fat, p.close_um, p.pen) == ((0.01, 0.015), False, 12.0, "off")
    assert TissueParameters().with_settings([]) == TissueParameters()
    image, truth = scene()
    strict = TissueParameters().with_settings(["density=0.9,0.9", "fat=false"])  # denser than anything is counted
    assert truth.any() and not find_tissue(image, MPP, strict).tissue.any()
    for text, why in (
        ("densty=1", "with a name of density, colour"),
        ("density=1", "expected two numbers; density=0.012,0.02 is the default"),
        ("density=2,1", "in increasing order"),
        ("close_um=x", "could not convert"),
        ("fat=maybe", "expected true or false"),
        ("to_json=1", "with a name of"),
    ):
        with pytest.raises(RequestError, match=why):
            TissueParameters().with_settings([text])
