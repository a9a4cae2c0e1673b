"""The same run under every launcher that is here: see :mod:`tests.workflows.launch.launcher_table`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.patience import BEFORE_KILLED_S
from tests.workflows.launch.launcher_table import rows
from tests.workflows.slurm import PATH, PROGRAMS, running_slurm


@pytest.mark.mpi
@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_every_launcher_does_the_same(tmp_path: Path) -> None:
    if os.geteuid() == 0 and all(shutil.which(name, path=PATH) for name in PROGRAMS):
        with running_slurm(tmp_path, 2) as slurm:
            found = rows(tmp_path / "runs", slurm, lambda _: True)
    else:
        found = rows(tmp_path / "runs", None, lambda _: True)
    for name, cells in found.items():
        assert cells[0] == "yes", (name, cells)
        _, equal, left, other, killed, frozen, dead, stopped, resumed = cells
        assert (equal, left, resumed) == ("equal", "equal", "equal"), (name, left)
        assert other == "-" or " s, named once, code 2" in other, (name, other)
        seconds, _, code = killed.partition(" s, named, in a log, code ")
        assert float(seconds) < BEFORE_KILLED_S, (name, killed)
        assert int(code) == 1 if name == "torchrun" else int(code) not in (0, 1, 2, 3), (name, killed)
        assert ", named, code " in frozen, (name, frozen)
        assert "no checkpoint, code " in dead and not dead.endswith("code 3"), (name, dead)
        assert ", code 3, step-" in stopped, (name, stopped)
