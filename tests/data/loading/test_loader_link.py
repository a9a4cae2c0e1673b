"""A trainer tells a loader that it waited only if it waited for that loader."""

from __future__ import annotations

from typing import Any

import torch

from data.loading.loader_link import PIXELS_TAG, LoaderLink
from hyfi_core.comm.base import Completed, Message, Pending


class Arrival(Completed):
    """Messages of one loader, which arrive when ``arrived`` is set."""

    def __init__(self) -> None:
        self.arrived = False

    def test(self) -> bool:
        return self.arrived


class Loaders:
    """A communicator that keeps what loaders are asked for."""

    def __init__(self) -> None:
        self.arrivals: dict[int, list[Arrival]] = {1: [], 2: []}
        self.waited: list[tuple[int, bool]] = []

    def exchange(self, sends: list[Message], receives: list[Message]) -> Pending:
        (loader,) = {message.peer for message in receives}
        self.arrivals[loader].append(Arrival())
        return self.arrivals[loader][-1]

    def send_object(self, value: dict[str, Any], loader: int, tag: int) -> Pending:
        if value["kind"] == "request":
            self.waited.append((loader, value["waited"]))
        return Completed()

    def arrive(self, *loaders: int) -> None:
        """Let all that these loaders were asked for arrive."""
        for loader in loaders:
            for arrival in self.arrivals[loader]:
                arrival.arrived = True


def request(link: LoaderLink, *loaders: int) -> int:
    receives = [Message(loader, torch.empty(1), PIXELS_TAG) for loader in loaders]
    return link.request(receives, {loader: {"numbers": []} for loader in loaders})


def link_to(loaders: Loaders) -> LoaderLink:
    comm: Any = loaders
    return LoaderLink(comm, [1, 2], {}, check_signals=lambda: loaders.arrive(1, 2))


def test_the_late_one_of_two_loaders_is_told_with_its_own_next_request() -> None:
    loaders = Loaders()
    link = link_to(loaders)
    first = request(link, 1, 2)
    loaders.arrive(1)
    link.wait(first)
    request(link, 1)
    request(link, 2)
    request(link, 2)
    assert loaders.waited[2:] == [(1, False), (2, True), (2, False)]


def test_earlier_requests_that_are_still_open_are_waited_for_and_later_ones_are_not() -> None:
    loaders = Loaders()
    link = link_to(loaders)
    request(link, 2)
    needed = request(link, 1)
    loaders.arrive(1)
    request(link, 1)
    assert link.answered() == 0
    link.wait(needed)
    request(link, 1)
    request(link, 2)
    assert loaders.waited[3:] == [(1, False), (2, True)] and link.answered() == 3


def test_none_is_told_where_all_arrived_in_time() -> None:
    loaders = Loaders()
    link = link_to(loaders)
    first = request(link, 1, 2)
    loaders.arrive(1, 2)
    link.wait(first)
    request(link, 1, 2)
    assert loaders.waited[2:] == [(1, False), (2, False)]
