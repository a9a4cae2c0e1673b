"""What runs out of memory says what would need less; what fails otherwise keeps its traceback."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from hyfi_core.errors import RequestError
from hyfi_core.files import naming
from workflows import out_of_memory
from workflows.exit_codes import FAULT, exit_code_of


def by_torch() -> int:
    return len(torch.empty(2**61, dtype=torch.uint8))


def by_numpy() -> int:
    try:
        return len(np.empty(2**61, np.uint8))
    except MemoryError as error:
        raise RuntimeError("the batch could not be made") from error


def by_the_system() -> int:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def by_a_gpu() -> int:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB")


@pytest.mark.parametrize("body", [by_torch, by_numpy, by_the_system, by_a_gpu])
def test_memory_that_runs_out_is_told_with_advice(
    body: Callable[[], int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(out_of_memory, "_advice", "")
    assert exit_code_of(body) == FAULT
    said = capsys.readouterr().err
    assert said.startswith("hyfi: out of memory") and "plan.grids" in said and "Traceback" not in said
    assert ("2.00 GiB more" in said) == (body is by_a_gpu)
    out_of_memory.remember_advice("forecast: 3 GB. plan.recompute=true takes less")
    exit_code_of(body)
    assert "plan.recompute=true takes less" in capsys.readouterr().err


def test_other_errors_keep_their_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> int:
        raise RuntimeError("shapes do not match")

    assert exit_code_of(fails) == FAULT
    assert "Traceback" in capsys.readouterr().err


def test_a_full_disk_is_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def writes() -> int:
        with naming(tmp_path / "predictions.csv"), Path("/dev/full").open("w") as file:
            file.write("row")
            file.flush()
        return 0

    assert exit_code_of(writes) == FAULT
    said = capsys.readouterr().err
    assert said.startswith(f"hyfi: {tmp_path}/predictions.csv cannot be written (No space left on device; its disk has")
    assert "make room there" in said and "Traceback" not in said
    unnamed = OSError(errno.EDQUOT, "Disk quota exceeded")
    assert str(out_of_memory.message_of(unnamed)).startswith("a file cannot be written (Disk quota exceeded); make")


def test_a_full_disk_of_spilled_maps_is_told_in_one_line() -> None:
    error = RequestError("cannot write to disk (plan.spill): No space left on device")
    assert out_of_memory.message_of(error) is None
    error.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    assert out_of_memory.message_of(error) == "cannot write to disk (plan.spill): No space left on device"
    run = RuntimeError(f"the run cannot continue: {error}")
    run.__cause__ = error
    assert out_of_memory.message_of(run) == str(run)
