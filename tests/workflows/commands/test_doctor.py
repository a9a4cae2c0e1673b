from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from hyfi_core.errors import RequestError
from tests.conftest import Hyfi
from workflows.commands import doctor
from workflows.commands.doctor import Finding
from workflows.launch import mpiexec


@pytest.mark.mpi
def test_here_everything_works_and_files_in_the_current_folder_are_not_imported(hyfi: Hyfi, tmp_path: Path) -> None:
    """Neither by the command nor by any process that it starts: the ranks of its probe."""
    planted = {f"{name}.py" for name in ("secrets", "random", "socket", "data", "zarr", "logging")}
    for name in planted:
        (tmp_path / name).write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write({name!r})\nraise OSError\n")
    done = hyfi("doctor", "--json")
    assert done.returncode == 0, done.stdout
    said = json.loads(done.stdout.splitlines()[-1])
    checks = {check["name"]: check for check in said["checks"]}
    assert said["ok"] is True
    assert set(checks) == set(doctor.CHECKS)
    assert [name for name, check in checks.items() if check["essential"] and not check["ok"]] == []
    assert "two ranks agree with one process" in checks["two-rank halo exchange"]["detail"]
    assert "OMP_NUM_THREADS=" in checks["threads"]["detail"]
    assert {path.name for path in tmp_path.iterdir()} == planted  # it leaves nothing here, and "imported" is not there


SRUN = {"PMI_FD": "77", "PMI_RANK": "1", "PMI_SIZE": "2", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}


def test_the_probe_of_a_task_of_srun_does_not_know_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In `srun -n 2 bash -c "hyfi doctor"` it took itself for a rank of srun without a connection to it."""
    environments: list[dict[str, str]] = []

    def run(words: list[str], env: dict[str, str], **_: object) -> subprocess.CompletedProcess[str]:
        environments.append(env)
        return subprocess.CompletedProcess(words, 0, '{"mpi": "MPICH", "difference": 0.0}\n')

    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(subprocess, "run", run)
    assert doctor._halo().startswith("two ranks agree with one process, over MPICH")
    assert len(environments) == 1 and not SRUN.keys() & environments[0].keys()


@pytest.mark.mpi
@pytest.mark.soak
def test_a_task_of_srun_starts_two_ranks_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    assert doctor._halo().startswith("two ranks agree with one process")


def test_what_is_missing_comes_with_what_mends_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_mpi() -> mpiexec.MpiExec:
        raise RequestError(mpiexec.NO_MPI)

    monkeypatch.setattr(mpiexec, "find_mpiexec", no_mpi)
    monkeypatch.setattr(doctor, "CHECKS", {name: doctor.CHECKS[name] for name in ("Python", "MPI", "threads")})
    assert doctor.run(as_json=True) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [check["ok"] for check in json.loads(lines[-1])["checks"]] == [True, False, True]
    assert any(line.startswith("missing MPI: cannot start several ranks: mpiexec not found") for line in lines)
    assert any("fix: pip install 'hyfi[local]'" in line for line in lines)


def test_more_threads_than_cores_are_noted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "CHECKS", {"threads": doctor.CHECKS["threads"]})
    monkeypatch.setattr(doctor, "usable_cores", lambda: 1)
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    assert doctor.run(as_json=True) == 0
    (check,) = json.loads(capsys.readouterr().out.splitlines()[-1])["checks"]
    assert not check["ok"] and check["detail"].startswith("2 threads on 1 core: they take turns; ")
    assert "--bind-to none" in check["mend"]


def test_a_note_is_no_fault(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small = Finding("shared memory", False, "only 1 MiB", "docker run --shm-size=1g", essential=False)
    monkeypatch.setattr(doctor, "CHECKS", {"shared memory": (lambda: small, "")})
    assert doctor.run(as_json=False) == 0
    assert "note    shared memory: only 1 MiB" in capsys.readouterr().out


def test_a_check_that_breaks_down_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> str:
        raise ImportError("libopenslide.so.1: cannot open shared object file")

    finding = doctor._tried("slides", broken, "pip install openslide-bin")
    assert (finding.ok, finding.mend) == (False, "pip install openslide-bin")
    assert "libopenslide" in finding.detail
