"""Slides dealt to groups of ranks: each group predicts one slide at a time, and takes the next when it has finished.

```
ranks     0 1 │ 2 3 │ 4 5        three groups of two ranks
          s0  │ s1  │ s2         each slide is divided among the ranks of its group
          s4  │ …   │ s3         the next slide goes to the group that is free first
```

Slides are taken by creating a file of the slide's number, which only one group can do.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from hyfi_core.comm.base import Communicator
from hyfi_core.errors import RequestError
from pathology.predict.options import RanksPerSlide
from pathology.predict.table import Prediction


def group_size(wanted: RanksPerSlide, ranks: int, slides: int) -> int:
    """Return the number of ranks that predict a slide together.

    Args:
        wanted: see `PredictOptions.ranks_per_slide`.
        ranks: of the job.
        slides: to predict.

    Raises:
        RequestError: groups of this size would leave ranks over.
    """
    if wanted == "auto":
        return next(size for size in range(1, ranks + 1) if ranks % size == 0 and ranks // size <= max(slides, 1))
    size = ranks if wanted is None else wanted
    if ranks % size:
        allowed = ", ".join(str(other) for other in range(1, ranks + 1) if ranks % other == 0)
        raise RequestError(f"--ranks-per-slide {size} with {ranks} ranks leaves ranks over; use one of {allowed}")
    return size


def own_group(comm: Communicator, size: int) -> Communicator:
    """Return the ranks of this rank's group; ``comm`` itself if there is one group. Collective.

    Args:
        comm: all ranks.
        size: of each group; divides their number.
    """
    group = comm if size == comm.size else comm.split(comm.rank // size, comm.rank)
    assert group is not None
    return group


class SlideQueue:
    """The slides of a run, each of which one group takes.

    Args:
        slides: their indices, in the order in which they are taken.
        folder: on a file system that all groups share, new for this run; used by the first rank of each group only.
        group: the ranks of this group.
        alone: whether this is the only group, so that no files are needed.
    """

    def __init__(self, slides: Sequence[int], folder: Path, group: Communicator, alone: bool) -> None:
        self._left, self._folder, self._group, self._alone = list(slides), folder, group, alone
        self._known: set[str] = set()

    def take(self) -> int | None:
        """Return the next slide of this group, None if all are taken. Collective over the group."""
        found = self._next() if self._group.rank == 0 else None
        index: int | None = self._group.broadcast_object(found)
        return index

    def finished(self, index: int) -> int:
        """Record that a slide is finished; return how many were finished by any group since the last call.

        For the first rank of each group.
        """
        if self._alone:
            return 1
        (self._folder / f"{index}.finished").touch()
        every = {path.name for path in self._folder.glob("*.finished")}
        new, self._known = len(every - self._known), every
        return new

    def _next(self) -> int | None:
        while self._left:
            index = self._left.pop(0)
            if self._alone or self._created(self._folder / f"{index}.taken"):
                return index
        return None

    def _created(self, path: Path) -> bool:
        """Create a file; return False if it exists."""
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True


def gathered(comm: Communicator, leads: bool, found: dict[int, Prediction]) -> list[Prediction]:
    """Return the predictions of all groups in the order of their slides, on every rank. Collective.

    Args:
        comm: all ranks.
        leads: whether this is the first rank of its group.
        found: the predictions of this rank's group, by the index of their slide.
    """
    mine = [[index, asdict(one)] for index, one in found.items()] if leads else []
    parts = comm.broadcast_object(comm.gather_objects(mine))
    every = {int(index): Prediction.of_json(values) for part in parts for index, values in part}
    return [every[index] for index in sorted(every)]
