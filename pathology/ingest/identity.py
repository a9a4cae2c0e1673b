"""Comparison of a stored slide with its source: parameters, size, mtime, and digest if necessary."""

from __future__ import annotations

import hashlib
import hmac
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from data.object_path import ObjectPath
from pathology.errors import SlideError
from pathology.ingest.staging import files_of

_READ_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class SourceStamp:
    """Size and time of all files of a slide (an MRXS has a folder of files beside it).

    Attributes:
        size_bytes: Total size.
        mtime_ns: Time of modification; for several files, a digest of their names, sizes and times; on object storage,
            of their names, sizes and versions.
    """

    size_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> SourceStamp:
        """Return the stamp of a slide.

        Raises:
            SlideError: The slide does not exist or cannot be read.
        """
        if isinstance(path, ObjectPath):
            listing, size_bytes = _listed(path)
            return cls(size_bytes, _short_digest(listing))
        try:
            statuses = [(file.name, file.stat()) for file in files_of(path)]
        except OSError as error:
            raise SlideError(f"the file cannot be read: {error.strerror}") from error
        size_bytes = sum(status.st_size for _, status in statuses)
        if len(statuses) == 1:
            ((_, status),) = statuses
            return cls(size_bytes, status.st_mtime_ns)
        listed = sorted((name, status.st_size, status.st_mtime_ns) for name, status in statuses)
        return cls(size_bytes, _short_digest(repr(listed).encode()))

    def to_json(self, secret: str = "") -> dict[str, int]:
        """Return both numbers as JSON.

        Args:
            secret: If not empty, the time is replaced by a keyed digest.
        """
        return {"size_bytes": self.size_bytes, "mtime_ns": _hidden_time(self.mtime_ns, secret)}


def _hidden_time(mtime_ns: int, secret: str) -> int:
    if not secret:
        return mtime_ns
    # Times of files are unique enough to find a slide by; without the secret the digest tells nothing.
    digest = hmac.digest(secret.encode(), str(mtime_ns).encode(), "sha256")
    return int.from_bytes(digest[:7], "big")


_DOCUMENTS = ("zarr.json", ".zgroup", ".zattrs", "0/zarr.json", "0/.zattrs", "0/.zarray", "OME/METADATA.ome.xml")


def _short_digest(content: bytes) -> int:
    """Return 56 bits of the SHA-256 of some bytes: a number that, like times in nanoseconds, is below 2⁶³."""
    return int.from_bytes(hashlib.sha256(content).digest()[:7], "big")


def _listed(store: ObjectPath) -> tuple[bytes, int]:
    """Return (names, sizes and versions of all objects of a store, as bytes; sum of their sizes).

    Web servers cannot list objects: there, only the files with metadata count.

    Raises:
        SlideError: The server cannot be reached.
    """
    try:
        if store.can_list:
            by_name = store.listing()
        else:
            present = [name for name in _DOCUMENTS if (store / name).is_file()]
            by_name = {name: ((store / name).stat().st_size, (store / name).version()) for name in present}
    except OSError as error:
        raise SlideError(f"the store cannot be read: {error.strerror or error}") from error
    return repr(sorted(by_name.items())).encode(), sum(size for size, _ in by_name.values())


def source_digest(path: Path) -> str:
    """Return the SHA-256 of the slide's file; for several files, that of their digests. See `RunningDigest`.

    Raises:
        SlideError: A file cannot be read.
    """
    with RunningDigest(path) as digest:
        return digest.result()


class RunningDigest:
    """The SHA-256 of a slide's files, computed by a thread while the slide is decoded.

    The thread reads the file sequentially, slightly ahead of the decoder if possible, so that the disk is read once.
    On object storage only the objects' names, sizes and versions are digested, as reading them again would be a second
    download. A context manager that stops the thread on exit.

    Args:
        path: The slide's file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(1, "digest")
        self._digest = self._pool.submit(self._run)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown(wait=True)

    def result(self) -> str:
        """Wait until all files are read, and return the digest in hexadecimal.

        Raises:
            SlideError: A file cannot be read.
        """
        return self._digest.result()

    def _run(self) -> str:
        """Return the digest of a slide's files, or of the list of its objects."""
        if isinstance(self._path, ObjectPath):
            return hashlib.sha256(_listed(self._path)[0]).hexdigest()
        try:
            digests = [self._digest_of(file) for file in files_of(self._path)]
        except OSError as error:
            raise SlideError(f"the file cannot be read: {error.strerror}") from error
        return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()

    def _digest_of(self, file: Path) -> str:
        """Return the SHA-256 of a file."""
        digest, buffer = hashlib.sha256(), memoryview(bytearray(_READ_BYTES))
        # One buffer, instead of a new one for each read.
        with file.open("rb", buffering=0) as stream:
            # After `_stop`, the digest is that of a part of the file, but nobody uses it.
            while (size := stream.readinto(buffer)) and not self._stop.is_set():
                digest.update(buffer[:size])
        return digest.hexdigest()


def differences(stored: dict[str, Any], requested: dict[str, Any], prefix: str = "") -> list[str]:
    """Return the differences of two nested parameter objects, as lines ``outer.key: old → new``."""
    lines = []
    for key in sorted(stored.keys() | requested.keys()):
        before, after = stored.get(key), requested.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            lines += differences(before, after, f"{prefix}{key}.")
        elif before != after:
            lines.append(f"{prefix}{key}: {before} → {after}")
    return lines
