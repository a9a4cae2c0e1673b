"""Slides dealt to groups of ranks: each group works on one slide at a time, and takes the next when it has finished.

```
ranks     0 1 │ 2 3 │ 4 5        three groups of two ranks
          s0  │ s1  │ s2         each slide is divided among the ranks of its group
          s4  │ …   │ s3         the next slide goes to the group that is free first
```

Slides are taken by creating a file of the slide's number, which only one group can do.
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
        RequestError: groups of this size would leave ranks over.
    """
    if ranks_per_slide == "auto":
        # The smallest divisor that leaves no more groups than slides: larger groups divide slides for nothing.
        return next(size for size in range(1, ranks + 1) if ranks % size == 0 and ranks // size <= max(slides, 1))
    size = ranks if ranks_per_slide is None else ranks_per_slide
    if ranks % size:
        allowed = ", ".join(str(divisor) for divisor in range(1, ranks + 1) if ranks % divisor == 0)
        raise RequestError(f"--ranks-per-slide {size} with {ranks} ranks leaves ranks over; use one of {allowed}")
    return size


def own_group(comm: Communicator, size: int) -> Communicator:
    """Return the ranks of this rank's group; ``comm`` itself if there is one group. Collective.

    Args:
        comm: all ranks.
        size: ranks of each group; divides the number of all.
    """
    # Neighbouring ranks share a slide: they are usually on one node.
    group = comm if size == comm.size else comm.split(comm.rank // size, comm.rank)
    assert group is not None
    return group


class SlideQueue:
    """The slides of a run; one group takes each.

    Args:
        slides: their indices, in the order in which they are taken.
        folder: on a file system that all groups share, new for this run; used by the first rank of each group only.
        group: the ranks of this group.
        alone: whether this is the only group, so that no files are needed.
    """

    def __init__(self, slides: Sequence[int], folder: Path, group: Communicator, alone: bool) -> None:
        # Every group has the whole list, and learns by the files which of them others have taken.
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
    """Return the results of all groups, sorted by the index of their slide, on every rank. Collective.

    Args:
        comm: all ranks.
        leads: whether this is the first rank of its group; the results of others are not used.
        results: the results of this rank's group as JSON, by the index of their slide.
    """
    own_pairs = list(results.items()) if leads else []
    # (index, result) pairs, one list for each rank: JSON has no dictionaries with numbers as keys.
    pairs_of_ranks = comm.broadcast_object(comm.gather_objects(own_pairs))
    by_index = {int(index): result for pairs in pairs_of_ranks for index, result in pairs}
    return [by_index[index] for index in sorted(by_index)]


def on_first_rank(comm: Communicator, action: Callable[[], T]) -> T:
    """Run ``action`` on rank 0; return its value, which is JSON, or raise its `RequestError`, on all ranks. Collective.

    Raises:
        RequestError: from ``action``.
    """
    value, refusal = None, ""
    if comm.rank == 0:
        try:
            value = action()
        except RequestError as error:
            refusal = str(error)
    # On all ranks, also after an error: a rank that raised alone would leave the others waiting here.
    value, refusal = comm.broadcast_object([value, refusal])
    if refusal:
        raise RequestError(refusal)
    return cast(T, value)


@contextmanager
def shared_folder(path: Path, comm: Communicator) -> Iterator[Path]:
    """Context that yields the name of a temporary folder beside ``path``, the same on every rank. Collective.

    The first rank creates it, before all others go on, and removes it with its contents at the end; it also removes
    those of ended runs.

    Raises:
        RequestError: on every rank: it cannot be created, or only some ranks see it.
    """
    # The first rank's name: each rank has another process id.
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
    """Create ``folder`` anew, and remove the folders that earlier runs have left under ``path`` and a suffix."""
    try:
        remove_leftovers(path)
        remove_tree(folder)
        folder.mkdir(parents=True)
    except OSError as error:
        raise RequestError(f"{path.parent}: cannot be written ({error.strerror}); choose another --out") from error
