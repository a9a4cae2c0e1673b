"""Slides dealt to groups of ranks: each group works on one slide at a time, and takes the next when it has finished.

```
ranks     0 1 │ 2 3 │ 4 5        three groups of two ranks
          s0  │ s1  │ s2         each slide is divided among the ranks of its group
          s4  │ …   │ s3         the next slide goes to the group that is free first
```

A group takes a slide by creating a file with the slide's number, which only one group can do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from data.files import remove_leftovers, temporary_path
from data.location import create_exclusively, is_remote, location, remove_tree
from hyfi_core.comm.agreement.shared_disk import require_shared
from hyfi_core.errors import RequestError

if TYPE_CHECKING:  # without torch, for processes that only read slides
    from hyfi_core.comm.base import Communicator

T = TypeVar("T")
RanksPerSlide = int | Literal["auto"] | None
"""Ranks that share a slide; ``auto``: as few as keep all ranks busy; None: all ranks."""


def group_size(ranks_per_slide: RanksPerSlide, ranks: int, slides: int) -> int:
    """Return the number of ranks that work on a slide together.

    Args:
        ranks_per_slide: see `RanksPerSlide`.
        ranks: number of ranks of the job.
        slides: number of slides of the job.

    Raises:
        RequestError: the number of ranks is not a multiple of this size.
    """
    if ranks_per_slide == "auto":
        # The smallest size with which no group is without a slide: small groups spend less on communication.
        return next(size for size in range(1, ranks + 1) if ranks % size == 0 and ranks // size <= max(slides, 1))
    size = ranks if ranks_per_slide is None else ranks_per_slide
    if ranks % size:
        allowed = ", ".join(str(divisor) for divisor in range(1, ranks + 1) if ranks % divisor == 0)
        raise RequestError(f"--ranks-per-slide {size} with {ranks} ranks leaves ranks over; use one of {allowed}")
    return size


def own_group(comm: Communicator, size: int) -> Communicator:
    """Return the communicator of this rank's group; ``comm`` itself if there is one group. Collective.

    Args:
        comm: all ranks.
        size: number of ranks of each group; divides the number of all ranks.
    """
    # Neighbouring ranks share a slide, because they are usually on one node.
    group = comm if size == comm.size else comm.split(comm.rank // size, comm.rank)
    assert group is not None
    return group


class SlideQueue:
    """The slides of a run; one group takes each.

    Args:
        slides: indices of the slides, in the order in which they are taken.
        folder: new for this run, on a file system that all groups share; only the first rank of each group uses it.
        group: the ranks of this group.
        alone: whether this is the only group; then no files are needed.
    """

    def __init__(self, slides: Sequence[int], folder: Path, group: Communicator, alone: bool) -> None:
        # Every group has the whole list; the files show which slides other groups have taken.
        self._untried, self._folder, self._group, self._alone = list(slides), folder, group, alone
        self._reported: set[int] = set()
        self._unreported: set[int] = set()

    def take(self) -> int | None:
        """Return the index of this group's next slide, None if all are taken. Collective over the group."""
        own = self._next() if self._group.rank == 0 else None
        index: int | None = self._group.broadcast_object(own)
        return index

    def finish(self, index: int) -> None:
        """Record that the slide of an index is finished; for the first rank of each group."""
        if self._alone:
            self._unreported.add(index)
        else:
            (self._folder / f"{index}.finished").touch()

    def newly_finished(self) -> set[int]:
        """Return the indices of slides that any group has finished since the last call; for each group's first rank."""
        if not self._alone:
            self._unreported = {int(path.stem) for path in self._folder.glob("*.finished")} - self._reported
        unreported, self._unreported = self._unreported, set()
        self._reported |= unreported
        return unreported

    def _next(self) -> int | None:
        """Take the next slide that no other group has taken; return its index, None if there is none."""
        while self._untried:
            index = self._untried.pop(0)
            if self._alone or create_exclusively(self._folder / f"{index}.taken"):
                return index
        return None


def gathered(comm: Communicator, leads: bool, results: Mapping[int, Any]) -> list[Any]:
    """Return the results of all groups, in the order of slides, on every rank. Collective.

    Args:
        comm: all ranks.
        leads: whether this is the first rank of its group; only its ``results`` are used.
        results: index of a slide -> result as JSON, for the slides of this rank's group.
    """
    own_pairs = list(results.items()) if leads else []
    # (index, result) pairs, one list for each rank: JSON has no dictionaries with numbers as keys.
    pairs_of_ranks = comm.broadcast_object(comm.gather_objects(own_pairs))
    by_index = {int(index): result for pairs in pairs_of_ranks for index, result in pairs}
    return [by_index[index] for index in sorted(by_index)]


def on_first_rank(comm: Communicator, action: Callable[[], T]) -> T:
    """Run ``action`` on rank 0; on all ranks, return its value (JSON) or raise its `RequestError`. Collective.

    Raises:
        RequestError: from ``action``.
    """
    value, refusal = None, ""
    if comm.rank == 0:
        try:
            value = action()
        except RequestError as error:
            refusal = str(error)
    # Also after an error: if rank 0 raised before this, the other ranks would wait here for ever.
    value, refusal = comm.broadcast_object([value, refusal])
    if refusal:
        raise RequestError(refusal)
    return cast(T, value)


@contextmanager
def shared_folder(path: Path, comm: Communicator) -> Iterator[Path]:
    """Context that yields a temporary folder beside ``path``, the same on every rank. Collective.

    The first rank creates it before any rank goes on, and removes it with its contents at the end. It also removes
    such folders of ended runs.

    Raises:
        RequestError: on every rank, if it cannot be created, or only some ranks see it.
    """
    # Rank 0 decides the name, because `temporary_path` contains the process id.
    folder = location(comm.broadcast_object(str(temporary_path(path))))
    on_first_rank(comm, lambda: _make_empty(path, folder))
    try:
        if not is_remote(folder):
            require_shared(comm, folder, f"--out {path.parent}")
        yield folder
    finally:
        if comm.rank == 0:
            with suppress(OSError):
                remove_tree(folder)


def _make_empty(path: Path, folder: Path) -> None:
    """Create ``folder`` as an empty folder, and remove temporary folders of ``path`` that ended runs have left."""
    try:
        remove_leftovers(path)
        remove_tree(folder)
        folder.mkdir(parents=True)
    except OSError as error:
        raise RequestError(f"{path.parent}: cannot be written ({error.strerror}); choose another --out") from error
