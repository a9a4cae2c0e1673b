"""An exclusion that leaves nothing names the slides, their flags and what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from data.csv_table import read_table
from data.samples.exclusion import ExcludedSlide, flags_to_exclude, refuse_empty, without_flags, write_excluded
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


def test_slides_with_one_of_the_flags_are_left_out_and_written_down(tmp_path: Path) -> None:
    rows = [{"slide_id": "a", "flags": "pen;blur"}, {"slide_id": "b", "flags": ""}, {"slide_id": "c", "flags": "pens"}]
    assert flags_to_exclude(rows[0], ["blur", "pen", "colour"]) == ("pen", "blur")
    assert flags_to_exclude({"slide_id": "d"}, ["blur"]) == ()
    assert without_flags(rows, ["blur"]) == rows[1:] and without_flags(rows, []) == rows
    write_excluded(tmp_path / "excluded.csv", [ExcludedSlide("a", "c1", "val", ("pen", "blur"))])
    table = read_table(tmp_path / "excluded.csv", "excluded")
    assert table.columns == ("slide_id", "case_id", "split", "flags")
    assert table.rows == ({"slide_id": "a", "case_id": "c1", "split": "val", "flags": "pen;blur"},)
