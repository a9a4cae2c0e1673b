"""Random numbers as a function of a key: the same on every rank, in any order, after a resume."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray


def keyed_bits(count: int, *key: int | str) -> NDArray[np.uint64]:
    """Return ``count`` random 64-bit words that depend only on ``key``.

    They are the raw output of the counter-based generator Philox 4x64-10 (Salmon et al., SC'11), whose 128-bit key is
    the BLAKE2b hash of ``key``. Across versions, NumPy keeps raw output the same, but not that of its distributions.

    Args:
        count: Number of words.
        key: Integers and strings; ``(1, "a")`` and ``("1", "a")`` are different keys.
    """
    # As Python's int: NumPy's integers have another `repr`, so they would be another key.
    exact = tuple(part if isinstance(part, str) else int(part) for part in key)
    digest = hashlib.blake2b(repr(exact).encode(), digest_size=16, person=b"hyfi").digest()
    words: NDArray[np.uint64] = np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(count)
    return words


def keyed_uniforms(count: int, *key: int | str) -> NDArray[np.float64]:
    """Return ``count`` numbers, uniform in [0, 1), that depend only on ``key`` (53 random bits each)."""
    # A float64 has 53 bits of precision, so nothing is rounded, up to 1.
    return (keyed_bits(count, *key) >> np.uint64(11)).astype(np.float64) * np.float64(2.0**-53)


def keyed_permutation(count: int, *key: int | str) -> NDArray[np.int64]:
    """Return a permutation of ``range(count)``, int64, that depends only on ``key``."""
    if count == 0:
        return np.zeros(0, np.int64)
    # Stable: if two words are equal, their order is still the same on every machine.
    return np.argsort(keyed_bits(count, *key), kind="stable").astype(np.int64)
