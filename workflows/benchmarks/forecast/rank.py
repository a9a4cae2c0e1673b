"""One rank of a measured plan: prints, on rank 0, the seconds of a step and the memory of each rank, in two ways.

    mpiexec -n 2 python -m workflows.benchmarks.forecast.rank resnet18 '{"grids": [[1, 2]], …}' 256 5 float32

The step is the shortest of those measured, each between two barriers, because other processes only add. The growth is
that of the peak of resident memory, from the moment before the model is created to the end of the steps; a tiny network
has trained before, so that libraries are loaded and their code is generated. In a further step, PyTorch's profiler
measures the peak of all tensors, without freed memory that the heap keeps.
"""

from __future__ import annotations

import json
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

import hyfi_core
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.comm.base import Communicator
from hyfi_core.models.resnet import resnet6
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.process_memory import forget_peak, peak_bytes, resident_bytes
from hyfi_core.runtime.engine import Engine
from workflows.benchmarks.forecast.allocated import held_bytes, peak_of
from workflows.benchmarks.forecast.cases import BATCH, NETWORKS
from workflows.evaluation.models import convert_model

_WARM = 3
"""Steps in which memory is touched for the first time."""


def main() -> None:
    """Run the plan of the command line; rank 0 prints its seconds and the memory of each rank as JSON."""
    name, plan, size, steps = sys.argv[1], ParallelPlan.from_json(json.loads(sys.argv[2])), *map(int, sys.argv[3:5])
    autocast = torch.bfloat16 if sys.argv[5] == "bfloat16" else None
    comm = hyfi_core.init()
    torch.manual_seed(0)
    _warm_up(autocast)
    forget_peak()
    before = resident_bytes()
    shape = (BATCH // plan.replicas, 3, size, size)
    held_before = held_bytes()
    engine = _engine(NETWORKS[name](), shape, plan, comm, autocast)
    step_s = _step_s(comm, engine, shape, steps)
    grown = comm.gather_objects(peak_bytes() - before)
    images, labels = _batch(shape)
    # What the engine holds between steps. Images and labels do not count: the forecast leaves them out.
    tensors = held_bytes() - held_before - images.nbytes - labels.nbytes
    allocated = comm.gather_objects(tensors + peak_of(lambda: engine.train_step(images, labels)))
    if grown is not None:
        print(json.dumps({"step_s": step_s, "grown_bytes": grown, "allocated_bytes": allocated}), flush=True)


def _warm_up(autocast: torch.dtype | None) -> None:
    shape = (1, 3, 32, 32)
    engine = _engine(resnet6(classes=2, width=8), shape, ParallelPlan(grids=((1, 1),)), AloneCommunicator(), autocast)
    _step_s(AloneCommunicator(), engine, shape, 1)


def _engine(
    model: nn.Module,
    shape: tuple[int, int, int, int],
    plan: ParallelPlan,
    comm: Communicator,
    autocast: torch.dtype | None,
) -> Engine:
    """Return the engine to measure."""
    return hyfi_core.parallelize(
        convert_model(model.train(), "float32", "channels_last"),
        shape,
        plan,
        comm,
        loss=F.cross_entropy,
        autocast=autocast,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        verify=False,
        release=True,
    )


def _batch(shape: tuple[int, int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.rand(shape).contiguous(memory_format=torch.channels_last)
    return images, torch.zeros(shape[0], dtype=torch.long)


def _step_s(comm: Communicator, engine: Engine, shape: tuple[int, int, int, int], steps: int) -> float:
    """Return the seconds of the shortest of ``steps`` steps after the first `_WARM`, from barrier to barrier."""
    images, labels = _batch(shape)
    times = []
    for _ in range(_WARM + steps):
        comm.barrier()
        begin = time.perf_counter()
        engine.train_step(images, labels)
        comm.barrier()
        times.append(time.perf_counter() - begin)
    return min(times[_WARM:])


if __name__ == "__main__":
    main()
