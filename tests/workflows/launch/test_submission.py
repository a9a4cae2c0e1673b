from __future__ import annotations

from pathlib import Path

import pytest

from hyfi_core.errors import RequestError
from workflows.launch import submission


def test_a_controller_that_does_not_answer_ends_the_submission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\nexec sleep 20\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(submission, "_SUBMISSION_S", 0.5)
    with pytest.raises(RequestError, match=r"has not answered within 0\.5 s; see with `squeue --me`"):
        submission.submit(tmp_path / "run.sbatch")
