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

    Ranks on hosts that match a pattern have this role; if a host matches both patterns, its ranks alternate between
    loading and validating. If ``validators`` is a number, the last of the other ranks validate: they communicate with
    each other, so they are kept together. If ``loaders`` is a number, loaders are distributed over hosts in proportion
    to the hosts' ranks. All others train.

    Args:
        hosts: the host of each rank.
        trainers: number of ranks that the plan needs.
        loaders: number of loaders, or host pattern.
        validators: number of validators, or host pattern.

    Raises:
        RequestError: the number of remaining ranks is not ``trainers``; the message lists roles and hosts.
    """
    load = _matching(hosts, loaders, "roles.loaders")
    validate = _matching(hosts, validators, "roles.validators")
    load, validate = _alternating(hosts, load, validate)
    if isinstance(validators, int):
        not_loading = _without(hosts, load)
        # The last ranks: those of a node are consecutive, so validators are near each other.
        validate = not_loading[max(0, len(not_loading) - validators) :]
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
        trainers: number of ranks of the plan without spare ranks.
        pattern: pattern of the spare ranks' hosts.

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
    """Return trainer -> the loaders that serve it; every loader serves some trainer.

    A trainer uses loaders on its own host. Hosts with only loaders are paired, in order, with trainers' hosts without
    loaders, so that every node's DPU loads for its node; if all trainers' hosts have loaders, with all of them.
    """
    training = list(dict.fromkeys(hosts[rank] for rank in roles.trainers))
    loading = list(dict.fromkeys(hosts[rank] for rank in roles.loaders))
    only_loading = [host for host in loading if host not in training]
    without_loaders = [host for host in training if host not in loading] or training
    near = {host: {host} for host in training}  # host of trainers -> hosts whose loaders they use
    for index, host in enumerate(without_loaders):
        near[host].update(_paired(only_loading, index, len(without_loaders)))
    nearby = {rank: tuple(r for r in roles.loaders if hosts[r] in near[hosts[rank]]) for rank in roles.trainers}
    return {rank: loaders or roles.loaders for rank, loaders in nearby.items()}


def _paired(loading: Sequence[str], index: int, count: int) -> Sequence[str]:
    """Return the hosts of loaders that are paired with host ``index`` of ``count``: several, or a shared one."""
    if len(loading) >= count:
        return loading[index::count]
    return [loading[index * len(loading) // count]] if loading else []


def _matching(hosts: Sequence[str], choice: HostChoice, key: str) -> list[int]:
    """Return the ranks on hosts that match a pattern; none if the choice is a number of ranks."""
    if isinstance(choice, int):
        return []
    ranks = [rank for rank, host in enumerate(hosts) if fnmatchcase(host, choice)]
    if not ranks:
        raise RequestError(f"{key}: no host matches {choice!r}; the ranks run on {', '.join(dict.fromkeys(hosts))}")
    return ranks


def _alternating(hosts: Sequence[str], load: list[int], validate: list[int]) -> tuple[list[int], list[int]]:
    """Return (ranks that load, ranks that validate); a host's ranks in both lists alternate between them."""
    loads_next: dict[str, bool] = {}  # host -> whether its next rank loads; the first does
    for rank in [rank for rank in load if rank in validate]:
        loads = loads_next.get(hosts[rank], True)
        loads_next[hosts[rank]] = not loads
        (validate if loads else load).remove(rank)
    return load, validate


def _spread(hosts: Sequence[str], ranks: Sequence[int], count: int) -> list[int]:
    """Return ``count`` of ``ranks``, or all if there are fewer, distributed over hosts in proportion to their ranks."""
    remaining: dict[str, list[int]] = {}
    for rank in ranks:
        remaining.setdefault(hosts[rank], []).append(rank)
    sizes = {host: len(of_host) for host, of_host in remaining.items()}

    def ranks_for_each(host: str) -> float:
        """Return the host's ranks for each of its loaders, if it gets one more; 0 if it has no rank left."""
        loaders = sizes[host] - len(remaining[host])
        return sizes[host] / (loaders + 1) if remaining[host] else 0.0

    chosen: list[int] = []
    while len(chosen) < min(count, len(ranks)):
        # D'Hondt's method, as in ``plan.apportion``.
        chosen.append(remaining[max(remaining, key=ranks_for_each)].pop())
    return sorted(chosen)


def _without(hosts: Sequence[str], ranks: Sequence[int]) -> list[int]:
    """Return the ranks of the job that are not in ``ranks``."""
    return [rank for rank in range(len(hosts)) if rank not in ranks]
