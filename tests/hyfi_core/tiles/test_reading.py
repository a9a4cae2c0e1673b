"""Chunks are read in order, and a slide keeps memory only while its chunks are read."""

from __future__ import annotations

import torch

from hyfi_core.tiles.chunks import SlideParts
from hyfi_core.tiles.reading import SourceReader
from hyfi_core.tiles.source import TensorTiles


class KeepingTiles(TensorTiles):
    """Tiles that note in ``events`` when they are read, and when what they keep is freed."""

    def __init__(self, name: str, count: int, kept_bytes: int, events: list[str]) -> None:
        super().__init__(torch.arange(count)[:, None, None, None].to(torch.uint8), name=name)
        self.kept_bytes, self._events = kept_bytes, events

    def read(self, indices: range) -> torch.Tensor:  # type: ignore[override]
        self._events.append(self.name)
        return super().read(indices)

    def forget(self) -> None:
        self._events.append(f"{self.name} forgets")


def test_a_slide_forgets_when_another_is_read() -> None:
    events: list[str] = []
    slides = [KeepingTiles("a", 3, 70, events), KeepingTiles("b", 2, 50, events)]
    reader, like = SourceReader(), ((1, 1, 1), torch.uint8)
    chunks = SlideParts((3, 2), 1).chunks(0, 2)
    read = [tiles.flatten().tolist() for _, tiles in reader.read(slides, chunks, like, lambda seconds: None, True)]
    assert read == [[0, 1], [2], [0, 1]]
    assert events == ["a", "a", "a forgets", "b", "b forgets"]
    assert reader.kept_bytes(slides) == 70
    assert reader.kept_bytes([TensorTiles(torch.zeros(1, 3, 2, 2))]) == 0


def test_a_slide_forgets_when_its_reader_stops_early() -> None:
    events: list[str] = []
    slides, chunks = [KeepingTiles("a", 3, 70, events)], SlideParts((3,), 1).chunks(0, 1)
    reading = SourceReader().read(slides, chunks, ((1, 1, 1), torch.uint8), lambda seconds: None, True)
    next(reading)
    reading.close()
    assert events[-1] == "a forgets"
