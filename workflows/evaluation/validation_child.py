"""The child process of a validator: builds the model, waits for weights, returns their metrics. Does not use MPI.

The children of several validators are connected by gloo; child 0 receives weights from its parent and broadcasts them.
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
"""Time limit of gloo, practically none: a child waits for weights as long as training takes."""


def start_child(
    network: Mapping[str, Any],
    config: Config,
    slides: Sequence[SlideRef],
    plan: ParallelPlan,
    rendezvous: Mapping[str, Any],
    descriptors: Sequence[int],
    *,
    device: str = "cpu",
) -> ChildProcess:
    """Start the child of one validator.

    The child gets the list of slides from its parent, not from the store, which may change before a restart.

    Args:
        network: The run's ``model.json``.
        config: The run's configuration.
        slides: The validation slides, all labelled.
        plan: The validators' plan.
        rendezvous: See :data:`workflows.evaluation.validator.Start`.
        descriptors: File descriptors of the snapshots' memory.
        device: Device of the child; the CPU is used if several children share an image.
    """
    import torch

    description = {
        "model": network,
        "plan": plan.to_json(),
        # Children exchange halos by gloo, which sends host memory.
        "device": device if plan.ranks_per_replica == 1 else "cpu",
        "cells": config.validation.cells,
        "store": str(config.data.store),
        "features": None if config.data.features is None else str(config.data.features),
        "slides": [[slide.slide_id, slide.case_id, slide.label] for slide in slides],
        # Rounding depends on the number of threads and on TF32: as in the parent.
        "threads": torch.get_num_threads(),
        "arithmetic": [config.run.tf32, config.run.deterministic],
        "rendezvous": dict(rendezvous),
    }
    return ChildProcess(PROGRAM, description, descriptors)


def validation_plan(config: Config, plan: ParallelPlan, validators: int) -> ParallelPlan:
    """Return the validators' plan: ``validation.grids``, with as many replicas as there are ranks for.

    With ``validation.cells``, each validator evaluates its own images, spilling as the trainers do. With tiles, as many
    validators share a slide as trainers do, if their number allows: chunks are then the same as in training.

    Args:
        config: The run's configuration.
        plan: The trainers' plan; its cuts are used if the number of stages is equal.
        validators: Number of validators.

    Raises:
        RequestError: The number of validators is not a multiple of the grids' ranks.
    """
    from hyfi_core.errors import RequestError
    from hyfi_core.plan.parallel_plan import ParallelPlan

    if plan.tiles is not None:
        # If the numbers do not fit, all validators share each slide.
        tiles = validators if validators % plan.tiles else plan.tiles
        return ParallelPlan(tiles=tiles, replicas=validators // tiles, memory_bytes=plan.memory_bytes)
    with_cells = config.validation.cells is not None
    grids = config.validation.grids or ((1, 1 if with_cells else validators),)
    replica_ranks = sum(rows * columns for rows, columns in grids)
    if validators % replica_ranks:
        raise RequestError(
            f"validation.grids: given {[list(grid) for grid in grids]}; allowed: grids whose ranks ({replica_ranks}) "
            f"divide the number of validators ({validators}, roles.validators)"
        )
    # Cuts name the stages' borders: those of another number of stages mean nothing.
    cuts = plan.cuts if len(grids) == len(plan.grids) else "auto"
    derived = ParallelPlan(grids, cuts, replicas=validators // replica_ranks, fused_halo=plan.fused_halo)
    if not with_cells:
        return derived
    return replace(derived, cells=config.validation.cells, spill=plan.spill, memory_bytes=plan.memory_bytes)


def main() -> None:
    """Evaluate what the parent sends, and report a failure to it, until it ends or kills this process."""
    from hyfi_core.collection import start_quickly
    from hyfi_core.errors import LostPeerError, RequestError

    start_quickly()
    parent = Parent.from_arguments()
    try:
        _serve(parent)
    except RequestError as error:
        parent.send("refused", reason=str(error))
    except LostPeerError:  # another child, whose own parent reports it
        parent.send("died", how=LOST_PEER)
    except BaseException:
        parent.send("raised", error=traceback.format_exc().rstrip())
    while True:
        parent.receive()  # wait to be killed: the other children would take an exit for a crash


def _serve(parent: Parent) -> None:
    """Evaluate the weights of each snapshot, until the parent ends."""
    description = parent.receive()

    import torch

    from hyfi_core.arithmetic import set_arithmetic
    from hyfi_core.comm.agreement.agree import agree
    from hyfi_core.plan.parallel_plan import ParallelPlan

    torch.set_num_threads(description["threads"])
    set_arithmetic(*description["arithmetic"])
    group = _connect(parent, description["rendezvous"])
    plan = ParallelPlan.from_json(description["plan"])
    evaluator = agree(group, lambda: _build_evaluator(description, plan, group))
    # Has the names and shapes of the weights, which snapshots do not state.
    like = evaluator.module.state_dict()
    # The validator's start ends with this: what fails before it is refused before the run begins.
    parent.send("ready")
    while True:
        weights = _weights(parent, group, like)
        metrics = evaluator.evaluate(weights)
        if metrics is not None:
            parent.send("result", metrics=metrics)


def _connect(parent: Parent, rendezvous: Mapping[str, Any]) -> Communicator:
    """Return the communicator of all children; child 0 chooses a free port and reports it to its parent."""
    from hyfi_core.comm.alone import AloneCommunicator

    if rendezvous["size"] == 1:
        return AloneCommunicator()

    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore  # torch.distributed re-exports it without saying so

    from hyfi_core.comm.torchdist import world

    if rendezvous["host"] == "localhost" and Path("/sys/class/net/lo").exists():
        # Else gloo takes the interface of the host's name, which a container or a laptop may not have.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    first = rendezvous["rank"] == 0
    # Port 0: the system chooses a free one. A port chosen before could be taken when it is opened.
    store = TCPStore(rendezvous["host"], rendezvous["port"] or 0, is_master=first, wait_for_workers=False, timeout=LONG)
    if first:
        parent.send("port", port=store.port)
    dist.init_process_group("gloo", store=store, rank=rendezvous["rank"], world_size=rendezvous["size"], timeout=LONG)
    return world()


def _build_evaluator(description: Mapping[str, Any], plan: ParallelPlan, group: Communicator) -> Evaluator:
    """Return the evaluator that a validator has described."""
    from data.samples.dataset import SlideRef
    from hyfi_core.comm.agreement.agree import agree
    from hyfi_core.runtime.launch import made_current
    from workflows.evaluation.evaluator import Evaluator, dataset_of
    from workflows.evaluation.tile_evaluator import bag_evaluator, bags_of

    model = description["model"]
    slides = [
        # JSON has made lists of tuples.
        SlideRef(slide_id, case_id, tuple(label) if isinstance(label, list) else label)
        for slide_id, case_id, label in description["slides"]
    ]
    dataset, device = dataset_of(model, Path(description["store"]), slides), made_current(description["device"])
    features, cells = description["features"], description["cells"]
    bags = agree(group, lambda: bags_of(model, dataset, None if features is None else Path(features)))
    if bags is not None:
        return bag_evaluator(model, bags, group, plan, device)
    return Evaluator.of(model, dataset, plan, group, tuple(cells) if isinstance(cells, list) else cells, device=device)


def _weights(parent: Parent, group: Communicator, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Wait for the next weights and return them on every child; on child 0 as views of the snapshot."""
    import torch

    from hyfi_core.runtime.saving.snapshot import snapshot_bytes, unflatten

    if group.rank == 0:
        message = parent.receive()
        # Mapped anew each time, as buffers change their size.
        shared = mmap.mmap(message["descriptor"], max(1, message["bytes"]))
        flat = torch.frombuffer(shared, dtype=torch.uint8)[: message["bytes"]]
    # First, so that the others take memory for the weights only when some come.
    group.broadcast_object("validate")
    if group.rank != 0:
        flat = torch.empty(snapshot_bytes(like), dtype=torch.uint8)
    group.broadcast(flat)
    return unflatten(flat, like)


if __name__ == "__main__":
    main()
