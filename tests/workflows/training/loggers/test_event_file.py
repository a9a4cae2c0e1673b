"""Event files hold what TensorBoard reads."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from workflows.training.loggers.event_file import EventFile


def values_of(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in EventAccumulator(str(folder)).Reload().Scalars(tag)]


def test_tensorboard_reads_all_values(tmp_path: Path) -> None:
    written = [(1, 0.5), (127, 1.25), (128, float("inf")), (10**12, -3.0)]
    file = EventFile(tmp_path / "board", 0)
    for step, value in written:
        file.add("train/loss", value, step)
    file.add("validation/größe " + "x" * 200, 2.0, 3)
    file.close()
    assert values_of(tmp_path / "board", "train/loss") == written
    assert values_of(tmp_path / "board", "validation/größe " + "x" * 200) == [(3, 2.0)]


@pytest.mark.parametrize(("value", "shown"), [(1e39, math.inf), (-1e60, -math.inf), (3.4e38, 3.4e38)])
def test_a_loss_beyond_float32_does_not_end_the_run(tmp_path: Path, value: float, shown: float) -> None:
    """The validation loss of a regression whose outputs are 1e20: finite in float64, too large for the format."""
    file = EventFile(tmp_path, 0)
    file.add("validation/loss", value, 1)
    file.close()
    assert values_of(tmp_path, "validation/loss") == [(1, pytest.approx(shown))]


@pytest.mark.parametrize("start", [3, 0])  # 0: killed before its first checkpoint
def test_a_run_that_goes_back_hides_what_came_later(tmp_path: Path, start: int) -> None:
    first = EventFile(tmp_path, 0)
    for step in range(1, 6):
        first.add("loss", float(step), step)
    first.close()
    again = EventFile(tmp_path, start)
    again.add("loss", 40.0, start + 1)
    again.close()
    before = [(step, float(step)) for step in range(1, start + 1)]
    assert values_of(tmp_path, "loss") == [*before, (start + 1, 40.0)]


def test_a_damaged_file_is_noticed_by_its_checksums(tmp_path: Path) -> None:
    file = EventFile(tmp_path, 0)
    file.add("loss", 1.0, 1)
    file.close()
    (path,) = tmp_path.iterdir()
    content = bytearray(path.read_bytes())
    content[-6] ^= 1  # in the last message
    path.write_bytes(content)
    assert "loss" not in EventAccumulator(str(tmp_path)).Reload().Tags()["scalars"]
