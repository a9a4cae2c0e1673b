"""Where the tiles of a slide come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from hyfi_core.comm.base import Communicator
from hyfi_core.errors import RequestError


@runtime_checkable
class TileSource(Protocol):
    """The tiles of one slide, read by index; each rank reads only its own, some of them twice in a step.

    ``read`` may be called from another thread, by one thread at a time. A source may also have

    * ``name``, for messages;
    * ``identity``, text that changes whenever a tile does: vectors of a frozen encoder are kept under it;
    * ``like``, (shape, dtype) of a tile: without it, one tile is read to find out;
    * ``kept_bytes``, the most memory that it keeps between reads, and ``forget()``, which frees that memory.
    """

    @property
    def coords(self) -> Any:
        """Return the positions of the tiles, ``(N, 2)``, in level-0 pixels; None if unknown."""
        ...

    def __len__(self) -> int:
        """Return the number of tiles."""
        ...

    def read(self, indices: Sequence[int]) -> torch.Tensor:
        """Return tiles ``(n, 3, T, T)``: floating point, passed on as they are, or uint8, passed on divided by 255."""
        ...


class TensorTiles:
    """The tiles of a slide in memory.

    Args:
        tiles: ``(N, 3, T, T)``, not copied.
        coords: ``(N, 2)`` in level-0 pixels.
        name: name for messages.
    """

    def __init__(self, tiles: torch.Tensor, coords: Any = None, name: str = "") -> None:
        self._tiles, self.coords, self.name = tiles, coords, name

    def __len__(self) -> int:
        """Return the number of tiles."""
        return len(self._tiles)

    def read(self, indices: Sequence[int]) -> torch.Tensor:
        """Return a copy of some tiles."""
        return self._tiles[torch.as_tensor(list(indices), dtype=torch.int64)]


def name_of(slide: TileSource, number: int) -> str:
    """Return the words for a slide in messages: ``slide 'a'``, or ``slide 3 of the batch`` without a name."""
    name = getattr(slide, "name", "")
    return f"slide {str(name)!r}" if name else f"slide {number} of the batch"


def check_slides(tiles: object, labels: torch.Tensor | None) -> list[TileSource]:
    """Check the slides of a batch and return them as a list.

    Raises:
        RequestError: they are not tile sources, one has no tiles, or there are not as many as labels.
    """
    if isinstance(tiles, TileSource):
        raise RequestError("tiles is one TileSource; pass a list with one for each slide of the batch: [source]")
    if not isinstance(tiles, (list, tuple)) or not tiles:
        raise RequestError(
            f"tiles is {type(tiles).__name__}; pass a list with a TileSource for each slide of the batch"
        )
    for number, slide in enumerate(tiles):
        if not isinstance(slide, TileSource):
            raise RequestError(
                f"slide {number} of the batch is {type(slide).__name__}; pass an object with len(), read(indices) and "
                f"coords, such as hyfi_core.TensorTiles(tiles, coords)"
            )
        if not len(slide):
            raise RequestError(f"{name_of(slide, number)} has no tiles; leave it out of the batch")
        if slide.coords is not None and tuple(getattr(slide.coords, "shape", ())) != (len(slide), 2):
            shape = getattr(slide.coords, "shape", None)
            raise RequestError(
                f"{name_of(slide, number)} has {len(slide)} tiles and coords of shape {shape}; use (N, 2)"
            )
    if labels is not None and (not isinstance(labels, torch.Tensor) or labels.dim() < 1 or len(labels) != len(tiles)):
        what = tuple(labels.shape) if isinstance(labels, torch.Tensor) else type(labels).__name__
        raise RequestError(f"labels are {what} for {len(tiles)} slides; pass a tensor with one entry for each slide")
    return list(tiles)


def tile_like(slide: TileSource) -> tuple[tuple[int, ...], torch.dtype]:
    """Return (shape, dtype) of a slide's tiles: its ``like``, or those of its first tile."""
    stated: tuple[tuple[int, ...], torch.dtype] | None = getattr(slide, "like", None)
    if stated is not None:
        return stated
    sample = read_tiles(slide, 0, [0])
    return tuple(sample.shape[1:]), sample.dtype


def gather_lengths(comm: Communicator, slides: Sequence[TileSource], ranks: int) -> list[tuple[int, ...]]:
    """Return the numbers of tiles of each replica's slides (collective): ``[(40, 7), (12,)]`` for two replicas.

    Args:
        comm: ranks of whole replicas.
        slides: slides of this rank's replica.
        ranks: number of ranks of a replica.

    Raises:
        RequestError: on every rank: the ranks of a replica have different slides.
    """
    # All ranks get all lists, so that all raise the same error.
    lengths = comm.broadcast_object(comm.gather_objects([len(slide) for slide in slides]))
    for first in range(0, len(lengths), ranks):
        for rank in range(first, first + ranks):
            if lengths[rank] != lengths[first]:
                raise RequestError(
                    f"ranks disagree: slides of {lengths[first]} tiles on rank {first}, of {lengths[rank]} on rank "
                    f"{rank}; pass the same slides on all ranks of a replica"
                )
    return [tuple(lengths[first]) for first in range(0, len(lengths), ranks)]


def read_tiles(slide: TileSource, number: int, indices: Sequence[int]) -> torch.Tensor:
    """Return tiles of a slide as its source returns them, checked; messages name the slide by ``number``.

    Raises:
        RequestError: the source returned something other than tiles.
    """
    read = slide.read(indices)
    shaped = isinstance(read, torch.Tensor) and read.dim() == 4 and len(read) == len(indices)
    if not shaped or not (read.dtype == torch.uint8 or read.is_floating_point()):
        what = f"{tuple(read.shape)} {read.dtype}" if isinstance(read, torch.Tensor) else type(read).__name__
        raise RequestError(
            f"{name_of(slide, number)}: read({len(indices)} indices) returned {what}; return a tensor "
            f"({len(indices)}, 3, T, T), uint8 or floating point"
        )
    return read


def as_input(tiles: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return tiles as the encoder takes them: bytes are divided by 255."""
    moved = tiles.to(device, dtype)
    # In place is safe: bytes became a new tensor above.
    return moved.div_(255.0) if tiles.dtype == torch.uint8 else moved
