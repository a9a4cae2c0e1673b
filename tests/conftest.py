"""What every test may use."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.patience import PATIENCE_S

ROOT = Path(__file__).parent.parent
PROGRAM_PATH = f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'startup'}"
"""PYTHONPATH of programs that are not commands of ``hyfi``: they start a quarter faster."""
MPIEXEC = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")

# A test must not fail because the machine is busy.
settings.register_profile("any load", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any load")

# Temporary folders in memory, where there is room: on some disks the removal of a folder takes a millisecond or more.
_IN_MEMORY, _ROOM_BYTES = Path("/dev/shm"), 6 << 30
if _IN_MEMORY.is_dir() and shutil.disk_usage(_IN_MEMORY).free > _ROOM_BYTES:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_IN_MEMORY))

Hyfi = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """The garbage collector waits while tests are collected: it would go through what is imported repeatedly.

    Afterwards it works less often than by default: captures make many objects, which die without it.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
        gc.enable()


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

    def run(*words: str | Path, timeout: float = PATIENCE_S, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [
                sys.executable,
                "-P",
                "-m",
                "workflows.cli",
                *map(str, words),
            ],  # as the program ``hyfi`` does, without the folder
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"} | environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return run


@pytest.fixture
def hyfi_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Hyfi]:
    """Like ``hyfi``, but in this process: for tests that are not about the process, whose start takes seconds."""
    from workflows import signals
    from workflows.cli import app

    monkeypatch.chdir(tmp_path)

    def run(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        given = [str(word) for word in words]
        capfd.readouterr()
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
            patch.setattr(signals, "_requested", False)
            for name, value in {"PYTHONPATH": str(ROOT), "COLUMNS": "200", **environment}.items():
                patch.setenv(name, value)
            app(given)
        return subprocess.CompletedProcess(given, int(ended.value.code or 0), *capfd.readouterr())

    yield run


@pytest.fixture(autouse=True)
def _same_signal_handlers() -> Iterator[None]:
    """Commands that run in this process install handlers, which the next test would find."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def _disk_is_not_waited_for() -> Iterator[None]:
    """Whether files outlive a power cut no test can see; each wait for the disk takes milliseconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(autouse=True)
def _no_node_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in this process shares chunks with all later ones: a test after it would read nothing from its store."""
    monkeypatch.setenv("HYFI_NODE_CACHE", "")


@pytest.fixture(autouse=True)
def _captures_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, equal models are captured once and not verified, but for tests marked ``captures_each``."""
    if request.node.get_closest_marker("captures_each"):
        return
    from tests.harness import captured_once

    monkeypatch.setattr("hyfi_core.runtime.subject.capture", captured_once)
    monkeypatch.setattr("workflows.evaluation.programs.capture", captured_once)
    monkeypatch.setattr("hyfi_core.runtime.subject.verify_capture", lambda *given: None)
    monkeypatch.setattr("hyfi_core.runtime.subject.mixes_images", lambda *given: False)


@pytest.fixture(autouse=True)
def _pytorch_writes_no_trace() -> None:
    """pytest adds handlers to loggers that do not propagate, so that PyTorch notes each step of a capture in JSON.

    Without handlers it notes nothing, as outside of pytest: captures take a fifth less time.
    """
    trace = logging.getLogger("torch.__trace")
    trace.propagate = True
    trace.handlers.clear()


@pytest.fixture(autouse=True)
def _no_mode_is_left() -> Iterator[None]:
    """A mode of PyTorch that a test leaves active changes, and slows down, whatever this thread computes after it."""
    yield
    import torch

    assert not (torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack())


@pytest.fixture(scope="module", autouse=True)
def _kept_objects_are_not_collected() -> None:
    """What is there when a module of tests begins, such as PyTorch's own objects, the garbage collector leaves alone.

    It went through all of them again and again, in a twentieth of the tests' time. Not in every module, most of which
    take less than a second: all garbage is collected first.
    """
    global _frozen_at_s
    if time.process_time() - _frozen_at_s > 10:
        gc.collect()
        gc.freeze()
        _frozen_at_s = time.process_time()


_frozen_at_s = -10.0
