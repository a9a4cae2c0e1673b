"""Symmetry of ranks: those that hold the same stages and have the same list of actions do the same at the same time.

    grids ((16, 16), (16, 16))     512 ranks in 2 classes; two ranks represent each of them

A deadlock, or a pair of ranks with messages in different orders, occurs between all ranks of two classes or between
none: the ranks of a class can all be advanced together. So the order of actions and the absence of faults are found
with few ranks, however many there are. A class is represented by two of its ranks, since they may send to each other as
well as to themselves. Where gradients are sent from direction 1 to the same part in direction 0, ranks of a class also
have partners of one class, and a representative's partners are representatives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from hyfi_core.plan.placement import Placement
from hyfi_core.schedule.action import Action, Schedule

_OF_A_CLASS = 2
"""Number of ranks that represent a class."""


@dataclass(frozen=True)
class Representatives:
    """A few ranks that represent all.

    Attributes:
        schedule: the lists of the representatives.
        placement: of the representatives alone, which have new rank numbers in it.
        of: for each rank of the replica, the new number of its representative.
    """

    schedule: Schedule
    placement: Placement
    of: tuple[int, ...]

    def for_all(self, rows: Sequence[tuple[Action, ...]]) -> Schedule:
        """Return the schedule of all ranks from the lists of the representatives."""
        return Schedule(self.schedule.name, tuple(rows[index] for index in self.of))


def represented(schedule: Schedule, placement: Placement, partners: bool) -> Representatives:
    """Return representatives of a schedule's ranks: of those that do the same, a few stand for all.

    Args:
        schedule: a list for each rank of the placement.
        placement: which ranks hold which stage.
        partners: whether direction 1 sends its gradients to the ranks with the same part in direction 0.
    """
    partners_of = _partners(placement) if partners else [()] * placement.size
    classes = _classes(schedule, placement, partners_of)  # the same number for ranks that do the same
    chosen: set[int] = set()
    members = Counter[int]()  # class -> its ranks so far
    for rank, number in enumerate(classes):
        members[number] += 1
        if members[number] <= _OF_A_CLASS:
            chosen.add(rank)
    # A representative waits for its partners, so they become representatives too, and so do theirs in turn.
    added = set(chosen)
    while added:
        added = {partner for rank in added for partner in partners_of[rank]} - chosen
        chosen |= added
    # The new rank numbers of the representatives.
    order = sorted(chosen)
    index_of = {rank: index for index, rank in enumerate(order)}
    first_of_class: dict[int, int] = {}
    for rank in order:
        first_of_class.setdefault(classes[rank], index_of[rank])

    def renumbered(group: Sequence[int]) -> tuple[int, ...]:
        """Return the new numbers of the representatives among a stage's ranks."""
        return tuple(index_of[rank] for rank in group if rank in index_of)

    groups = tuple(tuple(map(renumbered, stages)) for stages in placement.ranks)
    rows = tuple(schedule.actions[rank] for rank in order)
    return Representatives(
        Schedule(schedule.name, rows),
        Placement(placement.grids, groups),
        of=tuple(first_of_class[number] for number in classes),
    )


def _partners(placement: Placement) -> list[tuple[int, ...]]:
    """Return, for each rank, the ranks with the same parts of its stages in the other direction."""
    partners: list[list[int]] = [[] for _ in range(placement.size)]
    first, second = placement.ranks  # of each direction, for each stage: its ranks, in the order of their parts
    for ranks, opposite_ranks in zip(first, second, strict=True):
        for rank, partner in zip(ranks, opposite_ranks, strict=True):
            partners[rank].append(partner)
            partners[partner].append(rank)
    return [tuple(of_rank) for of_rank in partners]


def _classes(schedule: Schedule, placement: Placement, partners: Sequence[tuple[int, ...]]) -> list[int]:
    """Return the class of each rank: ranks of one class have the same stages, actions and classes of partners."""
    lists: dict[int, int] = {}  # id of a list -> its number; ranks with equal lists mostly share one object
    distinct: dict[tuple[Action, ...], int] = {}
    for row in schedule.actions:
        if id(row) not in lists:
            lists[id(row)] = distinct.setdefault(row, len(distinct))
    keys: list[Hashable] = [(placement.hosted(rank), lists[id(row)]) for rank, row in enumerate(schedule.actions)]
    classes = _numbered(keys)
    while True:
        finer = _numbered([(classes[rank], tuple(classes[p] for p in partners[rank])) for rank in range(len(classes))])
        # Each round only splits classes: if there are no more than before, the classes are final.
        if max(finer) == max(classes):
            return classes
        classes = finer


def _numbered(keys: Sequence[Hashable]) -> list[int]:
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]
