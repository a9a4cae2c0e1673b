"""A process that spills stays below ``plan.memory_bytes``, libraries included, with the least that it accepts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

_STEP = """
import json, re, sys
import torch, hyfi_core
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.errors import RequestError
from hyfi_core.models.resnet import resnet18
from hyfi_core.process_memory import forget_peak, peak_bytes
from hyfi_core.runtime import subject
from tests.harness import captured_once
subject.capture = captured_once  # all attempts have the same model
size, cells, more, precision, folder = json.loads(sys.argv[1])
torch.set_num_threads(1)
torch.manual_seed(0)
model = resnet18(2).train()

def step(memory_bytes):
    plan = hyfi_core.ParallelPlan(((1, 1),), cells=(cells, cells), spill=folder, memory_bytes=memory_bytes)
    given = {"autocast": torch.bfloat16 if precision == "bfloat16" else None, "verify": False}
    engine = hyfi_core.parallelize(model, (1, 3, size, size), plan, AloneCommunicator(), **given)
    forget_peak()
    for _ in range(2 if size < 1024 else 1):
        engine.accumulate(lambda box: torch.ones(1, 3, box.height, box.width), torch.tensor([0]))
    return peak_bytes(), engine.spilled().written_bytes

memory_bytes = 1
while True:
    try:
        found = step(memory_bytes)
        break
    except RequestError as error:
        memory_bytes = more + int(re.search(r"needs at least ([0-9,]+)", str(error))[1].replace(",", ""))
print(json.dumps([memory_bytes, *found]))
"""


@pytest.mark.parametrize(
    ("size", "cells", "more", "precision"),
    [
        (512, 2, 2 << 20, "float32"),
        pytest.param(1024, 8, 10 << 20, "float32", marks=pytest.mark.soak),
        pytest.param(1024, 4, 100 << 20, "bfloat16", marks=pytest.mark.soak),
        pytest.param(2048, 4, 50 << 20, "float32", marks=pytest.mark.soak),
        pytest.param(2048, 16, 200 << 20, "float32", marks=pytest.mark.soak),
    ],
)
def test_the_peak_of_a_step_is_below_the_limit(
    size: int, cells: int, more: int, precision: str, tmp_path: Path
) -> None:
    given = json.dumps([size, cells, more, precision, str(tmp_path)])
    done = subprocess.run([sys.executable, "-c", _STEP, given], capture_output=True, text=True, check=True)
    memory_bytes, peak, written = json.loads(done.stdout.splitlines()[-1])
    assert peak <= memory_bytes
    assert written > (1 << 20)
