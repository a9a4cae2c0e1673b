from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.progress import TimeRemainingColumn

from workflows import console


def test_counts_go_on_where_an_earlier_run_stopped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now_s[0])
    with console.progress(10, "train", finished=6) as shown:
        for step in range(4):
            now_s[0] += 3
            shown.advance(1, f"loss 0.{step}")
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "train: 7/10 after 3 s, 9 s left, loss 0.0"
    assert said[-1] == "train: 10/10 after 12 s, loss 0.3"


def test_what_an_earlier_run_did_takes_no_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now_s[0])
    with console.progress(8, "predicting") as shown:
        shown.skip(4)
        for name in "abcd":
            now_s[0] += 5
            shown.advance(1, name)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "predicting: 5/8 after 5 s, 15 s left, a" and said[-1] == "predicting: 8/8 after 20 s, d"
    with console._bar(8, "predicting", 0.0, True) as bar:
        bar.skip(4)
        bar.advance(1, "a")
        (task,) = bar._bars.tasks
        assert task.completed == 5


def test_counts_are_words() -> None:
    assert [console.counted(n, "slide") for n in (0, 1, 2, 5000)] == ["0 slides", "1 slide", "2 slides", "5,000 slides"]


def test_the_remaining_time_is_told_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now_s = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now_s[0])
    for estimate, told in ((True, "ingest: 2/4 after 10 min, 10 min left, a"), (False, "ingest: 2/4 after 10 min, a")):
        with console.progress(4, "ingest", estimate=estimate) as shown:
            now_s[0] += 600
            shown.advance(2, "a")
        assert capsys.readouterr().err.splitlines() == [told]


@pytest.mark.parametrize("estimate", [True, False])
def test_a_terminal_shows_the_remaining_time_once(estimate: bool) -> None:
    with console._bar(4, "ingest", 0.0, estimate) as shown:
        assert any(isinstance(column, TimeRemainingColumn) for column in shown._bars.columns) == estimate


def test_passwords_of_addresses_are_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    for address in ("https://me:s3cr:et@host/store", "https:/me:s3cret@host/store", "s3://key:s3cret@bucket"):
        console.say(f"reading {address}")
        console.warn(f"hyfi: {address} cannot be read")
        console.emit_json({"store": address})
    said = "".join(capsys.readouterr())
    assert "s3c" not in said and said.count("//me:***@host/store") == 3 and said.count("//key:***@bucket") == 3
    console.say("mail me@host, at 12:30 https://host:80/store, C:/a@b")
    assert capsys.readouterr().out == "mail me@host, at 12:30 https://host:80/store, C:/a@b\n"


def test_a_command_that_writes_files_goes_on_when_nobody_reads_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """``hyfi train … | head -1`` ended with code 70 after a line, and the training with it."""
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(console, "_outlives_readers", False)
    with pytest.raises(BrokenPipeError):
        console.say("step 1")
    console.ignore_closed_stdout()
    console.say("step 2")
    console.emit_json({"step": 3})
    os.write(stream.fileno(), b"what a library prints")
    stream.close()


def test_arrays_and_scalars_are_json() -> None:
    values = {"a": np.array([[1.5, np.nan]]), "b": torch.tensor([1, 2]), "c": np.float32(0.5), "d": np.longdouble(2)}
    assert console.plain_json(values) == {"a": [[1.5, None]], "b": [1, 2], "c": 0.5, "d": "2.0"}
    assert console.plain_json((np.bool_(True), Path("x"), np.int64(3))) == [True, "x", 3]
