"""Which ranks load, validate, train, or train as spare ones: by number and by host."""

from __future__ import annotations

import pytest

from hyfi_core.errors import RequestError
from hyfi_core.plan.roles import RankRoles, assign_roles, loaders_of, with_spare

ONE = ["here"] * 6
TWO = ["n1", "n1", "n1", "n2", "n2", "n2"]
DPUS = ["n1", "n1", "dpu-1", "n2", "n2", "dpu-2"]


def test_on_one_node_trainers_come_first() -> None:
    assert assign_roles(ONE, 3, 2, 1) == RankRoles((0, 1, 2), (3, 4), (5,))
    assert assign_roles(ONE, 6, 0, 0) == RankRoles((0, 1, 2, 3, 4, 5), (), ())


def test_loaders_stand_beside_their_trainers() -> None:
    roles = assign_roles(TWO, 4, 2, 0)
    assert roles == RankRoles((0, 1, 3, 4), (2, 5), ())
    assert loaders_of(TWO, roles) == {0: (2,), 1: (2,), 3: (5,), 4: (5,)}
    assert assign_roles(TWO, 3, 2, 1) == RankRoles((0, 1, 3), (2, 4), (5,))
    assert assign_roles(["a"] * 6 + ["b"] * 3, 6, 3, 0).loaders == (4, 5, 8)


def test_hosts_by_pattern_and_the_dpu_of_each_node() -> None:
    roles = assign_roles(DPUS, 4, "dpu-*", 0)
    assert roles == RankRoles((0, 1, 3, 4), (2, 5), ())
    assert loaders_of(DPUS, roles) == {0: (2,), 1: (2,), 3: (5,), 4: (5,)}
    assert assign_roles(DPUS, 3, "dpu-*", 1) == RankRoles((0, 1, 3), (2, 5), (4,))
    assert assign_roles(DPUS, 3, 1, "dpu-*") == RankRoles((0, 3, 4), (1,), (2, 5))


def test_a_host_that_matches_both_patterns_takes_turns() -> None:
    hosts = ["n1", "n1", "dpu", "dpu", "dpu"]
    assert assign_roles(hosts, 2, "dpu*", "dpu*") == RankRoles((0, 1), (2, 4), (3,))


def test_few_loaders_serve_all_nodes_and_many_share_them() -> None:
    hosts = ["n1", "n2", "n3", "d1", "d2"]
    assert loaders_of(hosts, RankRoles((0, 1, 2), (3, 4), ())) == {0: (3,), 1: (3,), 2: (4,)}
    hosts = ["n1", "n2", "d1", "d2", "d3"]
    assert loaders_of(hosts, RankRoles((0, 1), (2, 3, 4), ())) == {0: (2, 4), 1: (3,)}
    hosts = ["n1", "n1", "n2", "dpu"]
    assert loaders_of(hosts, RankRoles((0, 2), (1, 3), ())) == {0: (1,), 2: (3,)}
    assert loaders_of(hosts, RankRoles((0,), (1, 3), (2,))) == {0: (1, 3)}
    assert loaders_of(hosts, RankRoles((0, 2, 3), (1,), ())) == {0: (1,), 2: (1,), 3: (1,)}
    assert loaders_of(ONE, RankRoles((0, 1, 2, 3), (4, 5), ())) == dict.fromkeys(range(4), (4, 5))


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ((4, 1, 0), "of 6 ranks, 1 are loaders .* leaves 5; the plan needs 4"),
        ((4, "dpu-*", 0), "no host matches 'dpu-"),
        ((2, 9, 0), "the plan needs 2 trainers"),
        ((1, 0, 9), "the plan needs 1 trainers"),
    ],
)
def test_ranks_that_do_not_come_out_even_are_refused(wanted: tuple, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        assign_roles(TWO, *wanted)


def test_spare_ranks_by_host_come_last() -> None:
    assert with_spare(DPUS, 4, "dpu-*") == RankRoles((0, 1, 3, 4, 2, 5), (), ())
    with pytest.raises(RequestError, match=r"of 6 ranks, 2 are spare .* leaves 4; the plan needs 3 trainers"):
        with_spare(DPUS, 3, "dpu-*")
    with pytest.raises(RequestError, match=r"roles\.spare: no host matches"):
        with_spare(TWO, 6, "dpu-*")
