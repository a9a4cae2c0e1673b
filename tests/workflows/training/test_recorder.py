"""What a resumed run still has to validate."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workflows.training.recorder import Recorder


def recorder_of(checkpoints: Path, saved: list[int], validated: list[int], policy: str) -> Recorder:
    """Return a recorder of a run that validates after every fifth step and was stopped after the last saved one."""
    for step in saved:
        (checkpoints / f"step-{step:08d}").mkdir(parents=True)
    recorder: Any = Recorder.__new__(Recorder)
    recorder._log = SimpleNamespace(validations=lambda: dict.fromkeys(validated))
    recorder._start, recorder.folder = saved[-1], SimpleNamespace(checkpoints=checkpoints)
    config = SimpleNamespace(validation=SimpleNamespace(policy=policy))
    recorder._job = SimpleNamespace(config=config, validates_after=lambda step: step % 5 == 0)
    result: Recorder = recorder
    return result


@pytest.mark.parametrize(
    ("saved", "validated", "policy", "missing"),
    [
        ([5, 10, 15], [5], "all", [10, 15]),
        ([5, 10, 15], [5], "latest", [15]),
        ([5, 10, 12], [5], "latest", [10]),  # the stop saved step 12, which is not to be validated
        ([5, 10, 12], [10], "latest", []),  # step 5 was skipped on purpose
        ([3], [], "latest", []),
    ],
)
def test_a_checkpoint_of_the_stop_hides_no_missing_validation(
    tmp_path: Path, saved: list[int], validated: list[int], policy: str, missing: list[int]
) -> None:
    assert recorder_of(tmp_path, saved, validated, policy).unvalidated() == missing
