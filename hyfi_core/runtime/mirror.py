"""The mirror: two directions with a single owner of the optimizer state (GEMS-MASTER's communication optimisation).

    direction 1, stage s, rank k-1-r   ── gradients, after its last backward ──▶   direction 0, stage s, rank r
    direction 1, stage s, rank k-1-r   ◀── weights, after the update ──            direction 0, stage s, rank r

Both are sent point to point while other stages still compute, without an all-reduce over both directions. The paper
alternates which replica is updated; an optimizer with momentum needs one owner, so here it is always direction 0.
A rank that holds the same stage in both directions has one gradient for both and sends nothing.

Source: Jain et al., GEMS: GPU-Enabled Memory-Aware Model-Parallelism System for Distributed DNN Training, SC'20.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hyfi_core.comm.base import Message, Pending
from hyfi_core.comm.counted import CountedCommunicator
from hyfi_core.errors import RequestError
from hyfi_core.plan.placement import Placement
from hyfi_core.runtime.groups import Groups
from hyfi_core.runtime.lowered_model import LoweredModel

_UNFINISHED: dict[int, _InTransit] = {}
"""Exchanges that have not been waited for. MPI accesses their memory even after their mirror has been freed."""


@atexit.register
def finish_all() -> None:
    """Wait for all pending exchanges, before the process ends: the peers have started the same ones."""
    for transit in list(_UNFINISHED.values()):
        transit.finish()


@dataclass(eq=False)
class _InTransit:
    """Flat tensors of a pending exchange.

    Attributes:
        stage: stage of the tensors.
        pending: the exchange.
        flats: a flat tensor for each dtype.
        weights: parameters to be overwritten by the received weights; empty otherwise.
    """

    stage: int
    pending: Pending
    flats: list[torch.Tensor]
    weights: Sequence[nn.Parameter] = ()

    def finish(self) -> None:
        """Wait for the exchange; received weights are then copied to the parameters."""
        self.pending.wait()
        # A second call copies nothing: the weights may have been changed since they arrived.
        if _UNFINISHED.pop(id(self), None) is None or not self.weights:
            return
        with torch.no_grad():
            for parameter, piece in _pieces(self.weights, self.flats):
                parameter.copy_(piece)


class Mirror:
    """The exchanges between the two directions on one rank.

    Args:
        placement: which ranks hold which stage.
        comm: the ranks of the plane.
        parameters: for each stage, its trained parameters in one order on all ranks.

    Raises:
        RequestError: two stages share a parameter.
    """

    def __init__(
        self, placement: Placement, comm: CountedCommunicator, parameters: Sequence[Sequence[nn.Parameter]]
    ) -> None:
        self._gradients: list[_InTransit] = []  # arriving from direction 1
        self._weights: list[_InTransit] = []  # arriving from their owners
        self._leaving: list[_InTransit] = []  # of either kind, sent by this rank
        ids: set[int] = set()
        for of_stage in parameters:
            # The gradient of a shared parameter would have two owners, each with only a part of the sum.
            if ids & {id(parameter) for parameter in of_stage}:
                raise RequestError(
                    "plan.mirror is point_to_point, but a parameter is used by two stages and has no single owner; "
                    "use plan.mirror=all_reduce, or choose cuts that keep all its uses in one stage"
                )
            ids |= {id(parameter) for parameter in of_stage}
        self._comm = comm.of("reduce")
        self._parameters = parameters
        self._owner_of, self._mirror_of = _partners(placement, comm.rank)

    def expected(self) -> list[nn.Parameter]:
        """Return the parameters whose gradients get contributions from the other direction."""
        return [parameter for stage in self._mirror_of for parameter in self._parameters[stage]]

    def send_gradients(self, stage: int) -> None:
        """Start sending direction 1's gradients of a stage to their owner."""
        if stage in self._owner_of:
            flats = _flats(self._parameters[stage], [_gradient(p) for p in self._parameters[stage]])
            self._leaving.append(self._exchange(stage, self._owner_of[stage], flats, sends=True))

    def expect_gradients(self, stage: int) -> None:
        """Post the receives of a stage's gradients."""
        if stage in self._mirror_of:
            self._gradients.append(
                self._exchange(stage, self._mirror_of[stage], _room(self._parameters[stage]), sends=False)
            )

    def add_arrived_gradients(self, wait: bool) -> list[nn.Parameter]:
        """Add the received gradients; return their parameters.

        Args:
            wait: whether to wait for all receives and sends; sent gradients are then cleared.
        """
        arrived: list[nn.Parameter] = []
        # In the order in which they were posted; the copy allows removing while iterating.
        for transit in list(self._gradients):
            if wait or transit.pending.test():
                transit.finish()
                self._gradients.remove(transit)
                for parameter, piece in _pieces(self._parameters[transit.stage], transit.flats):
                    # A copy, because a view would keep the whole message in memory.
                    parameter.grad = piece.clone() if parameter.grad is None else parameter.grad.add_(piece)
                    arrived.append(parameter)
        if wait:
            for transit in self._leaving:
                transit.finish()
                for parameter in self._parameters[transit.stage]:
                    # The owner has added it to its sum; the next step of this direction starts from zero.
                    parameter.grad = None
            self._leaving.clear()
        return arrived

    def send_weights(self) -> None:
        """Start sending the new weights to direction 1, and receiving them there; ``settle`` waits."""
        self.settle()
        for stage, peer in sorted(self._owner_of.items()):
            transit = self._exchange(stage, peer, _room(self._parameters[stage]), sends=False)
            transit.weights = self._parameters[stage]
            self._weights.append(transit)
        for stage, peer in sorted(self._mirror_of.items()):
            # Concatenated into new memory: the next update may change the weights while the message is under way.
            flats = _flats(self._parameters[stage], [p.detach() for p in self._parameters[stage]])
            self._leaving.append(self._exchange(stage, peer, flats, sends=True))

    def arriving(self) -> list[nn.Parameter]:
        """Return this rank's parameters of direction 1 whose new weights have not been copied to them yet."""
        return [parameter for transit in self._weights for parameter in transit.weights]

    def settle(self) -> None:
        """Wait until this rank's weights of direction 1 have been received, and its own have been sent."""
        for transit in (*self._weights, *self._leaving):
            transit.finish()
        self._weights.clear()
        self._leaving.clear()

    def _exchange(self, stage: int, peer: int, flats: list[torch.Tensor], sends: bool) -> _InTransit:
        """Start sending flat tensors to a rank of the plane, or else receiving them from it."""
        messages = [Message(peer, flat) for flat in flats]
        pending = self._comm.exchange(messages, []) if sends else self._comm.exchange([], messages)
        transit = _InTransit(stage, pending, flats)
        _UNFINISHED[id(transit)] = transit
        return transit


class Mirrors:
    """The mirrors of an engine: one for each set of trained parameters. One is in use.

    Args:
        model: the user's module.
        groups: the plan's groups.
        used: whether the plan has mirrors (``plan.mirror`` is point_to_point).

    Attributes:
        current: the one in use; None without mirrors.
    """

    def __init__(self, model: nn.Module, groups: Groups, used: bool) -> None:
        self._model, self._groups, self._is_in_use = model, groups, used
        self._known: dict[frozenset[str], Mirror] = {}
        self.current: Mirror | None = None

    def choose(self, lowered: LoweredModel, settle: Callable[[], None]) -> None:
        """Choose the mirror for the currently trained parameters; first ``settle`` waits for weights in transit."""
        if not self._is_in_use:
            return
        if lowered.trained not in self._known:
            stages = _trained_by_stage(self._model, lowered)
            self._known[lowered.trained] = Mirror(self._groups.placement, self._groups.plane, stages)
        if self.current is not self._known[lowered.trained]:
            settle()
            self.current = self._known[lowered.trained]

    def arriving(self) -> list[nn.Parameter]:
        """Return the parameters whose new weights have not been copied to them yet."""
        return [] if self.current is None else self.current.arriving()

    def send_weights(self) -> None:
        """Start sending new weights to direction 1."""
        if self.current is not None:
            self.current.send_weights()

    def settle(self) -> None:
        """Wait for weights in transit."""
        if self.current is not None:
            self.current.settle()

    def arrived(self, direction: int) -> None:
        """Wait for the weights of a direction."""
        if direction == 1:
            self.settle()


def _trained_by_stage(model: nn.Module, lowered: LoweredModel) -> list[list[nn.Parameter]]:
    """Return the trained parameters of each stage, each once, in one order on all ranks."""
    named = dict(model.named_parameters(remove_duplicate=False))
    return [
        list({id(named[n]): named[n] for n in names if n in lowered.trained}.values()) for names in lowered.parameters
    ]


def _partners(placement: Placement, rank: int) -> tuple[Mapping[int, int], Mapping[int, int]]:
    """Return the ranks with which ``rank`` exchanges gradients and weights of its stages.

    Returns:
        Stage -> owner, for stages that it holds in direction 1 only; stage -> mirror, for those in direction 0 only.
    """
    owners, mirrors = {}, {}
    for stage in range(placement.stages):
        # Equal positions hold equal parts of the stage, hence the same weights.
        first, second = placement.group(stage, 0), placement.group(stage, 1)  # ranks in direction 0, in direction 1
        if rank in second and rank not in first:
            owners[stage] = first[second.index(rank)]
        if rank in first and rank not in second:
            mirrors[stage] = second[first.index(rank)]
    return owners, mirrors


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    """Return a parameter's gradient, zeros if it has none."""
    # Zeros, since the owner has posted a receive of full size without knowing which parameters were used here.
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _dtypes(parameters: Sequence[nn.Parameter]) -> list[torch.dtype]:
    # By name: dtypes have no order of their own, and both ends must cut messages alike.
    return sorted({parameter.dtype for parameter in parameters}, key=str)


def _flats(parameters: Sequence[nn.Parameter], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return one flat tensor for each dtype of the parameters: their ``tensors`` of this dtype, concatenated."""
    return [
        torch.cat([t.reshape(-1) for p, t in zip(parameters, tensors, strict=True) if p.dtype == dtype])
        for dtype in _dtypes(parameters)
    ]


def _room(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """Return new memory to receive what ``_flats`` returns for these parameters."""
    return [
        torch.empty(sum(p.numel() for p in parameters if p.dtype == dtype), dtype=dtype, device=parameters[0].device)
        for dtype in _dtypes(parameters)
    ]


def _pieces(
    parameters: Sequence[nn.Parameter], flats: Sequence[torch.Tensor]
) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """Return (parameter, its view of the flat tensor of its dtype); ``flats`` as from ``_flats``."""
    pieces = []
    for dtype, flat in zip(_dtypes(parameters), flats, strict=True):
        group = [p for p in parameters if p.dtype == dtype]
        pieces += [
            (p, piece.view(p.shape)) for p, piece in zip(group, flat.split([p.numel() for p in group]), strict=True)
        ]
    return pieces
