"""Scripts for clusters: what is asked for stands in them, what cannot be is refused."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hyfi_core.errors import RequestError
from tests.conftest import Hyfi
from tests.patience import PATIENCE_S
from tests.workflows.archive import make_config
from workflows.commands.launch import ScriptOptions, run
from workflows.launch.scripts import Resources, Site, _seconds_of, log_name, script_of

HYFI = (sys.executable, "-m", "workflows")
OPEN_MPI = "--bind-to none -x HYFI_EXIT_FILE -x OMP_NUM_THREADS "


def test_a_site_and_the_options_meet_in_the_script(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text(
        "account: lab\npartition: gpu\nmodules: [cuda/12]\nsetup: ['source env/bin/activate']\n"
        "program: apptainer exec hyfi.sif hyfi\nsrun: --distribution=block\nsbatch: ['--exclusive']\nsignal_s: 300\n"
    )
    site = Site.load(tmp_path / "site.yaml")
    asked = Resources(nodes=2, gpus_per_node=4, cpus_per_task=8, time="12:00:00", partition="big", mpi="pmix")
    text = script_of("slurm", Path("a b.sbatch"), ["train", "my run.yaml", "x.y=[1, 2]"], 7, asked, site)
    for line in (
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks=7",
        "#SBATCH --ntasks-per-node=4",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --cpus-per-task=8",
        "#SBATCH --time=12:00:00",
        "#SBATCH --partition=big",
        "#SBATCH --account=lab",
        "#SBATCH --signal=B:USR1@300",
        "#SBATCH --exclusive",
        "module load cuda/12 || exit 2",
        "source env/bin/activate",
        "srun --mpi=pmix --kill-on-bad-exit=1 --cpus-per-task=8 --cpu-bind=cores --distribution=block "
        "apptainer exec hyfi.sif hyfi "
        "train 'my run.yaml' 'x.y=[1, 2]' --resume &",
    ):
        assert line in text.splitlines()
    assert "{{" not in text
    assert "hetjob" not in text and "TMPDIR" not in text


@pytest.mark.parametrize("value", ["-5", "0", "true", "soon"])
def test_a_signal_after_the_limit_is_refused(tmp_path: Path, value: str) -> None:
    (tmp_path / "site.yaml").write_text(f"signal_s: {value}")
    with pytest.raises(RequestError, match="signal_s is a number from 1"):
        Site.load(tmp_path / "site.yaml")


def test_nodes_for_roles_are_the_second_part_of_a_heterogeneous_job() -> None:
    site = Site(
        partition="gpu", role_partition="cpu", role_sbatch=["--constraint=dpu"], scratch="/scratch/$SLURM_JOB_ID"
    )
    asked = Resources(nodes=2, gpus_per_node=4, time="1:00:00", mpi="pmi2", role_nodes=2, role_ranks=3)
    text = script_of("slurm", Path("a.sbatch"), ["train", "a.yaml"], 8, asked, site)
    trainers, _, others = text.partition("#SBATCH hetjob\n")
    for part, lines in (
        (trainers, ("nodes=2", "ntasks=8", "ntasks-per-node=4", "gpus-per-node=4", "time=1:00:00", "partition=gpu")),
        (others, ("nodes=2", "ntasks=3", "ntasks-per-node=2", "time=1:00:00", "partition=cpu", "constraint=dpu")),
    ):
        assert {f"#SBATCH --{line}" for line in lines} <= set(part.splitlines())
    assert "gpus" not in others and "constraint" not in trainers
    assert "srun --mpi=pmi2 --kill-on-bad-exit=1 --het-group=0,1 " in others
    assert others.count('mkdir -p "$scratch"') == 2 and 'export TMPDIR="$scratch"' in others


@pytest.mark.parametrize(
    ("version", "several", "one"),
    [
        ("HYDRA build details:", "-ppn 2 ", ""),
        ("mpiexec (OpenRTE) 4.1.4", f"--map-by ppr:2:node {OPEN_MPI}", OPEN_MPI),
        ("mpiexec (Open MPI) 5.0.3", f"--map-by ppr:2:node {OPEN_MPI}", OPEN_MPI),
    ],
)
def test_the_script_around_mpiexec_speaks_to_each_mpi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, several: str, one: str
) -> None:
    """Open MPI 4's mpiexec was not recognised, and none of Open MPI's knows -ppn."""
    program = tmp_path / "mpiexec"
    program.write_text(f"#!/bin/bash\n[[ $1 == --version ]] && echo '{version}' || printf '%s\\n' \"$*\"\n")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(
        "data: {store: s, size_px: 64}\nrun: {dir: r, steps: 1}\nplan: {grids: [[1, 3]]}\n"
    )
    for nodes, words in ((2, several), (1, one)):
        options = ScriptOptions(Resources(nodes), path=tmp_path / "run.sh")
        (tmp_path / "site.yaml").write_text("program: 'true'")
        assert run("mpiexec", Path("run.yaml"), [], None, options) == 0
        environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        done = subprocess.run(["bash", "run.sh"], env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
        assert (done.returncode, done.stdout) == (0, f"-n 3 {words}true train run.yaml --resume\n"), done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("partion: gpu", "partion: given 'gpu'; allowed: partition"),
        ("modules: cuda", "modules: given 'cuda'"),
        ("- gpu", "given list"),
        ("a: [", "cannot be read as YAML"),
    ],
)
def test_a_wrong_site_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "site.yaml").write_text(text)
    with pytest.raises(RequestError, match=message):
        Site.load(tmp_path / "site.yaml")


def test_edited_templates_come_first(tmp_path: Path) -> None:
    (tmp_path / "mpiexec.sh.j2").write_text("mine: {{ ranks }} {{ command }}\n")
    site = Site(templates=str(tmp_path))
    assert script_of("mpiexec", Path("x.sh"), ["train", "a"], 3, Resources(), site, hosts="") == "mine: 3 train a\n"


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["slurm", "run.yaml", "--nodes", "9"], "--nodes 9: the run has ranks for 1 at most"),
        (["slurm", "run.yaml", "--ranks", "3"], "--ranks 3: the run needs 1"),
        (["slurm", "none.yaml"], "no such file"),
        (["slurm", "run.yaml", "--time", "12h"], "--time 12h: not a time limit; give HH:MM:SS"),
        (["slurm", "run.yaml", "--time", "1"], "--time 1: Slurm tells the job to save and stop before the limit"),
        (["slurm-array", "ingest", "x", "--out", "s", "--time", "1:00"], "--time 1:00: Slurm tells the job to save"),
        (["slurm", "run.yaml", "--role-nodes", "1"], "roles given by number are spread over all nodes"),
        (["slurm", "run.yaml", "roles.loaders=cpu*", "--role-nodes", "1", "--ranks", "2"], "give --role-ranks"),
        (["slurm", "run.yaml", "roles.loaders=cpu*", "--role-nodes", "2", "--role-ranks", "1"], "give more with"),
        (["local", "run.yaml", "roles.loaders=cpu*"], "a local run has one host"),
        (["slurm-array", "verify", "x"], "slurm-array: given 'verify'"),
        (["slurm-array", "ingest", "x", "--out", "s", "--part", "1/2"], "--part is added by the script"),
        (["slurm-array", "ingest", "x", "--out", "s", "--gpus-per-node", "2"], "No such option: --gpus-per-node"),
        (["slurm-array", "predict", "x", "y"], "Missing option '--out'"),
        (["slurm-array", "--", "ingest", "--out", "s", "--", "x"], "give all options before the paths, without --"),
        (["slurm-array", "--parts", "3", "train", "run.yaml", "--folds", "all"], "has a job for each fold"),
        (["slurm-array", "train", "run.yaml", "--folds", "all", "--parts", "4"], "has a job for each fold"),
        (["slurm", "run.yaml", "--script", "a\\b.sbatch"], "without control characters and backslashes"),
        (["local", "run.yaml", "--script", "a\nb.sh"], "without control characters and backslashes"),
    ],
)
def test_wrong_requests_write_nothing(hyfi_here: Hyfi, tmp_path: Path, words: list[str], refusal: str) -> None:
    make_config(tmp_path, tmp_path / "store", model={"name": "resnet6"})
    before = sorted(tmp_path.iterdir())
    done = hyfi_here("launch", *words)
    assert done.returncode == 2 and refusal in done.stderr
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("time", "signal_s"), [(None, 120), ("2", 30), ("0:06:00", 90), ("8:00:00", 120), ("UNLIMITED", 120)]
)
def test_a_short_time_limit_leaves_three_quarters_of_it(time: str | None, signal_s: int) -> None:
    text = script_of("slurm", Path("x.sbatch"), ["train", "a"], 1, Resources(time=time, mpi="pmi2"), Site())
    assert f"#SBATCH --signal=B:USR1@{signal_s}\n" in text


@pytest.mark.parametrize("by", ["slurm", "local", "mpiexec", "torchrun", "slurm-array"])
def test_every_script_is_shell(hyfi_here: Hyfi, tmp_path: Path, by: str) -> None:
    make_config(tmp_path, tmp_path / "store", model={"name": "resnet6"})
    words = ["ingest", "slides", "--out", "store", "--parts", "3"] if by == "slurm-array" else ["run.yaml"]
    done = hyfi_here("launch", by, *words, "--script", "job.sh")
    assert done.returncode == 0, done.stderr
    assert subprocess.run(["bash", "-n", tmp_path / "job.sh"], check=False).returncode == 0
    assert "{{" not in (tmp_path / "job.sh").read_text()


ODD = 'our job\'s $x `y` "z" 5%j'


@pytest.mark.parametrize("by", ["local", "mpiexec", "torchrun"])
def test_names_of_scripts_and_folders_are_quoted(hyfi_here: Hyfi, tmp_path: Path, by: str) -> None:
    """The file of the exit code was named by the shell's reading of the script's name."""
    folder = tmp_path / ODD
    folder.mkdir()
    make_config(tmp_path, tmp_path / "store", model={"name": "resnet6"})
    (tmp_path / "run.yaml").rename(folder / f"{ODD}.yaml")
    launcher = '[[ $1 == --version ]] || { echo 3 > "${HYFI_EXIT_FILE:-exit}"; ls -A > seen; exit '
    launcher += "3; }" if by == "local" else "1; }"
    path = programs(tmp_path, mpiexec=launcher, torchrun=launcher, started=launcher)["PATH"]
    (tmp_path / "site.yaml").write_text(f"program: {tmp_path}/bin/started\n")
    words = ["launch", by, f"{ODD}.yaml", "--site", str(tmp_path / "site.yaml")]
    told = subprocess.run([*HYFI, *words], cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S)
    assert told.returncode == 0, told.stderr
    line = told.stdout.partition("start it with ")[2]
    done = subprocess.run(
        line,
        shell=True,
        cwd=folder,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stderr) == (3, "")
    assert by == "local" or any(name.startswith(f".{ODD}-") for name in (folder / "seen").read_text().splitlines())


def test_a_folder_like_a_pattern_of_slurm_has_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm replaced the folder's %j, found no such folder, and the job failed without a log."""
    (tmp_path / "50%j").mkdir()
    monkeypatch.chdir(tmp_path / "50%j")
    assert log_name(Path("run.sbatch"), "%j") == f"{tmp_path}/50%%j/run-%j.log"
    monkeypatch.chdir(tmp_path)
    assert log_name(Path("run.sbatch"), "%j") == "run-%j.log"


def test_names_of_jobs_are_quoted(tmp_path: Path) -> None:
    """As Slurm itself reads the lines: an array of such a name ran, with its log; before, sbatch refused it."""
    asked = Resources(partition="a b", mpi="pmi2")
    text = script_of("slurm", Path(f"{ODD}.sbatch"), ["train", "r.yaml"], 1, asked, Site())
    options = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    for option in (f"--job-name={ODD}", f"--output={ODD.replace('%', '_')}-%j.log", "--partition=a b"):
        assert [option] in [shlex.split(line) for line in options]


@pytest.mark.parametrize("by", ["slurm", "slurm-array", "local", "mpiexec", "torchrun"])
@pytest.mark.parametrize("missing", ["folder", "module", "scratch"])
def test_nothing_is_started_where_something_is_missing(tmp_path: Path, by: str, missing: str) -> None:
    """A job whose folder was not on its node ran in another one, where relative paths name other files."""
    site = Site(program=str(tmp_path / "bin" / "started"), modules=["cuda"] if missing == "module" else [])
    if missing == "scratch":
        if by not in ("slurm", "slurm-array"):
            pytest.skip("scratch folders are made by Slurm jobs")
        (tmp_path / "file").touch()
        site = replace(site, scratch=str(tmp_path / "file" / "my scratch"))
    extra = {"mpiexec": {"hosts": ""}, "torchrun": {"rendezvous": ""}}.get(
        by, {"array": "1-2", "part": "", "about": ""}
    )
    text = script_of(by.replace("-", "_"), Path("job.sh"), ["train", "r.yaml"], 2, Resources(mpi="pmix"), site, **extra)
    if missing == "folder":
        text = text.replace(f"cd {Path.cwd()}", f"cd {tmp_path / 'none'}")
    (tmp_path / "job.sh").write_text(text)
    run = f'[[ $* == *mkdir* ]] && exec "${{@:3}}"; touch {tmp_path}/ran'
    path = programs(
        tmp_path,
        started=f"touch {tmp_path}/ran",
        srun=run,
        mpiexec=run,
        torchrun=run,
        module="echo no cuda >&2; exit 1",
    )
    environment = os.environ | path | {"SLURM_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_JOB_ID": "7"}
    done = subprocess.run(
        ["bash", "job.sh"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 2 and done.stderr and not (tmp_path / "ran").exists(), done.stderr


@pytest.mark.parametrize("by", ["slurm", "slurm_array", "local", "mpiexec", "torchrun"])
def test_setup_may_read_variables_that_are_not_set(tmp_path: Path, by: str) -> None:
    """As scripts that activate an environment do; the job ended there, with the code of inputs that failed."""
    extra = {"mpiexec": {"hosts": ""}, "torchrun": {"rendezvous": ""}}.get(
        by, {"array": "1-2", "part": "", "about": ""}
    )
    site = Site(program="true", setup=['if [[ -z "$NOT_SET" ]]; then touch activated; fi', "exit 7"])
    text = script_of(by, Path("job.sh"), ["train", "r.yaml"], 2, Resources(mpi="pmix"), site, **extra)
    (tmp_path / "job.sh").write_text(text)
    assert subprocess.run(["bash", "job.sh"], cwd=tmp_path, timeout=PATIENCE_S, check=False).returncode == 7
    assert (tmp_path / "activated").exists()


FAKE_LAUNCHER = """#!/bin/bash
# Stands in for mpiexec and torchrun: on USR1 its only rank ends as it is told, and it returns a code of its own.
[[ $1 == --version ]] && exit 0
trap 'stopped=yes' USR1
echo ready >> ready
while [[ -z ${stopped:-} ]]; do sleep 0.02; done
if [[ -n $RANK_CODE ]]; then echo "$RANK_CODE" > "$HYFI_EXIT_FILE"; fi
exit "$OWN_CODE"
"""


@pytest.mark.parametrize(
    ("rank", "own", "code"),
    [("3", 1, 3), ("70", 1, 70), ("", 1, 1), ("70", 0, 70), ("0", 0, 0)],
    ids=["stopped", "failed", "killed", "one rank ended with 0", "done"],
)
@pytest.mark.parametrize("by", ["mpiexec", "torchrun"])
def test_code_3_is_that_of_ranks_that_stopped(tmp_path: Path, by: str, rank: str, own: int, code: int) -> None:
    """After a request to stop, the scripts made every code a 3, also that of a failure while saving."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / by).write_text(FAKE_LAUNCHER)
    (tmp_path / "bin" / by).chmod(0o755)
    extra = {"mpiexec": {"hosts": ""}, "torchrun": {"rendezvous": ""}}[by]
    text = script_of(by, Path("job.sh"), ["train", "run.yaml"], 2, Resources(), Site(setup=[f"cd {tmp_path}"]), **extra)
    script = tmp_path / "job.sh"
    script.write_text(text.replace(f"cd {Path.cwd()}", f"cd {tmp_path}").replace("pkill -USR1 -P", "kill -USR1"))
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "RANK_CODE": rank, "OWN_CODE": str(own)}
    job = subprocess.Popen(["bash", script], cwd=tmp_path, env=environment)
    deadline_s = time.monotonic() + PATIENCE_S
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < deadline_s and job.poll() is None
        time.sleep(0.01)
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=PATIENCE_S) == code
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("code", "preempted", "requeued"), [(3, True, True), (3, False, False), (70, True, False), (0, True, False)]
)
def test_a_preempted_job_requeues_itself(tmp_path: Path, code: int, preempted: bool, requeued: bool) -> None:
    """Only the ranks are told, and a job that ends in its grace time is not requeued by Slurm: the run stayed ended."""
    (tmp_path / "bin").mkdir()
    known = (
        f"JobId=7 PreemptEligibleTime=2026-03-01T10:00:00 PreemptTime={'2026-03-01T11:00:00' if preempted else 'None'}"
    )
    programs = {
        "srun": f"if [[ $* == *--overlap* ]]; then exit 0; fi; exit {code}",  # all nodes answer
        "scontrol": f"if [[ $* == *show* ]]; then echo '{known} Power='; else echo \"$*\" > requeued; fi",
    }
    for name, line in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    resources = Resources(mpi="pmi2")
    text = script_of("slurm", Path("job.sh"), ["train", "run.yaml"], 2, resources, Site(setup=[f"cd {tmp_path}"]))
    (tmp_path / "job.sh").write_text(text.replace(f"cd {Path.cwd()}", f"cd {tmp_path}"))
    environment = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", "job.sh"], cwd=tmp_path, env=environment, timeout=PATIENCE_S, check=False)
    assert done.returncode == code
    assert (tmp_path / "requeued").exists() == requeued


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("30", 1800),
        ("30:15", 1815),
        ("2:00:00", 7200),
        ("1-0", 86400),
        ("1-6:30", 109_800),
        ("2-00:00:01", 172_801),
        ("UNLIMITED", float("inf")),
        ("0", float("inf")),  # was refused as too short
        ("", None),
        ("1d", None),
        ("1-", None),
        ("-5", None),
        ("1:2:3:4", None),
    ],
)
def test_time_limits_are_those_of_slurm(time: str, seconds: float | None) -> None:
    assert _seconds_of(time) == seconds


def programs(folder: Path, **scripts: str) -> dict[str, str]:
    """Write programs that stand in for Slurm's, and return the environment in which they are found."""
    for name, text in scripts.items():
        (folder / "bin").mkdir(exist_ok=True)
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    return {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}


def test_a_refused_job_leaves_no_script_and_names_the_partitions(hyfi_here: Hyfi, tmp_path: Path) -> None:
    make_config(tmp_path, tmp_path / "store", model={"name": "resnet6"})
    refusal = "sbatch: error: invalid partition specified: gpuu\nsbatch: error: Batch job submission failed"
    path = programs(tmp_path, sbatch=f"echo '{refusal}' >&2; exit 1", sinfo="printf 'cpu\ngpu\ngpu\n'")
    words = ["launch", "slurm", "run.yaml", "--partition", "gpuu", "--mpi", "pmi2", "--submit"]
    told = hyfi_here(*words, **path)
    assert told.returncode == 2 and not (tmp_path / "run.sbatch").exists()
    assert "invalid partition specified: gpuu; Batch job submission failed; the partitions are cpu, gpu" in told.stderr
    (tmp_path / "run.sbatch").write_text("mine")
    assert hyfi_here(*words, **path).returncode == 2 and (tmp_path / "run.sbatch").read_text() == "mine"


@pytest.mark.parametrize(("reason", "warned"), [("PartitionNodeLimit", True), ("Priority", False)])
def test_a_job_that_can_never_start_is_told_of(hyfi_here: Hyfi, tmp_path: Path, reason: str, warned: bool) -> None:
    make_config(tmp_path, tmp_path / "store", model={"name": "resnet6"})
    path = programs(tmp_path, sbatch="echo 77", squeue=f"echo {reason}")
    told = hyfi_here("launch", "slurm", "run.yaml", "--mpi", "pmi2", "--submit", **path)
    assert told.returncode == 0 and "submitted as job 77" in told.stdout
    assert ("job 77 does not start as it is: the partition does not allow so many nodes" in told.stderr) == warned


@pytest.mark.parametrize(("state", "asked", "requeued"), [("RUNNING", True, True), ("CANCELLED", False, False)])
def test_nodes_are_asked_only_while_the_job_goes_on(tmp_path: Path, state: str, asked: bool, requeued: bool) -> None:
    """A job that was cancelled while srun started its ranks stayed until Slurm killed it, half a minute later."""
    path = programs(
        tmp_path,
        srun="[[ $* == *--nodelist=node1* ]] && exit 0\nif [[ $* == *--overlap* ]]; then touch asked; exit 1; fi\n"
        "exit 137",
        scontrol="case $* in *hostnames*) printf 'node1\\nnode2\\n' ;; *show*) "
        f"echo 'JobId=7 JobState={state} ExcNodeList=(null) X=1' ;; *) echo $* >> requeued ;; esac",
    )
    resources = Resources(mpi="pmi2")
    text = script_of("slurm", Path("job.sh"), ["train", "run.yaml"], 2, resources, Site(setup=[f"cd {tmp_path}"]))
    (tmp_path / "job.sh").write_text(text.replace(f"cd {Path.cwd()}", f"cd {tmp_path}"))
    environment = os.environ | path | {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]"}
    done = subprocess.run(["bash", "job.sh"], cwd=tmp_path, env=environment, timeout=PATIENCE_S, check=False)
    assert done.returncode == 137
    assert ((tmp_path / "asked").exists(), (tmp_path / "requeued").exists()) == (asked, requeued)
    if requeued:
        assert (tmp_path / "requeued").read_text() == "requeue 7\nupdate JobId=7 ExcNodeList=node2\n"


def test_torchrun_on_several_nodes_asks_for_the_node_that_all_meet_on(hyfi_here: Hyfi, tmp_path: Path) -> None:
    make_config(tmp_path, tmp_path / "store", model={"name": "resnet6"}, plan={"grids": [[1, 2]]})
    told = hyfi_here("launch", "torchrun", "run.yaml", "--nodes", "2")
    assert "on each of the 2 nodes with HEAD_NODE=NODE bash run.sh" in told.stdout
    environment = {name: value for name, value in os.environ.items() if name != "HEAD_NODE"}
    done = subprocess.run(
        ["bash", "run.sh"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 2 and "HEAD_NODE is not set" in done.stderr
