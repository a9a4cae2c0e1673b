"""A rank's log: what goes to its file, what to the terminal, and that nothing is lost when there is no file."""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from workflows import console
from workflows.launch.rank_log import RankLog

LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \S+ rank (\d+) (INFO|WARNING|ERROR) (.*)")


class OwnHandler(logging.StreamHandler[TextIO]):
    """Prints to what is standard error at the moment; pytest has another one in each phase of a test."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, _: TextIO) -> None:
        pass


@pytest.fixture
def library() -> Iterator[logging.Logger]:
    """A library that prints by a handler of its own, as torch does."""
    logger = logging.getLogger("tests.library")
    logger.addHandler(OwnHandler())
    logger.propagate = False
    yield logger
    logger.handlers.clear()


def report_everything(library: logging.Logger) -> None:
    library.warning("two\nlines")
    warnings.warn("old", stacklevel=1)
    console.say("said")
    console.warn("warned")


def lines(run: Path, rank: int) -> list[tuple[str, str, str]]:
    text = (run / "logs" / f"rank-{rank}.log").read_text()
    found = [LINE.fullmatch(line) for line in text.splitlines()]
    assert all(found), text
    return [match.groups() for match in found if match]


@pytest.mark.parametrize("rank", [0, 3])
def test_the_file_has_all_and_the_terminal_what_is_rank_0s(
    rank: int, tmp_path: Path, library: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    log = RankLog(rank, heads_terminal_lines=False)
    try:
        library.warning("before the folder is ours")
        assert not (tmp_path / "logs").exists()
        log.open_in(tmp_path, "trainer 0 on cpu")
        report_everything(library)
        log.note("ERROR", "printed elsewhere")
    finally:
        log.close()
    found = lines(tmp_path, rank)
    assert {number for number, _, _ in found} == {str(rank)}
    texts = [text for _, _, text in found]
    assert texts[0] == f"starts: trainer 0 on cpu, process {os.getpid()}"
    assert texts[1:4] == ["tests.library: before the folder is ours", "tests.library: two", "lines"]
    assert any("UserWarning: old" in text for text in texts)
    assert [entry[1:] for entry in found[-3:]] == [
        ("INFO", "said"),
        ("WARNING", "warned"),
        ("ERROR", "printed elsewhere"),
    ]
    out, err = capsys.readouterr()
    assert (out, "warned\n" in err, "printed elsewhere" in err) == ("said\n", True, False)
    assert (err.count("tests.library: "), err.count("UserWarning: old")) == ((2, 1) if rank == 0 else (0, 0))
    library.warning("afterwards")  # by its own handler again
    assert capsys.readouterr().err == "afterwards\n" and "afterwards" not in str(lines(tmp_path, rank))


def test_lines_of_many_hosts_are_marked_on_the_terminal_too(
    tmp_path: Path, library: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    log = RankLog(0, heads_terminal_lines=True)
    log.open_in(tmp_path, "trainer 0 on cpu")
    report_everything(library)
    console.emit_json({"status": "done"})
    log.close()
    out, err = capsys.readouterr()
    *said, result = out.splitlines()
    assert result == '{"status": "done"}'  # for a program, not a line of a log
    assert said and all(LINE.fullmatch(line) for line in [*said, *err.splitlines()])


def test_without_a_folder_nothing_is_lost(library: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    log = RankLog(3, heads_terminal_lines=False)
    report_everything(library)
    log.close()
    out, err = capsys.readouterr()
    assert (out, err.count("warned")) == ("said\n", 1)
    held = [match.group(3) for line in err.splitlines() if (match := LINE.fullmatch(line))]
    assert held[:2] == ["tests.library: two", "lines"] and any("UserWarning: old" in text for text in held)


@pytest.mark.parametrize("disk_is_full", [False, True])
def test_a_folder_that_cannot_be_written_is_no_reason_to_stop(
    disk_is_full: bool, tmp_path: Path, library: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    if disk_is_full:
        (tmp_path / "logs").mkdir()
        (tmp_path / "logs" / "rank-3.log").symlink_to("/dev/full")
    else:
        (tmp_path / "logs").write_text("a file")
    log = RankLog(3, heads_terminal_lines=False)
    library.warning("early")
    log.open_in(tmp_path, "trainer 3 on cpu")
    library.warning("late")
    log.close()
    err = capsys.readouterr().err
    assert "early" in err and "tests.library: late" in err and "rank 3 has no log" in err
