"""An encoder whose weights are divided among ranks: the same steps, checkpoints and predictions as with whole ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import hyfi_core
from hyfi_core.comm.threads import run_ranks
from hyfi_core.tiles.sharding.shard_encoder import check_shardable, units_of
from tests.conftest import MPIEXEC, PROGRAM_PATH
from tests.hyfi_core.tiles.bags import Attention, SmallViT, token
from workflows.encoders.lora import add_lora

PROGRAM = "tests.hyfi_core.tiles.sharding.sharded_ranks"


def start(command: list[str], argument: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": PROGRAM_PATH, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, "-m", PROGRAM, argument], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def run(command: list[str], folder: Path) -> str:
    done = start(command, str(folder), folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.mpi
@pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec: pip install 'hyfi[local]'")
def test_two_ranks_of_mpi_equal_whole_weights(tmp_path: Path) -> None:
    assert "equal" in run([*str(MPIEXEC).split(), "-n", "2", sys.executable], tmp_path)


@pytest.mark.mpi
@pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec: pip install 'hyfi[local]'")
def test_a_rank_that_fails_while_others_gather_weights_ends_all_and_says_why(tmp_path: Path) -> None:
    failed = start([*str(MPIEXEC).split(), "-n", "2", sys.executable], "fail", tmp_path)
    assert failed.returncode and "rank 1 failed, all ranks stop" in failed.stderr, failed.stderr
    assert "OSError: the disk is gone" in failed.stderr


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, 4])  # 4: two replicas
def test_ranks_of_torchrun_equal_whole_weights(tmp_path: Path, ranks: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    assert "equal" in run(command, tmp_path)


def test_units_are_the_blocks_of_a_network() -> None:
    vit = SmallViT()
    assert units_of(vit) == [*vit.blocks]
    add_lora(vit.blocks, 1)
    assert units_of(vit) == [*vit.blocks]  # not the parts of updates
    stages = nn.Sequential(*(nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9)) for _ in range(2)))
    assert units_of(nn.Sequential(stages)) == [layer for stage in stages for layer in stage]  # each half is too much
    assert units_of(nn.Linear(3, 3)) == []


def test_weights_that_cannot_be_divided_are_refused_by_name() -> None:
    tied, scalar, hooked, mixed = (SmallViT() for _ in range(4))
    tied.blocks[1] = tied.blocks[0]
    scalar.scale = nn.Parameter(torch.tensor(1.0))
    hooked.token.register_hook(lambda gradient: gradient)
    mixed.unused.double()
    for encoder, says in ((tied, "are one tensor"), (scalar, "'scale'"), (hooked, "'token'"), (mixed, "float64")):
        with pytest.raises(hyfi_core.RequestError, match=says):
            check_shardable(encoder)


def test_threads_are_refused_and_one_rank_has_whole_weights() -> None:
    def engine(comm: hyfi_core.Communicator, ranks: int) -> hyfi_core.TilesEngine:
        torch.manual_seed(0)
        plan = hyfi_core.ParallelPlan(tiles=ranks)
        return hyfi_core.parallelize_tiles(SmallViT(), Attention(), plan, comm, output=token, shard=True)

    with pytest.raises(hyfi_core.RequestError, match="a process for each rank"):
        run_ranks(2, lambda comm: engine(comm, 2))
    assert type(engine(hyfi_core.init(), 1)) is hyfi_core.TilesEngine
