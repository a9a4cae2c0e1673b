"""What the logs of a run's ranks say: the hosts, the warnings and errors since the run was last started."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from workflows.launch.rank_log import FOLDER, STARTS

_LINE = re.compile(r"(?P<time>\S+ \S+) (?P<host>\S+) rank (?P<rank>\d+) (?P<level>[A-Z]+) (?P<text>.*)")
_READ_BYTES = 256 * 1024
"""Only the end of a log is read, so that thousands of them take seconds."""


@dataclass(frozen=True)
class RankReport:
    """The end of one rank's log.

    Attributes:
        rank: The rank.
        host: Its host.
        warnings: Number of lines of warnings.
        error: Last line of its error; None if it reported none.
        error_time: When it did, as text; empty if it did not.
    """

    rank: int
    host: str
    warnings: int
    error: str | None
    error_time: str


def read_logs(run: Path) -> list[RankReport]:
    """Return the reports of all ranks that have a log, by rank."""
    found = (_report(path) for path in (run / FOLDER).glob("rank-*.log"))
    return sorted((report for report in found if report is not None), key=lambda report: report.rank)


def first_failed(reports: list[RankReport]) -> RankReport | None:
    """Return the rank that reported its error first; None if none did."""
    return min((one for one in reports if one.error), key=lambda one: (one.error_time, one.rank), default=None)


def _report(path: Path) -> RankReport | None:
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _READ_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return None
    lines = [match for line in text.splitlines() if (match := _LINE.fullmatch(line))]
    if not lines:
        return None
    begin = max((n for n, line in enumerate(lines) if line["text"].startswith(STARTS)), default=0)
    errors = [line for line in lines[begin:] if line["level"] in ("ERROR", "CRITICAL")]
    warnings = sum(line["level"] == "WARNING" for line in lines[begin:])
    last = lines[-1]
    error, when = (errors[-1]["text"].strip(), errors[-1]["time"]) if errors else (None, "")
    return RankReport(int(last["rank"]), last["host"], warnings, error, when)
