from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.spelling import NameKind, canonical, difference, forms_of, one_spelling, shown
from hyfi_core.errors import RequestError

NFD = unicodedata.normalize("NFD", "M\u00fcller")


@pytest.mark.parametrize(
    ("one", "other", "what"),
    [
        ("7", "007", "zeros or dashes"),
        ("7", "7.0", "zeros or dashes"),
        ("007", "7,0", "zeros or dashes"),
        ("S1-2", "S1\u20132", "zeros or dashes"),
        ("P 1", "P\u00a01", "Unicode form"),
        ("P1", "\uff301", "Unicode form"),
        ("M\u00fcller", NFD, "Unicode form"),
        ("P 1", " P  1", "white space"),
        ("P1", "P1\u200b", "invisible characters"),
        ("P1", "\ufeffp1", "case"),
        ("Stra\u00dfe", "STRASSE", "case"),
        ("K12", "\u041a12", "alphabet (Cyrillic letters that look like Latin ones)"),
        ("benign", "B\u0435nign", "alphabet (Cyrillic letters that look like Latin ones)"),
    ],
)
def test_spellings_of_one_name(one: str, other: str, what: str) -> None:
    assert canonical(one) == canonical(other)
    assert difference(one, other) == difference(other, one) == what
    assert shown(one) != shown(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("7", "-7"),
        ("7", "70"),
        ("0", "00A"),
        ("1.10", "1.1"),
        ("P1 2", "P12"),
        ("a/1", "b/1"),
        ("1,000", "1"),
        ("a_1", "a-1"),
        ("TGF-b", "TGF-\u03b2"),
        ("5 mm", "5 \u00b5m"),
        ("\u0440\u0430\u043a", "rak"),
    ],
)
def test_names_that_differ(one: str, other: str) -> None:
    assert canonical(one) != canonical(other)


def test_letters_that_look_alike_are_told_apart_in_the_message() -> None:
    with pytest.raises(RequestError, match=r"'\\u041a12' and 'K12' differ only in alphabet"):
        one_spelling(["K12", "K12", "\u041a12"], "name", "t.csv", merge=False)
    with pytest.raises(RequestError, match=r"'K12': the store has '\\u041a12', another alphabet"):
        one_spelling(["K12"], "name", "t.csv", merge=False, known_names=["\u041a12"])


def test_kinds_of_several_are_other_not_another() -> None:
    with pytest.raises(RequestError, match="'7': the store has '007', other zeros or dashes"):
        one_spelling(["7"], "name", "t.csv", merge=False, known_names=["007"])


def test_an_ending_counts_where_both_have_one() -> None:
    forms = forms_of(["a.tif", "a.tiff", "B", "b.ome.TIFF", "c.DX1", "c"])
    assert forms["a.tif"] != forms["a.tiff"] and forms["B"] == forms["b.ome.TIFF"] and forms["c.DX1"] != forms["c"]
    assert len(set(forms_of(["a", "a.tif", "a.tiff"]).values())) == 1


def test_the_most_frequent_spelling_stands_for_the_others() -> None:
    spelled = one_spelling(["p1", "P1", "P1", "", "q"], "name", "t.csv", merge=True)
    assert spelled.spelling == {"p1": "P1", "P1": "P1", "q": "q"} and spelled.joined == (("p1", "P1"),)
    assert one_spelling(["p1", "P1"], "name", "t.csv", merge=False, known_names=["P1", "p1"]).joined == ()


@pytest.mark.parametrize("name", ["1.23457E+11", "1,2E+05", "1E+05", "1.2345678901234568e+17"])
def test_names_that_a_spreadsheet_rounded_are_refused(name: str) -> None:
    """Two patients of twelve digits are one case then, in splits, bags and metrics."""
    for merge in (False, True):
        with pytest.raises(RequestError, match=r"t.csv: case_id: '.*' \(line 7\) is a number .* rounded"):
            one_spelling(["a", name, name], "name", "t.csv: case_id", merge=merge, lines=(5, 7, 9))
    # A slide of the store, whatever its file is called; and a class, of which all are seen.
    assert one_spelling([name], "name", "t.csv", merge=False, known_names=[name]).spelling == {name: name}
    assert one_spelling([name], "class", "t.csv", merge=False).spelling == {name: name}


@pytest.mark.parametrize("name", ["1E5", "E+05", "1E+5", "S1.2E+05", "1.2E-05", "12E+05"])
def test_names_with_an_e_that_no_spreadsheet_writes_are_taken(name: str) -> None:
    assert one_spelling([name], "name", "t.csv", merge=False).spelling == {name: name}


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=12), st.sampled_from(["name", "class"]))
def test_forms_are_stable(text: str, kind: NameKind) -> None:
    assert canonical(canonical(text)) == canonical(text)
    assert len(set(forms_of([text, f" {text}\u200b"], kind).values())) == 1
    if text.strip():
        with pytest.raises(RequestError, match="several ways"):
            one_spelling([text, f"{text}\u200b"], kind, "t.csv", merge=False)
