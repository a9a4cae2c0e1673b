"""The feed of a trainer whose slides are bags of tiles: receives the tiles of its chunks from loader ranks.

::

    loaders    a0 a1 a2 a3 …  a3 a2 …  b0 b1           read and sent when requested, in turn from each loader
    trainer    a0 a1 ╎ a2 a3                           at most ``ahead`` requested and not taken yet
               taken ╎ on their way
               pass 1         pass 2   next step       the first chunks of the next step follow the last of this one
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from data.loading.decode import BANDS
from data.loading.feed import Report
from data.loading.loader_link import PIXELS_TAG, LoaderLink
from hyfi_core.comm.base import Communicator, Message
from hyfi_core.plan.box import Box
from hyfi_core.tiles.chunks import TileChunk
from hyfi_core.tiles.reading import Like
from hyfi_core.tiles.source import TileSource

MOST_TILES = 32
"""Most tiles in one message: longer chunks arrive in several."""

TileSpan = tuple[int, int, int]
"""The tiles of one message: (number of the sample, first tile, tile after the last)."""


class PackedTile(Protocol):
    """The form in which a tile is sent, a row of an image; `data.tiles.rows.TileRow` implements it."""

    @property
    def width(self) -> int:
        """Number of columns."""
        ...

    def unpack(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the ``n`` tiles of rows ``(3, n, width)`` uint8, in new memory."""
        ...


class TileFeed:
    """Receives tiles, in the chunks in which a trainer's engine encodes them; a `hyfi_core.tiles.reading.ChunkReader`.

    Memory: ``ahead`` messages of at most 32 tiles, and a chunk.

    Args:
        comm: Communicator of all ranks.
        loaders: Ranks of the loaders that serve this trainer.
        replica: The trainer's replica.
        row: How a tile becomes a row of an image.
        ahead: Largest number of messages requested and not taken yet.
        pinned: Whether to receive in memory from which GPUs copy.
        check_signals: Called while waiting, for signals; may raise.

    Attributes:
        ahead: Chunks that may be in memory beside the one at work.
    """

    def __init__(
        self,
        comm: Communicator,
        loaders: Sequence[int],
        replica: int,
        row: PackedTile,
        ahead: int,
        pinned: bool = False,
        check_signals: Callable[[], None] = lambda: None,
    ) -> None:
        self.ahead = ahead
        self._loaders, self._row, self._pinned = tuple(loaders), row, pinned
        # Spans that are requested and not taken yet: (number of the request, memory of the tiles).
        self._open: dict[TileSpan, tuple[int, torch.Tensor]] = {}
        self._turn_numbers: tuple[int, ...] = ()  # of the turn's samples
        self._later: list[TileSpan] = []  # spans that the next turn needs first
        self._waiting: deque[TileSpan] = deque()  # to be requested, in this order
        self._sent = 0  # requests so far
        # What loaders need to know. One more than is requested ahead, for a span that was not expected; a box has the
        # tiles of a message, each a row of an image.
        hello = {"parts": [], "replica": replica, "ahead": ahead + 1, "box_bytes": BANDS * MOST_TILES * row.width}
        self._link = LoaderLink(comm, loaders, hello, check_signals)

    @property
    def reports(self) -> dict[int, Report]:
        """Report of each loader, by rank; complete after ``close``."""
        return self._link.reports

    def begin(self, numbers: Sequence[int], chunks: Sequence[TileChunk], later: Sequence[TileSpan]) -> None:
        """Begin a turn, and request the first of its tiles.

        Args:
            numbers: Numbers of this turn's samples, in the order of the engine's slides.
            chunks: Chunks that the engine is expected to encode first.
            later: Spans that the next turn is expected to need first, see `spans`.
        """
        self._turn_numbers, self._later = tuple(numbers), list(later)
        self._expect(spans(chunks, numbers))

    def read(
        self,
        slides: Sequence[TileSource],
        chunks: Sequence[TileChunk],
        like: Like,
        waited: Callable[[float], None],
        last: bool,
    ) -> Iterator[tuple[TileChunk, torch.Tensor]]:
        """Send requests now; return an iterator of (chunk, its tiles), in order.

        Args:
            slides: The slides of the batch; not used, because loaders read them.
            chunks: The chunks of this rank.
            like: Shape and dtype of a tile.
            waited: Called for each chunk with the seconds spent waiting for it.
            last: Whether these are the last chunks of the turn: tiles of the next turn are requested after them.
        """
        self._expect(spans(chunks, self._turn_numbers) + (self._later if last else []))
        return self._taken(chunks, like, waited)

    def kept_bytes(self, slides: Sequence[TileSource]) -> int:
        """Return 0: slides are not read here."""
        return 0

    def close(self, stopped: bool) -> None:
        """End the link: receive all requested tiles, then the loaders' reports; ``stopped``: as for ``Feed.close``."""
        self._link.close(stopped)

    def _taken(
        self, chunks: Sequence[TileChunk], like: Like, waited: Callable[[float], None]
    ) -> Iterator[tuple[TileChunk, torch.Tensor]]:
        """Yield each chunk with its tiles; ``waited`` is called with the seconds that this took."""
        shape, dtype = like
        for chunk in chunks:
            start_s = time.perf_counter()
            # A long chunk arrives in several messages, one for each span.
            parts = [self._take(span) for span in spans([chunk], self._turn_numbers)]
            if len(parts) == 1:
                tiles = parts[0]  # not copied
            else:
                tiles = torch.cat(parts) if parts else torch.empty((0, *shape), dtype=dtype)
            del parts  # otherwise the messages would stay in memory while the engine encodes their tiles
            waited(time.perf_counter() - start_s)
            # The engine drops its reference before it takes the next chunk; this frame must, too.
            yield chunk, tiles
            del tiles

    def _expect(self, coming: list[TileSpan]) -> None:
        """Request these spans from now on, in order; drop requested spans that are not among them."""
        expected = set(coming)
        self._open = {span: opened for span, opened in self._open.items() if span in expected}
        self._waiting = deque(span for span in coming if span not in self._open)
        self._request_ahead()

    def _take(self, span: TileSpan) -> torch.Tensor:
        """Return the tiles of a span when they have arrived, and request the next ones."""
        if span not in self._open:
            # It is read out of order: `ahead` other spans were requested before it.
            self._waiting.remove(span)
            self._request(span)
        # Request the next spans before waiting for this one: the loader is then busy meanwhile.
        request, rows = self._open.pop(span)
        self._request_ahead()
        self._link.wait(request)
        return self._row.unpack(rows)

    def _request_ahead(self) -> None:
        """Request the next spans until ``ahead`` are requested and not taken."""
        while self._waiting and len(self._open) < self.ahead:
            self._request(self._waiting.popleft())

    def _request(self, span: TileSpan) -> None:
        """Request the tiles of a span from the next loader."""
        number, start, stop = span
        box = Box(start, stop, 0, self._row.width)
        rows = torch.empty((BANDS, *box.shape), dtype=torch.uint8, pin_memory=self._pinned)
        # Loaders in turn, whatever the sample: one slide has many tiles, and every loader can read them.
        loader = self._loaders[self._sent % len(self._loaders)]
        self._sent += 1
        asked = {"numbers": [number], "box": (box.y0, box.y1, box.x0, box.x1)}
        self._open[span] = self._link.request([Message(loader, rows, PIXELS_TAG)], {loader: asked}), rows


def spans(chunks: Sequence[TileChunk], numbers: Sequence[int]) -> list[TileSpan]:
    """Return the spans of chunks, each at most ``MOST_TILES`` tiles long: one for each message.

    Args:
        chunks: Chunks in the order in which they are encoded.
        numbers: Sample number of each slide of the batch.
    """
    return [
        (numbers[chunk.slide], start, min(start + MOST_TILES, chunk.stop))
        for chunk in chunks
        for start in range(chunk.start, chunk.stop, MOST_TILES)
    ]
