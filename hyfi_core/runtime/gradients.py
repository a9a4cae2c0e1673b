"""Gradients of one rank: whose they are, when they are complete, and how they are summed over all that have a share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from hyfi_core.comm.counted import CountedCommunicator
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.runtime.compiled import Compiled
from hyfi_core.runtime.groups import Groups
from hyfi_core.runtime.mirror import Mirror
from hyfi_core.runtime.reduction import ReductionGroup

Key = tuple[int, int]


class StepGradients:
    """The gradients of one compiled model. Making it is collective over all trainers.

    Args:
        model: the user's module.
        compiled: its stages.
        groups: the plan's groups.
        plan: replicas and their shares, mirror, type on the wire.
        mirror: the gradients of direction 1 on their way, None where they are reduced with the others.
    """

    def __init__(
        self,
        model: nn.Module,
        compiled: Compiled,
        groups: Groups,
        plan: ParallelPlan,
        mirror: Mirror | None,
    ) -> None:
        self._named = dict(model.named_parameters(remove_duplicate=False))
        self._compiled = compiled
        self._mirror = mirror
        self._parameters = list({id(p): p for p in self._named.values() if p.requires_grad}.values())
        dtype = torch.bfloat16 if plan.reduce_dtype == "bfloat16" else None
        self._group_of: dict[int, ReductionGroup] = {}
        self._groups: list[ReductionGroup] = []
        for holders, members in sorted(
            _by_holders(self._named, compiled, groups).items(), key=lambda kv: sorted(kv[0])
        ):
            comm = groups.reduction(holders)
            if comm is not None and comm.size > 1:
                group = ReductionGroup(members, comm, plan.mean_over, dtype)
                self._groups.append(group)
                self._group_of.update({id(parameter): group for parameter in members})
        self._waiting: dict[int, int] = {}
        self._kept: list[torch.Tensor | None] = []

    @property
    def reduces(self) -> bool:
        """Whether any gradient is shared with other ranks."""
        return bool(self._groups)

    def begin(self) -> None:
        """Set aside what earlier calls have accumulated, so that only new shares are summed."""
        self._kept = [None if p.grad is None else p.grad.clone() for p in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        for group in self._groups:
            group.begin()
        self._waiting = {}
        for stage in self._compiled.hosted.values():
            for name in stage.ranked.program.parameters.values():
                self._wait_for(self._named[name])
        if self._mirror is not None:
            for parameter in self._mirror.expected():
                self._wait_for(parameter)

    def complete(self, key: Key, names: Sequence[str]) -> None:
        """Take note that a stage adds no more to these gradients on this rank; start what is complete."""
        program = self._compiled.hosted[key].ranked.program
        for name in names:
            self._one_less(self._named[program.parameters[name]])
        for group in self._groups:
            group.poll()

    def stage_done(self) -> None:
        """All backwards of a stage are done on this rank: let reductions make progress."""
        self._land(wait=False)
        for group in self._groups:
            group.poll()

    def send(self, stage: int) -> None:
        """Start sending a stage's gradients to the direction that owns them."""
        assert self._mirror is not None
        self._mirror.send_gradients(stage)

    def expect(self, stage: int) -> None:
        """Post the receives of a stage's gradients from the other direction."""
        assert self._mirror is not None
        self._mirror.expect_gradients(stage)

    def finish(self) -> None:
        """Return when every gradient is the sum over all shares, added to what was set aside."""
        self._land(wait=True)
        for group in self._groups:
            group.finish()
        for parameter, old in zip(self._parameters, self._kept, strict=True):
            if old is not None:
                parameter.grad = old if parameter.grad is None else old.add_(parameter.grad)
        self._kept = []

    def _land(self, wait: bool) -> None:
        if self._mirror is not None:
            for parameter in self._mirror.land_gradients(wait):
                self._one_less(parameter)

    def _wait_for(self, parameter: nn.Parameter) -> None:
        self._waiting[id(parameter)] = self._waiting.get(id(parameter), 0) + 1

    def _one_less(self, parameter: nn.Parameter) -> None:
        self._waiting[id(parameter)] -= 1
        if not self._waiting[id(parameter)] and id(parameter) in self._group_of:
            self._group_of[id(parameter)].complete([parameter])


def _by_holders(
    named: Mapping[str, nn.Parameter], compiled: Compiled, groups: Groups
) -> dict[frozenset[int], list[nn.Parameter]]:
    """Return ranks that hold -> trained parameters, those used last first: so their gradients become complete."""
    stages: dict[int, set[int]] = {}
    order: dict[int, nn.Parameter] = {}
    for stage, names in enumerate(compiled.parameters):
        for name in names:
            if name in compiled.trained:
                order.setdefault(id(named[name]), named[name])
                stages.setdefault(id(named[name]), set()).add(stage)
    found: dict[frozenset[int], list[nn.Parameter]] = {}
    for key in reversed(order):
        found.setdefault(groups.holders(stages[key]), []).append(order[key])
    return found


def clip(
    owned: Sequence[nn.Parameter], counted: Sequence[nn.Parameter], max_norm: float, comm: CountedCommunicator | None
) -> None:
    """Scale gradients down to a norm over the whole model, as ``torch.nn.utils.clip_grad_norm_`` does.

    Args:
        owned: parameters of this rank.
        counted: those that this rank counts, so that each is counted by one rank of ``comm``.
        max_norm: the norm that is not exceeded.
        comm: the ranks that hold the model together; None where this rank counts all of it.
    """
    device = owned[0].device
    norms = [p.grad.norm().double() for p in counted if p.grad is not None]
    total = torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64, device=device)
    if comm is not None:
        comm.of("reduce").all_reduce(total)
    share = max_norm / (float(total) ** 0.5 + 1e-6)
    gradients = [p.grad for p in owned if p.grad is not None]
    if share < 1.0 and gradients:
        torch._foreach_mul_(gradients, share)
