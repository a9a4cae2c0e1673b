"""The loss of a step as its schedule needs it, and what a step leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

import torch

from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.runtime.groups import Groups
from hyfi_core.runtime.losses.batch_loss import BatchLoss
from hyfi_core.runtime.losses.loss_function import LossFunction
from hyfi_core.runtime.losses.step_loss import Leaves, MicrobatchLoss, StepLoss


def loss_of_step(
    function: LossFunction,
    pick: Callable[[Leaves], Any],
    labels: torch.Tensor,
    plan: ParallelPlan,
    groups: Groups,
    over_batch: bool,
    common_leaves: Set[int] = frozenset(),
) -> StepLoss:
    """Return the loss of a step (collective over all trainers when the first one is over the whole batch).

    Args:
        function: the loss.
        pick: turns the leaves of the output into the loss's argument.
        labels: labels of this replica's batch, on the device.
        plan: plan of the run, with every cell as a rank.
        groups: communication groups of this rank or cell.
        over_batch: whether the loss is computed once over the whole batch.
        common_leaves: indices of the leaves of the output that are the same for all images.
    """
    if over_batch:
        groups.prepare_outputs()
        return BatchLoss(function, pick, labels, plan, groups, common_leaves)
    count = plan.microbatches
    # With shares replicas count by their samples, and reduced gradients are sums (``plan.mean_over`` is 1).
    divisor = float(count / plan.weight(groups.replica_index)) if plan.shares else count
    return MicrobatchLoss(function, pick, labels.split(len(labels) // count), divisor, labels.device)
