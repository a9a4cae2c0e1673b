"""Runs under a real Slurm: found places, wrong requests, lost ranks, time limits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from data.store.manifest import load_manifest
from tests.pathology.slides import draw_slide, write_slide
from tests.patience import BEFORE_KILLED_S, PATIENCE_S
from tests.workflows.archive import make_config, make_store
from tests.workflows.launch.test_launchers import open_mpi
from tests.workflows.predictions import rows_of, save
from tests.workflows.runs import losses
from tests.workflows.slurm import CONFIGURATION, Slurm, running_slurm, slurm
from workflows.launch.scripts import log_name
from workflows.training.metrics_log import read_metrics

__all__ = ["slurm"]
pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[3]
HYFI = (sys.executable, "-m", "workflows")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
TWO = "plan.grids=[[1,2]]"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return make_store(tmp_path)


def environment(slurm: Slurm, **more: str) -> dict[str, str]:
    return slurm.environment | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | more


def begin(slurm: Slurm, folder: Path, *words: str, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        words, cwd=folder, env=environment(slurm, **more), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run(slurm: Slurm, folder: Path, *words: str) -> tuple[int, str]:
    process = begin(slurm, folder, *words)
    out, err = process.communicate(timeout=300)
    return process.returncode, out + err


def steps(folder: Path) -> int:
    return max((record["step"] for record in read_metrics(folder / "metrics.jsonl")), default=0)


def wait_for_step(process: subprocess.Popen[str], folder: Path, step: int) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while steps(folder) < step:
        assert time.monotonic() < deadline_s and process.poll() is None, process.communicate()
        time.sleep(0.05)


def test_one_task_starts_its_ranks_itself(slurm: Slurm, tmp_path: Path, store: Path) -> None:
    """``srun bash -c 'hyfi train …'``: srun gives its only task a place in a world of one."""
    config = make_config(tmp_path, store, run={"steps": 2})
    line = " ".join([*HYFI, "train", str(config), f"'{TWO}'"])
    code, said = run(slurm, tmp_path, "srun", "--mpi=pmi2", "-N1", "-n1", "-c4", "bash", "-c", line)
    assert code == 0, said
    assert steps(tmp_path / "run") == 2


def test_tasks_that_do_not_know_each_other_are_refused(slurm: Slurm, tmp_path: Path, store: Path) -> None:
    """Each took itself for the only rank, and three whole trainings wrote into one folder."""
    config = make_config(tmp_path, store)
    code, said = run(slurm, tmp_path, "srun", "--mpi=none", "-N1", "-n3", *HYFI, "train", str(config))
    assert code == 2
    assert said.count("srun started 3 tasks, but MPI sees 1") == 1
    assert "--mpi=pmi2" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("library", "spoken", "right"), [("MPICH", "pmix", "pmi2"), ("Open MPI", "pmi2", "pmix")])
def test_the_mpi_type_of_another_library_is_named_once_with_the_one_to_use(
    slurm: Slurm, tmp_path: Path, store: Path, library: str, spoken: str, right: str
) -> None:
    """What was seen was the library's abort, or advice to start as many tasks as were started."""
    more = {} if library == "MPICH" else open_mpi()[1]
    config = make_config(tmp_path, store)
    job = begin(slurm, tmp_path, "srun", f"--mpi={spoken}", "-N1", "-n2", *HYFI, "train", str(config), TWO, **more)
    out, err = job.communicate(timeout=PATIENCE_S)
    if "cannot find" in err or "Invalid MPI type" in err:
        pytest.skip(f"this Slurm has no {spoken}")
    assert job.returncode == 2, out + err
    assert err.count(f"its MPI library is {library}") == 1
    assert f"use `srun --mpi={right} …`" in err and "MPI_Init" not in err
    assert not (tmp_path / "run").exists()


def test_several_nodes_are_not_used_by_one_process(slurm: Slurm, tmp_path: Path, store: Path) -> None:
    config = make_config(tmp_path, store)
    words = ["salloc", "-N2", "-n2", *HYFI, "train", str(config), TWO]
    code, said = run(slurm, tmp_path, *words)
    assert code == 2
    assert "this Slurm job has 2 nodes" in said and "-n 2 hyfi train" in said and "hyfi launch slurm" in said
    assert not (tmp_path / "run").exists()


def test_a_second_job_is_refused_and_a_killed_rank_ends_all_within_seconds(
    slurm: Slurm, tmp_path: Path, store: Path
) -> None:
    """A second ``srun --resume`` names the first; without --kill-on-bad-exit srun let the others wait for ever."""
    config = make_config(tmp_path, store, run={"steps": 5000}, validation={"every_steps": 5000})
    words = ["srun", "--mpi=pmi2", "-N2", "-n2", *HYFI, "train", str(config), TWO]
    job = begin(slurm, tmp_path, *words, HYFI_TEST_MARK=str(tmp_path))
    wait_for_step(job, tmp_path / "run", 2)
    code, said = run(slurm, tmp_path, *words, "--resume")
    assert code == 2, said
    number = slurm.only_running_job()
    assert said.count(f"{tmp_path / 'run'}: in use by process ") == 1 and f"job {number}" in said, said
    assert job.poll() is None
    os.kill(_pid_of_rank(1, tmp_path), signal.SIGKILL)
    killed_s = time.monotonic()
    _, err = job.communicate(timeout=PATIENCE_S)
    assert time.monotonic() - killed_s < BEFORE_KILLED_S
    assert job.returncode not in (0, 1, 2, 3)
    assert "rank 1 was killed or crashed" in err


@pytest.mark.parametrize("at", ["start", "step"])
def test_a_request_to_stop_is_a_checkpoint_and_code_3(slurm: Slurm, tmp_path: Path, store: Path, at: str) -> None:
    config = make_config(tmp_path, store, run={"steps": 5000}, validation={"every_steps": 5000})
    words = ["srun", "-K", "--mpi=pmi2", "-N2", "-n2", *HYFI, "train", str(config), TWO]
    job = begin(slurm, tmp_path, *words, HYFI_TEST_MARK=str(tmp_path))
    if at == "start":
        _wait_for_handlers(signal.SIGUSR1, tmp_path)
    else:
        wait_for_step(job, tmp_path / "run", 2)
    job.send_signal(signal.SIGUSR1)
    _, err = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 3, err
    if at == "step":
        assert (tmp_path / "run" / "checkpoints" / "latest").resolve().name == f"step-{steps(tmp_path / 'run'):08d}"


@pytest.mark.soak
def test_a_cancelled_job_of_srun_is_a_checkpoint_and_code_3(slurm: Slurm, tmp_path: Path, store: Path) -> None:
    """``scancel`` asks the ranks by TERM, as preemption and time limits do; TERM to srun itself would kill them."""
    config = make_config(tmp_path, store, run={"steps": 5000}, validation={"every_steps": 5000})
    job = begin(slurm, tmp_path, "srun", "--mpi=pmi2", "-N2", "-n2", *HYFI, "train", str(config), TWO)
    wait_for_step(job, tmp_path / "run", 2)
    number = slurm.only_running_job()
    slurm.run("scancel", number)
    _, err = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 3, err
    assert (tmp_path / "run" / "checkpoints" / "latest").exists()


@pytest.mark.soak
def test_a_preempted_job_saves_and_continues_by_itself(slurm: Slurm, tmp_path: Path, store: Path) -> None:
    """A job of a partition that goes first takes both nodes; the run saves in its grace time, and goes on later."""
    config = make_config(tmp_path, store, run={"steps": 12}, validation={"every_steps": 6})
    straight = [*HYFI, "train", str(config), TWO, f"run.dir={tmp_path / 'straight'}"]
    subprocess.run(straight, cwd=tmp_path, env=environment(slurm), check=True, capture_output=True, timeout=300)
    slow = environment(slurm, HYFI_TEST_FAULT="0:3:update:slow_until_requeued")
    words = ["launch", "slurm", str(config), TWO, "--nodes", "2", "--mpi", "pmi2", "--partition", "idle", "--submit"]
    said = subprocess.run([*HYFI, *words], cwd=tmp_path, env=slow, check=True, capture_output=True, text=True)
    job, deadline_s = said.stdout.split()[-1], time.monotonic() + 280
    log = tmp_path / f"run-{job}.log"
    while steps(tmp_path / "run") < 2:
        assert time.monotonic() < deadline_s, slurm.state(job)
        time.sleep(0.1)
    slurm.run("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 3")
    while slurm.state(job)[0] not in ENDED or slurm.state(job)[1] < 1:
        assert time.monotonic() < deadline_s, (slurm.state(job), log.read_text())
        time.sleep(0.5)
    assert slurm.state(job)[0] == "COMPLETED", log.read_text()
    assert "stopped on request" in log.read_text() and "continues after step" in log.read_text()
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")


@pytest.mark.soak
def test_a_run_meets_its_time_limit_and_continues_by_itself(slurm: Slurm, tmp_path: Path, store: Path) -> None:
    config = make_config(tmp_path, store, run={"steps": 60}, validation={"every_steps": 20})
    straight = [*HYFI, "train", str(config), TWO, f"run.dir={tmp_path / 'straight'}"]
    subprocess.run(straight, cwd=tmp_path, env=environment(slurm), check=True, capture_output=True, timeout=300)
    (tmp_path / "site.yaml").write_text("signal_s: 75\npartition: all\n")
    slow = environment(slurm, HYFI_TEST_FAULT="0:20:update:slow_until_requeued")
    words = [*HYFI, "launch", "slurm", str(config), TWO, "--nodes", "2", "--time", "3", "--mpi", "pmi2", "--submit"]
    said = subprocess.run(
        words, cwd=tmp_path, env=slow, check=True, capture_output=True, text=True, timeout=PATIENCE_S
    ).stdout
    job = said.split()[-1]
    deadline_s = time.monotonic() + 420
    while slurm.state(job)[0] not in ENDED:
        assert time.monotonic() < deadline_s, (slurm.state(job), (tmp_path / f"run-{job}.log").read_text())
        time.sleep(1)
    log = (tmp_path / f"run-{job}.log").read_text()
    state, restarts = slurm.state(job)
    assert state == "COMPLETED" and restarts >= 1, log
    assert "stopped on request" in log
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")


@pytest.mark.soak
def test_a_requeued_job_starts_where_killed_ranks_left_shared_memory(slurm: Slurm, tmp_path: Path, store: Path) -> None:
    """MPICH failed in the step of the same number, with "Out of memory" or "Message truncated"."""
    run = tmp_path / "run"
    config = make_config(tmp_path, store, run={"steps": 5000}, validation={"every_steps": 5})
    words = [*HYFI, "launch", "slurm", str(config), TWO, "--nodes", "2", "--mpi", "pmi2", "--submit"]
    said = subprocess.run(
        words, cwd=tmp_path, env=environment(slurm), check=True, capture_output=True, text=True, timeout=PATIENCE_S
    ).stdout
    job, log, deadline_s = said.split()[-1], tmp_path / f"run-{said.split()[-1]}.log", time.monotonic() + 420
    for restart in range(3):
        wanted = steps(run) + 6
        while steps(run) < wanted:
            assert time.monotonic() < deadline_s and slurm.state(job)[0] not in ENDED, log.read_text()
            time.sleep(0.1)
        if restart == 2:
            slurm.run("scancel", job)
            return
        slurm.run("scancel", "--signal=KILL", f"{job}.{min(restart, 1)}")
        while slurm.state(job)[0] not in ENDED:
            assert time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.1)
        slurm.run("scontrol", "requeue", job)


@pytest.mark.soak
@pytest.mark.parametrize("array", [None, "1-1"])
def test_a_job_in_a_folder_like_a_pattern_runs_and_has_its_log(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, array: str | None
) -> None:
    folder = tmp_path / "50%j of %A"
    folder.mkdir()
    monkeypatch.chdir(folder)
    more = ["#SBATCH --array=1-1"] if array else []
    lines = ["#!/bin/bash", f"#SBATCH --output={log_name(Path('a.sbatch'), '%A_%a' if array else '%j')}", *more, "pwd"]
    (folder / "a.sbatch").write_text("\n".join(lines) + "\n")
    code, said = run(slurm, folder, "sbatch", "--wait", "a.sbatch")
    assert code == 0, said
    (log,) = folder.glob("a-*.log")
    assert log.read_text() == f"{folder}\n"


def test_a_job_that_is_told_to_end_saves_first(slurm: Slurm, tmp_path: Path, store: Path) -> None:
    """The script passed TERM on to srun, which killed the ranks by it."""
    config = make_config(tmp_path, store, run={"steps": 5000}, validation={"every_steps": 5000})
    words = [*HYFI, "launch", "slurm", str(config), TWO, "--nodes", "2", "--mpi", "pmi2", "--submit"]
    said = subprocess.run(
        words, cwd=tmp_path, env=environment(slurm), check=True, capture_output=True, text=True, timeout=PATIENCE_S
    ).stdout
    job, deadline_s = said.split()[-1], time.monotonic() + PATIENCE_S
    while steps(tmp_path / "run") < 2:
        assert time.monotonic() < deadline_s, slurm.state(job)
        time.sleep(0.1)
    slurm.run("scancel", "--batch", "--signal=TERM", job)
    while slurm.state(job)[0] not in ENDED:
        assert time.monotonic() < deadline_s, slurm.state(job)
        time.sleep(0.1)
    assert "ExitCode=3:0" in slurm.run("scontrol", "show", "job", job)
    assert (tmp_path / "run" / "checkpoints" / "latest").exists()


@pytest.mark.soak
def test_roles_run_on_nodes_of_another_kind(slurm: Slurm, tmp_path: Path, store: Path) -> None:
    """A heterogeneous job: trainers on the first node, a loader and a validator on the second; asked to stop, it
    requeues itself and finishes with the losses of an undisturbed run."""
    roles = {"loaders": "node2", "validators": "node2"}
    config = make_config(tmp_path, store, run={"steps": 12}, validation={"every_steps": 6}, roles=roles)
    alone = ["roles.loaders=0", "roles.validators=0", f"run.dir={tmp_path / 'straight'}"]
    straight = [*HYFI, "train", str(config), TWO, *alone]
    subprocess.run(straight, cwd=tmp_path, env=environment(slurm), check=True, capture_output=True, timeout=300)
    own_name = "unshare --uts bash -c 'hostname $SLURMD_NODENAME; exec \"$@\"' -"  # virtual nodes share this machine's
    scratch = tmp_path / "scratch"
    (tmp_path / "site.yaml").write_text(
        f"program: |-\n  {own_name} {' '.join(HYFI)}\nscratch: {scratch}/$SLURM_JOB_ID\nrole_partition: all\n"
    )
    slow = environment(slurm, HYFI_TEST_FAULT="0:3:update:slow_until_requeued")
    launch = ["launch", "slurm", str(config), TWO, "--role-nodes", "1", "--role-ranks", "2"]
    more = ["--mpi", "pmi2", "--cpus-per-task", "2", "--submit"]
    said = subprocess.run([*HYFI, *launch, *more], cwd=tmp_path, env=slow, check=True, capture_output=True, text=True)
    job, deadline_s = said.stdout.split()[-1], time.monotonic() + 300
    while steps(tmp_path / "run") < 2:
        assert time.monotonic() < deadline_s, slurm.state(job)
        time.sleep(0.1)
    slurm.run("scancel", "--batch", "--signal=USR1", job)  # as before the time limit
    while slurm.state(job)[0] not in ENDED or slurm.state(job)[1] < 1:
        assert time.monotonic() < deadline_s, (slurm.state(job), (tmp_path / f"run-{job}.log").read_text())
        time.sleep(0.5)
    assert slurm.state(job)[0] == "COMPLETED", (tmp_path / f"run-{job}.log").read_text()
    # One validator sums in another order than two trainers that validate.
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "straight"), rel=1e-7)
    logs = [(tmp_path / "run" / "logs" / f"rank-{rank}.log").read_text() for rank in range(4)]
    assert "node1 rank 0 INFO starts: trainer 0" in logs[0] and "node1 rank 1 INFO starts: trainer 1" in logs[1]
    assert {"loader 0", "validator 0"} == {
        line.split("starts: ")[1].split(" on ")[0] for line in (logs[2].splitlines()[0], logs[3].splitlines()[0])
    }
    assert all(" node2 rank " in log for log in logs[2:])
    assert (scratch / job).is_dir()


def submit_array(slurm: Slurm, folder: Path, parts: int, *words: str) -> list[str]:
    """Submit an array of jobs, wait for its end, and return the logs of its parts."""
    (folder / "site.yaml").write_text("partition: all\n")
    command = [*HYFI, "launch", "slurm-array", "--parts", str(parts), "--submit", *words]
    said = subprocess.run(
        command, cwd=folder, env=environment(slurm), check=True, capture_output=True, text=True, timeout=PATIENCE_S
    ).stdout
    job, logs = said.split()[-1], []
    deadline_s = time.monotonic() + 300
    for part in range(1, parts + 1):
        while slurm.state(f"{job}_{part}")[0] not in ENDED:
            assert time.monotonic() < deadline_s, slurm.run("squeue")
            time.sleep(0.5)
        logs.append((folder / f"{words[0]}-{job}_{part}.log").read_text())
        assert slurm.state(f"{job}_{part}")[0] == "COMPLETED", logs[-1]
    return logs


@pytest.mark.soak
def test_an_array_ingests_and_predicts_every_slide_once(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "slides").mkdir()
    for number in range(6):
        write_slide(tmp_path / "slides" / f"{number}.tiff", draw_slide(seed=number))
    logs = submit_array(slurm, tmp_path, 3, "ingest", "slides", "--out", "store", "--mpp", "2.0", "--workers", "1")
    assert all("2 done, 0 failed, 0 finished before" in log for log in logs), logs
    assert [row["status"] for row in load_manifest(tmp_path / "store")] == ["done"] * 6
    checkpoint = save(tmp_path / "step-00000012")
    logs = submit_array(slurm, tmp_path, 2, "predict", str(checkpoint), "slides", "--out", "predictions")
    assert all("3 predicted, 0 incomplete, 0 failed" in log for log in logs), logs
    assert sorted(rows_of(tmp_path / "predictions")) == [str(number) for number in range(6)]


@pytest.mark.soak
def test_a_node_is_lost_and_an_array_still_ingests_every_slide_once(tmp_path: Path) -> None:
    """Forty slides, four nodes; one is lost with all that runs on it, and its jobs start again elsewhere."""
    (tmp_path / "slides").mkdir()
    for number in range(40):
        write_slide(tmp_path / "slides" / f"{number:02d}.tiff", draw_slide(seed=number))
    (tmp_path / "c").mkdir()  # a short name: sockets have paths of 108 bytes at most
    with running_slurm(tmp_path / "c", 4) as slurm:
        (tmp_path / "site.yaml").write_text("partition: all\n")
        ingest = ["ingest", "slides", "--out", "store", "--mpp", "2.0", "--workers", "1"]
        words = [*HYFI, "launch", "slurm-array", "--parts", "8", "--cpus-per-task", "4", "--submit", *ingest]
        marked = environment(slurm, HYFI_TEST_MARK=str(tmp_path))
        said = subprocess.run(words, cwd=tmp_path, env=marked, check=True, capture_output=True, timeout=PATIENCE_S)
        job, deadline_s = said.stdout.decode().split()[-1], time.monotonic() + 400
        while len(list((tmp_path / "store").glob("*.zarr"))) < 3:
            assert time.monotonic() < deadline_s, slurm.run("squeue")
            time.sleep(0.1)
        _lose(slurm, slurm.run("squeue", "-h", "-t", "RUNNING", "-o", "%N").split()[0], tmp_path)
        while slurm.run("squeue", "-h", "-j", job).strip():
            assert time.monotonic() < deadline_s, slurm.run("squeue")
            time.sleep(1)
        states = {part: slurm.state(f"{job}_{part}") for part in range(1, 9)}
    logs = {part: (tmp_path / f"ingest-{job}_{part}.log").read_text() for part in range(1, 9)}
    assert {state for state, _ in states.values()} == {"COMPLETED"}, (states, logs)
    assert any(restarts for _, restarts in states.values())
    rows = load_manifest(tmp_path / "store")
    assert [row["status"] for row in rows] == ["done"] * 40
    assert len({row["slide_id"] for row in rows}) == len(list((tmp_path / "store").glob("*.zarr"))) == 40
    verified = subprocess.run(
        [*HYFI, "verify", "store"], cwd=tmp_path, env=marked, capture_output=True, timeout=PATIENCE_S
    )
    assert verified.returncode == 0, verified.stderr


@pytest.mark.soak
def test_a_run_that_loses_a_node_starts_again_by_itself(tmp_path: Path, store: Path) -> None:
    """Ranks end long before Slurm knows; the job goes on with the third node, from the latest checkpoint."""
    run = {"steps": 40, "checkpoint_every_steps": 3}
    config = make_config(tmp_path, store, run=run, validation={"every_steps": 20})
    (tmp_path / "c").mkdir()
    with running_slurm(tmp_path / "c", 3) as slurm:
        straight = [*HYFI, "train", str(config), TWO, f"run.dir={tmp_path / 'straight'}"]
        subprocess.run(straight, cwd=tmp_path, env=environment(slurm), check=True, capture_output=True, timeout=300)
        slow = environment(slurm, HYFI_TEST_MARK=str(tmp_path), HYFI_TEST_FAULT="0:20:update:slow_until_requeued")
        words = [*HYFI, "launch", "slurm", str(config), TWO, "--nodes", "2", "--mpi", "pmi2", "--submit"]
        said = subprocess.run(
            words, cwd=tmp_path, env=slow, check=True, capture_output=True, text=True, timeout=PATIENCE_S
        )
        job, deadline_s = said.stdout.split()[-1], time.monotonic() + 400
        log = tmp_path / f"run-{job}.log"
        while steps(tmp_path / "run") < 10:
            assert time.monotonic() < deadline_s, slurm.state(job)
            time.sleep(0.1)
        batch, lost = slurm.run("squeue", "-h", "-j", job, "-o", "%B %N").split()[0], _second_node(slurm, job)
        assert lost != batch
        _lose(slurm, lost, tmp_path)
        while slurm.state(job)[0] not in ENDED or slurm.state(job)[1] < 1:
            assert time.monotonic() < deadline_s, (slurm.state(job), log.read_text())
            time.sleep(0.5)
        assert slurm.state(job)[0] == "COMPLETED", log.read_text()
        shown = slurm.run("scontrol", "-o", "show", "job", job)
    # The script finds it out, unless srun waits for the lost rank until Slurm does.
    found = [log.read_text().count(text) for text in ("a node does not answer any more", "DUE TO NODE FAILURE")]
    assert sum(found) == 1
    if found[0]:
        assert f" ExcNodeList={lost} " in shown and f"is not started on {lost} again" in log.read_text()
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")


@pytest.mark.soak
def test_a_node_that_does_not_answer_is_not_given_to_the_job_again(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm believes it to be well for longer than the job needs to start again, which it would do on the same node."""
    config = make_config(tmp_path, store)
    program = tmp_path / "program"
    program.write_text(
        "#!/bin/bash\n[[ ${SLURM_RESTART_COUNT:-0} -gt 0 ]] && exit 0\n"
        f"touch {tmp_path}/begun-$SLURM_PROCID\nwhile [[ ! -e {tmp_path}/lost ]]; do sleep 0.1; done\nexit 70\n"
    )
    program.chmod(0o755)
    (tmp_path / "site.yaml").write_text(f"program: {program}\nsbatch: [--exclude=node4]\n")
    (tmp_path / "c").mkdir()
    monkeypatch.setattr(
        "tests.workflows.slurm.CONFIGURATION", CONFIGURATION.replace("SlurmdTimeout=15", "SlurmdTimeout=600")
    )
    with running_slurm(tmp_path / "c", 4) as slurm:
        words = [*HYFI, "launch", "slurm", str(config), TWO, "--nodes", "2", "--mpi", "none", "--submit"]
        said = subprocess.run(
            words, cwd=tmp_path, env=environment(slurm), check=True, capture_output=True, text=True, timeout=PATIENCE_S
        )
        job, deadline_s = said.stdout.split()[-1], time.monotonic() + PATIENCE_S
        while len(list(tmp_path.glob("begun-*"))) < 2:
            assert time.monotonic() < deadline_s, slurm.state(job)
            time.sleep(0.1)
        lost, log = _second_node(slurm, job), tmp_path / f"run-{job}.log"
        slurm.slurmd[lost].kill()
        (tmp_path / "lost").touch()
        while slurm.state(job)[1] < 1:
            assert time.monotonic() < deadline_s, (slurm.state(job), log.read_text())
            time.sleep(0.2)
        slurm.begin_node(lost)  # as if it had been away for a while only
        while slurm.state(job)[0] not in ENDED:
            assert time.monotonic() < deadline_s, (slurm.state(job), log.read_text())
            time.sleep(0.5)
        shown = slurm.run("scontrol", "-o", "show", "job", job)
    assert f"the job is not started on {lost} again; to allow it: " in log.read_text()
    assert " JobState=COMPLETED " in shown and " NodeList=node[1,3] " in shown, shown
    assert lost == "node2" and " ExcNodeList=node4,node2 " in shown, shown


def _second_node(slurm: Slurm, job: str) -> str:
    """Return the last node of a job; its script runs on the first."""
    names = slurm.run("squeue", "-h", "-j", job, "-o", "%N").strip()
    return slurm.run("scontrol", "show", "hostnames", names).split()[-1]


def _lose(slurm: Slurm, node: str, mark: Path) -> None:
    """Kill a node's daemon and all that runs there of the jobs that carry a mark; steps first: they report no end."""
    slurm.slurmd[node].kill()
    tasks = _processes({f"HYFI_TEST_MARK={mark}".encode(), f"SLURMD_NODENAME={node}".encode()})
    for pid in [*(step for step in map(_parent, tasks) if step not in tasks), *tasks]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _pid_of_rank(rank: int, mark: Path) -> int:
    """Return the process that is this rank of the job that carries a mark."""
    found = _processes({f"HYFI_TEST_MARK={mark}".encode(), f"PMI_RANK={rank}".encode()})
    assert found, f"no rank {rank}"
    return found[0]


def _wait_for_handlers(number: signal.Signals, mark: Path) -> None:
    """Wait until both ranks of the job that carries a mark handle a signal; before that it ends Python itself."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        ranks = [_processes({f"HYFI_TEST_MARK={mark}".encode(), f"PMI_RANK={rank}".encode()}) for rank in (0, 1)]
        if all(any(_handles(pid, number) for pid in pids) for pids in ranks):
            return
        assert time.monotonic() < deadline_s, ranks
        time.sleep(0.02)


def _handles(pid: int, number: signal.Signals) -> bool:
    with suppress(OSError):
        caught = Path(f"/proc/{pid}/status").read_text().partition("SigCgt:")[2].split()[0]
        return bool(int(caught, 16) >> (number - 1) & 1)
    return False


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _processes(wanted: set[bytes]) -> list[int]:
    """Return the processes that have these variables in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and wanted <= set((entry / "environ").read_bytes().split(b"\0")):
                found.append(int(entry.name))
    return found
