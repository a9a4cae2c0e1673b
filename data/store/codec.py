"""How the pixels of one chunk become bytes: zstd or JPEG, and under a checksum.

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
import numpy.typing as npt
import simplejpeg

from hyfi_core.errors import RequestError

_codecs: Any = imagecodecs  # its annotations know bytes alone; arrays are taken, too

Pixels = npt.NDArray[np.uint8]
Buffers = tuple[bytes | Pixels, ...]
"""Bytes that follow each other, where joining them would be one copy more."""
CRC_BYTES = 4
_CRC32C = {"name": "crc32c"}
_MOST = {"zstd": 22, "jpeg": 100}
_FULL_COLOUR_FROM = 90
"""JPEG quality from which colour is kept at full resolution, as libvips does."""


@dataclass(frozen=True, slots=True)
class PixelCodec:
    """One way to store chunks.

    Attributes:
        name: ``zstd`` (exact) or ``jpeg``.
        level: zstd's level 1–22 or JPEG's quality 1–100; None for JPEG streams of other encoders.
    """

    name: str = "zstd"
    level: int | None = 1

    @classmethod
    def parse(cls, text: str) -> PixelCodec:
        """Return the codec of ``zstd:N`` or ``jpeg:Q``.

        Raises:
            RequestError: It is something else.
        """
        name, _, level = text.partition(":")
        if name not in _MOST or not level.isdecimal() or not 1 <= int(level) <= _MOST[name]:
            raise RequestError(
                f"--codec {text}: expected zstd:1 (fast) to zstd:22 (small), or jpeg:1 to jpeg:100 (lossy)"
            )
        return cls(name, int(level))

    def __str__(self) -> str:
        return self.name if self.level is None else f"{self.name}:{self.level}"

    @property
    def exact(self) -> bool:
        """Whether decoding gives the pixels that were encoded."""
        return self.name == "zstd"

    def to_json(self) -> list[dict[str, Any]]:
        """Return the chain of zarr codecs."""
        if self.name == "zstd":
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
        """Return the bytes of a whole chunk ``(c, y, x)`` or ``(y, x)`` of any strides, its checksum at their end."""
        if self.name == "zstd":
            chunk = scratch("pixels", pixels.size).reshape(pixels.shape)
            np.copyto(chunk, pixels)
            # Fresh memory for what may become as large as the pixels would cost a fifth of the time.
            room = scratch("coded", pixels.size + pixels.size // 128 + 1024)
            size = _codecs.zstd_encode(chunk, level=self.level, out=room).size
            room[size : size + CRC_BYTES] = np.frombuffer(_checksum(room[:size]), np.uint8)
            return room[: size + CRC_BYTES].tobytes()
        subsampling = "444" if (self.level or 0) >= _FULL_COLOUR_FROM else "420"
        interleaved = np.ascontiguousarray(pixels.transpose(1, 2, 0))
        return joined(with_checksum(_codecs.jpeg8_encode(interleaved, level=self.level, subsampling=subsampling)))

    def decode(self, body: Pixels, shape: tuple[int, ...]) -> Pixels:
        """Return the pixels of a chunk; they are valid until this thread decodes or encodes the next.

        Args:
            body: Its bytes without the checksum.
            shape: Its ``(c, y, x)`` or ``(y, x)``.

        Raises:
            ValueError, RuntimeError: It does not decode, or to another size.
        """
        size = int(np.prod(shape))
        flat = scratch("pixels", size)
        if self.name == "zstd":
            # The result is the part of ``flat`` that was written.
            if _codecs.zstd_decode(body, out=flat).size != size:
                raise ValueError(f"its pixels are not {size} bytes")
            return flat.reshape(shape)
        channels, height, width = shape
        interleaved = flat.reshape(height, width, channels)
        # Strict: what libjpeg only warns of is damage here.
        if simplejpeg.decode_jpeg(body, "RGB", buffer=interleaved, strict=True).shape != interleaved.shape:
            raise ValueError(f"it is not of {height} × {width} px")
        return interleaved.transpose(2, 0, 1)


_local = threading.local()


def scratch(name: str, size_bytes: int) -> Pixels:
    """Return this thread's memory of a name, flat: the same every time, so that it stays in the cache."""
    found: Pixels | None = getattr(_local, name, None)
    if found is None or found.size < size_bytes:
        found = np.empty(size_bytes, np.uint8)
        setattr(_local, name, found)
    return found[:size_bytes]


ZSTD = PixelCodec("zstd", 1)
"""Default codec."""


def with_checksum(*body: bytes | Pixels) -> Buffers:
    """Return ``body``, in parts, with its crc32c (little-endian) as the last."""
    return *body, _checksum(*body)


def joined(parts: Iterable[Any]) -> bytes:
    """Return parts as one; their annotation knows no arrays, which are taken, too."""
    return b"".join(parts)


def without_checksum(data: bytes | Pixels) -> Pixels:
    """Return ``data`` without the crc32c at its end, a view.

    Raises:
        ValueError: The checksum is wrong.
    """
    whole = np.frombuffer(data, np.uint8)
    body = whole[:-CRC_BYTES]
    if len(whole) < CRC_BYTES or _checksum(body) != whole[-CRC_BYTES:].tobytes():
        raise ValueError("the checksum is wrong")
    return body


def _checksum(*body: bytes | Pixels) -> bytes:
    value = 0
    for part in body:
        value = google_crc32c.extend(value, part)
    return value.to_bytes(CRC_BYTES, "little")
