"""Flips and quarter turns of images, as contiguous copies.

numpy copies a transposed image byte by byte. Here, 8 x 8 blocks of bytes are transposed in words of 64 bits, as Warren
transposes bits (Hacker's Delight, 2nd edition, section 7-3), and then words are copied::

    8 rows of a block            exchange halves of 4, 2 and 1 rows     8 columns, one word each
    a0 a1 … a7  (one word)  ──►  with the halves of their words    ──►  a0 b0 … h0
    b0 b1 … b7                                                          a1 b1 … h1
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_SIDE = 8
"""Rows and columns of a block: bytes of a word."""
_BLOCK_ROWS = 16
"""Rows of blocks that are transposed at a time, so that they stay in the cache."""
_WORD = np.dtype("<u8")
_EXCHANGES = (
    (4, np.uint64(32), np.uint64(0x00000000FFFFFFFF)),
    (2, np.uint64(16), np.uint64(0x0000FFFF0000FFFF)),
    (1, np.uint64(8), np.uint64(0x00FF00FF00FF00FF)),
)
"""(distance of two rows that exchange halves, bits of a half, mask of the low halves of a word). The first row gives
its high halves to the second row, for the low halves of that."""


def turned(pixels: NDArray[np.uint8], mirror: bool, turns: int) -> NDArray[np.uint8]:
    """Return ``np.rot90(mirrored pixels, turns)`` as a new contiguous array.

    Args:
        pixels: ``(c, h, w)``; it is not changed.
        mirror: Whether left and right are swapped first.
        turns: Number of quarter turns, counter-clockwise.
    """
    if turns % 2 == 0:
        # Rows keep their direction or are reversed: NumPy copies these fast enough.
        return np.array(np.rot90(pixels[:, :, ::-1] if mirror else pixels, turns, axes=(1, 2)), order="C")
    result = np.empty((pixels.shape[0], pixels.shape[2], pixels.shape[1]), np.uint8)
    # One quarter turn transposes, then reverses the order of rows; three reverse the rows first, then transpose.
    # Mirroring before the turn equals reversing the rows after the transposition. So one quarter turn reverses these
    # rows, mirroring does, and both together cancel out; three quarter turns leave them.
    target = result if mirror == (turns % 4 == 1) else result[:, ::-1]
    _transpose(pixels if turns % 4 == 1 else pixels[:, ::-1], target)
    return result


def _transpose(pixels: NDArray[np.uint8], target: NDArray[np.uint8]) -> None:
    """Write ``pixels (c, h, w)``, transposed, into ``target (c, w, h)``; the pixels of a row are adjacent in both."""
    channels, height, width = pixels.shape
    whole_h, whole_w = height // _SIDE * _SIDE, width // _SIDE * _SIDE
    if whole_h and whole_w:
        for channel in range(channels):
            # Eight adjacent bytes of a row are a word, wherever the row begins.
            words = target[channel, :whole_w, :whole_h].view(_WORD)
            _transpose_blocks(pixels[channel, :whole_h, :whole_w].view(_WORD), words)
    # The rest, which is no whole block: fewer than eight columns, then fewer than eight rows.
    target[:, whole_w:] = pixels[:, :, whole_w:].swapaxes(1, 2)
    target[:, :whole_w, whole_h:] = pixels[:, whole_h:, :whole_w].swapaxes(1, 2)


def _transpose_blocks(words: NDArray[np.uint64], target: NDArray[np.uint64]) -> None:
    """Write the transposed bytes of ``words (h, w / 8)`` into ``target (w, h / 8)``.

    In each block of 8 × 8 bytes, rows that are 4, 2 and 1 apart exchange the halves, quarters and eighths of their
    words that lie on the wrong side of the diagonal.
    """
    rows, columns = words.shape[0] // _SIDE, words.shape[1]
    for first in range(0, rows, _BLOCK_ROWS):
        count = min(_BLOCK_ROWS, rows - first)
        part = words[first * _SIDE : (first + count) * _SIDE].reshape(count, _SIDE, columns)
        # (row of a block, row of blocks, column of blocks): each exchange is one operation on long rows.
        blocks = part.transpose(1, 0, 2).copy()
        for apart, bits, mask in _EXCHANGES:
            # Row k of `upper` and row k of `lower` are `apart` rows apart.
            pairs = blocks.reshape(-1, 2, apart, count, columns)
            upper, lower = pairs[:, 0], pairs[:, 1]
            # `exchanged` has the bits in which the two halves differ: XOR with it exchanges the halves.
            exchanged = ((upper >> bits) ^ lower) & mask
            lower ^= exchanged
            upper ^= exchanged << bits
        # Splitting the first axis makes a view, whatever the strides; column k of a block is row k of the result.
        target.reshape(columns, _SIDE, rows)[:, :, first : first + count] = blocks.transpose(2, 0, 1)
