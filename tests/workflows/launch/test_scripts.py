"""Scripts for clusters: what is asked for stands in them, what cannot be is refused."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hyfi_core.errors import RequestError
from tests.conftest import Hyfi
from tests.workflows.archive import make_config
from workflows.launch.scripts import Resources, Site, script_of


def test_a_site_and_the_options_meet_in_the_script(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text(
        "account: lab\npartition: gpu\nmodules: [cuda/12]\nsetup: ['source env/bin/activate']\n"
        "program: apptainer exec hyfi.sif hyfi\nsrun: --cpu-bind=cores\nsbatch: ['--exclusive']\nsignal_s: 300\n"
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
        "module load cuda/12",
        "source env/bin/activate",
        "srun --mpi=pmix --kill-on-bad-exit=1 --cpu-bind=cores apptainer exec hyfi.sif hyfi "
        "train 'my run.yaml' 'x.y=[1, 2]' --resume &",
    ):
        assert line in text.splitlines()
    assert "{{" not in text


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
        (["slurm-array", "verify", "x"], "slurm-array: given 'verify'"),
        (["slurm-array", "ingest", "x", "--out", "s", "--part", "1/2"], "--part is added by the script"),
    ],
)
def test_wrong_requests_write_nothing(hyfi: Hyfi, tmp_path: Path, words: list[str], refusal: str) -> None:
    make_config(tmp_path, tmp_path / "store", model={"name": "resnet6"})
    before = sorted(tmp_path.iterdir())
    done = hyfi("launch", *words)
    assert done.returncode == 2 and refusal in done.stderr
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("by", ["slurm", "mpiexec", "torchrun", "slurm-array"])
def test_every_script_is_shell(hyfi: Hyfi, tmp_path: Path, by: str) -> None:
    make_config(tmp_path, tmp_path / "store", model={"name": "resnet6"})
    words = ["ingest", "slides", "--out", "store", "--parts", "3"] if by == "slurm-array" else ["run.yaml"]
    done = hyfi("launch", by, *words, "--script", "job.sh")
    assert done.returncode == 0, done.stderr
    assert subprocess.run(["bash", "-n", tmp_path / "job.sh"], check=False).returncode == 0
    assert "{{" not in (tmp_path / "job.sh").read_text()
