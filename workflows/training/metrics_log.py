"""``metrics.jsonl``: one line for every step and every validation."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from data.files import write_atomically
from hyfi_core.files import naming
from workflows.console import plain_json

MetricsLine = dict[str, Any]


def read_metrics(path: Path) -> list[MetricsLine]:
    """Return the records of a log; truncated and damaged lines are skipped, and a log that does not exist is empty."""
    if not path.is_file():
        return []
    records = []
    # "replace": one damaged byte must not hide the other lines.
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        # A killed process may leave half a line.
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict) and isinstance(record.get("kind"), str) and isinstance(record.get("step"), int):
            records.append(record)
    return records


def nonfinite_steps(records: Iterable[MetricsLine]) -> list[int]:
    """Return the steps whose loss or gradient was not finite."""
    return [record["step"] for record in records if record.get("nonfinite")]


def describe_nonfinite(records: Iterable[MetricsLine]) -> str | None:
    """Return as text how many steps were not finite, and how many updates were left out; None if all were finite."""
    wrong = [record for record in records if record.get("nonfinite")]
    if not wrong:
        return None
    skipped = sum(bool(record.get("skipped")) for record in wrong)
    return (
        f"{len(wrong)} step{'s' * (len(wrong) > 1)} with a loss or gradient that is not finite, the first of them step "
        f"{wrong[0]['step']}; updates left out: {skipped}"
    )


class MetricsLog:
    """The log of a run, open for appending; every line is flushed.

    NaN and infinities are written as null.
    """

    def __init__(self, path: Path, until_step: int) -> None:
        """Open ``path`` and drop the lines of steps after ``until_step``, which a resumed run does again."""
        self.path = path
        self.records = read_metrics(path)
        self._file: TextIO | None = None
        self.cut(until_step)

    def cut(self, until_step: int) -> None:
        """Drop the lines of steps after ``until_step`` (atomically)."""
        if self._file is not None:
            self._file.close()
        self.records = [record for record in self.records if record["step"] <= until_step]
        if self.path.exists():
            # A new file replaces the old one. It is opened below: lines written to the old one would be lost.
            write_atomically(self.path, "".join(map(_line, self.records)).encode())
        self._file = self.path.open("a", encoding="utf-8", buffering=1)

    def write(self, kind: str, **values: Any) -> None:
        """Append one record of ``kind``."""
        # Memory has the same values as the file, so that a resumed run, which reads the file, decides alike.
        record = plain_json({"kind": kind, **values})
        self.records.append(record)
        assert self._file is not None
        with naming(self.path):
            self._file.write(_line(record))
            self._file.flush()

    def validations(self) -> dict[int, MetricsLine]:
        """Return the validation records by step."""
        return {record["step"]: record for record in self.records if record["kind"] == "validation"}

    def close(self) -> None:
        """Sync to disk and close."""
        assert self._file is not None
        with naming(self.path):
            self._file.flush()
            # Before `status.json` says that the run is done.
            os.fsync(self._file.fileno())
            self._file.close()


def _line(record: Mapping[str, Any]) -> str:
    # JSON has no NaN: Python would write it, and other readers would refuse the line.
    return json.dumps(record, allow_nan=False) + "\n"
