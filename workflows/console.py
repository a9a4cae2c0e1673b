"""Console output of commands: lines, warnings, progress bars, one JSON object."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TextIO

from data.location import without_password

LINES_PER_PROGRESS = 10
MIN_SECONDS_BETWEEN_LINES = 2.0


def duration(seconds: float) -> str:
    """Return a duration as text: ``40 s``, ``12 min``, ``3 h 20 min``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def counted(number: int, noun: str) -> str:
    """Return ``1 slide``, ``2 slides``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def listed(names: Sequence[str], most: int = 5) -> str:
    """Return names as text, not more than ``most``: ``a, b and 3 more``."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def plain_number(value: float, digits: int) -> str:
    """Return a number with about ``digits`` digits; large ones have no exponent: ``0.17``, ``1.4``, ``137``."""
    # "g" would write 1.37e+04.
    return f"{value:.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


class Progress(Protocol):
    """Progress of a long job."""

    def advance(self, steps: float = 1, note: str = "") -> None:
        """Report that ``steps`` more are done; ``note`` is shown beside the bar."""
        ...

    def skip(self, steps: float) -> None:
        """Report that an earlier run has done ``steps``; they do not count for the remaining time."""
        ...


class Silent:
    """Progress that is not shown, on ranks other than the first."""

    def advance(self, steps: float = 1, note: str = "") -> None:
        """See `Progress`."""

    def skip(self, steps: float) -> None:
        """See `Progress`."""


Keep = Callable[[str, str], str]
_keep: Keep | None = None


def keep_lines(keep: Keep | None) -> None:
    """Pass all lines from now on to ``keep(level, text)``, and print the text that it returns; None: print them as is.

    The level is that of `logging`: ``INFO``, ``WARNING`` or ``ERROR``.
    """
    global _keep
    _keep = keep


_outlives_readers = False


def ignore_closed_stdout() -> None:
    """From now on, go on without output when its reader has gone, as in ``hyfi train … | head``.

    For commands that write their results to files: hours of training must not be lost with a terminal.
    """
    global _outlives_readers
    _outlives_readers = True


def discard(stream: TextIO) -> None:
    """Send to the null device everything that this process writes to a stream from now on."""
    null = os.open(os.devnull, os.O_WRONLY)
    # The descriptor is replaced, to which libraries print, too; text that is still buffered goes there.
    os.dup2(null, stream.fileno())
    os.close(null)


def say(text: str = "") -> None:
    """Print a line to standard output and flush it (logs are read while the job runs)."""
    _print(sys.stdout, "INFO", text)


def warn(text: str, level: str = "WARNING") -> None:
    """Print a line to standard error and flush it."""
    _print(sys.stderr, level, text)


def _print(stream: TextIO | None, level: str, text: str) -> None:
    show(stream, text if _keep is None else _keep(level, text))


def show(stream: TextIO | None, text: str) -> None:
    """Print a line without the passwords of addresses, and flush it; nothing if ``stream`` is None (closed).

    Raises:
        BrokenPipeError: Its reader has gone, and the command does not go on without one.
    """
    if stream is None:
        return
    text = without_password(text)
    encoding = getattr(stream, "encoding", None) or "utf-8"
    # Escape what the stream cannot encode: file names may have undecodable bytes, and a log may be ASCII only.
    shown = text.encode(encoding, "backslashreplace").decode(encoding)
    # One write for the text and its line end: several ranks share one pipe.
    try:
        stream.write(shown + "\n")
        stream.flush()
    except BrokenPipeError:
        if not _outlives_readers:
            raise
        discard(stream)


def emit_json(value: Mapping[str, Any] | Sequence[Any]) -> None:
    """Print one JSON object as the last line of standard output; NaN and infinities become null."""
    plain = plain_json(value)
    text = json.dumps(plain, ensure_ascii=False, allow_nan=False)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:  # use JSON's own escapes
        text = json.dumps(plain, allow_nan=False)
    show(sys.stdout, text)


def plain_json(value: Any) -> Any:
    """Return ``value`` in JSON's types: paths as strings, tuples as lists, NaN and infinities as None."""
    if isinstance(value, Mapping):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain_json(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    # Scalars and arrays of NumPy and torch; `tolist` of a long double returns a long double.
    plain = value.tolist() if hasattr(value, "tolist") else value
    return str(value) if type(plain) is type(value) else plain_json(plain)


@contextmanager
def progress(total: float | None, label: str, finished: float = 0.0, *, estimate: bool = True) -> Iterator[Progress]:
    """Show the progress of a job on standard error.

    On a terminal this is a progress bar; otherwise about ten plain lines, at least two seconds apart.

    Args:
        total: Number of steps; None: unknown.
        label: Name of the job.
        finished: Steps that an earlier run has done.
        estimate: Whether to show the remaining time; False: the job shows it in its notes.
    """
    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        with _bar(total, label, finished, estimate) as shown:
            yield shown
    else:
        lines = _LogLines(total, label, finished, estimate)
        # No `finally`: after an error, a last line would look like progress.
        yield lines
        lines.finish()


@contextmanager
def _bar(total: float | None, label: str, finished: float, estimate: bool) -> Iterator[Progress]:
    """Context with a bar on the terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        *([TimeRemainingColumn()] if estimate else []),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with RichProgress(*columns, console=Console(stderr=True)) as bars:
        yield _TerminalBar(bars, bars.add_task(label, total=total, completed=int(finished), note=""))


class _TerminalBar:
    """A task of a rich progress display."""

    def __init__(self, bars: Any, task: Any) -> None:
        self._bars, self._task = bars, task

    def advance(self, steps: float = 1, note: str = "") -> None:
        self._bars.update(self._task, advance=steps, note=note)

    def skip(self, steps: float) -> None:
        task = self._bars.tasks[self._task]
        self._bars.reset(self._task, completed=int(task.completed + steps), note="")


class _LogLines:
    """Progress in a log: a line for every tenth of the job, at least two seconds apart."""

    def __init__(self, total: float | None, label: str, finished: float, estimate: bool) -> None:
        self._total, self._label, self._estimate = total, label, estimate
        self._first = self._done = self._printed = finished
        self._note = ""
        self._started_s = self._printed_s = time.monotonic()

    def advance(self, steps: float = 1, note: str = "") -> None:
        self._done, self._note = self._done + steps, note
        now_s = time.monotonic()
        # Without a total, a line whenever a fifth of what is done is new: ever rarer.
        share = (self._total or self._done * 2) / LINES_PER_PROGRESS
        if self._done - self._printed >= share and now_s - self._printed_s >= MIN_SECONDS_BETWEEN_LINES:
            self._print()

    def skip(self, steps: float) -> None:
        self._first, self._done, self._printed = self._first + steps, self._done + steps, self._printed + steps

    def finish(self) -> None:
        if self._done > self._printed:
            self._print()

    def _print(self) -> None:
        """Print the steps that are done, the time that they took, and the time that is left."""
        self._printed, self._printed_s = self._done, time.monotonic()
        of = f"/{self._total:g}" if self._total is not None else ""
        spent_s = self._printed_s - self._started_s
        # Steps of an earlier run, `_first`, took no time of this one.
        left_s = (self._total - self._done) * spent_s / (self._done - self._first) if self._total is not None else 0
        left = f", {duration(left_s)} left" if left_s >= 1 and self._estimate else ""
        note = f", {self._note}" if self._note else ""
        warn(f"{self._label}: {self._done:g}{of} after {duration(spent_s)}{left}{note}", "INFO")
