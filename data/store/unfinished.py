"""An unfinished slide: the folder in which it is written, and the journal of its finished files.

```
STORE/.<slide_id>.zarr.part-<digest>         with an identity: a later writer with the same identity resumes it
STORE/.<slide_id>.zarr.tmp-<host>-<pid>      without an identity: removed once its process has ended
    journal.jsonl                            one line for each finished pixel file
```

A line is written after its file is synced and has its final name. Truncated lines are ignored, and so are lines whose
file has another size or digest.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

from data.files import private_folder, remove_leftovers, sha256_of, temporary_path
from data.location import is_remote
from data.store.manifest import record_path
from data.store.shard import TEMPORARY, FileEntry
from data.store.slide_store import slide_path

JOURNAL = "journal.jsonl"
_UNFINISHED = re.compile(r"\.(.+)\.zarr\.(?:part|tmp)-.+")
_MOST_NAMED = 5


def working_folder(store: Path, base: Path | None = None) -> Path:
    """Return the local folder in which slides of a store are written: the store itself, or a folder for its uploads.

    It is the same for later runs of this user on this machine, so they can resume slides.

    Args:
        store: A folder, or on object storage.
        base: Folder on a local disk for uploads; default: the system's temporary folder.
    """
    if not is_remote(store):
        return store
    digest = hashlib.sha256(os.fsencode(str(store))).hexdigest()[:16]
    return _uploads(base) / digest


def make_private(store: Path, base: Path | None = None) -> None:
    """Make the folder of this user's uploads, if the store is on object storage; arguments as for `working_folder`.

    Raises:
        OSError: It cannot be made, or belongs to another user, who could read the pixels.
    """
    if is_remote(store):
        private_folder(_uploads(base))


def _uploads(base: Path | None) -> Path:
    return (base or Path(tempfile.gettempdir())) / f"hyfi-upload-{os.getuid()}"


def unfinished_folder(final: Path, identity: list[Any] | None) -> Path:
    """Return the folder in which to write ``final``; remove unfinished folders that no writer can resume.

    Args:
        final: Path of the finished slide.
        identity: JSON of everything that determines the slide's content; None: a new folder for this process.
    """
    remove_leftovers(final)
    prefix = f".{final.name}.part-"
    if identity is None:
        folder = temporary_path(final)
        shutil.rmtree(folder, ignore_errors=True)
    else:
        # The digest of the identity is in the name: files of two identities never mix.
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        folder = final.with_name(f"{prefix}{digest[:16]}")
    # Unfinished slides of other identities: nobody will finish them, because this writer replaces the slide.
    for path in final.parent.iterdir():
        if path.name.startswith(prefix) and path != folder:
            shutil.rmtree(path, ignore_errors=True)
    for path in folder.rglob(f".*{TEMPORARY}*"):  # files that were incomplete when a writer was killed
        path.unlink(missing_ok=True)
    return folder


def unfinished_slides(store: Path) -> list[str]:
    """Return the names of unfinished slides: being written now, or left by a stopped ingest.

    Empty for a store on object storage, whose slides may be written on other machines.
    """
    if is_remote(store):
        return []
    try:
        names = [match[1] for path in store.iterdir() if (match := _UNFINISHED.fullmatch(path.name))]
    except OSError:
        return []  # whoever reads the store reports the error
    # Leave out slides that are being replaced (they exist) and slides that failed (their records say so).
    return sorted(
        {name for name in names if not (slide_path(store, name).exists() or record_path(store, name).exists())}
    )


def unfinished_note(store: Path) -> str:
    """Return a note about the slides of `unfinished_slides`; empty if there are none."""
    names = unfinished_slides(store)
    if not names:
        return ""
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return (
        f"note: {store}: not finished, as an ingest is writing them now or was stopped: "
        f"{', '.join(names[:_MOST_NAMED])}{more}; they are left out. The ingest's command, given again, finishes them"
    )


class Journal:
    """The finished files of one unfinished slide; safe to use from several threads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._earlier = _load(folder / JOURNAL)
        self.entries: dict[str, FileEntry] = {}
        """Files written by this run, and files of earlier runs that `finished` found intact."""
        self._file = (folder / JOURNAL).open("a", encoding="utf-8")
        self._file.write("\n")  # ends a truncated line

    def finished(self, name: str) -> bool:
        """Whether this run or an earlier one wrote this file; a file of an earlier run is read once to check it."""
        if name in self.entries:
            return True
        # `pop`, so that a file is read only once to check it.
        entry = self._earlier.pop(name, None)
        if entry is None or not _is_intact(self._folder / name, entry):
            return False
        with self._lock:
            self.entries[name] = entry
        return True

    def add(self, name: str, entry: FileEntry) -> None:
        """Append a file that is synced to disk."""
        line = json.dumps({"name": name, **entry.to_json()}) + "\n"
        with self._lock:
            self.entries[name] = entry
            self._file.write(line)
            # Not synced: if a power cut loses the line, one file is written again.
            self._file.flush()

    def close(self) -> None:
        """Close the journal and keep it."""
        self._file.close()

    def remove(self) -> None:
        """Close and delete the journal of a complete slide, whose own file list replaces it."""
        self._file.close()
        (self._folder / JOURNAL).unlink()


def _load(path: Path) -> dict[str, FileEntry]:
    """Return file -> entry of a journal, without truncated lines."""
    entries: dict[str, FileEntry] = {}
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return entries
    for line in lines:
        try:
            value = json.loads(line)
            entries[str(value["name"])] = FileEntry.from_json(value)
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return entries


def _is_intact(path: Path, entry: FileEntry) -> bool:
    """Whether a file has the size and digest of its entry."""
    # Without a size, all chunks are blank, and there is no file.
    if entry.size is None:
        return not path.exists()
    try:
        return path.stat().st_size == entry.size and sha256_of(path) == entry.sha256
    except OSError:
        return False
