"""Pseudonyms for slides and cases; the key with the real names is a file outside of the store.

```
KEY.csv   slide_id, case_id      the pseudonyms, which are in the store
          secret                 the HMAC key, the same in each row; also used to hide the files' times
          source_path, real_slide_id, real_case_id, and the user's other columns: only here
```

Names are keyed digests (HMAC-SHA-256) of the real ones: random without the secret, and reproducible with it.
"""

from __future__ import annotations

import csv
import hmac
import os
import re
import secrets
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from data.csv_table import csv_bytes, read_own
from data.files import replacing
from hyfi_core.errors import RequestError
from pathology.claims import Claim
from pathology.ingest.discover import SlideJob
from pathology.readers.mpp import is_sensible, parse_number
from pathology.readers.sources import largest_scene
from pathology.search import is_gone

KEPT_COLUMNS = ("source_mpp", "label", "split")
"""Columns of the user's manifest that are copied to the store; all others stay in the key."""
_QUOTED = re.compile(r"""b?'[^']*'|b?"[^"]*\"""")
_COLUMNS = ("slide_id", "case_id", "secret", "source_path", "real_slide_id", "real_case_id")


@dataclass(frozen=True, slots=True)
class KeyRow:
    """One row of ``KEY.csv``; the top of this module describes its columns."""

    slide_id: str
    case_id: str
    secret: str
    source_path: str
    real_slide_id: str
    real_case_id: str
    others: dict[str, str] = field(default_factory=dict)

    def to_csv(self) -> dict[str, str]:
        """Return the row as it is in the file."""
        return {**self.others, **{name: getattr(self, name) for name in _COLUMNS}}


class KeyFile:
    """The pseudonyms of an archive.

    Args:
        path: ``KEY.csv``; created by `commit`.
        store: Store of the slides.

    Raises:
        RequestError: The file is inside the store, cannot be written, or exists and is not a key.
    """

    def __init__(self, path: Path, store: Path) -> None:
        if path.resolve().is_relative_to(store.resolve()):
            raise RequestError(f"--pseudonyms {path}: is inside the store {store}; choose a file outside of it")
        if not path.absolute().parent.is_dir():
            raise RequestError(f"--pseudonyms {path}: no such folder: {path.absolute().parent}")
        _require_writable(path)
        self._path = path.absolute()
        self._rows = _load(self._path)
        self._secret = next((row.secret for row in self._rows.values()), secrets.token_hex(32))
        self._former: dict[str, str] = {}  # pseudonym -> former path, of files that seem to have moved

    @property
    def cases(self) -> dict[str, str]:
        """The real case of each slide, by the slide's real name; empty if unknown."""
        return {row.real_slide_id: row.real_case_id for row in self._rows.values()}

    def pseudonymise(self, jobs: Sequence[SlideJob]) -> list[SlideJob]:
        """Return the jobs with pseudonyms, and with manifest rows that have only `KEPT_COLUMNS`."""
        return [self._pseudonymised(job) for job in jobs]

    def refuse_another_file(self, job: SlideJob) -> None:
        """Refuse a slide that would get the pseudonym of a missing file only because both files have the same name.

        Scanners number files and begin again at 1: the slide of another patient would get these names.

        Raises:
            RequestError: The slide has another content and another path than the file of its pseudonym.
        """
        former = self._former.get(job.slide_id)
        if former is not None and not is_gone(job.source):
            raise RequestError(
                f"{job.source} has the name of {former}, which is gone, but not the content of its slide in the store, "
                "whose pseudonym it would get: give the file another name, or replace that slide with --overwrite"
            )

    def commit(self) -> bool:
        """Save the pseudonyms, in a file that only the owner can read.

        Returns:
            False if another run has created the key in the meantime: its pseudonyms are valid, and `pseudonymise` must
            be called again.

        Raises:
            OSError: The key cannot be written.
        """
        folder = self._path.parent / f".{self._path.name}.claims"
        # Two runs that begin at the same time must not give one slide two names.
        with Claim.wait(folder, "key"):
            saved = _load(self._path)
            if any(row.secret != self._secret for row in saved.values()):
                self._rows, self._secret = saved, next(iter(saved.values())).secret
                return False
            ours = {row.slide_id for row in self._rows.values()}  # by name, because a moved slide has another path
            self._rows = {path: row for path, row in saved.items() if row.slide_id not in ours} | self._rows
            _save(self._path, self._rows.values())
        with suppress(OSError):
            folder.rmdir()
        return True

    def _pseudonymised(self, job: SlideJob) -> SlideJob:
        """Return a job under its pseudonym, without what could identify the patient."""
        if job.row.get("scene", "0") not in ("0", str(largest_scene(job.source))):
            raise RequestError(
                f"{job.source}: it has several scenes, which have no pseudonyms of their own; choose --scene largest, "
                f"or ingest it without --pseudonyms"
            )
        row = self._row(job)
        self._rows[row.source_path] = row
        shown = {"slide_id": row.slide_id, **{k: v for k, v in job.row.items() if k in KEPT_COLUMNS}}
        if not _may_be_mpp(shown.get("source_mpp", "")):
            shown["source_mpp"] = "…"  # still invalid, without revealing the value
        if row.case_id:
            shown["case_id"] = row.case_id
        if (scene := job.row.get("scene", "0")) != "0":
            shown["scene"] = scene
        # With the secret, the ingest hides the times of the slide's files, too.
        return replace(job, slide_id=row.slide_id, row=shown, secret=row.secret)

    def _row(self, job: SlideJob) -> KeyRow:
        """Return the job's row of the key file, or a new one, updated from its row of the user's manifest."""
        path, manifest_row = str(job.source), job.row
        row = self._rows.get(path) or self._row_of_moved_file(job.source)
        if row is None:
            row = KeyRow(
                slide_id=self._pseudonym("s", path),
                case_id="",
                secret=self._secret,
                source_path=path,
                real_slide_id=manifest_row.get("slide_id", job.slide_id),
                real_case_id="",
            )
        if manifest_row.get("case_id"):
            row = replace(
                row, case_id=self._pseudonym("c", manifest_row["case_id"]), real_case_id=manifest_row["case_id"]
            )
        other_columns = {k: v for k, v in manifest_row.items() if k not in (*_COLUMNS, *KEPT_COLUMNS, "path")}
        return replace(row, others=row.others | other_columns)

    def _row_of_moved_file(self, source: Path) -> KeyRow | None:
        """Return the row of a missing file with the same name, with its new path ``source``; None without exactly one.

        The row is removed from ``_rows``.
        """
        same_name = [row for row in self._rows.values() if Path(row.source_path).name == source.name]
        gone = [row for row in same_name if is_gone(Path(row.source_path))]
        # If several files with this name are missing, it is unknown which one was moved.
        if len(gone) != 1:
            return None
        self._former[gone[0].slide_id] = gone[0].source_path
        return replace(self._rows.pop(gone[0].source_path), source_path=str(source))

    def _pseudonym(self, kind: str, real: str) -> str:
        digest = hmac.new(self._secret.encode(), f"{kind}:{real}".encode("utf-8", "surrogateescape"), "sha256")
        return f"{kind}-{digest.hexdigest()[:16]}"


def _require_writable(path: Path) -> None:
    """Refuse a key file whose folder cannot be written."""
    try:
        with tempfile.TemporaryFile(dir=path.absolute().parent):
            pass
    except OSError as error:
        raise RequestError(
            f"--pseudonyms {path}: cannot write to the folder {path.absolute().parent} ({error.strerror}); choose a "
            f"file in another folder"
        ) from error


def _may_be_mpp(text: str) -> bool:
    """Whether a cell is empty or a plausible number of microns per pixel."""
    if not text:
        return True
    with suppress(ValueError):
        value = parse_number(text)
        return is_sensible((value, value))
    return False


def scrubbed(reason: str, source: Path, name: str) -> str:
    """Return the reason of a failed slide without the file's name and path, and without texts from the file."""
    # Texts in quotes are from the file: labels, names of tags.
    plain = _QUOTED.sub("…", reason)
    whole_path = str(source.absolute())
    secrets_of_path = {str(source), whole_path, str(source.resolve()), source.name, source.stem}
    secrets_of_path |= {
        str(parent) for parent in (*source.absolute().parents, *source.resolve().parents) if parent.name
    }
    # Not shorter names of folders, which occur in other words of the reason.
    secrets_of_path |= {parent.name for parent in source.absolute().parents if len(parent.name) > 2}
    # The longest first, so that a whole path is replaced before its folders.
    for text in sorted(secrets_of_path, key=len, reverse=True):
        plain = plain.replace(text, name if text == whole_path else "…")
    return plain


def _load(path: Path) -> dict[str, KeyRow]:
    """Return source path -> row of a key file; empty if there is no file yet.

    Raises:
        RequestError: It cannot be read, is not a key, or its rows do not all have the same secret.
    """
    try:
        columns, rows = read_own(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise RequestError(f"--pseudonyms {path}: cannot be read ({error.strerror})") from error
    except csv.Error as error:
        raise RequestError(f"--pseudonyms {path}: is not a CSV ({error}); choose another file") from error
    if not set(_COLUMNS) <= set(columns):
        raise RequestError(
            f"--pseudonyms {path}: exists and is not a key of an earlier ingest (with the columns "
            f"{', '.join(_COLUMNS)}); choose another file"
        )
    key_rows = [KeyRow(**{k: row.pop(k) for k in _COLUMNS}, others=row) for row in rows]  # others: what is left
    # Without a secret, anybody could compute the pseudonyms; with several, `commit` would never agree with the file.
    if key_rows and (len({row.secret for row in key_rows}) > 1 or not key_rows[0].secret):
        raise RequestError(
            f"--pseudonyms {path}: the column secret is empty, or differs between rows; restore the file as an ingest "
            "wrote it, and use one key for each store"
        )
    return {row.source_path: row for row in key_rows}


def _save(path: Path, rows: Iterable[KeyRow]) -> None:
    """Write the key file, which only its owner can read."""
    table = sorted((row.to_csv() for row in rows), key=lambda row: row["source_path"])
    columns = [*_COLUMNS, *sorted({name for row in table for name in row} - set(_COLUMNS))]
    with replacing(path) as temporary:
        # The mode is set on creation, so that others can never read the file.
        handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(csv_bytes(columns, table))
