"""What of an unfinished slide is finished: a line for each file, so that a killed ingest goes on where it was.

The lines stand in ``journal.jsonl`` of the unfinished slide's folder. A line is written when its file is on the disk
under its name; a line that was cut off says nothing, and a line whose file is not as it says counts for nothing.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path

from data.files import sha256_of
from data.store.shard import FileEntry

JOURNAL = "journal.jsonl"


class Journal:
    """The files of one unfinished slide; any number of threads may add to it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._earlier = _load(folder / JOURNAL)
        self.entries: dict[str, FileEntry] = {}
        """Files of this run, and those of earlier runs that `finished` has found whole."""
        self._file = (folder / JOURNAL).open("a", encoding="utf-8")
        self._file.write("\n")  # ends a line that was cut off

    def finished(self, name: str) -> bool:
        """Whether an earlier run wrote this file and it is still whole; reads it once."""
        if name in self.entries:
            return True
        entry = self._earlier.pop(name, None)
        if entry is None or not _is_whole(self._folder / name, entry):
            return False
        with self._lock:
            self.entries[name] = entry
        return True

    def add(self, name: str, entry: FileEntry) -> None:
        """Note that a file is on the disk."""
        line = json.dumps({"name": name, **entry.to_json()}) + "\n"
        with self._lock:
            self.entries[name] = entry
            self._file.write(line)
            self._file.flush()

    def close(self) -> None:
        """Close the file; the journal stays."""
        self._file.close()

    def remove(self) -> None:
        """Remove the journal: the slide is whole, and its own list takes its place."""
        self._file.close()
        (self._folder / JOURNAL).unlink()


def _load(path: Path) -> dict[str, FileEntry]:
    found: dict[str, FileEntry] = {}
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return found
    for line in lines:
        try:
            value = json.loads(line)
            found[str(value["name"])] = FileEntry.from_json(value)
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return found


def _is_whole(path: Path, entry: FileEntry) -> bool:
    if entry.size is None:
        return not path.exists()
    try:
        return path.stat().st_size == entry.size and sha256_of(path) == entry.sha256
    except OSError:
        return False
