"""The process that validates: builds the network, waits for weights, says what they are worth. It knows no MPI.

Several of them are connected by gloo; child 0 hears from its parent and sends the weights on to the others.
"""

from __future__ import annotations

import mmap
import os
import traceback
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workflows.launch.child_process import LOST_PEER, ChildProcess, Parent

if TYPE_CHECKING:
    import torch

    from hyfi_core.comm.base import Communicator
    from hyfi_core.plan.parallel_plan import ParallelPlan
    from workflows.evaluation.judge import Judge
    from workflows.training.job import Job

PROGRAM = ("-m", "workflows.evaluation.validation_child")
LONG = timedelta(days=365)  # whoever waits here is watched over by a parent: a clock would only end what is well


def start_child(job: Job, plan: ParallelPlan, seat: Mapping[str, Any], descriptors: Any) -> ChildProcess:
    """Start the child of one validator.

    It is told everything it needs: a child that is started again after hours must not find other slides in the store.

    Args:
        job: the run.
        plan: of the validators.
        seat: see :data:`workflows.evaluation.validator.Start`.
        descriptors: where snapshots are.
    """
    import torch

    description = {
        "model": job.model_json(),
        "plan": plan.to_json(),
        "cells": job.config.validation.cells,
        "store": str(job.config.data.store),
        "slides": [[sample.slide_id, sample.case_id, sample.label] for sample in job.val.samples],
        "threads": torch.get_num_threads(),
        "seat": dict(seat),
    }
    return ChildProcess(PROGRAM, description, descriptors)


def validation_plan(job: Job, validators: int) -> ParallelPlan:
    """Return how the validators share the work: the grids asked for, as often as there are ranks for.

    With ``validation.cells`` every validator is alone with images of its own.

    Raises:
        RequestError: the ranks do not come out even.
    """
    from hyfi_core.errors import RequestError
    from hyfi_core.plan.parallel_plan import ParallelPlan

    alone = job.config.validation.cells is not None
    grids = job.config.validation.grids or ((1, 1 if alone else validators),)
    of_one = sum(rows * columns for rows, columns in grids)
    if validators % of_one:
        raise RequestError(
            f"validation.grids: given {[list(grid) for grid in grids]}, which needs {of_one} ranks or a multiple; "
            f"there are {validators} validators (roles.validators)"
        )
    cuts = job.plan.cuts if len(grids) == len(job.plan.grids) else "auto"
    return ParallelPlan(grids, cuts, replicas=validators // of_one, fused_halo=job.plan.fused_halo)


def main() -> None:
    """Serve the parent until it ends, or ends this process."""
    from hyfi_core.errors import RequestError

    parent = Parent.of_arguments()
    try:
        _serve(parent)
    except RequestError as error:
        parent.say("refused", reason=str(error))
    except BaseException as error:
        if "/gloo/" in str(error):  # the cause is another child's, whose parent tells it
            parent.say("died", how=LOST_PEER)
        else:
            parent.say("raised", error=traceback.format_exc().rstrip())
    while True:
        parent.hear()  # not to leave before it is told to: the other children would take it for a death


def _serve(parent: Parent) -> None:
    description = parent.hear()

    import torch

    from hyfi_core.comm.agree import agree
    from hyfi_core.plan.parallel_plan import ParallelPlan

    torch.set_num_threads(description["threads"])
    group = _connect(parent, description["seat"])
    plan = ParallelPlan.from_json(description["plan"])
    judge = agree(group, lambda: _judge(description, plan, group))
    like = judge.module.state_dict()
    parent.say("ready")
    while True:
        weights = _weights(parent, group, like)
        metrics = judge.judge(weights)
        if metrics is not None:
            parent.say("result", metrics=metrics)


def _connect(parent: Parent, seat: Mapping[str, Any]) -> Communicator:
    """Return the group of all children; child 0 finds a free port and says it."""
    from hyfi_core.comm.alone import AloneCommunicator

    if seat["size"] == 1:
        return AloneCommunicator()

    import torch.distributed as dist

    from hyfi_core.comm.torchdist import world

    if seat["host"] == "localhost" and Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    first = seat["rank"] == 0
    store = dist.TCPStore(seat["host"], seat["port"] or 0, is_master=first, wait_for_workers=False, timeout=LONG)
    if first:
        parent.say("port", port=store.port)
    dist.init_process_group("gloo", store=store, rank=seat["rank"], world_size=seat["size"], timeout=LONG)
    return world()


def _judge(description: Mapping[str, Any], plan: ParallelPlan, group: Communicator) -> Judge:
    from data.samples.dataset import SlideRef
    from workflows.evaluation.judge import Judge, dataset_of

    model = description["model"]
    slides = [SlideRef(slide_id, case_id, label) for slide_id, case_id, label in description["slides"]]
    cells = tuple(description["cells"]) if description["cells"] else None
    return Judge.of(model, dataset_of(model, Path(description["store"]), slides), plan, group, cells)


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
