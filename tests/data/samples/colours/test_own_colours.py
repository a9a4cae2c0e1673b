"""The user's own change of colours: the same for every part of an image, refused where it is not."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from data.samples.augment import Augment
from data.samples.colours.own_colours import try_colours
from hyfi_core.errors import RequestError
from hyfi_core.plan.box import Box

HERE = "tests.data.samples.colours.test_own_colours"
Pixels = NDArray[np.uint8]


def darker(pixels: Pixels, rng: np.random.Generator) -> Pixels:
    factors = rng.uniform(0.5, 1, (3, 1, 1))
    return (pixels * factors).astype(np.uint8)


def noisy(pixels: Pixels, rng: np.random.Generator) -> Pixels:
    return (pixels * rng.uniform(0.9, 1, pixels.shape)).astype(np.uint8)


def unseeded(pixels: Pixels, rng: np.random.Generator) -> Pixels:
    return (pixels * np.random.default_rng().uniform()).astype(np.uint8)


def floats(pixels: Pixels, rng: np.random.Generator) -> NDArray[np.float64]:
    return pixels / 2


def no_arguments() -> None:
    """Takes nothing."""


def test_parts_have_the_colours_of_the_whole_and_images_differ() -> None:
    augment = Augment(stain=0.1, own=f"{HERE}:darker")
    image = np.random.default_rng(1).integers(0, 256, (3, 32, 32), dtype=np.uint8)
    varied = [augment.draw(3, 0, slide, (32, 32)) for slide in ("a", "b")]
    whole = varied[0].apply(image)
    box = Box(3, 20, 7, 30)
    source = varied[0].source(box)
    part = varied[0].apply(image[:, source.y0 : source.y1, source.x0 : source.x1])
    assert np.array_equal(part, whole[:, 3:20, 7:30])
    assert varied[0].own_draw != varied[1].own_draw
    try_colours(f"{HERE}:darker")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("noisy", "a part of an image"),
        ("unseeded", "from call to call"),
        ("floats", "float64"),
        ("no_arguments", "fails for pixels"),
        ("absent", "has no 'absent'"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        try_colours(f"{HERE}:{name}")
