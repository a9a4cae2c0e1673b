"""Bookkeeping of the cache of decoded images; the pixels are stored elsewhere."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from hyfi_core.plan.box import Box

Key = tuple[int, Box]


@dataclass
class Place:
    """One image's place: its offset, whether its pixels are valid, and the number of current readers or writers."""

    at: int
    kept: bool = False
    users: int = 0


class SampleCache:
    """Places for decoded images, not varied yet, by (index, box); who was asked for longest ago leaves first.

    Args:
        begin: the first byte of the memory.
        size_bytes: of the memory; 0: nothing is kept.
        place_bytes: of the largest image.
    """

    def __init__(self, begin: int, size_bytes: int, place_bytes: int) -> None:
        count = size_bytes // place_bytes if place_bytes else 0
        self._free = [begin + place * place_bytes for place in reversed(range(count))]
        self._places: OrderedDict[Key, Place] = OrderedDict()

    def borrow(self, index: int, box: Box) -> Place | None:
        """Return the place of an image, for reading where it is ``kept``, else for writing.

        None if there is no room, or while another worker writes it. Call ``give_back`` afterwards.
        """
        key = index, box
        place = self._places.get(key)
        if place is None:
            at = self._room()
            if at is None:
                return None
            place = self._places[key] = Place(at)
        elif not place.kept:
            return None
        self._places.move_to_end(key)
        place.users += 1
        return place

    def give_back(self, index: int, box: Box) -> None:
        """Release a borrowed image, whose pixels are now valid."""
        place = self._places[index, box]
        place.users -= 1
        place.kept = True

    def _room(self) -> int | None:
        if self._free:
            return self._free.pop()
        idle = next((key for key, place in self._places.items() if not place.users), None)
        return self._places.pop(idle).at if idle is not None else None
