"""The process that validates: builds the network, waits for weights, sends back their metrics. It knows no MPI.

Several of them are connected by gloo; child 0 hears from its parent and sends the weights on to the others.
"""

from __future__ import annotations

import mmap
import os
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workflows.launch.child_process import LOST_PEER, ChildProcess, Parent

if TYPE_CHECKING:
    import torch

    from data.samples.dataset import SlideRef
    from hyfi_core.comm.base import Communicator
    from hyfi_core.plan.parallel_plan import ParallelPlan
    from workflows.config.run import Config
    from workflows.evaluation.evaluator import Evaluator

PROGRAM = ("-m", "workflows.evaluation.validation_child")
LONG = timedelta(days=365)
"""Its parent supervises a process that waits: a time limit could only end a healthy one."""


def start_child(
    network: Mapping[str, Any],
    config: Config,
    slides: Sequence[SlideRef],
    plan: ParallelPlan,
    seat: Mapping[str, Any],
    descriptors: Sequence[int],
    *,
    device: str = "cpu",
) -> ChildProcess:
    """Start the child of one validator.

    It gets all data from its parent: a child restarted after hours must not find different slides in the store.

    Args:
        network: of the run, as ``model.json`` describes it.
        config: of the run.
        slides: those that validate, all labelled.
        plan: of the validators.
        seat: see :data:`workflows.evaluation.validator.Start`.
        descriptors: files with snapshots.
        device: for computation; the CPU if several children evaluate an image together.
    """
    import torch

    description = {
        "model": network,
        "plan": plan.to_json(),
        "device": device if plan.ranks_per_replica == 1 else "cpu",
        "cells": config.validation.cells,
        "store": str(config.data.store),
        "slides": [[slide.slide_id, slide.case_id, slide.label] for slide in slides],
        "threads": torch.get_num_threads(),
        "seat": dict(seat),
    }
    return ChildProcess(PROGRAM, description, descriptors)


def validation_plan(config: Config, plan: ParallelPlan, validators: int) -> ParallelPlan:
    """Return how the validators share the work: the grids asked for, as often as there are ranks for.

    With ``validation.cells`` every validator evaluates images of its own, and maps leave memory as the trainers' do.

    Args:
        config: of the run.
        plan: of the trainers; its cuts are used if the number of stages is equal.
        validators: how many ranks validate.

    Raises:
        RequestError: the number of ranks is not a multiple of that of the grids.
    """
    from hyfi_core.errors import RequestError
    from hyfi_core.plan.parallel_plan import ParallelPlan

    alone = config.validation.cells is not None
    grids = config.validation.grids or ((1, 1 if alone else validators),)
    of_one = sum(rows * columns for rows, columns in grids)
    if validators % of_one:
        raise RequestError(
            f"validation.grids: given {[list(grid) for grid in grids]}; allowed: grids whose ranks ({of_one}) divide "
            f"the number of validators ({validators}, roles.validators)"
        )
    cuts = plan.cuts if len(grids) == len(plan.grids) else "auto"
    found = ParallelPlan(grids, cuts, replicas=validators // of_one, fused_halo=plan.fused_halo)
    if not alone:
        return found
    return replace(found, cells=config.validation.cells, spill=plan.spill, memory_bytes=plan.memory_bytes)


def main() -> None:
    """Serve the parent until it ends, or ends this process."""
    from hyfi_core.errors import RequestError

    parent = Parent.of_arguments()
    try:
        _serve(parent)
    except RequestError as error:
        parent.say("refused", reason=str(error))
    except BaseException as error:
        if "/gloo/" in str(error):  # caused by another child, whose parent reports it
            parent.say("died", how=LOST_PEER)
        else:
            parent.say("raised", error=traceback.format_exc().rstrip())
    while True:
        parent.hear()  # wait for the parent's request: the other children would take an exit for a crash


def _serve(parent: Parent) -> None:
    description = parent.hear()

    import torch

    from hyfi_core.comm.agree import agree
    from hyfi_core.plan.parallel_plan import ParallelPlan

    torch.set_num_threads(description["threads"])
    group = _connect(parent, description["seat"])
    plan = ParallelPlan.from_json(description["plan"])
    evaluator = agree(group, lambda: _build_evaluator(description, plan, group))
    like = evaluator.module.state_dict()
    parent.say("ready")
    while True:
        weights = _weights(parent, group, like)
        metrics = evaluator.evaluate(weights)
        if metrics is not None:
            parent.say("result", metrics=metrics)


def _connect(parent: Parent, seat: Mapping[str, Any]) -> Communicator:
    """Return the group of all children; child 0 finds a free port and reports it."""
    from hyfi_core.comm.alone import AloneCommunicator

    if seat["size"] == 1:
        return AloneCommunicator()

    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore  # torch.distributed re-exports it without saying so

    from hyfi_core.comm.torchdist import world

    if seat["host"] == "localhost" and Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    first = seat["rank"] == 0
    store = TCPStore(seat["host"], seat["port"] or 0, is_master=first, wait_for_workers=False, timeout=LONG)
    if first:
        parent.say("port", port=store.port)
    dist.init_process_group("gloo", store=store, rank=seat["rank"], world_size=seat["size"], timeout=LONG)
    return world()


def _build_evaluator(description: Mapping[str, Any], plan: ParallelPlan, group: Communicator) -> Evaluator:
    from data.samples.dataset import SlideRef
    from hyfi_core.runtime.launch import made_current
    from workflows.evaluation.evaluator import Evaluator, dataset_of

    model = description["model"]
    slides = [SlideRef(slide_id, case_id, label) for slide_id, case_id, label in description["slides"]]
    cells = tuple(description["cells"]) if description["cells"] else None
    return Evaluator.of(
        model,
        dataset_of(model, Path(description["store"]), slides),
        plan,
        group,
        cells,
        device=made_current(description["device"]),
    )


def _weights(parent: Parent, group: Communicator, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Wait for the next weights and return them, on every child; views of the snapshot on child 0."""
    import torch

    from workflows.evaluation.snapshot import snapshot_bytes, unflatten

    if group.rank == 0:
        word = parent.hear()
        shared = mmap.mmap(word["descriptor"], max(1, word["bytes"]))
        flat = torch.frombuffer(shared, dtype=torch.uint8)[: word["bytes"]]
    group.broadcast_object("validate")
    if group.rank != 0:
        flat = torch.empty(snapshot_bytes(like), dtype=torch.uint8)
    group.broadcast(flat)
    return unflatten(flat, like)


if __name__ == "__main__":
    main()
