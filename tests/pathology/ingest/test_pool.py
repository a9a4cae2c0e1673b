from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest

from data.store.manifest import DONE, FAILED, SlideRecord, load_records
from data.store.slide_store import slide_path
from pathology.ingest.discover import SlideJob
from pathology.ingest.options import IngestOptions
from pathology.ingest.pool import SlidePool
from tests.conftest import ROOT
from tests.patience import PATIENCE_S

_SCRIPT = """
from pathlib import Path
import sys
from pathology.ingest.discover import SlideJob
from pathology.ingest.options import IngestOptions
from pathology.ingest.pool import SlidePool
if __name__ == "__main__":
    store = Path(sys.argv[1])
    store.mkdir()
    jobs = [SlideJob(store / f"{k}.tiff", str(k)) for k in range(3)]
    SlidePool(store, IngestOptions(mpp=0.5), 2, lambda outcome: None).run(jobs)
"""


def workers_of(pid: int) -> list[int]:
    """Return the processes that ``multiprocessing`` spawned for this one."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(c) for c in children if b"spawn_main" in Path(f"/proc/{c}/cmdline").read_bytes()]


def is_at_work(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def starting(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Give a pool's process, and its workers, of which none has done more than to begin."""
    (tmp_path / "pool.py").write_text(_SCRIPT)
    command = [sys.executable, str(tmp_path / "pool.py"), str(tmp_path / "store")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline_s = time.monotonic() + PATIENCE_S
    while len(found := workers_of(process.pid)) < 2:
        assert process.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.002)
    yield process, found
    for pid in (process.pid, *found):
        if is_at_work(pid):
            os.kill(pid, signal.SIGKILL)
    process.communicate()


def test_workers_that_lose_their_parent_while_they_start_leave(
    starting: tuple[subprocess.Popen[str], list[int]],
) -> None:
    process, workers = starting
    time.sleep(0.1)  # they have their orders, and import what these name
    process.kill()
    process.wait()
    deadline_s = time.monotonic() + PATIENCE_S
    while any(map(is_at_work, workers)):
        assert time.monotonic() < deadline_s, "they wait for jobs for ever"
        time.sleep(0.05)


def test_workers_that_are_interrupted_while_they_start_say_nothing(
    starting: tuple[subprocess.Popen[str], list[int]],
) -> None:
    process, workers = starting
    time.sleep(0.1)
    for pid in workers:
        os.kill(pid, signal.SIGINT)
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0 and "Traceback" not in said


def test_an_interrupted_pool_ends_its_own_workers_only(tmp_path: Path) -> None:
    other = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(PATIENCE_S,))
    other.start()

    def interrupt(fractions: Sequence[float]) -> None:
        raise KeyboardInterrupt

    jobs = [SlideJob(tmp_path / f"{k}.tiff", str(k)) for k in range(3)]
    with pytest.raises(KeyboardInterrupt):
        SlidePool(tmp_path, IngestOptions(mpp=0.5), 2, lambda outcome: None, interrupt).run(jobs)
    assert multiprocessing.active_children() == [other] and other.is_alive()
    other.kill()


class InterruptedAlone(SlidePool):
    """Works on a slide for long; Ctrl-C is pressed as soon as it has begun."""

    def _submit(self, pool: ProcessPoolExecutor, number: int) -> Future[Any]:
        self.submitted = pool.submit(time.sleep, 20)
        while not self.submitted.running():
            time.sleep(0.01)

        class Interrupted(Future[Any]):
            def result(self, timeout: float | None = None) -> Any:
                raise KeyboardInterrupt

        return Interrupted()


def test_a_slide_that_is_tried_alone_is_ended_by_an_interrupt(tmp_path: Path) -> None:
    pool = InterruptedAlone(tmp_path, IngestOptions(mpp=0.5), 2, lambda outcome: None)
    pool._jobs = (SlideJob(tmp_path / "a.tiff", "a"),)
    with pytest.raises(KeyboardInterrupt):
        pool._run_alone(0)
    assert isinstance(pool.submitted.exception(), BrokenProcessPool)  # ended, instead of finished


def test_a_pool_may_run_twice(tmp_path: Path) -> None:
    seen: list[str] = []
    pool = SlidePool(tmp_path, IngestOptions(mpp=0.5), 1, lambda outcome: seen.append(outcome.record.slide_id))
    for name in "ab":
        pool.run([SlideJob(tmp_path / f"{name}.tiff", name)])
    assert seen == ["a", "b"]


class PickledBomb:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> tuple[object, ...]:
        return os._exit, (1,)


def test_a_finished_slide_survives_the_death_of_a_worker(tmp_path: Path) -> None:
    SlideRecord("a", "/x/a.tiff", DONE, store_mpp=0.5).save(tmp_path)
    slide_path(tmp_path, "a").mkdir()
    seen: list[str] = []
    job = SlideJob(tmp_path / "a.tiff", "a", {"path": PickledBomb()})  # type: ignore[dict-item]
    SlidePool(tmp_path, IngestOptions(mpp=0.5), 2, lambda outcome: seen.append(outcome.record.status)).run([job])
    record = load_records(tmp_path)["a"]
    assert seen == [FAILED] and (record.status, record.store_mpp) == (DONE, 0.5) and "died" in record.reason
