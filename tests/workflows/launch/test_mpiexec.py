"""The output of ranks as the launcher forwards it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hyfi_core.errors import RequestError
from tests.patience import PATIENCE_S
from workflows.gpu_check import run_parts
from workflows.gpu_check.parts import all_parts
from workflows.gpu_check.setting import SMALL
from workflows.launch import launch, mpiexec
from workflows.launch.mpiexec import Output

RANK = "for line in range(20_000): print('a line', line)\nprint('', 'last', '', '', sep='\\n')"


def test_ranks_are_read_after_the_reader_of_their_output_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full pipe blocks the ranks: 20,000 lines are more than it holds."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        rank = subprocess.Popen([sys.executable, "-c", RANK], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        output = Output(rank)
        try:
            assert rank.wait(timeout=PATIENCE_S) == 0
        finally:
            rank.kill()
        output.finish()


def test_lines_are_forwarded_as_they_are(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rank = subprocess.Popen([sys.executable, "-c", RANK], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    output = Output(rank)
    rank.wait(timeout=PATIENCE_S)
    output.finish()
    said = capsys.readouterr().out
    assert said.startswith("a line 0\na line 1\n") and said.endswith("a line 19999\n\nlast\n\n\n")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("SLURM_JOB_NUM_NODES", "2", "this Slurm job has 2 nodes, but all 3 ranks would run on this one.*srun --mpi="),
        ("LSB_MCPU_HOSTS", "a 16 b 16 b 4", "this LSF job has 2 nodes.*`mpiexec -n 3 hyfi train …`"),
        ("PBS_NODEFILE", "nodes", "this PBS job has 2 nodes.*`mpiexec -n 3 hyfi train …`"),
        ("LSB_MCPU_HOSTS", "a 16", None),
        ("PBS_NODEFILE", "node", None),
        ("PBS_NODEFILE", "none", None),
    ],
)
def test_ranks_of_a_job_of_several_nodes_are_not_started_on_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str | None
) -> None:
    (tmp_path / "nodes").write_text("a\nb\na\n")
    (tmp_path / "node").write_text("a\na\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(name, value)
    if said is None:
        mpiexec.refuse_several_nodes("train", 3)
        return
    with pytest.raises(RequestError, match=said):
        mpiexec.refuse_several_nodes("train", 3)


def test_ranks_start_although_the_list_of_nodes_of_a_job_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container, or with a variable left over from a job that has ended."""
    monkeypatch.setenv("PBS_NODEFILE", "/nonexistent")
    words = [*mpiexec.find_mpiexec().command(1), "echo", "begun"]
    of_part = run_parts._environment(next(part for part in all_parts(SMALL) if part.launcher == "mpiexec"), 0)
    for environment in (launch._environment(1), of_part):
        ran = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
        assert ran.stdout == "begun\n", ran.stderr
