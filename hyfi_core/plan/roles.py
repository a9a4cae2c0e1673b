"""Assignment of a job's ranks to roles: trainers, loaders, validators; a pure function.

::

    rank      0   1   2   3   4   5        4 trainers, 2 loaders
    host      n1  n1  n1  n2  n2  n2
    role      T   T   L   T   T   L        a loader on each node

    rank      0   1   2   3   4   5        loaders: "dpu-*"
    host      n1  n1  dpu-1  n2  n2  dpu-2
    role      T   T   L      T   T   L
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from hyfi_core.errors import RequestError

HostChoice = int | str
"""A number of ranks, or a pattern of host names (``dpu-*``)."""


@dataclass(frozen=True)
class RankRoles:
    """Ranks by role, each in ascending order (spare trainers last); together all ranks of the job."""

    trainers: tuple[int, ...]
    loaders: tuple[int, ...]
    validators: tuple[int, ...]

    @property
    def order(self) -> tuple[int, ...]:
        """All ranks: trainers, then loaders, then validators."""
        return self.trainers + self.loaders + self.validators


def assign_roles(hosts: Sequence[str], trainers: int, loaders: HostChoice, validators: HostChoice) -> RankRoles:
    """Assign ranks to roles.

    Hosts that match a pattern have only this role; if a host matches both, its ranks alternate between loading and
    validating. Of the other ranks, the last validate (they communicate with each other, so they are kept together),
    loaders are distributed over hosts in proportion to their ranks, and the rest train.

    Args:
        hosts: the host of each rank.
        trainers: ranks that the plan needs.
        loaders: number, or host pattern.
        validators: likewise.

    Raises:
        RequestError: the number of remaining ranks is not ``trainers``; the message lists roles and hosts.
    """
    load = _matching(hosts, loaders, "roles.loaders")
    validate = _matching(hosts, validators, "roles.validators")
    load, validate = _alternating(hosts, load, validate)
    if isinstance(validators, int):
        # The last ones: ranks of a node are consecutive, so that validators are near each other.
        validate = _without(hosts, load)[len(_without(hosts, load)) - validators :]
    if isinstance(loaders, int):
        load = _spread(hosts, _without(hosts, validate), loaders)
    train = _without(hosts, [*load, *validate])
    if len(train) != trainers:
        raise RequestError(
            f"of {len(hosts)} ranks, {len(load)} are loaders (roles.loaders: {loaders}) and {len(validate)} are "
            f"validators (roles.validators: {validators}), which leaves {len(train)}; the plan needs {trainers} "
            f"trainers. Hosts: {', '.join(dict.fromkeys(hosts))}"
        )
    return RankRoles(tuple(train), tuple(load), tuple(validate))


def with_spare(hosts: Sequence[str], trainers: int, pattern: str) -> RankRoles:
    """Assign spare ranks, which train as further replicas: those on matching hosts, after all others.

    Args:
        hosts: the host of each rank.
        trainers: ranks of the plan without them.
        pattern: of the spare ranks' hosts.

    Raises:
        RequestError: no host matches, or the number of other ranks is not ``trainers``.
    """
    spare = _matching(hosts, pattern, "roles.spare")
    permanent = _without(hosts, spare)
    if len(permanent) != trainers:
        raise RequestError(
            f"of {len(hosts)} ranks, {len(spare)} are spare (roles.spare: {pattern}), which leaves {len(permanent)}; "
            f"the plan needs {trainers} trainers. Hosts: {', '.join(dict.fromkeys(hosts))}"
        )
    return RankRoles((*permanent, *spare), (), ())


def loaders_of(hosts: Sequence[str], roles: RankRoles) -> dict[int, tuple[int, ...]]:
    """Return the loaders of each trainer; every loader has trainers.

    A trainer uses loaders on its own host. Hosts with only loaders are paired, in order, with trainers' hosts without
    loaders, so that every node's DPU loads for its node; if there are none, with all trainers' hosts.
    """
    homes = list(dict.fromkeys(hosts[rank] for rank in roles.trainers))
    loading = [hosts[rank] for rank in roles.loaders]
    spare = [host for host in dict.fromkeys(loading) if host not in homes]
    short = [home for home in homes if home not in loading] or homes
    near = {home: {home, *_paired(spare, short.index(home), len(short))} if home in short else {home} for home in homes}
    nearby = {rank: tuple(r for r in roles.loaders if hosts[r] in near[hosts[rank]]) for rank in roles.trainers}
    return {rank: loaders or roles.loaders for rank, loaders in nearby.items()}


def _paired(spare: Sequence[str], index: int, of: int) -> Sequence[str]:
    """Return the spare hosts of the ``index``-th of ``of`` hosts: several, or one shared with others."""
    if len(spare) >= of:
        return spare[index::of]
    return [spare[index * len(spare) // of]] if spare else []


def _matching(hosts: Sequence[str], ranks_wanted: HostChoice, key: str) -> list[int]:
    """Return the ranks on hosts that match a pattern; none if the choice is a number of ranks."""
    if isinstance(ranks_wanted, int):
        return []
    ranks = [rank for rank, host in enumerate(hosts) if fnmatchcase(host, ranks_wanted)]
    if not ranks:
        raise RequestError(
            f"{key}: no host matches {ranks_wanted!r}; the ranks run on {', '.join(dict.fromkeys(hosts))}"
        )
    return ranks


def _alternating(hosts: Sequence[str], load: list[int], validate: list[int]) -> tuple[list[int], list[int]]:
    """Divide the ranks that match both patterns, host by host."""
    common = [rank for rank in load if rank in validate]
    turns: dict[str, int] = {}
    for rank in common:
        turn = turns[hosts[rank]] = turns.get(hosts[rank], -1) + 1
        # Turns begin with loading: the first of a host leaves the validators.
        (validate if turn % 2 == 0 else load).remove(rank)
    return load, validate


def _spread(hosts: Sequence[str], ranks: Sequence[int], count: int) -> list[int]:
    """Return ``count`` of ``ranks``: distributed over hosts in proportion to their ranks."""
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(hosts[rank], []).append(rank)
    sizes = {host: len(of) for host, of in by_host.items()}
    chosen: list[int] = []
    while len(chosen) < min(count, len(ranks)):
        # The host with the most ranks for each loader that it would then have, as in ``plan.apportion``.
        host = max(by_host, key=lambda h: sizes[h] / (sizes[h] - len(by_host[h]) + 1) if by_host[h] else 0.0)
        chosen.append(by_host[host].pop())
    return sorted(chosen)


def _without(hosts: Sequence[str], ranks: Sequence[int]) -> list[int]:
    return [rank for rank in range(len(hosts)) if rank not in ranks]
