"""Cases that a table and the store's manifest both know: one grouping of slides, or a refusal."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.csv_table import read_table
from data.samples.names import AgreedCases, cases_of
from hyfi_core.errors import RequestError

SLIDES = [f"s{k}" for k in range(6)]
stored_cases = st.lists(st.sampled_from(["", "1", "2", "3"]), min_size=6, max_size=6)
own_cases = st.lists(st.sampled_from(["", "1", "2", "P1", "P2", "P3"]), min_size=6, max_size=6)


@given(stored_cases, own_cases)
def test_slides_that_are_together_in_either_stay_together_or_it_is_refused(first: list[str], second: list[str]) -> None:
    stored, own = (dict(zip(SLIDES, names, strict=True)) for names in (first, second))
    both = [slide for slide in SLIDES if stored[slide] and own[slide]]
    pairs = {(stored[slide], own[slide]) for slide in both}
    one_for_one = len(pairs) == len({case for case, _ in pairs}) == len({name for _, name in pairs})
    swapped = any(case != name and (name in first or case in second) for case, name in pairs)
    if not one_for_one or swapped:
        with pytest.raises(RequestError, match=r"labels.csv: case_id contradicts .* s\d (and s\d are|is) of"):
            AgreedCases.of(stored, own, "labels.csv")
        return
    agreed = AgreedCases.of(stored, own, "labels.csv")
    assert all(agreed.cases[slide] == stored[slide] for slide in SLIDES if stored[slide])
    assert agreed.cases.keys() == {slide for slide in SLIDES if stored[slide] or own[slide]}
    for names in (stored, own):
        for one in SLIDES:
            for other in SLIDES:
                if names[one] and names[one] == names[other]:
                    assert agreed.cases[one] == agreed.cases[other]
    assert bool(agreed.notes) == any(case != name for case, name in pairs)
    assert AgreedCases.of(agreed.cases, own, "labels.csv").cases == agreed.cases


def test_a_case_of_another_name_is_said_and_found_for_slides_that_only_the_table_knows() -> None:
    agreed = AgreedCases.of({"a": "1", "b": "", "c": "2"}, {"a": "P1", "b": "P1", "c": "P2", "d": "P9"}, "labels.csv")
    assert agreed.cases == {"a": "1", "b": "1", "c": "2", "d": "P9"}
    assert "for 2 cases, one for one (P1 is 1 there)" in agreed.notes[0]


def test_a_refusal_says_what_would_work() -> None:
    """An ingest writes the store's manifest anew; a shared name may be a word for "unknown"."""
    stored, own = {"a": "1", "b": "2"}, {"a": "pending", "b": "pending"}
    with pytest.raises(RequestError) as refusal:
        AgreedCases.of(stored, own, "labels.csv")
    for words in ("the manifest given to `hyfi ingest`", "with --resume", "'pending' means", "hyfi split --missing"):
        assert words in str(refusal.value)
    with pytest.raises(RequestError, match=r"contradicts mine.csv.*correct the one that is wrong"):
        AgreedCases.of(stored, own, "labels.csv", "mine.csv")
    assert "other names than mine.csv for 1 case," in AgreedCases.of({"a": "1"}, {"a": "P1"}, "t", "mine.csv").notes[0]


def test_a_table_of_slides_and_cases_alone_has_cases(tmp_path: Path) -> None:
    for columns, cases in (("slide_id,case_id", {"a": "1", "b": "1"}), ("slide_id,patient", {})):
        (tmp_path / "cases.csv").write_text(f"{columns}\na,1\nb,1\nc,\n")
        assert cases_of(read_table(tmp_path / "cases.csv", "splits")) == cases


@pytest.mark.parametrize(
    ("stored", "own", "said"),
    [
        (
            {"a": "1", "b": "1"},
            {"a": "P1", "b": "P2"},
            "a and b are of one case in the manifest (1), and of two in the table (P1, P2)",
        ),
        (
            {"a": "1", "b": "2"},
            {"a": "P1", "b": "P1"},
            "a and b are of one case in the table (P1), and of two in the manifest (1, 2)",
        ),
        (
            {"a": "1", "b": "2"},
            {"a": "2", "b": "3"},
            "a is of the case 1 in the manifest, and of 2 in the table, and one of these names is another case's, too",
        ),
    ],
)
def test_a_refusal_names_the_slides_and_both_groupings(stored: dict[str, str], own: dict[str, str], said: str) -> None:
    with pytest.raises(RequestError) as caught:
        AgreedCases.of(stored, own, "labels.csv", "mine.csv")
    assert str(caught.value).startswith(f"labels.csv: case_id contradicts mine.csv: {said}. Slides of a case stay")
