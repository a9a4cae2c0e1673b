"""``parallelize``: the one call that spreads a model over ranks, and what it asks of its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hyfi_core.comm.agree import agree
from hyfi_core.comm.base import Communicator
from hyfi_core.errors import RequestError
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.plan.strategy import Strategy, plan_for
from hyfi_core.runtime.batch_reader import check_share, divisor
from hyfi_core.runtime.consensus import Shape, compare_requests
from hyfi_core.runtime.engine import Engine, Loss, OptimizerFactory


def parallelize(
    model: nn.Module,
    shape: Shape,
    plan: ParallelPlan | None,
    comm: Communicator,
    *,
    strategy: Strategy | None = None,
    loss: Loss = F.cross_entropy,
    optimizer: OptimizerFactory | None = None,
    output: Callable[[Any], Any] | None = None,
    autocast: torch.dtype | None = None,
) -> Engine:
    """Spread a model over the ranks of a plan.

    Args:
        model: any ``nn.Module`` that takes one image tensor, untouched; parameters and buffers become rank 0's.
        shape: of the whole batch of one replica, ``(B, C, H, W)``; with ``plan.shares`` B is this replica's share.
        plan: how; ``plan.ranks`` must be ``comm.size``. None with a ``strategy``.
        comm: from ``hyfi_core.init()``, or a group of its ranks.
        strategy: "data", "model", "spatial" or "hybrid": a plan for ``comm.size`` ranks by one word.
        loss: of one micro-batch, a mean over its samples.
        optimizer: makes an optimiser of a list of parameters; needed for ``update``.
        output: picks the logits out of what the model returns.
        autocast: computes in this type where autocast would (``torch.bfloat16``).

    Raises:
        RequestError: plan, ranks, shape or model do not go together, or ranks were given different ones: the same error
            on every rank, before any of them has changed anything.
    """
    plan = agree(comm, lambda: _checked(model, shape, plan, comm, strategy))
    settings = {"autocast": autocast, "optimizer": "given" if optimizer is not None else "none"}
    compare_requests(comm, model, shape, plan, settings)
    return Engine(model, shape, plan, comm, loss, optimizer, output, autocast)


def _checked(
    model: nn.Module, shape: Shape, plan: ParallelPlan | None, comm: Communicator, strategy: Strategy | None
) -> ParallelPlan:
    """Return the plan; raise what is wrong with the request of this rank."""
    if not isinstance(model, nn.Module):
        raise RequestError(f"model is {type(model).__name__}; give a torch.nn.Module that takes one image tensor")
    if len(shape) != 4 or any(side < 1 for side in shape):
        raise RequestError(f"shape is {shape}; give (B, C, H, W) of the whole batch of one replica")
    if (plan is None) == (strategy is None):
        raise RequestError(
            "parallelize needs a plan or a strategy, and not both; strategies are data, model, spatial, hybrid"
        )
    if plan is None:
        assert strategy is not None
        plan = plan_for(strategy, comm.size, shape[0])
    if plan.ranks != comm.size:
        raise RequestError(
            f"the plan needs {plan.ranks} ranks, {comm.size} are here; start {plan.ranks} or change plan.grids"
        )
    check_share(plan, comm.rank // plan.ranks_per_replica, shape[0])
    if shape[0] % plan.microbatches:
        raise RequestError(
            f"a batch of {shape[0]} images cannot be cut into {plan.microbatches} equal micro-batches; "
            f"use plan.microbatches={divisor(shape[0], plan.microbatches)}"
        )
    return plan
