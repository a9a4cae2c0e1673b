"""Garbage collection that is paused."""

from __future__ import annotations

import gc
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from hyfi_core.collection import collection_paused, start_quickly
from tests.conftest import ROOT
from tests.patience import PATIENCE_S


def test_the_last_of_nested_pauses_ends_it_also_after_an_error() -> None:
    assert gc.isenabled()
    with pytest.raises(ValueError, match="inside"), collection_paused():
        with collection_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise ValueError("inside")
    assert gc.isenabled()


def test_the_last_of_several_threads_ends_it() -> None:
    both_inside, one_outside = Barrier(2, timeout=PATIENCE_S), Barrier(2, timeout=PATIENCE_S)

    def first() -> bool:
        with collection_paused():
            both_inside.wait()
        one_outside.wait()
        return True

    def second() -> bool:
        with collection_paused():
            both_inside.wait()
            one_outside.wait()
            return gc.isenabled()

    with ThreadPoolExecutor(2) as threads:
        ends_first, stays = threads.submit(first), threads.submit(second)
        assert ends_first.result() and not stays.result()
    assert gc.isenabled()


def test_it_stays_off_where_it_was_off() -> None:
    gc.disable()
    try:
        with collection_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


START = """
import atexit, gc, sys
atexit.register(lambda: print("at the end", gc.get_freeze_count() > frozen))  # before: the first comes last
from hyfi_core.collection import start_quickly
finders = list(sys.meta_path)
start_quickly()
import another
import torch
assert sys.meta_path == finders and torch.VALUE == 3 and torch.__spec__.name == "torch"
frozen = gc.get_freeze_count()
made = [[number] for number in range(1000)]
print("after", gc.isenabled(), frozen > 0)
"""


def test_a_quick_start_pauses_for_torch_alone_and_leaves_its_objects_alone(tmp_path: Path) -> None:
    (tmp_path / "another.py").write_text("import gc\nprint('another', gc.isenabled(), gc.get_freeze_count())\n")
    (tmp_path / "torch.py").write_text("import gc\nprint('torch', gc.isenabled())\nVALUE = 3\n")
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", START], env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.stdout.splitlines() == ["another True 0", "torch False", "after True True", "at the end True"]
    assert (done.returncode, done.stderr) == (0, "")


def test_torch_that_is_missing_is_missed_as_ever() -> None:
    code = "from hyfi_core.collection import start_quickly\nstart_quickly()\nimport torch"
    words = [sys.executable, "-S", "-c", code]  # without the folder of packages
    done = subprocess.run(words, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stderr.endswith("ModuleNotFoundError: No module named 'torch'\n"), done.stderr


def test_a_process_that_has_torch_gets_no_finder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atexit.register", lambda function: None)
    before = list(sys.meta_path)
    start_quickly()
    assert sys.meta_path == before
