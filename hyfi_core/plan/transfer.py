"""Transfers: the boxes that ranks send to each other so that every rank has what it needs.

    have   │ rank 0  │ rank 1  │ rank 2  │        what each rank owns
    need         └─────────────────┘              what rank 1 needs: a strip of either neighbour

The needed box may extend beyond the map: that is padding, which is not sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hyfi_core.plan.box import Box
from hyfi_core.plan.boxes import Boxes


@dataclass(frozen=True, slots=True)
class Strip:
    """A box sent between this rank and a peer."""

    peer: int
    box: Box


@dataclass(frozen=True, slots=True)
class Transfer:
    """What one rank sends, receives and keeps in a redistribution.

    Attributes:
        have: the box that this rank owns.
        need: the box that it needs, including padding.
        map: the whole map.
        sends: boxes of ``have`` for others, in rank order.
        receives: boxes of ``need`` from others, in rank order.
        kept: the part of ``need`` that this rank owns itself; may be empty.
    """

    have: Box
    need: Box
    map: Box
    sends: tuple[Strip, ...]
    receives: tuple[Strip, ...]
    kept: Box

    @property
    def idle(self) -> bool:
        """Whether this rank has exactly what it needs and sends nothing."""
        # Empty boxes of equal shape are equal tensors, wherever they lie.
        same = self.have == self.need or (self.have.empty and self.have.shape == self.need.shape)
        return same and not self.sends and not self.receives

    @property
    def received_px(self) -> int:
        """Number of pixels received from others."""
        return sum(strip.box.area for strip in self.receives)


def plan_transfer(have: Sequence[Box], need: Sequence[Box], map_box: Box, rank: int) -> Transfer:
    """Return what ``rank`` sends, receives and keeps if ranks own ``have`` and need ``need``.

    Args:
        have: the box that each rank owns; the boxes do not overlap and cover the map.
        need: the box that each rank needs; boxes may overlap and extend beyond the map.
        map_box: the map.
        rank: the rank whose transfer is returned.
    """
    # Sender and receiver compute the same boxes in the same order of ranks: messages need no description.
    sends = tuple(Strip(peer, box) for peer, box in _meeting(need, have[rank]) if peer != rank)
    receives = tuple(Strip(peer, box) for peer, box in _meeting(have, need[rank]) if peer != rank)
    return Transfer(have[rank], need[rank], map_box, sends, receives, have[rank].intersect(need[rank]))


def _meeting(boxes: Sequence[Box], box: Box) -> Iterable[tuple[int, Box]]:
    """Yield (rank, intersection) of all ranks whose boxes meet ``box``, in rank order."""
    if isinstance(boxes, Boxes):
        return boxes.meeting(box)
    intersections = ((rank, rank_box.intersect(box)) for rank, rank_box in enumerate(boxes))
    return ((rank, common) for rank, common in intersections if not common.empty)
