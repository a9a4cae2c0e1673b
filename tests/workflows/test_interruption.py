"""A disk that fills and a store that goes away end a run with one line: what, where, and how to continue."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hyfi_core.runtime.engine import Engine
from hyfi_core.runtime.saving import checkpoint_writer
from hyfi_core.runtime.saving.checkpoint_writer import write_tensors
from tests.workflows.archive import make_config, make_store
from tests.workflows.runs import assert_same_run, run_here
from workflows.exit_codes import FAULT, exit_code_of
from workflows.interruption import RunInterruptedError, interruption
from workflows.training.metrics_log import MetricsLog

pytestmark = pytest.mark.usefixtures("in_process")
AtUpdate = Callable[[Callable[[], Any]], None]
STEPS = {"run": {"steps": 8, "checkpoint_every_steps": 3}, "validation": {"every_steps": 99}}


@pytest.fixture
def at_update(monkeypatch: pytest.MonkeyPatch) -> AtUpdate:
    """Does something before each of a run's updates."""

    def plan(act: Callable[[], Any]) -> None:
        update = Engine.update_unread

        def watched(self: Engine, *args: Any, **kwargs: Any) -> Any:
            act()
            return update(self, *args, **kwargs)

        monkeypatch.setattr(Engine, "update_unread", watched)

    return plan


@pytest.fixture
def small_files() -> Iterator[Callable[[], None]]:
    """From its call on, no file of this process becomes larger than 1,000 bytes: as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_one_line_and_the_run_resumes(
    tmp_path: Path,
    store: Path,
    at_update: AtUpdate,
    small_files: Callable[[], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = make_config(
        tmp_path, store, run={"steps": 40, "checkpoint_every_steps": 3}, validation={"every_steps": 99}
    )
    assert run_here(config, f"run.dir={tmp_path / 'straight'}") == 0
    latest = tmp_path / "run" / "checkpoints" / "latest"
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    room = ["left"]
    at_update(lambda: latest.exists() and room and (room.pop(), small_files()))
    assert exit_code_of(lambda: run_here(config)) == FAULT
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    said = capsys.readouterr().err.splitlines()[-1]
    metrics = tmp_path / "run" / "metrics.jsonl"
    assert said.startswith(f"hyfi: the run cannot continue: {metrics} cannot be written (File too large; its disk has")
    step = int(latest.resolve().name.removeprefix("step-"))
    assert said.endswith(
        f"make room there, or raise the quota; --resume continues after step {step}, that of the latest checkpoint; "
        f"later steps are computed again"
    )
    assert run_here(config, resume=True) == 0
    assert_same_run(tmp_path / "straight", tmp_path / "run", 40)


def test_a_checkpoint_that_does_not_fit_is_one_line_with_its_file(
    tmp_path: Path,
    store: Path,
    small_files: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = make_config(tmp_path, store, **STEPS)
    monkeypatch.setattr(MetricsLog, "write", lambda *_, **__: None)  # it would fail first

    def write(temporary: Path, *tensors: Any, **number: Any) -> Any:
        if "step-00000006" in temporary.name:
            small_files()
        return write_tensors(temporary, *tensors, **number)

    monkeypatch.setattr(checkpoint_writer, "write_tensors", write)
    wanted = r"\.step-00000006\.tmp-\w+/model\.safetensors cannot be written \(File too large; .* after step 3, "
    with pytest.raises(RunInterruptedError, match=wanted):
        run_here(config)
    left = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if not path.name.startswith(".")}
    assert left == {"latest", "step-00000003"}


def test_a_store_that_is_removed_is_one_line(
    tmp_path: Path, at_update: AtUpdate, capsys: pytest.CaptureFixture[str]
) -> None:
    store = make_store(tmp_path)
    config = make_config(tmp_path, store, data={"cache_bytes": 0}, **STEPS)
    at_update(lambda: shutil.rmtree(store, ignore_errors=True))
    assert exit_code_of(lambda: run_here(config)) == FAULT
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"hyfi: the run cannot continue: data.store {store} is not there any more ({store}/slide-")
    assert said.endswith("put it back; there is no checkpoint yet: --resume begins the run again")


def test_a_shard_that_is_removed_names_the_shard_and_what_to_do(tmp_path: Path, at_update: AtUpdate) -> None:
    store = make_store(tmp_path)
    config = make_config(tmp_path, store, data={"cache_bytes": 0}, **STEPS)
    at_update(lambda: [shutil.rmtree(path, ignore_errors=True) for path in store.glob("slide-*.zarr")])
    with pytest.raises(
        RunInterruptedError, match=r"slide-\d+\.zarr/0/c/0/0/0: the shard .* or ingest the slide again; there"
    ):
        run_here(config)


def test_other_errors_of_files_keep_their_traceback(tmp_path: Path, store: Path) -> None:
    from workflows.config.load import load_config

    config = load_config(make_config(tmp_path, store), [])
    assert interruption(FileNotFoundError(errno.ENOENT, "No such file", "/elsewhere/settings"), config) is None
    assert interruption(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), config) is None
    stale = OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(tmp_path / "run" / "metrics.jsonl"))
    assert "metrics.jsonl cannot be written (Stale file handle)" in str(interruption(stale, config))
