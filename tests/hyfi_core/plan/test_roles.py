"""Which ranks load, validate, train, or train as spare ones: by number and by host."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


HOSTS = st.lists(st.sampled_from(["n1", "n2", "n3", "d1", "d2"]), min_size=2, max_size=12).map(sorted)


@settings(deadline=None, max_examples=80)
@given(HOSTS, st.integers(0, 4), st.integers(0, 3))
def test_every_rank_has_one_role_and_loaders_are_spread_in_proportion(
    hosts: list[str], loaders: int, validators: int
) -> None:
    """Of the hosts with most ranks for each loader, the first gets the next: D'Hondt's method, by its definition."""
    trainers = len(hosts) - loaders - validators
    if trainers < 1:
        return
    roles = assign_roles(hosts, trainers, loaders, validators)
    assert sorted(roles.order) == list(range(len(hosts)))
    assert [len(roles.trainers), len(roles.loaders), len(roles.validators)] == [trainers, loaders, validators]
    assert roles.validators == tuple(range(len(hosts)))[len(hosts) - validators :], "the last"
    others = hosts[: len(hosts) - validators]
    taken = {host: sum(hosts[rank] == host for rank in roles.loaders) for host in others}
    more = [others.count(host) / (taken[host] + 1) for host in taken if taken[host] < others.count(host)]
    assert all(others.count(host) / count >= max(more, default=0.0) for host, count in taken.items() if count)
    for host in taken:
        of_host = [rank for rank, name in enumerate(others) if name == host]
        assert [rank for rank in roles.loaders if hosts[rank] == host] == of_host[len(of_host) - taken[host] :]


@settings(deadline=None, max_examples=80)
@given(HOSTS, st.data())
def test_every_loader_has_trainers_and_is_on_their_host_if_any_is(hosts: list[str], data: st.DataObject) -> None:
    kinds = [data.draw(st.sampled_from("TL")) for _ in hosts]
    trainers, loaders = ([rank for rank, kind in enumerate(kinds) if kind == which] for which in "TL")
    if not trainers or not loaders:
        return
    found = loaders_of(hosts, RankRoles(tuple(trainers), tuple(loaders), ()))
    assert list(found) == trainers and {loader for of in found.values() for loader in of} == set(loaders)
    homes = list(dict.fromkeys(hosts[rank] for rank in trainers))
    alone = list(dict.fromkeys(hosts[rank] for rank in loaders if hosts[rank] not in homes))
    without = [home for home in homes if not any(hosts[rank] == home for rank in loaders)]
    for trainer, of in found.items():
        home = hosts[trainer]
        assert list(of) == sorted(of) and all(found[other] == of for other in trainers if hosts[other] == home)
        own = [loader for loader in loaders if hosts[loader] == home]
        assert set(own) <= set(of)
        if without and own:
            assert list(of) == own, "hosts of loaders alone are for those that have none"
        if home in without and len(alone) <= len(without) and alone:
            assert {hosts[loader] for loader in of} == {alone[without.index(home) * len(alone) // len(without)]}
        if home in without and len(alone) >= len(without):
            assert {hosts[loader] for loader in of} == set(alone[without.index(home) :: len(without)])


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ((4, 1, 0), "of 6 ranks, 1 are loaders .* leaves 5; the plan needs 4"),
        ((4, "dpu-*", 0), "no host matches 'dpu-"),
        ((2, 9, 0), "the plan needs 2 trainers"),
        ((1, 0, 9), "the plan needs 1 trainers"),
        ((4, 0, 8), "6 are validators .* leaves 0; the plan needs 4 trainers"),
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
