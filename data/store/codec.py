"""Chunk codecs: pixels to bytes by zstd or JPEG, followed by a checksum.

```
zstd    pixels (c, y, x) → zstd → crc32c
jpeg    pixels (c, y, x) → (y, x, c) → JPEG → crc32c
```

The JSON is that of zarr 3 (`transpose`, `bytes`, `zstd`, `crc32c` of the core specification) and, for JPEG, of the
codec that the package imagecodecs registers as `imagecodecs_jpeg`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import google_crc32c
import imagecodecs
import numpy as np
import simplejpeg

from data.arrays import Pixels
from hyfi_core.errors import RequestError

_codecs: Any = imagecodecs  # its type annotations allow only bytes; it accepts arrays too

Buffers = tuple[bytes | Pixels, ...]
"""Consecutive bytes in several pieces, which are not joined to save a copy."""
CRC_BYTES = 4
_CRC32C = {"name": "crc32c"}
_MAX_LEVEL = {"zstd": 22, "jpeg": 100}
_FULL_COLOUR_QUALITY = 90
"""JPEG quality from which chroma is not subsampled, as in libvips."""


@dataclass(frozen=True, slots=True)
class PixelCodec:
    """How chunks are encoded.

    Attributes:
        name: ``zstd`` (lossless) or ``jpeg``.
        level: zstd's level 1–22 or JPEG's quality 1–100; None for JPEG tiles copied from a slide's file.
    """

    name: str = "zstd"
    level: int | None = 1

    @classmethod
    def parse(cls, text: str) -> PixelCodec:
        """Return the codec of ``zstd:N`` or ``jpeg:Q``.

        Raises:
            RequestError: ``text`` is neither.
        """
        name, _, level = text.partition(":")
        if name not in _MAX_LEVEL or not level.isdecimal() or not 1 <= int(level) <= _MAX_LEVEL[name]:
            raise RequestError(
                f"--codec {text}: expected zstd:1 (fast) to zstd:22 (small), or jpeg:1 to jpeg:100 (lossy)"
            )
        return cls(name, int(level))

    def __str__(self) -> str:
        return self.name if self.level is None else f"{self.name}:{self.level}"

    @property
    def exact(self) -> bool:
        """Whether the codec is lossless."""
        return self.name == "zstd"

    def to_json(self) -> list[dict[str, Any]]:
        """Return the codec chain for ``zarr.json``."""
        if self.name == "zstd":
            # Without zstd's own checksum: the crc32c behind it also covers the compressed bytes.
            zstd = {"name": "zstd", "configuration": {"level": self.level, "checksum": False}}
            return [{"name": "bytes"}, zstd, _CRC32C]
        jpeg: dict[str, Any] = {"name": "imagecodecs_jpeg"}
        if self.level is not None:
            jpeg["configuration"] = {"level": self.level}
        return [{"name": "transpose", "configuration": {"order": [1, 2, 0]}}, jpeg, _CRC32C]

    @classmethod
    def from_json(cls, chain: list[dict[str, Any]]) -> PixelCodec:
        """Return the codec of a chain of zarr codecs.

        Raises:
            ValueError: The chain is not one of those that `to_json` makes.
        """
        names = tuple(codec["name"] for codec in chain)
        if names == ("bytes", "zstd", "crc32c"):
            return cls("zstd", int(chain[1]["configuration"]["level"]))
        if names == ("transpose", "imagecodecs_jpeg", "crc32c") and chain[0]["configuration"]["order"] == [1, 2, 0]:
            level = chain[1].get("configuration", {}).get("level")
            return cls("jpeg", None if level is None else int(level))
        raise ValueError(f"expected the codecs bytes, zstd, crc32c or transpose, imagecodecs_jpeg, crc32c; got {names}")

    def encode(self, pixels: Pixels) -> bytes:
        """Encode a whole chunk, ``(c, y, x)`` or ``(y, x)`` of any strides; return its bytes and their crc32c."""
        if self.name == "zstd":
            chunk = scratch("pixels", pixels.size).reshape(pixels.shape)
            np.copyto(chunk, pixels)
            # A reused buffer: allocating one for each chunk would take a fifth of the time. It is larger than
            # ZSTD_compressBound (size + size / 256), which pixels that cannot be compressed may need.
            room = scratch("encoded", pixels.size + pixels.size // 128 + 1024)
            size = _codecs.zstd_encode(chunk, level=self.level, out=room).size
            room[size : size + CRC_BYTES] = np.frombuffer(_checksum(room[:size]), np.uint8)
            # A copy: the next chunk of this thread is encoded into the same buffer.
            return room[: size + CRC_BYTES].tobytes()
        subsampling = "444" if (self.level or 0) >= _FULL_COLOUR_QUALITY else "420"
        # The JPEG encoder needs the three values of a pixel side by side.
        interleaved = np.ascontiguousarray(pixels.transpose(1, 2, 0))
        return joined(with_checksum(_codecs.jpeg8_encode(interleaved, level=self.level, subsampling=subsampling)))

    def decode(self, body: Pixels, shape: tuple[int, ...]) -> Pixels:
        """Decode a chunk; the pixels are valid until this thread decodes or encodes the next chunk.

        Args:
            body: The chunk's bytes without the checksum.
            shape: The chunk's shape, ``(c, y, x)`` or ``(y, x)``.

        Raises:
            ValueError, RuntimeError: The bytes do not decode, or decode to another shape.
        """
        size = int(np.prod(shape))
        flat = scratch("pixels", size)
        if self.name == "zstd":
            # The result is a view of the part of ``flat`` that was written.
            if _codecs.zstd_decode(body, out=flat).size != size:
                raise ValueError(f"it does not decode to {size} bytes")
            return flat.reshape(shape)
        channels, height, width = shape
        interleaved = flat.reshape(height, width, channels)
        # `strict` treats warnings of libjpeg as damage.
        if simplejpeg.decode_jpeg(body, "RGB", buffer=interleaved, strict=True).shape != interleaved.shape:
            raise ValueError(f"it is not {height} × {width} px")
        # A view is enough: the caller copies the pixels to their place.
        return interleaved.transpose(2, 0, 1)


_local = threading.local()


def scratch(name: str, size_bytes: int) -> Pixels:
    """Return ``size_bytes`` of this thread's buffer ``name``; all calls share it, so it stays in the CPU cache."""
    buffer: Pixels | None = getattr(_local, name, None)
    if buffer is None or buffer.size < size_bytes:
        buffer = np.empty(size_bytes, np.uint8)
        setattr(_local, name, buffer)
    return buffer[:size_bytes]


ZSTD = PixelCodec("zstd", 1)
"""Default codec."""


def with_checksum(*body: bytes | Pixels) -> Buffers:
    """Return the pieces of ``body``, and the crc32c of all of them (little-endian) as the last piece."""
    return *body, _checksum(*body)


def joined(parts: Iterable[Any]) -> bytes:
    """Concatenate bytes and uint8 arrays (`bytes.join` takes arrays, but its annotation does not say so)."""
    return b"".join(parts)


def without_checksum(data: bytes | memoryview | Pixels) -> Pixels:
    """Check the crc32c at the end of ``data`` and return a view without it.

    Raises:
        ValueError: The checksum is wrong.
    """
    stored = np.frombuffer(data, np.uint8)
    body = stored[:-CRC_BYTES]
    # Also for data shorter than a checksum, which equals no checksum.
    if _checksum(body) != stored[-CRC_BYTES:].tobytes():
        raise ValueError("the checksum is wrong")
    return body


def _checksum(*body: bytes | Pixels) -> bytes:
    """Return the crc32c of consecutive pieces, 4 bytes, little-endian."""
    value = 0
    for part in body:
        value = google_crc32c.extend(value, part)
    return value.to_bytes(CRC_BYTES, "little")
