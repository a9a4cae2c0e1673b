"""What every test may use."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MPIEXEC = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")

Hyfi = Callable[..., "subprocess.CompletedProcess[str]"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``cuda`` skip where there is no GPU."""
    marked = [item for item in items if item.get_closest_marker("cuda") is not None]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session")
def real_slides() -> Path:
    """The folder of real slides; skips where there is none."""
    folder = os.environ.get("HYFI_TEST_SLIDES")
    if not folder:
        pytest.skip("HYFI_TEST_SLIDES names no folder of real slides")
    return Path(folder)


@pytest.fixture
def hyfi(tmp_path: Path) -> Hyfi:
    """Runs ``hyfi WORDS…`` as a user would, in ``tmp_path``, and returns what it said and its exit code."""

    def run(*words: str | Path, timeout: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "workflows.cli", *map(str, words)],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"} | environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return run


@pytest.fixture
def captures_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are captured once for all ranks and runs of this process, and not verified: both take seconds."""
    from tests.harness import captured_once

    monkeypatch.setattr("hyfi_core.runtime.subject.capture", captured_once)
    monkeypatch.setattr("hyfi_core.runtime.parallelize.verify_capture", lambda *given: None)
