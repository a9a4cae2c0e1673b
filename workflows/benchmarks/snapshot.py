"""Benchmark of snapshots: what sending weights to a validator costs a trainer, also if the validator is too slow.

    python -m workflows.benchmarks.snapshot [--model resnet18] [--size 512] [--every 4] [--validations 4]

The child of one validator takes twice as long for each snapshot as one trainer takes between two snapshots (it sleeps,
so that it does not slow the trainer down). Prints a JSON line for each policy: the seconds of gathering, copying and
sending as a fraction of the seconds between validations (``snapshot_share``), the seconds of waiting for a place in the
queue likewise (``wait_share``), and which steps were validated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import hyfi_core
from hyfi_core.comm.base import Communicator
from hyfi_core.models import resnet
from hyfi_core.runtime.engine import Engine
from workflows.evaluation.validation_client import QUEUE, Policy, ValidationClient
from workflows.evaluation.validator import ValidationService
from workflows.launch.child_process import ChildProcess, Parent
from workflows.launch.mpiexec import find_mpiexec

PROGRAM = ("-m", "workflows.benchmarks.snapshot", "--child")


def main() -> None:
    """Start the ranks, or run as one of them, or as the validator's child."""
    if "--child" in sys.argv:
        _evaluate_slowly(Parent.from_arguments())
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--every", type=int, default=4, help="steps between two snapshots")
    parser.add_argument("--validations", type=int, default=4, help="number of snapshots")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        _rank(args)
    else:
        command = [sys.executable, "-m", "workflows.benchmarks.snapshot", *sys.argv[1:], "--rank"]
        raise SystemExit(subprocess.run([*find_mpiexec().command(2), *command]).returncode)


def _rank(args: argparse.Namespace) -> None:
    """Train (rank 0) or serve validation (rank 1), once for each policy."""
    torch.set_num_threads(1)
    world = hyfi_core.init()
    group = world.split(world.rank)  # each rank alone: the trainer's group, and the validators'
    assert group is not None
    engine, step_s = _trainer(args, group) if world.rank == 0 else (None, 0.0)
    # A validation takes twice the time between two snapshots, so that the queue fills up.
    seconds = 2 * args.every * float(world.broadcast_object(step_s))
    policies: tuple[Policy, ...] = ("all", "latest")
    for policy in policies:
        if engine is None:
            service = ValidationService(world, group, partial(_start, seconds))
            service.begin()
            world.barrier()
            service.serve()
        else:
            world.barrier()
            client = ValidationClient(world, leader=1, policy=policy)
            print(json.dumps(measure(engine, client, policy, args)), flush=True)


def _trainer(args: argparse.Namespace, group: Communicator) -> tuple[Engine, float]:
    """Return a trainer's engine, and the median seconds of a step."""
    torch.manual_seed(0)
    model = getattr(resnet, args.model)(2).to(memory_format=torch.channels_last)
    engine = hyfi_core.parallelize(
        model,
        (1, 3, args.size, args.size),
        hyfi_core.ParallelPlan(grids=((1, 1),)),
        group,
        loss=F.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    )
    times = []
    for _ in range(6):
        start_s = time.perf_counter()
        _step(engine, args.size)
        times.append(time.perf_counter() - start_s)
    return engine, statistics.median(times[1:])


def _step(engine: Engine, size: int) -> None:
    images = torch.ones(1, 3, size, size).contiguous(memory_format=torch.channels_last)
    engine.train_step(images, torch.tensor([1]))


def measure(engine: Engine, client: ValidationClient, policy: Policy, args: argparse.Namespace) -> dict[str, Any]:
    """Train and validate with one policy; return the times and what share of them snapshots and waits take."""
    submitting_s = waiting_s = 0.0
    steps: list[int] = []
    start_s = time.perf_counter()
    for step in range(1, args.every * args.validations + 1):
        _step(engine, args.size)
        before_s = time.perf_counter()
        if step % args.every == 0:
            # `submit` would wait for a free place, too; waiting here counts it apart from the sending.
            while policy == "all" and client.waiting >= QUEUE:
                time.sleep(1e-3)
                steps += [validated for validated, _ in client.collect()]
            waiting_s += time.perf_counter() - before_s
            before_s = time.perf_counter()
            state = engine.gather_state_dict()
            assert state is not None
            client.submit(step, state, lambda: False)
        steps += [validated for validated, _ in client.collect()]
        submitting_s += time.perf_counter() - before_s
    train_s = time.perf_counter() - start_s
    client.drain(lambda: False)
    steps += [validated for validated, _ in client.collect()]
    client.close(stopped=False)
    # Waiting is left out, because it depends on the validator alone.
    between_s = (train_s - waiting_s) / args.validations
    return {
        "policy": policy,
        "between_validations_s": round(between_s, 3),
        "snapshot_s": round(submitting_s / args.validations, 4),
        "snapshot_share": round(submitting_s / args.validations / between_s, 4),
        "wait_share": round(waiting_s / args.validations / between_s, 3),
        "validated": steps,
        "of": args.validations,
    }


def _start(seconds: float, rendezvous: Mapping[str, Any], descriptors: Sequence[int]) -> ChildProcess:
    return ChildProcess(PROGRAM, {"seconds": seconds}, descriptors)


def _evaluate_slowly(parent: Parent) -> None:
    """Answer each snapshot after some seconds, as a validator's child."""
    seconds = parent.receive()["seconds"]
    parent.send("ready")
    while True:
        parent.receive()
        time.sleep(seconds)
        parent.send("result", metrics={})


if __name__ == "__main__":
    main()
