"""Groups are assigned as the module's page says: by a second, plain implementation in fractions."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.samples.assign import assign_groups
from data.samples.keyed import keyed_permutation
from hyfi_core.errors import RequestError

Members = dict[str, list[str]]


def plainly(members: Members, shares: dict[str, float], seed: int) -> dict[str, str]:
    """Assign by computing the whole error, in fractions, for each group and each part it may go to."""
    groups, parts, counts = list(members), list(shares), {g: Counter(names) for g, names in members.items()}
    classes = sorted({name for names in members.values() for name in names})
    rest = {name: [g for g in groups if counts[g][name]] for name in classes}
    rarest = {g: min(counts[g], key=lambda name: (len(rest[name]), name)) for g in groups}
    total = {**{name: sum(counts[g][name] for g in groups) for name in classes}, None: sum(map(len, members.values()))}
    target = {part: Fraction(shares[part]) / sum(map(Fraction, shares.values())) for part in parts}
    inside: dict[str, list[str]] = {part: [] for part in parts}

    def error() -> Fraction:
        return sum(
            ((sum(counts[g][name] if name is not None else len(members[g]) for g in inside[part]) / Fraction(of))
             - target[part]) ** 2
            for part in parts for name, of in total.items()
        )  # fmt: skip

    def after(g: str, part: str) -> Fraction:
        inside[part].append(g)
        result = error()
        inside[part].pop()
        return result

    shuffled = [groups[k] for k in keyed_permutation(len(groups), "split", seed)]
    left = sorted(shuffled, key=lambda g: (len(rest[rarest[g]]), rarest[g], -len(members[g])))
    while left:
        g, name = left[0], rarest[left[0]]
        empty = [part for part in parts if not inside[part]]
        without = [part for part in parts if not any(counts[one][name] for one in inside[part])]
        of_class = [one for one in left if rarest[one] == name]
        allowed = empty if len(left) <= len(empty) else without if len(of_class) <= len(without) else parts
        inside[min(allowed, key=lambda part: (after(g, part), parts.index(part)))].append(left.pop(0))
    return {g: part for part in parts for g in inside[part]}


@settings(deadline=None, max_examples=60)
@given(
    st.dictionaries(
        st.integers(0, 99).map(str), st.lists(st.sampled_from("xyz"), min_size=1, max_size=4), min_size=4, max_size=14
    ),
    st.sampled_from([{"a": 0.5, "b": 0.25, "c": 0.25}, {"a": 3.0, "b": 1.0}, {"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0}]),
    st.integers(0, 3),
)
def test_each_group_goes_where_the_error_falls_most(members: Members, shares: dict[str, float], seed: int) -> None:
    assert assign_groups(members, shares, seed, strict=False) == plainly(members, shares, seed)


def test_too_few_groups_are_refused_and_of_one_class_unless_it_may_miss_a_part() -> None:
    shares = {"train": 1.0, "val": 1.0, "test": 1.0}
    with pytest.raises(RequestError) as few:
        assign_groups({"a": ["x"], "b": ["x"]}, shares, 0)
    assert str(few.value) == "2 groups cannot fill 3 splits; ask for fewer folds"
    members = {"a": ["x"], "b": ["x"], "c": ["x", "rare"], "d": ["rare"], "e": [""]}
    with pytest.raises(RequestError) as rare:
        assign_groups(members, shares, 0)
    assert str(rare.value) == (
        "class 'rare' is in 2 groups, which cannot fill 3 splits; ask for fewer folds, or leave out --stratify"
    )
    # Slides without a class are none.
    assert assign_groups({**members, "d": [""]}, {"train": 1.0}, 0).keys() == members.keys()
    assert set(assign_groups({"a": ["x"], "b": ["x"], "c": ["x"], "d": [""]}, shares, 0).values()) == shares.keys()
    assert set(assign_groups(members, shares, 0, strict=False).values()) == shares.keys()
