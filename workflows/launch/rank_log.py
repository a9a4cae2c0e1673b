"""The log of each rank of a run: ``RUN/logs/rank-<N>.log``, every line with time, host, rank and level.

::

    2026-03-01 14:02:11 node2 rank 3 WARNING torch.nn: …

    written by          rank 0                       other ranks
    say, warn           terminal and file            terminal and file (few: errors, lost processes)
    progress            terminal and file            none
    logging, warnings   terminal and file            file
    the rank's error    terminal (once) and file     terminal (once) and file

On the terminal, lines have this form under ``srun``, ``mpiexec`` and ``torchrun``, where lines of several hosts are
mixed; ``hyfi train`` alone prints them plain. Lines are held back until this run owns its folder; if it never does,
they go to the terminal. What libraries print without Python's logging, such as MPI's messages, stays on the terminal.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import time
from pathlib import Path
from typing import TextIO

from data.location import without_password
from hyfi_core.runtime.launch import inside_launcher
from workflows import console
from workflows.launch.status import RunStatus

FOLDER, STARTS = "logs", "starts: "
TIME_FORMAT = "%Y-%m-%d %H:%M:%S"


class RankLog(logging.Handler):
    """Takes over logging, warnings and the lines of `workflows.console` of this process until ``close``.

    Args:
        rank: This rank, as its launcher counts.
        heads_terminal_lines: Whether lines on the terminal, too, begin with time, host, rank and level.
    """

    def __init__(self, rank: int, heads_terminal_lines: bool) -> None:
        super().__init__()
        self._rank, self._heads_terminal_lines = rank, heads_terminal_lines
        self._host, self._began = socket.gethostname(), _time_text()
        self._file: TextIO | None = None
        self._held: list[tuple[str, bool]] | None = []  # lines, and whether the terminal has them already
        # Loggers that were taken over, with their own handlers and `propagate`.
        self._taken_over: list[tuple[logging.Logger, list[logging.Handler], bool]] = []
        # `warnings.warn` then comes as a record of the logger `py.warnings`.
        logging.captureWarnings(True)
        console.keep_lines(self.keep)
        logging.getLogger().addHandler(self)
        self._take_over()

    def open_in(self, run: Path, role: str) -> None:
        """Write to ``run/logs`` from now on: a line with ``role``, then the lines that were held back.

        If that fails, all lines go to the terminal.
        """
        self._take_over()  # also from libraries that were imported since
        try:
            (run / FOLDER).mkdir(parents=True, exist_ok=True)
            file = (run / FOLDER / f"rank-{self._rank}.log").open("a", encoding="utf-8", errors="replace")
            file.write(f"{self._began} {self._head('INFO')}{STARTS}{role}, process {os.getpid()}\n")
            # The lines from before this run owned its folder; until then the file belonged to another process, if to
            # any.
            file.write("".join(lines for lines, _ in self._held or ()))
            file.flush()
        except OSError as error:
            self._show_held()
            console.warn(f"hyfi: {run / FOLDER} cannot be written ({error.strerror}): rank {self._rank} has no log")
        else:
            self._file, self._held = file, None

    def keep(self, level: str, text: str) -> str:
        """Write lines to the log and return them as the terminal shows them."""
        headed = self._log_lines(level, text, shown=True)
        return headed.rstrip("\n") if self._heads_terminal_lines else text

    def note(self, level: str, text: str) -> None:
        """Write lines to the log alone."""
        self._log_lines(level, text, shown=True)

    def emit(self, record: logging.LogRecord) -> None:
        """Write what a library reports through logging or warnings; rank 0 shows it on the terminal, too."""
        text = record.getMessage().rstrip()
        if record.exc_info:
            text += "\n" + logging.Formatter().formatException(record.exc_info)
        if record.name not in ("py.warnings", "root"):
            text = f"{record.name}: {text}"
        # Libraries warn alike on all ranks: once on the terminal is enough, unless a rank has no file. While
        # lines are held for one (``_held``), they are shown later if it cannot be opened.
        shown = self._rank == 0 or (self._file is None and self._held is None)
        headed = self._log_lines(record.levelname, text, shown)
        if shown:
            console.show(sys.stderr, headed.rstrip("\n") if self._heads_terminal_lines else text)

    def close(self) -> None:
        """Give logging, warnings and the console back; lines that have no file go to the terminal."""
        logging.getLogger().removeHandler(self)
        logging.captureWarnings(False)
        console.keep_lines(None)
        # Reversed: a logger that was taken over twice gets its first handlers.
        for logger, handlers, propagate in reversed(self._taken_over):
            logger.handlers, logger.propagate = handlers, propagate
        self._taken_over.clear()
        self._show_held()
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk
                self._file.close()
        super().close()

    def _log_lines(self, level: str, text: str, shown: bool) -> str:
        """Return lines as the log has them, with time, host, rank and level; write them, or keep them until it opens.

        ``shown``: the terminal has them; other lines are printed there if the log cannot be opened.
        """
        head = f"{_time_text()} {self._head(level)}"
        headed = "".join(f"{head}{line}\n" for line in without_password(text).splitlines() or [""])
        # `logging.Handler` has a lock: lines of threads are not mixed.
        with self.lock or contextlib.nullcontext():
            if self._file is not None:
                with contextlib.suppress(OSError, ValueError):  # a full disk or a closed file must not end the run
                    self._file.write(headed)
                    self._file.flush()
            elif self._held is not None:
                self._held.append((headed, shown))
        return headed

    def _head(self, level: str) -> str:
        return f"{self._host} rank {self._rank} {level} "

    def _show_held(self) -> None:
        """Print the lines that were held back and that the terminal does not have yet."""
        buffered, self._held = self._held or [], None
        for lines, shown in buffered:
            if not shown:
                console.show(sys.stderr, lines.rstrip("\n"))

    def _take_over(self) -> None:
        """Route through this handler what libraries, such as torch, print by their own handlers."""
        for logger in (logging.root, *logging.root.manager.loggerDict.values()):
            # The dictionary also has placeholders, for parents of loggers that nobody has asked for.
            if isinstance(logger, logging.Logger) and any(map(_prints_to_terminal, logger.handlers)):
                self._taken_over.append((logger, logger.handlers, logger.propagate))
                # A new list: `_taken_over` has the old one, which is put back as it was.
                logger.handlers = [handler for handler in logger.handlers if not _prints_to_terminal(handler)]
                logger.propagate = True


def _time_text() -> str:
    return time.strftime(TIME_FORMAT)


def _prints_to_terminal(handler: logging.Handler) -> bool:
    return isinstance(handler, logging.StreamHandler) and handler.stream in (sys.stderr, sys.stdout)


_log: RankLog | None = None


def begin(rank: int) -> None:
    """Begin the log of this process, which is a rank of a run or the only one."""
    global _log
    end()
    _log = RankLog(rank, heads_terminal_lines=inside_launcher() is not None and RunStatus.from_environment() is None)


def open_in(run: Path, role: str) -> None:
    """Write the log of this process to the folder of its run, which must be owned; ``role``: for its first line."""
    if _log is not None:
        _log.open_in(run, role)


def note_error(text: str) -> None:
    """Write an error to the log of this process; it is printed elsewhere."""
    if _log is not None:
        _log.note("ERROR", text)


def append_error(run: Path, rank: int, text: str) -> None:
    """Write an error to the log of a killed rank, which cannot do so itself; do nothing if it has no log."""
    path = run / FOLDER / f"rank-{rank}.log"
    with contextlib.suppress(OSError):
        if path.is_file():
            with path.open("a", encoding="utf-8", errors="replace") as file:
                file.write(f"{_time_text()} {socket.gethostname()} rank {rank} ERROR {text}\n")


def end() -> None:
    """End the log of this process."""
    global _log
    if _log is not None:
        _log.close()
        _log = None
