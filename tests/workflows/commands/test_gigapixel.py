"""The recipe for images larger than memory, on small ones: spilling changes no bit of a run, nor of one resumed."""

from __future__ import annotations

import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import workflows
from hyfi_core.cells import pager, paging, spill_store
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.errors import RequestError
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.runtime.engine import Engine
from tests.workflows.archive import make_config, make_store
from tests.workflows.runs import assert_same_run, in_this_process, run_here
from workflows.evaluation.evaluator import Evaluator

RECIPE = Path(workflows.__file__).parent / "recipes" / "gigapixel.yaml"
_SMALL = (
    *("data.size_px=128", "data.align_px=32", "data.min_coverage=0"),
    *("model.name=resnet6", "model.options={width: 4}", "optimizer.accumulate=2", "run.tensorboard=false"),
    *("run.epochs=null", "run.steps=2", "validation.every_steps=2", "run.checkpoint_every_steps=2"),
)


def test_a_run_that_spills_is_the_same_to_the_last_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = [f"data.store={make_store(tmp_path)}", *_SMALL]
    disk = tmp_path / "disk"
    ways = {
        "kept": ["plan.cells=[2, 2]", "plan.spill=null", "plan.memory_bytes=null"],
        "spilled": ["plan.cells=[2, 2]", f"plan.spill={disk}", "plan.memory_bytes=null"],
        "recipe": [f"plan.spill={disk}"],  # all fits in 12 GiB: no cells
    }
    monkeypatch.setattr(pager, "SMALLEST_BYTES", 1)
    monkeypatch.setattr(paging, "page_limit", lambda *given: 100_000)
    with in_this_process(monkeypatch):
        for way, plan in ways.items():
            assert run_here(RECIPE, *small, *plan, f"run.dir={tmp_path / way}") == 0
    assert_same_run(tmp_path / "kept", tmp_path / "spilled", 2)
    assert list(disk.iterdir()) == []


def test_too_little_memory_or_disk_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [f"data.store={make_store(tmp_path)}", f"run.dir={tmp_path / 'run'}", f"plan.spill={tmp_path / 'disk'}"]
    given += [*_SMALL, "plan.cells=[2, 2]"]
    with in_this_process(monkeypatch):
        assert run_here(RECIPE, *given, "plan.memory_bytes=1000") == 2
        assert re.search(r"plan\.memory_bytes is 1,000, but .* at least [\d,]{9,}:", capsys.readouterr().err)
        monkeypatch.setattr(spill_store.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
        monkeypatch.setattr(paging, "page_limit", lambda *given: 100_000)
        assert run_here(RECIPE, *given) == 2
    assert re.search(r"a step spills up to [\d,]{6,} bytes to .*, which has 1,000 bytes", capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


def test_too_little_disk_for_a_validation_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [f"data.store={make_store(tmp_path)}", f"run.dir={tmp_path / 'run'}", f"plan.spill={tmp_path / 'disk'}"]
    stored = paging._stored_bytes
    more = lambda found, limit, trains: stored(found, limit, trains) + (0 if trains else 10**15)  # noqa: E731
    monkeypatch.setattr(paging, "_stored_bytes", more)
    monkeypatch.setattr(paging, "page_limit", lambda *given: 100_000)
    with in_this_process(monkeypatch):
        assert run_here(RECIPE, *given, *_SMALL, "plan.cells=[2, 2]") == 2
    told = capsys.readouterr().err
    assert re.search(r"validation between training steps \(roles\.validators=0\): a step spills up to 1,000,000,", told)
    assert not (tmp_path / "run").exists()


def test_a_validator_that_spills_is_refused_before_it_has_weights(tmp_path: Path) -> None:
    images: Any = SimpleNamespace(size_px=(128, 128))
    model = {"model": {"name": "resnet6", "classes": 2, "width": 4}, "size_px": [128, 128]}
    plan = ParallelPlan(((1, 1),), cells=(2, 2), spill=str(tmp_path / "disk"), memory_bytes=1000)
    with pytest.raises(RequestError, match=r"plan\.memory_bytes is 1,000, but with these cells a rank needs at least"):
        Evaluator.of(model, images, plan, AloneCommunicator(), (2, 2))


def test_a_checkpoint_is_published_before_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, published, accumulate = tmp_path / "run", list[list[str]](), Engine.accumulate_unread

    def watched(engine: Engine, *given: Any) -> Any:
        published.append(sorted(path.name for path in run.glob("checkpoints/step-*")))
        return accumulate(engine, *given)

    monkeypatch.setattr(Engine, "accumulate_unread", watched)
    given = [f"data.store={make_store(tmp_path)}", f"run.dir={run}", f"plan.spill={tmp_path / 'disk'}", *_SMALL]
    with in_this_process(monkeypatch):
        steps = ["run.steps=3", "run.checkpoint_every_steps=1", "validation.every_steps=1"]
        assert run_here(RECIPE, *given, "plan.cells=[2, 2]", *steps, "optimizer.accumulate=1") == 0
    assert published == [[], ["step-00000001"], ["step-00000001", "step-00000002"]]
    told = capsys.readouterr()
    assert "are spilled to" in told.out + told.err
    assert "computing 0 %" not in told.out + told.err


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_the_commands_of_the_recipe_run_as_they_are(tmp_path: Path) -> None:
    shutil.copy(RECIPE, tmp_path)
    lines = re.findall(r"^#     hyfi (.*)$", RECIPE.read_text(), re.MULTILINE)
    assert [line.split()[0] for line in lines] == ["synth", "ingest", "train"]
    small = ["data.size_px=1024", "plan.memory_bytes=800000000", "optimizer.accumulate=1"]
    small += ["run.epochs=null", "run.steps=3", "validation.every_steps=3", "run.checkpoint_every_steps=3"]
    for line, more in zip(lines, ([], [], small), strict=True):
        words = line.replace("--slides 12 --size 32768", "--slides 6 --size 2048").split()
        command = [sys.executable, "-m", "workflows.cli", *words, *more]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
    told = done.stdout + done.stderr
    assert re.search(r"each rank computes its part in \d+ x \d+ cells", told)
    assert re.search(r"epoch 0: .*-bound: .*\[computing \d+ %, spilling \d+ %", told)
    assert not [path for path in tmp_path.iterdir() if path.name not in _FOLDERS]


_FOLDERS = ("gigapixel.yaml", "slides", "store", "runs")


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_run_whose_disk_is_full_in_mid_step_ends_with_one_line_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    disk, store = tmp_path / "disk", make_store(tmp_path)
    config = make_config(tmp_path, store, **_spilling(disk))
    command = [sys.executable, "-m", "workflows.cli", "train", str(config)]
    calm, full = (f"run.dir={tmp_path / name}" for name in ("calm", "full"))
    subprocess.run([*command, calm], check=True, capture_output=True, timeout=600)
    with subprocess.Popen([*command, full], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        _wait_for_steps(process, tmp_path / "full", 4)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1 << 18, 1 << 18))
        _, told = process.communicate(timeout=600)
    assert process.returncode not in (0, 1, 3)
    assert "Traceback" not in told
    assert re.search(r"\(plan\.spill\): File too large; free some space there and resume", told)
    assert list(disk.iterdir()) == []
    subprocess.run([*command, full, "--resume"], check=True, capture_output=True, timeout=600)
    assert_same_run(tmp_path / "calm", tmp_path / "full", 8)


def _spilling(disk: Path) -> dict[str, Any]:
    return {
        "model": {"name": "tests.workflows.commands.small_pages:tiny"},
        "plan": {"cells": [2, 2], "spill": str(disk)},
        "run": {"steps": 8, "checkpoint_every_steps": 2},
        "validation": {"every_steps": 100},
    }


def _wait_for_steps(process: subprocess.Popen[Any], run: Path, steps: int) -> None:
    metrics = run / "metrics.jsonl"
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= steps):
        assert process.poll() is None
        time.sleep(0.01)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_run_that_is_killed_leaves_nothing_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    config = make_config(tmp_path, make_store(tmp_path), **_spilling(disk))
    command = [sys.executable, "-m", "workflows.cli", "train", str(config)]
    calm, killed = (f"run.dir={tmp_path / name}" for name in ("calm", "killed"))
    subprocess.run([*command, calm], check=True, capture_output=True, timeout=600)
    with subprocess.Popen([*command, killed], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        _wait_for_steps(process, tmp_path / "killed", 4)
        process.send_signal(signal.SIGKILL)
    assert list(disk.iterdir()) == []
    subprocess.run([*command, killed, "--resume"], check=True, capture_output=True, timeout=600)
    assert_same_run(tmp_path / "calm", tmp_path / "killed", 8)
    assert list(disk.iterdir()) == []
