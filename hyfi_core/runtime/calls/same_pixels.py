"""Ranks of one image must be given the same image: pixels that two of them read are compared.

::

    rank 0  ████████████            each rank reads its part and a halo
    rank 1          ████████████    ▲
                    ▲▲▲▲            these pixels twice: a few rows of them must be equal

Parts without a common pixel, such as those of a model that begins with patches, cannot be compared; neither can cells,
which read their pixels later.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hyfi_core.comm.base import Communicator
from hyfi_core.errors import RequestError
from hyfi_core.plan.box import Box
from hyfi_core.plan.input_part import InputPart
from hyfi_core.runtime.batch_reader import LocalInput

_EVERY = 64
"""Calls 1, 2, 4, 8 … are compared, and every call whose number is a multiple of this."""
_LINES = 4
"""Rows (or columns) of common pixels that are compared."""


class SamePixels:
    """Compares the pixels that several ranks of a replica read, in some of the calls.

    Args:
        comm: all trainers.
        replica: the number of this rank's replica.
    """

    def __init__(self, comm: Communicator, replica: int) -> None:
        self._comm, self._replica, self._calls = comm, replica, 0

    def check(self, inputs: LocalInput) -> None:
        """Compare the pixels of a call (collective over all trainers).

        Args:
            inputs: what this rank reads; pixels that it has not read yet are not compared.

        Raises:
            RequestError: two ranks were given different pixels; the same on every rank.
        """
        self._calls += 1
        calls = self._calls
        # ``calls & (calls − 1)`` is zero for powers of two.
        if self._comm.size == 1 or (calls % _EVERY and calls & (calls - 1)):
            return
        read = {part: inputs.local[key] for key, part in inputs.parts.items() if key in inputs.local}
        # First all ranks exchange the boxes they have read, so that both ranks of a pair compare the same box.
        parts = [[self._replica, part.first, part.stop, *_corners(part.box)] for part in read]
        everywhere = self._comm.broadcast_object(self._comm.gather_objects(parts))
        sums = dict(self._sums(everywhere, read))
        difference = self._comm.broadcast_object(_difference(self._comm.gather_objects(sums)))
        if difference is not None:
            raise RequestError(difference)

    def _sums(
        self, everywhere: list[list[list[int]]], read: Mapping[InputPart, torch.Tensor]
    ) -> Iterator[tuple[str, list[Any]]]:
        """Yield (name, [checksum, corners of the box]) for the pixels that this rank and another one have read.

        Both ranks give the same name to their common pixels.

        Args:
            everywhere: for each rank, its parts as [replica, first sample, sample after the last, y0, y1, x0, x1].
            read: part -> pixels, of this rank.
        """
        mine = self._comm.rank
        for peer, peer_parts in enumerate(everywhere):
            if peer == mine:
                continue
            for replica, first, stop, *corners in peer_parts:
                if replica != self._replica:
                    continue
                for part, pixels in read.items():
                    box = _few_lines(part.box.intersect(Box(*corners)))
                    samples = range(max(first, part.first), min(stop, part.stop))
                    if box.empty or not samples:
                        continue
                    own_samples = slice(samples.start - part.first, samples.stop - part.first)
                    common = pixels[(own_samples, slice(None), *box.relative_to(part.box).slices())]
                    name = f"{min(mine, peer)} {max(mine, peer)} {_corners(box)} {samples.start} {samples.stop}"
                    yield name, [_checksum(common), _corners(box)]


def _corners(box: Box) -> list[int]:
    return [box.y0, box.y1, box.x0, box.x1]


def _few_lines(box: Box) -> Box:
    """Return a few rows of a box, or columns if it is higher than wide."""
    height, width = box.shape
    if height <= width:
        return Box(box.y0, min(box.y1, box.y0 + _LINES), box.x0, box.x1)
    return Box(box.y0, box.y1, box.x0, min(box.x1, box.x0 + _LINES))


def _checksum(pixels: torch.Tensor) -> int:
    # Contiguous in one format: ranks may have chosen channels-last differently for the same pixels.
    values = pixels.detach().to("cpu").contiguous(memory_format=torch.contiguous_format)
    return zlib.crc32(values.view(torch.uint8).numpy().tobytes())


def _difference(gathered: list[dict[str, list[Any]]] | None) -> str | None:
    """Return a sentence about the first pixels that differ; None if all are equal, and on ranks but the root."""
    first_sums: dict[str, tuple[int, int]] = {}
    for rank, sums in enumerate(gathered or ()):
        for name, (checksum, corners) in sums.items():
            first_rank, first_checksum = first_sums.setdefault(name, (rank, checksum))
            if first_checksum != checksum:
                y0, y1, x0, x1 = corners
                return (
                    f"ranks {first_rank} and {rank} were given different images: they differ in rows {y0} to {y1}, "
                    f"columns {x0} to {x1}, which both read. Pass the same batch on all ranks of a replica: the same "
                    f"samples in the same order, with the same augmentation"
                )
    return None
