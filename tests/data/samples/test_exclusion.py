"""An exclusion that leaves nothing names the slides, their flags and what is missing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from data.samples.exclusion import ExcludedSlide, refuse_empty
from hyfi_core.errors import RequestError


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        (["luad", "lusc"], "no slide of 'luad', 'lusc' is left in 'val'"),
        ([], "no slide is left in 'val'"),
    ],
)
def test_an_exclusion_that_empties_a_split_names_its_slides_alone(lost: Sequence[str], said: str) -> None:
    excluded = [
        ExcludedSlide("a", "", "val", ("blur", "pen")),
        ExcludedSlide("b", "", "train", ("pen",)),
        ExcludedSlide("c", "", "val", ("pen",)),
    ]
    with pytest.raises(RequestError) as caught:
        refuse_empty("val", lost, excluded)
    assert str(caught.value) == (
        f"data.exclude_flags: 2 slides left out: a (blur, pen), c (pen); {said}; exclude fewer flags, or add slides"
    )
