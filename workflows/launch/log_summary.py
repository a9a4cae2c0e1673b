"""Summary of the logs of a run's ranks: hosts, warnings and errors since the run was last started."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from workflows.launch.rank_log import FOLDER, STARTS, TIME_FORMAT

_LINE = re.compile(r"(?P<time>\S+ \S+) (?P<host>\S+) rank (?P<rank>\d+) (?P<level>[A-Z]+) (?P<text>.*)")
_READ_BYTES = 256 * 1024
"""Only the end of a log is read, so that thousands of them take seconds."""
_STARTS_WITHIN_S = 60.0
"""A rank whose last line is older than the start of rank 0 by more than this does not belong to the last start."""


@dataclass(frozen=True)
class RankReport:
    """The end of one rank's log.

    Attributes:
        rank: The rank.
        host: Its host.
        warnings: Number of lines of warnings.
        error: Last line of its error; None if it reported none.
        error_time: Time of its error, as text; empty without one.
        start_time: Time of its last start, as text; empty if that was not read.
        last_time: Time of its last line, as text.
    """

    rank: int
    host: str
    warnings: int
    error: str | None
    error_time: str
    start_time: str
    last_time: str


def read_logs(run: Path) -> list[RankReport]:
    """Return the reports of all ranks of the last start that have a log, by rank.

    A run that continues on fewer ranks leaves the logs of the others; these are not reported.
    """
    parsed = (_report(path) for path in (run / FOLDER).glob("rank-*.log"))
    reports = sorted((report for report in parsed if report is not None), key=lambda report: report.rank)
    # Without rank 0's log nothing is known of the last start, and all reports count.
    start_s = _seconds(reports[0].start_time) if reports and reports[0].rank == 0 else 0.0
    return [report for report in reports if _seconds(report.last_time) >= start_s - _STARTS_WITHIN_S]


def first_failed(reports: list[RankReport]) -> RankReport | None:
    """Return the rank that reported its error first; None if none did."""
    return min(
        (report for report in reports if report.error),
        # Times are in whole seconds, and clocks of hosts differ: of equals, the lowest rank.
        key=lambda report: (report.error_time, report.rank),
        default=None,
    )


def _report(path: Path) -> RankReport | None:
    """Return what the log of a rank says of its last start; None if it has no lines."""
    try:
        with path.open("rb") as file:
            # From here the first line may be cut: it then does not match, and is left out.
            file.seek(max(0, os.fstat(file.fileno()).st_size - _READ_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return None
    lines = [match for line in text.splitlines() if (match := _LINE.fullmatch(line))]
    if not lines:
        return None
    starts = [n for n, line in enumerate(lines) if line["text"].startswith(STARTS)]
    # A run that is continued appends to the logs of its earlier starts.
    begin = starts[-1] if starts else 0
    errors = [line for line in lines[begin:] if line["level"] in ("ERROR", "CRITICAL")]
    warnings = sum(line["level"] == "WARNING" for line in lines[begin:])
    last = lines[-1]
    error, error_time = (errors[-1]["text"].strip(), errors[-1]["time"]) if errors else (None, "")
    start_time = lines[begin]["time"] if starts else ""
    return RankReport(int(last["rank"]), last["host"], warnings, error, error_time, start_time, last["time"])


def _seconds(text: str) -> float:
    """Return a time of a log in seconds; 0 if it is none."""
    try:
        return time.mktime(time.strptime(text, TIME_FORMAT))
    except ValueError:
        return 0.0
