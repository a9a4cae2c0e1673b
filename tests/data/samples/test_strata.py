"""Strata: classes, quarters of numbers, and both; and groups that are the test set whatever is drawn."""

from __future__ import annotations

import pytest

from data.csv_table import Table
from data.samples.strata import fixed_groups, strata_of
from hyfi_core.errors import RequestError


def table(**columns: list[str]) -> Table:
    rows = tuple(dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
    return Table("labels.csv", tuple(columns), rows, tuple(range(2, 2 + len(rows))))


def test_numbers_are_divided_at_their_quartiles_and_columns_are_combined() -> None:
    names, ages = [f"s{k}" for k in range(12)], [str(age) for age in range(40, 52)]
    of_both = table(slide_id=names, grade=["low", "high"] * 6, age=[*ages[:-1], ""])
    assert strata_of(of_both, ["grade"]) == ["low", "high"] * 6
    quarters = strata_of(of_both, ["age"])
    assert quarters[-1] == "" and len(set(quarters[:-1])) == 4
    combined = strata_of(of_both, ["grade", "age"])
    assert combined[-1] == "" and combined[0] == f"grade low; age {quarters[0]}"


def test_groups_with_a_value_are_the_test_set() -> None:
    sites = table(slide_id=["a", "b", "c", "d"], site=["Leeds", "York", "Leeds", "Hull"])
    groups = ["g1", "g2", "g1", "g3"]
    assert fixed_groups(sites, groups, None) == set()
    assert fixed_groups(sites, groups, "site=Leeds") == {"g1"}
    assert fixed_groups(sites, groups, "site=Leeds, Hull") == {"g1", "g3"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("site", "allowed: COLUMN=VALUE"),
        ("site=Bath", "no row has Bath; site has: Leeds, York"),
        ("site=Leeds,York", "every row has it"),
        ("site=York", "g2 has rows of the test set, and others"),
    ],
)
def test_a_test_set_that_is_none_is_refused(words: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        fixed_groups(table(slide_id=["a", "b", "c"], site=["Leeds", "York", "Leeds"]), ["g1", "g2", "g2"], words)


def test_few_numbers_and_many_words_are_classes() -> None:
    ten, eleven = [str(grade) for grade in range(10)], [str(grade) for grade in range(11)]
    assert strata_of(table(slide_id=ten * 2, grade=ten * 2), ["grade"]) == ten * 2
    assert len(set(strata_of(table(slide_id=eleven, grade=eleven), ["grade"]))) == 4
    words = [f"site {number}" for number in eleven]
    assert strata_of(table(slide_id=words, site=words), ["site"]) == words
    # One word among many numbers.
    mixed = [*eleven, "unknown"]
    assert strata_of(table(slide_id=mixed, site=mixed), ["site"]) == mixed
