"""An unfinished slide: the folder in which it is prepared, and the journal of finished files.

```
STORE/.<slide_id>.zarr.part-<digest>         with an identity: the next writer of the same identity resumes there
STORE/.<slide_id>.zarr.tmp-<host>-<pid>      without: removed when its process has ended
    journal.jsonl                            one line for each file of pixels that is whole
```

A line is written when its file is on the disk under its name; a line that was cut off says nothing, and a line whose
file is not as it says counts for nothing.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from pathlib import Path
from typing import Any

from data.files import remove_leftovers, sha256_of, temporary_beside
from data.store.shard import BESIDE, FileEntry

JOURNAL = "journal.jsonl"


def unfinished_folder(final: Path, identity: list[Any] | None) -> Path:
    """Return the folder in which ``final`` is prepared; folders of other identities or ended processes are removed.

    Args:
        final: Name of the finished slide.
        identity: JSON of all that decides the slide's content; None: a new folder for this process.
    """
    remove_leftovers(final)
    prefix = f".{final.name}.part-"
    if identity is None:
        folder = temporary_beside(final)
        shutil.rmtree(folder, ignore_errors=True)
    else:
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        folder = final.with_name(f"{prefix}{digest[:16]}")
    for path in final.parent.iterdir():
        if path.name.startswith(prefix) and path != folder:
            shutil.rmtree(path, ignore_errors=True)
    for path in folder.rglob(f".*{BESIDE}*"):  # files that a kill cut off
        path.unlink(missing_ok=True)
    return folder


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
