"""Ranks find their GPUs from what launchers say, and are refused where there are too few."""

from __future__ import annotations

import pytest

from hyfi_core.errors import RequestError
from hyfi_core.plan.device import RankGpus, assign_devices, device_request, gpu_index, local_rank, spare_devices

FOUR_NODES = [RankGpus(f"node{rank // 8}", "", 8) for rank in range(32)]


@pytest.mark.parametrize(
    "name", ["LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK", "SLURM_LOCALID"]
)
def test_every_launcher_says_the_local_rank(name: str) -> None:
    by_torchrun = name == "LOCAL_RANK"
    assert local_rank({name: "5"}, by_torchrun) == 5
    assert gpu_index({name: "5"}, by_torchrun, 8) == 5
    assert gpu_index({name: "5"}, by_torchrun, 4) is None


def test_torchrun_inside_slurm_counts_its_own_processes() -> None:
    assert local_rank({"LOCAL_RANK": "3", "SLURM_LOCALID": "0"}, by_torchrun=True) == 3
    assert local_rank({}, by_torchrun=True) == local_rank({"SLURM_LOCALID": ""}, by_torchrun=False) == 0


def test_a_local_rank_that_torchrun_left_behind_does_not_count() -> None:
    """All ranks of mpiexec took GPU 0 in a shell with torchrun's variables."""
    assert local_rank({"LOCAL_RANK": "0", "MPI_LOCALRANKID": "3"}, by_torchrun=False) == 3
    assert local_rank({"LOCAL_RANK": "2"}, by_torchrun=False) == 2


def test_a_task_that_was_given_one_gpu_takes_it() -> None:
    assert gpu_index({"SLURM_LOCALID": "3", "CUDA_VISIBLE_DEVICES": "3"}, False, 1) == 0
    assert gpu_index({"SLURM_LOCALID": "3"}, False, 1) is None
    assert gpu_index({}, False, 0) is None


@pytest.mark.parametrize("request_", ["auto", "cuda"])
def test_four_nodes_of_eight_gpus(request_: str) -> None:
    assert assign_devices(request_, FOUR_NODES) == [f"cuda:{rank % 8}" for rank in range(32)]  # type: ignore[arg-type]
    assert assign_devices("cpu", FOUR_NODES) == ["cpu"] * 32


def test_tasks_with_gpus_of_their_own_all_take_their_first() -> None:
    bound = [RankGpus("node", str(rank), 1) for rank in range(4)]
    assert assign_devices("cuda", bound) == ["cuda:0"] * 4


def test_ranks_that_are_dealt_to_nodes_in_turn() -> None:
    dealt = [RankGpus(f"node{rank % 2}", "", 2) for rank in range(4)]
    assert assign_devices("cuda", dealt) == ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]


@pytest.mark.parametrize(
    ("trainers", "words"),
    [
        ([RankGpus("a", "", 1), RankGpus("a", "", 1)], "2 trainers on a see 1 GPU; start at most one trainer"),
        ([RankGpus("a", "", 0)], "1 trainer on a sees no GPU"),
        ([RankGpus("a", "", 2), RankGpus("b", "", 0)], "1 trainer on b sees no GPU"),
        ([RankGpus("a", "0,1", 2)] * 3, "3 trainers on a see 2 GPUs"),
    ],
)
def test_more_trainers_than_gpus(trainers: list[RankGpus], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        assign_devices("cuda", trainers)
    assert assign_devices("auto", trainers) == ["cpu"] * len(trainers)


def test_a_refusal_names_what_the_command_calls_it() -> None:
    with pytest.raises(RequestError, match=r"--device is cuda, but 1 rank on a sees no GPU; .* or use --device cpu"):
        assign_devices("cuda", [RankGpus("a", "", 0)], "--device ", "rank")
    with pytest.raises(RequestError, match=r"or use run\.device=cpu"):
        assign_devices("cuda", [RankGpus("a", "", 0)])
    assert device_request("auto") == "auto"
    with pytest.raises(RequestError, match="--device gpu: use one of auto, cpu, cuda"):
        device_request("gpu")


def test_validators_take_the_gpus_that_trainers_leave() -> None:
    node = [RankGpus("a", "", 4)] * 2
    assert spare_devices("auto", node, [RankGpus("a", "", 4)] * 3) == ["cuda:2", "cuda:3", "cpu"]
    assert spare_devices("cuda", node, [RankGpus("b", "", 1)] * 2) == ["cuda:0", "cpu"]
    assert spare_devices("cpu", node, [RankGpus("a", "", 4)]) == ["cpu"]
    full = [RankGpus("a", "", 2)] * 3  # more trainers than GPUs: they compute on the CPU, and all GPUs are free
    assert spare_devices("auto", full, [RankGpus("a", "", 2)]) == ["cuda:0"]
    bound = [RankGpus("a", str(rank), 1) for rank in range(3)]
    assert spare_devices("auto", bound[:2], bound[2:]) == ["cuda:0"]
