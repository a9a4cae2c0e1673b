from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.samples.assign import assign_groups
from data.samples.splits import check_cases, load_splits
from hyfi_core.errors import RequestError

MANIFEST = [
    {"slide_id": "s1", "case_id": "c1"},
    {"slide_id": "s2", "case_id": "c1"},
    {"slide_id": "s3", "case_id": "c2"},
    {"slide_id": "s4", "case_id": ""},
]


def write(tmp_path, text):
    path = tmp_path / "splits.csv"
    path.write_text(text)
    return path


def test_splits_by_slide(tmp_path):
    path = write(tmp_path, "slide_id,split\ns1,train\ns2,Train\ns3,test\ns4,\n")
    assert load_splits(path, MANIFEST) == {"s1": "train", "s2": "train", "s3": "test"}


def test_splits_by_case_reach_its_slides(tmp_path):
    path = write(tmp_path, "case_id,part\nc1,val\nc2,train\nc9,test\n")
    assert load_splits(path, MANIFEST, column="part") == {"s1": "val", "s2": "val", "s3": "train"}


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        (
            "slide_id,split\ns1,train\ns2,val\n",
            {},
            r"case c1 is in two splits: train \(slide s1\) and val \(slide s2\)",
        ),
        ("slide_id,case_id,split\na,k,train\nb,k,test\n", {}, "case k is in two splits: train .* and test"),
        ("slide_id,case_id,split\na,k,train\na,m,train\n", {}, "slide_id a has two cases: k on line 2 and m on"),
        ("case_id,split\nc1,train\nc1,test\n", {}, "case c1 is in two splits: train and test"),
        ("slide_id,split\ns3,train\ns3,test\n", {}, "slide s3 is in two splits: train and test"),
        ("slide_id,split\ns3,training\n", {}, "line 2: split is 'training'; allowed: train, val, test"),
        ("slide_id,part\ns3,train\n", {}, "no column 'split'.*slide_id, part"),
        ("slide_id,split\ns3,0\ns4,1\n", {}, "line 2: 'split' has folds.*such as split_0"),
        ("slide_id,split\ns3,train\n", {"column": "split_1"}, "no column 'split_1'.*--split-column"),
        ("slide_id,split\n,train\n", {}, "line 2: in train, but no slide"),
    ],
)
def test_wrong_splits_are_refused_with_their_reason(tmp_path, text, options, words):
    with pytest.raises(RequestError, match=words):
        load_splits(write(tmp_path, text), MANIFEST, **options)


def test_cases_without_slides(tmp_path):
    with pytest.raises(RequestError, match="no slide has a known case"):
        load_splits(write(tmp_path, "case_id,split\nc1,train\n"))


def test_cases_of_which_no_slide_is_known(tmp_path):
    with pytest.raises(RequestError, match="none of its cases, such as c9"):
        load_splits(write(tmp_path, "case_id,split\nc9,train\n"), MANIFEST)


def test_slides_without_a_case_are_cases_of_their_own():
    check_cases({"a": "train", "b": "test"}, {"a": "", "b": ""})


@settings(deadline=None, max_examples=60)
@given(
    st.dictionaries(
        st.integers(0, 500).map(str), st.lists(st.sampled_from("xyz"), min_size=1, max_size=3), min_size=3, max_size=60
    ),
    st.integers(0, 5),
)
def test_groups_are_dealt_whole_and_the_same_each_time(members, seed):
    shares = {"train": 0.6, "val": 0.2, "test": 0.2}
    parts = assign_groups(members, shares, seed, strict=False)
    assert set(parts) == set(members)
    assert set(parts.values()) == set(shares)
    assert parts == assign_groups(members, shares, seed, strict=False)


@settings(deadline=None, max_examples=40)
@given(st.integers(3, 30), st.integers(3, 60), st.integers(2, 5), st.integers(0, 9))
def test_classes_are_spread_alike(rare, common, folds, seed):
    members = {f"r{i}": ["rare"] for i in range(rare)} | {f"c{i}": ["common"] for i in range(common)}
    shares = {str(fold): 1.0 for fold in range(folds)}
    if min(rare, common) < folds:
        with pytest.raises(RequestError, match="groups, which cannot fill"):
            assign_groups(members, shares, seed)
        return
    parts = assign_groups(members, shares, seed)
    for letter, count in (("r", rare), ("c", common)):
        sizes = [sum(part == fold for name, part in parts.items() if name[0] == letter) for fold in shares]
        assert max(sizes) - min(sizes) <= 1 and sum(sizes) == count
    sizes = [sum(part == fold for part in parts.values()) for fold in shares]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("rare", [3, 4, 5])
def test_a_small_part_gets_the_rare_class_too(seed, rare):
    members = {f"r{i}": ["rare"] for i in range(rare)} | {f"c{i}": ["common"] for i in range(40)}
    parts = assign_groups(members, {"train": 0.8, "val": 0.1, "test": 0.1}, seed)
    assert {part for name, part in parts.items() if name[0] == "r"} == {"train", "val", "test"}


def test_another_seed_deals_otherwise():
    members = {str(i): [""] for i in range(30)}
    shares = {"a": 0.5, "b": 0.5}
    assert assign_groups(members, shares, 0) != assign_groups(members, shares, 1)
