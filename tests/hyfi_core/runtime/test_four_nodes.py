"""A run on 4 nodes of 8 GPUs, walked through without them: what launchers say, devices, groups, order of operations."""

from __future__ import annotations

import copy
import os
import threading
from collections import defaultdict
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import hyfi_core
from hyfi_core.comm.supervision.rendezvous import Expected
from hyfi_core.comm.thread_ranks.group import ThreadGroup
from hyfi_core.plan.device import RankGpus, assign_devices
from hyfi_core.runtime.launch import _check_tasks, _select_gpu, inside_launcher
from tests.harness import run_copies

NODES, GPUS = 4, 8
RANKS = NODES * GPUS


def torchrun(rank: int) -> dict[str, str]:
    return {"TORCHELASTIC_RUN_ID": "1", "RANK": str(rank), "LOCAL_RANK": str(rank % GPUS), "WORLD_SIZE": str(RANKS)}


def slurm(rank: int) -> dict[str, str]:
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(RANKS), "SLURM_NODEID": str(rank // GPUS)}
    return step | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % GPUS)}


def slurm_pmix(rank: int) -> dict[str, str]:
    return slurm(rank) | {"PMIX_RANK": str(rank), "PMIX_SIZE": str(RANKS)}


def slurm_torchrun(rank: int) -> dict[str, str]:
    """One task on each node, which starts eight processes: Slurm's own local rank is 0 in all of them."""
    step = slurm(rank) | {"SLURM_STEP_NUM_TASKS": str(NODES), "SLURM_PROCID": str(rank // GPUS), "SLURM_LOCALID": "0"}
    return step | torchrun(rank)


def open_mpi(rank: int) -> dict[str, str]:
    return {"OMPI_COMM_WORLD_SIZE": str(RANKS), "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % GPUS), "PMIX_RANK": str(rank)}


def hydra(rank: int) -> dict[str, str]:
    local = {"MPI_LOCALRANKID": str(rank % GPUS), "MPI_LOCALNRANKS": str(GPUS)}
    return {"PMI_SIZE": str(RANKS), "PMI_RANK": str(rank), **local}


@pytest.mark.parametrize(
    ("launcher", "kind"),
    [
        (torchrun, "torchrun"),
        (slurm, "slurm"),
        (slurm_pmix, "mpi"),
        (slurm_torchrun, "torchrun"),
        (open_mpi, "mpi"),
        (hydra, "mpi"),
    ],
)
@pytest.mark.parametrize("bound", [False, True], ids=["all GPUs visible", "one GPU for each task"])
def test_every_process_selects_a_gpu_of_its_own_before_all_else(
    launcher: Any, kind: str, bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, current = [], []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1 if bound else GPUS)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    for rank in range(RANKS):
        environment = launcher(rank) | ({"CUDA_VISIBLE_DEVICES": str(rank % GPUS)} if bound else {})
        with mock.patch.dict(os.environ, environment, clear=True):
            assert inside_launcher() == kind
            if kind != "torchrun":
                _check_tasks(RANKS, Expected(kind, os.environ))
            _select_gpu(kind)
        seen.append(RankGpus(f"node{rank // GPUS}", environment.get("CUDA_VISIBLE_DEVICES", ""), 1 if bound else GPUS))
    assert current == ([0] * RANKS if bound else [rank % GPUS for rank in range(RANKS)])
    assert assign_devices("cuda", seen) == [f"cuda:{index}" for index in current]  # what the run agrees on is the same


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4)
        self.second, self.head = nn.Conv2d(4, 4, 3, 1, 1), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x)).relu()
        return self.head(self.second(x).mean((2, 3)))


def shape_and_dtype(post: Any) -> tuple[Any, ...]:
    return tuple(post.message.tensor.shape), post.message.tensor.dtype


class Log:
    """All operations of all ranks, as they were started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.collective: dict[ThreadGroup, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
        self.sent: dict[Any, list[Any]] = defaultdict(list)
        self.received: dict[Any, list[Any]] = defaultdict(list)
        enter, send, receive = ThreadGroup.enter, ThreadGroup.send, ThreadGroup.receive

        def entered(group: ThreadGroup, number: int, rank: int, what: str, value: Any) -> Any:
            self.collective[group][rank].append(what)
            return enter(group, number, rank, what, value)

        def sends(group: ThreadGroup, rank: int, post: Any) -> None:
            self.sent[group, rank, post.message.peer].append(shape_and_dtype(post))
            send(group, rank, post)

        def receives(group: ThreadGroup, rank: int, post: Any) -> None:
            self.received[group, post.message.peer, rank].append(shape_and_dtype(post))
            receive(group, rank, post)

        monkeypatch.setattr(ThreadGroup, "enter", entered)
        monkeypatch.setattr(ThreadGroup, "send", sends)
        monkeypatch.setattr(ThreadGroup, "receive", receives)


def node_of_thread() -> str:
    return f"node{int(threading.current_thread().name.removeprefix('rank-')) // GPUS}"


PLANS = {
    "a pipeline of two stages in each node": hyfi_core.ParallelPlan(
        grids=((2, 2), (2, 2)), cuts=("norm",), microbatches=2, schedule="1f1b", replicas=NODES, reduce_dtype="bfloat16"
    ),
    "an image over all GPUs": hyfi_core.ParallelPlan(grids=((4, 8),)),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_all_ranks_start_the_operations_of_a_group_in_one_order(
    plan: hyfi_core.ParallelPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By NCCL's rules: one stream for each group, no tags, a send ends with its receive."""
    monkeypatch.setattr("hyfi_core.runtime.groups.node_name", node_of_thread)
    log, shape = Log(monkeypatch), (plan.microbatches, 3, 32, 64)
    torch.manual_seed(0)
    model = Network().double()
    images = torch.randn(plan.replicas, *shape, dtype=torch.float64)
    labels = torch.arange(plan.replicas * shape[0]).remainder(2).view(plan.replicas, -1)

    def body(comm: Any, module: nn.Module) -> Any:
        engine = hyfi_core.parallelize(module, shape, plan, comm)
        replica = comm.rank // plan.ranks_per_replica
        engine.accumulate(images[replica], labels[replica])
        return engine.gather_gradients()

    found = run_copies(copy.deepcopy(model), RANKS, body, strict=True)[0]
    orders = [list(of_rank.values()) for of_rank in log.collective.values()]
    assert all(order == of_group[0] for of_group in orders for order in of_group)
    assert log.sent and log.sent == log.received
    narrow = any(dtype == torch.bfloat16 for of_pair in log.sent.values() for _, dtype in of_pair)
    assert narrow is (plan.reduce_dtype == "bfloat16")

    for replica in range(plan.replicas):
        for image, label in zip(images[replica], labels[replica], strict=True):
            loss = nn.functional.cross_entropy(model(image[None]), label[None])
            (loss / (plan.replicas * plan.microbatches)).backward()
    tolerance = 2e-2 if plan.reduce_dtype == "bfloat16" else 1e-10
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        difference = (found[name] - parameter.grad).norm()
        assert difference <= tolerance * max(float(parameter.grad.norm()), 1e-3), name
