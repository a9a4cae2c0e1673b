"""A folder of features: what is finished in it, and what is damaged or out of date.

```
DIR/<slide_id>.h5          or as the format has it
DIR/features.json          encoder and settings of all features of the folder
DIR/features.csv           one row for each slide, a failed one too
DIR/.hyfi/<slide_id>.json  what a slide's files depend on, their sizes and digests; written last
```
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from data.csv_table import write_table
from data.files import read_json_object, sha256_of, write_json_atomically
from data.location import remove_tree
from hyfi_core.errors import RequestError
from pathology.claims import Claim
from workflows.features.feature_file import FeatureFormat, files_of

RUN_FILE, TABLE_FILE, SIDECARS = "features.json", "features.csv", ".hyfi"
COLUMNS = ("slide_id", "tiles", "status", "reason", "file")
DONE, FAILED = "done", "failed"
_CLAIM = ".begin"


class FeatureFolder:
    """The folder of features of one encoder.

    Args:
        path: The folder; need not exist.
        form: Format of the files.
        settings: JSON of everything besides the slide that features depend on: encoder, weights, tiles, precision,
            format.
    """

    def __init__(self, path: Path, form: FeatureFormat, settings: Mapping[str, Any]) -> None:
        self.path, self.form = path, form
        # As read back from the file: tuples become lists, so both can be compared.
        self._settings = json.loads(json.dumps(settings))

    def check(self, sources: Mapping[str, str | None], overwrite: bool) -> None:
        """Check that the folder may be written; writes nothing.

        Args:
            sources: For each slide, the SHA-256 of the file that it was ingested from; None: not known.
            overwrite: Whether features of other settings, or of other files with the same slide ids, may be replaced.

        Raises:
            RequestError: It is a file; it has features of other settings, files that ``hyfi features`` did not write,
                or features of another slide file with the same slide id.
        """
        if self.path.exists() and not self.path.is_dir():
            raise RequestError(f"{self.path} is a file; choose a folder for the features")
        written = self._written_settings()
        if written is not None and written != self._settings and not overwrite:
            names = [name for name in {**written, **self._settings} if written.get(name) != self._settings.get(name)]
            difference = f"{names[0]} ({_short(written.get(names[0]))}; now {_short(self._settings.get(names[0]))})"
            raise RequestError(
                f"{self.path} has features made with another {difference}; choose another --out, or use --overwrite to "
                f"start over"
            )
        for slide_id, source in sources.items():
            for name in files_of(slide_id, self.form):
                if (self.path / name).exists() and not self._sidecar(slide_id).exists() and written is None:
                    raise RequestError(f"{self.path / name} was not written by hyfi features; choose another --out")
            if overwrite or not source:
                continue
            stated = read_json_object(self._sidecar(slide_id)).get("source_sha256")
            # Two labs may both have a slide "1": its features must not silently replace those of the other.
            if stated and stated != source:
                raise RequestError(
                    f"{self.path} has features of {slide_id} from another file (SHA-256 {_short(stated)}; now "
                    f"{_short(source)}): another slide of the same name, or a new scan; choose another --out, or use "
                    "--overwrite to replace them"
                )

    def begin(self) -> None:
        """Create the folder and write `RUN_FILE`; features of other settings are removed first.

        Raises:
            OSError: The folder cannot be written.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / SIDECARS).mkdir(exist_ok=True)
        with Claim.wait(self.path, _CLAIM):  # another process with another part may begin at the same time
            written = self._written_settings()
            if written is not None and written != self._settings:
                self._remove_all()
            if written != self._settings:
                write_json_atomically(self.path / RUN_FILE, self._settings)

    def fault(self, slide_id: str, tiles: str | None) -> str | None:
        """Return why a slide must be computed: ``new``, or what is damaged or out of date; None if it is finished.

        Args:
            slide_id: The slide.
            tiles: Digest of its tiles; None: not compared.
        """
        written = read_json_object(self._sidecar(slide_id))
        if written.get("status") != DONE:
            return "new"
        if tiles is not None and written.get("tiles_sha256") != tiles:
            return "out of date: the slide was ingested again"
        files = written.get("files")
        if not isinstance(files, dict) or set(files) != set(files_of(slide_id, self.form)):
            return f"damaged: {self._sidecar(slide_id)} is not complete"
        for name, stated in files.items():
            path = self.path / name
            try:
                # Same size and time: not read again. A copy has another time, so its content decides.
                if stated.get("stamp") != _stamp(path) and stated.get("sha256") != digest_of(path):
                    return f"damaged: {path} is not the file that was written"
            except OSError as error:
                return f"damaged: {path}: {error.strerror or error}"
        return None

    def note_done(
        self, slide_id: str, source_sha256: str | None, tiles_sha256: str, count: int, note: str = ""
    ) -> None:
        """Write a slide's sidecar after its files.

        Args:
            slide_id: The slide.
            source_sha256: Of the file that it was ingested from; None: not known.
            tiles_sha256: Digest of its tiles.
            count: Number of its tiles.
            note: For the column ``reason`` of its row of the table.
        """
        files = {
            name: {"sha256": digest_of(self.path / name), "stamp": _stamp(self.path / name)}
            for name in files_of(slide_id, self.form)
        }
        record = {"slide_id": slide_id, "status": DONE, "tiles": count, "tiles_sha256": tiles_sha256, "files": files}
        record |= {"source_sha256": source_sha256} if source_sha256 else {}
        record |= {"reason": note} if note else {}
        write_json_atomically(self._sidecar(slide_id), record)

    def note_failed(self, slide_id: str, reason: str) -> None:
        """Write the sidecar of a slide that failed; features of an earlier version of it are removed."""
        for name in files_of(slide_id, self.form):
            _remove(self.path / name)
        write_json_atomically(self._sidecar(slide_id), {"slide_id": slide_id, "status": FAILED, "reason": reason})

    def write_table(self) -> Path:
        """Write `TABLE_FILE` from the sidecars; return its path."""
        rows = [
            {
                "slide_id": record["slide_id"],
                "tiles": str(record.get("tiles", "")),
                "status": record["status"],
                "reason": record.get("reason", ""),
                "file": next(iter(record.get("files", {})), ""),
            }
            for record in self._records()
        ]
        write_table(self.path / TABLE_FILE, list(COLUMNS), rows)
        return self.path / TABLE_FILE

    def _records(self) -> Iterator[dict[str, Any]]:
        for path in sorted((self.path / SIDECARS).glob("*.json")):
            record = read_json_object(path)
            if {"slide_id", "status"} <= record.keys():
                yield record

    def _written_settings(self) -> dict[str, Any] | None:
        """Return the settings in the folder's `RUN_FILE`; None without that file."""
        return read_json_object(self.path / RUN_FILE) if (self.path / RUN_FILE).exists() else None

    def _remove_all(self) -> None:
        """Remove the files that sidecars list, each sidecar first: a slide without one is never taken for finished."""
        for record in list(self._records()):
            self._sidecar(record["slide_id"]).unlink(missing_ok=True)
            for name in record.get("files", {}):
                _remove(self.path / name)

    def _sidecar(self, slide_id: str) -> Path:
        return self.path / SIDECARS / f"{slide_id}.json"


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file, or of a folder's files with their names, in hexadecimal digits."""
    if not path.is_dir():
        return sha256_of(path)
    summed = hashlib.sha256()
    for file in sorted(entry for entry in path.rglob("*") if entry.is_file()):
        # Bytes of the name: it need not be UTF-8.
        summed.update(os.fsencode(f"{file.relative_to(path).as_posix()} {sha256_of(file)}\n"))
    return summed.hexdigest()


def _stamp(path: Path) -> list[list[Any]]:
    """Return size and time of a file, or of all files of a folder: with the same stamp, a file is not read again."""
    files = sorted(entry for entry in path.rglob("*") if entry.is_file()) if path.is_dir() else [path]
    stats = [(file.relative_to(path).as_posix(), file.stat()) for file in files]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]


def _remove(path: Path) -> None:
    if path.is_dir():
        remove_tree(path)
    else:
        path.unlink(missing_ok=True)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:12]}…"
