"""The executor: runs a tape forward, and backward in the one order that all ranks share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hyfi_core.comm.counted import KindCommunicator
from hyfi_core.graph.segments import Meeting, Segment, Step, Tape
from hyfi_core.ops.memory import ours_alone

Values = dict[str, torch.Tensor]


class _Entry(torch.autograd.Function):
    """Where a value enters a segment: autograd leaves its gradient in a list.

    A leaf tensor would do the same but keep the value alive until backward; this keeps it only if an operator saved it.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, value: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
        ctx.gradients = gradients
        # Not view_as: for a batch of one it makes up another stride, by which channels-last is not recognised any more.
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        ctx.gradients.append(cotangents[0])
        return None, None, None


@dataclass
class _SegmentRecord:
    """What backward needs of a segment: where its graph begins and ends."""

    segment: Segment
    entries: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    exits: dict[str, Any] = field(default_factory=dict)


@dataclass
class _MeetingRecord:
    """What backward needs of a communicating operator."""

    meeting: Meeting
    saved: Any


Record = _SegmentRecord | _MeetingRecord


class Executor:
    """Runs one rank's tape.

    Args:
        tape: steps and the values that carry gradients.
        comm: the ranks of the stage.
        copies: those of the stage in all replicas, for what is synchronised over them; None for ``comm`` again.
    """

    def __init__(self, tape: Tape, comm: KindCommunicator, copies: KindCommunicator | None = None) -> None:
        self.tape = tape
        self._comm = comm
        self._copies = comm if copies is None else copies
        self._anchor = torch.zeros((), requires_grad=True)

    def forward(self, values: Values, record: bool) -> list[Record]:
        """Run all steps; ``values`` holds the inputs and is left with what nothing has dropped.

        Args:
            values: name -> local tensor; changed.
            record: whether backward will follow; without it nothing is kept.

        Returns:
            What ``backward`` needs, in forward order; empty without ``record``.
        """
        records: list[Record] = []
        for step in self.tape.steps:
            made = self.do(step, values, record)
            if record and made is not None:
                records.append(made)
        return records

    def do(self, step: Step, values: Values, record: bool = False) -> Record | None:
        """Run one step of the tape; see ``forward``. Where a communication raises, ``values`` is as it was."""
        return self._meet(step, values) if isinstance(step, Meeting) else self._run(step, values, record)

    def _meet(self, meeting: Meeting, values: Values) -> Record | None:
        step = meeting.step
        comm = self._copies if step.copies else self._comm
        comm.kind = step.kind
        inputs: Any = tuple(values[name] if name is not None else None for name in step.inputs)
        with torch.no_grad():
            outputs, saved = step.collective.forward(comm, inputs)
        values.update((n, out) for n, out in zip(step.outputs, outputs, strict=False) if n is not None)
        for name in meeting.drops:
            values.pop(name, None)
        active = any(name in self.tape.active for name in step.outputs)
        return _MeetingRecord(meeting, saved) if active else None

    def _run(self, segment: Segment, values: Values, record: bool) -> Record | None:
        made = _SegmentRecord(segment)
        local: Values = {}
        active = record and any(name in self.tape.active for name in segment.outputs)
        with torch.set_grad_enabled(active):
            for name in segment.inputs if active else ():
                tensor = values[name]
                if name in self.tape.active and not tensor.requires_grad:  # parameters enter as they are
                    made.entries[name] = []
                    local[name] = _Entry.apply(self._anchor, tensor, made.entries[name])  # type: ignore[no-untyped-call]
            for compute, drops in zip(segment.computes, segment.drops, strict=True):
                _call(compute, local, values)
                for name in drops:
                    local.pop(name, None)
                    values.pop(name, None)
        for name in segment.outputs:
            tensor = local[name]
            values[name] = tensor.detach()
            if active and name in self.tape.active and tensor.requires_grad:
                made.exits[name] = torch.autograd.graph.get_gradient_edge(tensor)
        return made if active else None

    def backward(
        self,
        records: list[Record],
        cotangents: Mapping[str, torch.Tensor],
        parameters: Mapping[str, torch.Tensor],
        keep: bool = False,
        complete: Callable[[Sequence[str]], None] | None = None,
    ) -> Values:
        """Run the records backward; gradients of parameters are added to their ``grad``.

        Args:
            records: from ``forward``; unless ``keep``, emptied from the end so that what is done is freed.
            cotangents: of the answer's values.
            parameters: value name -> parameter.
            keep: whether the records will be run again.
            complete: called with the value names of parameters that get no more gradient, as soon as that is so:
                inside a segment, too, which may be the whole model.

        Returns:
            Cotangents of values that no record made: those that entered from outside.
        """
        open_cotangents = dict(cotangents)
        remaining = list(records) if keep else records
        last = _last_contributions(records, parameters) if complete is not None else {}
        while remaining:
            record = remaining.pop()
            names = last.get(len(remaining), [])
            if isinstance(record, _MeetingRecord):
                found = self._meet_back(record, open_cotangents)
            elif complete is not None:
                with _told_early(names, parameters, complete) as names:
                    found = _run_back(record, open_cotangents, keep)
            else:
                found = _run_back(record, open_cotangents, keep)
            _credit(found, parameters, open_cotangents)
            if complete is not None:
                complete(names)
        return open_cotangents

    def _meet_back(self, record: _MeetingRecord, cotangents: Values) -> list[tuple[str, torch.Tensor]]:
        step = record.meeting.step
        if not any(name in self.tape.active for name in step.inputs):
            return []
        given = tuple(cotangents.pop(name, None) if name is not None else None for name in step.outputs)
        comm = self._copies if step.copies else self._comm
        comm.kind = step.kind
        wanted = tuple(name in self.tape.active for name in step.inputs)
        with torch.no_grad():
            results = step.collective.backward(comm, record.saved, given, wanted)
        return [
            (name, result)
            for name, result in zip(step.inputs, results, strict=True)
            if name is not None and result is not None and name in self.tape.active
        ]


def _call(compute: Any, local: Values, values: Values) -> None:
    """Run one local call, or return empty tensors where this rank owns nothing of the result."""
    inputs = [local[name] if name in local else values[name] for name in compute.inputs]
    if compute.empty is None:
        results = compute.function(*inputs)
    else:
        like = next(tensor for tensor in inputs if tensor.is_floating_point())
        results = tuple(like.new_empty(shape) for shape in compute.empty)
    if isinstance(results, torch.Tensor):
        results = (results,)
    for name, result in zip(compute.outputs, results, strict=False):
        if name is not None:
            local[name] = result


def _run_back(record: _SegmentRecord, cotangents: Values, keep: bool) -> list[tuple[str, torch.Tensor]]:
    given = {name: cotangents.pop(name) for name in record.exits if name in cotangents}
    if given:
        edges = [record.exits[name] for name in given]
        torch.autograd.backward(edges, list(given.values()), retain_graph=keep)
    found = []
    for name, gradients in record.entries.items():
        if gradients:
            total = gradients[0]
            for gradient in gradients[1:]:
                total = total + gradient
            found.append((name, total))
            gradients.clear()
    return found


@contextlib.contextmanager
def _told_early(
    names: Sequence[str], parameters: Mapping[str, torch.Tensor], complete: Callable[[Sequence[str]], None]
) -> Iterator[list[str]]:
    """Call ``complete`` for each parameter as autograd finishes its gradient; yield those that it has not yet told.

    Only on the CPU, where autograd runs in the thread that called it: communicators belong to that thread.
    """
    left = list(names)

    def tell(name: str) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            left.remove(name)
            complete([name])

        return hook

    handles = [
        parameters[name].register_post_accumulate_grad_hook(tell(name))
        for name in names
        if parameters[name].requires_grad and parameters[name].device.type == "cpu"
    ]
    try:
        yield left
    finally:
        for handle in handles:
            handle.remove()


def _credit(found: list[tuple[str, torch.Tensor]], parameters: Mapping[str, torch.Tensor], cotangents: Values) -> None:
    """Add what a step found to what it belongs to, and empty the list: the next step may then write over it."""
    while found:
        name, cotangent = found.pop(0)
        if name in parameters:
            _accumulate(parameters[name], cotangent)
        elif name in cotangents:
            both = (cotangents.pop(name), cotangent)
            del cotangent
            cotangents[name] = _sum(both)
        else:
            cotangents[name] = cotangent


def _sum(both: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the sum of two cotangents, over one of them where nobody else holds that."""
    if both[0].dtype == both[1].dtype and both[0].shape == both[1].shape:
        for over, other in ((0, 1), (1, 0)):
            if ours_alone(both, over):
                return both[over].add_(both[other])
    return both[0] + both[1]


def _accumulate(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add to a parameter's gradient as autograd does: in place where there is one."""
    gradient = gradient.to(parameter.dtype)
    if parameter.grad is None:
        expanded = not torch.ops.aten.is_non_overlapping_and_dense(gradient)
        parameter.grad = gradient.contiguous() if expanded else gradient
    else:
        parameter.grad.add_(gradient)


def _last_contributions(records: Sequence[Record], parameters: Mapping[str, Any]) -> dict[int, list[str]]:
    """Return record -> parameters whose gradient is complete once it has run backward: it was the first to use them."""
    seen: set[str] = set()
    result: dict[int, list[str]] = {}
    for index, record in enumerate(records):
        names = record.segment.inputs if isinstance(record, _SegmentRecord) else record.meeting.step.inputs
        for name in names:
            if name is not None and name in parameters and name not in seen:
                seen.add(name)
                result.setdefault(index, []).append(name)
    return result
