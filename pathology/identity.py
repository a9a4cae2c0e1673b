"""Whether a slide in the store is the slide that is asked for: parameters, size, mtime, and digest in doubt."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data.files import sha256_of
from pathology.errors import SlideError


@dataclass(frozen=True, slots=True)
class SourceStamp:
    """Size and time of a slide's files; companions (the folder beside an MRXS) included."""

    size_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> SourceStamp:
        """Stat the slide's files.

        Raises:
            SlideError: The slide is not there or cannot be read.
        """
        try:
            stats = [f.stat() for f in slide_files(path)]
        except OSError as error:
            raise SlideError(f"the file cannot be read: {error.strerror}") from error
        return cls(sum(s.st_size for s in stats), max(s.st_mtime_ns for s in stats))

    def to_json(self) -> dict[str, int]:
        """Return both numbers."""
        return asdict(self)


def slide_files(path: Path) -> list[Path]:
    """Return the slide's file and, for the formats that have one, the files of its companion folder."""
    folder = path.with_suffix("")
    if path.suffix.lower() in {".mrxs", ".vms", ".vmu"} and folder.is_dir():
        return [path, *sorted(f for f in folder.iterdir() if f.is_file())]
    return [path]


def source_digest(path: Path) -> str:
    """Return the SHA-256 of the slide's file; with companions, that of all their digests."""
    files = slide_files(path)
    if len(files) == 1:
        return sha256_of(path)
    return hashlib.sha256("".join(sha256_of(f) for f in files).encode()).hexdigest()


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """Return what differs between two nested parameter objects, as lines ``key: old → new``."""
    found = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            found += differences(before, after, f"{prefix}{key}.")
        elif before != after:
            found.append(f"{prefix}{key}: {before} → {after}")
    return found
