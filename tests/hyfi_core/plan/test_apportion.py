"""Batches dealt by speed: whole, in proportion, and never later than another deal."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyfi_core.errors import RequestError
from hyfi_core.plan.apportion import apportion

SECONDS = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=6)


@given(SECONDS, st.integers(0, 60), st.integers(1, 4))
def test_a_batch_is_dealt_whole_in_units_and_everybody_gets_one(seconds: list[float], more: int, unit: int) -> None:
    samples = (len(seconds) + more) * unit
    shares = apportion(samples, seconds, unit)
    assert sum(shares) == samples and len(shares) == len(seconds)
    assert all(share >= unit and share % unit == 0 for share in shares)
    for one, its in zip(seconds, shares, strict=True):
        for other, theirs in zip(seconds, shares, strict=True):
            assert one >= other or its >= theirs, "the faster gets fewer"


@given(SECONDS, st.integers(0, 60), st.integers(-8, 8))
def test_only_ratios_matter(seconds: list[float], more: int, power: int) -> None:
    samples = len(seconds) + more
    assert apportion(samples, [one * 2.0**power for one in seconds]) == apportion(samples, seconds)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=3), st.integers(0, 9))
def test_no_other_deal_is_done_earlier(seconds: list[int], more: int) -> None:
    samples = len(seconds) + more
    deals = [deal for deal in product(range(1, samples + 1), repeat=len(seconds)) if sum(deal) == samples]
    best = min(max(s * t for s, t in zip(deal, seconds, strict=True)) for deal in deals)
    assert max(s * t for s, t in zip(apportion(samples, seconds), seconds, strict=True)) == best


@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.integers(1, 4))
def test_speeds_that_divide_the_batch_are_met_exactly(speeds: list[int], times: int) -> None:
    seconds = [27720 / speed for speed in speeds]  # of all numbers to 12 a multiple: exact
    assert apportion(sum(speeds) * times, seconds) == tuple(speed * times for speed in speeds)


def test_the_picture_above_the_function() -> None:
    assert apportion(9, [1.0, 1.0, 4.0]) == (4, 4, 1)
    assert apportion(8, [1.0, 4.0]) == (7, 1)  # 6.4 and 1.6: rounded to 2, the slow one would take 8 seconds, not 4
    assert apportion(5, [1.0, 1.0]) == (3, 2)
    assert apportion(12, [1.0, 1e9], unit=3) == (9, 3)


@pytest.mark.parametrize(("samples", "unit"), [(1, 1), (3, 2), (5, 2)])
def test_a_batch_too_small_or_uneven_is_refused(samples: int, unit: int) -> None:
    with pytest.raises(
        RequestError, match=f"a batch of {samples} cannot be divided among 2 replicas in multiples of {unit}"
    ):
        apportion(samples, [1.0, 2.0], unit)


@pytest.mark.parametrize("seconds", [[], [0.0], [1.0, -1.0], [float("nan")], [float("inf")]])
def test_seconds_are_finite_and_above_zero(seconds: list[float]) -> None:
    with pytest.raises(ValueError, match="finite number above 0"):
        apportion(8, seconds)
