"""The layout of a zarr array: the file, slot and codec of each chunk.

```
array    ┌──────────────┬─────── …   divided into shards, each a file `c/0/<row>/<column>`
         │ 0 1 2 3 4 …  │            a shard is divided into chunks: slot = row · columns + column
         │ 8 9 …        │            without shards each chunk is a file with one slot
```

Pixels beyond the array's border are never read; slots completely beyond it are empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from data.store.codec import CRC_BYTES, ZSTD, PixelCodec
from hyfi_core.plan.box import Box

BACKGROUND = 255
CHUNK_PX = 512
SHARD_PX = 4096


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """The layout of a uint8 array ``(y, x)`` or ``(c, y, x)``; every chunk has all channels.

    Attributes:
        shape: The array's shape.
        chunk_px: Height and width of a chunk.
        shard_px: Height and width of the box in a file: multiples of ``chunk_px``; without shards, ``chunk_px``.
        sharded: Whether files are shards with an index, or bare chunks.
        codec: How chunks are encoded.
    """

    shape: tuple[int, ...]
    chunk_px: tuple[int, int] = (CHUNK_PX, CHUNK_PX)
    shard_px: tuple[int, int] = (SHARD_PX, SHARD_PX)
    sharded: bool = True
    codec: PixelCodec = ZSTD

    def __post_init__(self) -> None:
        if any(s % c for s, c in zip(self.shard_px, self.chunk_px, strict=True)):
            raise ValueError("expected shard_px to be a multiple of chunk_px")
        if not self.sharded and self.shard_px != self.chunk_px:
            raise ValueError("expected shard_px equal to chunk_px in an array without shards")

    @property
    def box(self) -> Box:
        """The box of the whole array."""
        return Box.of_size(self.shape[-2], self.shape[-1])

    @property
    def fill(self) -> int:
        """Value of an absent chunk: white in images, 0 in labels."""
        return BACKGROUND if len(self.shape) > 2 else 0

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """Shape of a chunk, channels included."""
        return (*self.shape[:-2], *self.chunk_px)

    @property
    def slots(self) -> tuple[int, int]:
        """Rows and columns of chunks in one file."""
        return self.shard_px[0] // self.chunk_px[0], self.shard_px[1] // self.chunk_px[1]

    @property
    def index_bytes(self) -> int:
        """Length of a shard's index, its checksum included."""
        return self.slots[0] * self.slots[1] * 16 + CRC_BYTES  # offset and length of each chunk, 8 bytes each

    def files(self, box: Box | None = None) -> Iterator[tuple[int, int]]:
        """Yield (row, column) of the files that hold ``box`` (default: all), row by row."""
        box, (sh, sw) = box or self.box, self.shard_px
        # -(-a // b) rounds up: the first file after the box.
        for row in range(box.y0 // sh, -(-box.y1 // sh)):
            for column in range(box.x0 // sw, -(-box.x1 // sw)):
                yield row, column

    def file_name(self, file: tuple[int, int]) -> str:
        """Return the path of a file inside the array's folder."""
        return "/".join(["c", *("0" for _ in self.shape[:-2]), str(file[0]), str(file[1])])

    def file_box(self, file: tuple[int, int]) -> Box:
        """Return the box of the array that a file covers."""
        (row, column), (sh, sw) = file, self.shard_px
        return Box(row * sh, (row + 1) * sh, column * sw, (column + 1) * sw).intersect(self.box)

    def chunk_box(self, file: tuple[int, int], slot: int) -> Box:
        """Return the box of a chunk, which may extend beyond the array."""
        (ch, cw), (row, column) = self.chunk_px, divmod(slot, self.slots[1])
        y, x = file[0] * self.shard_px[0] + row * ch, file[1] * self.shard_px[1] + column * cw
        return Box(y, y + ch, x, x + cw)

    def used_slots(self, file: tuple[int, int]) -> list[int]:
        """Return the slots of a file that hold pixels of the array."""
        (ch, cw), inside = self.chunk_px, self.file_box(file)
        rows, columns = -(-inside.height // ch), -(-inside.width // cw)
        return [row * self.slots[1] + column for row in range(rows) for column in range(columns)]

    def to_json(self) -> dict[str, Any]:
        """Return the array's ``zarr.json``."""
        chain: list[dict[str, Any]] = self.codec.to_json()
        leading = list(self.shape[:-2])
        if self.sharded:
            inner = {
                "chunk_shape": [*leading, *self.chunk_px],
                "codecs": chain,
                "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
                "index_location": "end",
            }
            chain = [{"name": "sharding_indexed", "configuration": inner}]
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(self.shape),
            "data_type": "uint8",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [*leading, *self.shard_px]}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": self.fill,
            "codecs": chain,
            "dimension_names": ["c", "y", "x"][-len(self.shape) :],
            "attributes": {},
            "storage_transformers": [],
        }

    @classmethod
    def from_json(cls, meta: dict[str, Any]) -> ArrayLayout:
        """Return the layout of a ``zarr.json``.

        Raises:
            KeyError, TypeError, ValueError, IndexError, AttributeError: It is not a layout that `to_json` writes.
        """
        if meta["zarr_format"] != 3 or meta["data_type"] != "uint8":
            raise ValueError("expected a uint8 array of zarr format 3")
        if meta["chunk_key_encoding"].get("configuration", {}).get("separator", "/") != "/":
            raise ValueError("expected chunk keys with slashes")
        shape = _integers(meta["shape"])
        outer = _integers(meta["chunk_grid"]["configuration"]["chunk_shape"])
        chain, inner = meta["codecs"], outer
        sharded = chain[0]["name"] == "sharding_indexed"
        if sharded:
            sharding = chain[0]["configuration"]
            chain, inner = sharding["codecs"], _integers(sharding["chunk_shape"])
            # zarr also allows the index at the start of a shard, which `read_index` does not.
            if len(meta["codecs"]) != 1 or sharding.get("index_location", "end") != "end":
                raise ValueError("expected sharding as the only codec, with the index at the end")
        if inner[:-2] != shape[:-2] or outer[:-2] != shape[:-2]:
            raise ValueError("expected all channels in one chunk")
        codec = PixelCodec.from_json(chain)
        return cls(shape, (inner[-2], inner[-1]), (outer[-2], outer[-1]), sharded, codec)


@dataclass(frozen=True, slots=True)
class LevelSize:
    """Height and width of one level in pixels."""

    height_px: int
    width_px: int


@dataclass(frozen=True, slots=True)
class StoredLevel:
    """One level to write: its layout and its microns per pixel (y, x)."""

    layout: ArrayLayout
    mpp: tuple[float, float]


def pyramid_levels(
    sizes: Sequence[LevelSize], mpp_um: float, codec: PixelCodec = ZSTD, sharded: bool = True
) -> tuple[StoredLevel, ...]:
    """Return the levels of a pyramid in which each level is half the size of the one before.

    Args:
        sizes: Sizes of the levels, finest first.
        mpp_um: Microns per pixel of the finest level, in both axes.
        codec: How chunks are encoded; default ``zstd:1``.
        sharded: True: each file is a shard of 8 × 8 chunks; False: each chunk is a file.
    """
    side = SHARD_PX if sharded else CHUNK_PX
    levels = []
    for k, size in enumerate(sizes):
        shape = (3, size.height_px, size.width_px)
        layout = ArrayLayout(shape, (CHUNK_PX, CHUNK_PX), (side, side), sharded, codec)
        levels.append(StoredLevel(layout, (mpp_um * 2**k, mpp_um * 2**k)))
    return tuple(levels)


def _integers(values: list[Any]) -> tuple[int, ...]:
    return tuple(int(n) for n in values)
