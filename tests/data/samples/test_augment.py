from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.samples.augment import EOSIN, HAEMATOXYLIN, Augment, Variation
from hyfi_core.plan.box import Box


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (3, height, width), dtype=np.uint8)


@settings(max_examples=120, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.booleans(), st.integers(0, 10**6), st.integers(0, 20), st.data())
def test_any_box_is_a_slice_of_the_whole(height, width, square, seed, epoch, data):
    size = (height, height if square else width)
    variation = Augment(stain=0.3, colour=0.2).draw(seed, epoch, "slide", size)
    image = picture(*size)
    whole = variation.apply(image)
    assert whole.shape == image.shape
    y0, x0 = data.draw(st.integers(0, size[0] - 1)), data.draw(st.integers(0, size[1] - 1))
    box = Box(y0, data.draw(st.integers(y0 + 1, size[0])), x0, data.draw(st.integers(x0 + 1, size[1])))
    source = variation.source(box)
    assert Box.of_size(*size).contains(source)
    part = variation.apply(image[(slice(None), *source.slices())])
    assert np.array_equal(part, whole[(slice(None), *box.slices())])


@pytest.mark.parametrize("mirror", [False, True])
@pytest.mark.parametrize("turns", range(6))
def test_moves_are_those_of_numpy(mirror, turns):
    image, variation, box = picture(6, 6), Variation((6, 6), mirror, turns), Box(0, 2, 1, 6)
    moved = variation.apply(image)
    assert np.array_equal(moved, np.rot90(np.flip(image, 2) if mirror else image, turns, (1, 2)))
    part = image[(slice(None), *variation.source(box).slices())]
    assert np.array_equal(variation.apply(part), moved[(slice(None), *box.slices())])


def test_all_eight_moves_are_drawn_and_half_of_them_where_not_square():
    augment = Augment(stain=0, colour=0)
    square = {(v.mirror, v.turns) for v in (augment.draw(0, e, "s", (8, 8)) for e in range(200))}
    oblong = {(v.mirror, v.turns) for v in (augment.draw(0, e, "s", (8, 9)) for e in range(200))}
    assert square == {(m, t) for m in (False, True) for t in range(4)}
    assert oblong == {(m, t) for m in (False, True) for t in (0, 2)}


def test_a_quarter_turn_of_an_oblong_is_refused():
    with pytest.raises(ValueError, match="square"):
        Variation((4, 5), turns=1)


def test_draws_depend_on_seed_epoch_and_slide_alone():
    augment = Augment()
    draws = [augment.draw(s, e, name, (8, 8)) for s in (0, 1) for e in (0, 1) for name in ("a", "b")]
    assert len(set(draws)) == 8
    assert draws[0] == augment.draw(0, 0, "a", (8, 8))


@settings(max_examples=60, deadline=None)
@given(st.tuples(*[st.floats(0.5, 1.5)] * 4))
def test_glass_stays_glass(factors):
    variation = Variation((1, 1), stains=factors[:2], density=factors[2], contrast=factors[3])
    glass = np.full((3, 5, 7), 255, np.uint8)
    assert (variation.recolour(glass) == 255).all()
    nearly = np.full((3, 1, 1), 243, np.uint8)
    assert variation.recolour(nearly).min() > 243 - 35


def test_nothing_changes_when_all_is_off():
    image = picture(9, 9)
    still = Augment(flips=False, stain=0.0, colour=0.0).draw(3, 4, "s", (9, 9)).apply(image)
    assert np.array_equal(still, image)
    assert not np.shares_memory(still, image)


def test_tables_alone_change_no_colour():
    """Factors that are nearly one go through the tables: each of the 256 values comes back as it was."""
    ramp = np.arange(256, dtype=np.uint8).reshape(1, 1, 256).repeat(3, 0)
    assert np.abs(Variation((1, 256), density=1 + 1e-9).recolour(ramp).astype(int) - ramp).max() <= 1


@pytest.mark.parametrize(("stain", "other"), [(HAEMATOXYLIN, 1), (EOSIN, 0)])
def test_more_of_one_stain_is_more_of_that_stain(stain, other):
    """A pure stain of density d becomes one of density 1.2 d; a change of the other stain leaves it alone."""
    unit = np.array(stain) / np.linalg.norm(stain)

    def pixel(density):
        return np.rint(256 * np.exp(-unit * density) - 1).clip(0, 255).astype(np.uint8).reshape(3, 1, 1)

    factors = [1.2, 1.2]
    factors[other] = 1.0
    more = Variation((1, 1), stains=tuple(factors)).recolour(pixel(1.0)).astype(int)
    assert np.abs(more - pixel(1.2)).max() <= 1
    unmoved = [1.0, 1.0]
    unmoved[other] = 1.2
    assert np.abs(Variation((1, 1), stains=tuple(unmoved)).recolour(pixel(1.0)).astype(int) - pixel(1.0)).max() <= 1


def test_colours_match_the_formula():
    image = picture(40, 40)
    variation = Variation((40, 40), stains=(1.15, 0.9), density=1.05, contrast=0.97)
    stains = np.array([HAEMATOXYLIN, EOSIN, np.cross(HAEMATOXYLIN, EOSIN)])
    stains /= np.linalg.norm(stains, axis=1, keepdims=True)
    density = -np.log((image.reshape(3, -1).T + 1.0) / 256)
    amounts = density @ np.linalg.inv(stains) * [1.15, 0.9, 1.0]
    values = 256 * np.exp(-np.clip(amounts @ stains * 1.05, 0, None)) - 1
    wanted = (255 - (255 - values) * 0.97).clip(0, 255).T.reshape(image.shape)
    assert np.abs(variation.recolour(image) - wanted).max() <= 1
