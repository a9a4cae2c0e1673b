"""A tape run backward, in the one order that all ranks share; gradients of weights are deferred to fill waits.

```
convolution     cotangent of its map ── of its weight: deferred
relu            over the same memory
batch norm      sums ── all-reduce under way ── deferred gradients are computed ── cotangent of its map
```

Cores are never equally fast. With the weight's share of a convolution, about half of its backward, between sending
sums and needing those of the others, no rank waits for one that is behind by less than that. Nothing is held longer
than it was alive anyway: relus and norms write over the cotangent that they are given, so until the norm is done there
is no new map.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hyfi_core.comm.base import Communicator
from hyfi_core.comm.progress import polled
from hyfi_core.lowering.segments import Meeting, Segment, Tape
from hyfi_core.ops.base import Cotangents, InTwo, Rest, Waiting
from hyfi_core.ops.memory import ours_alone
from hyfi_core.rules.instructions import NO_MESSAGES, Communicate

Values = dict[str, torch.Tensor]
Found = list[tuple[str, torch.Tensor]]
Complete = Callable[[Sequence[str]], None]


@dataclass
class SegmentRecord:
    """What backward needs of a segment: where its graph begins and ends."""

    segment: Segment
    entries: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    exits: dict[str, Any] = field(default_factory=dict)


@dataclass
class CommunicationRecord:
    """What backward needs of a communicating operator."""

    meeting: Meeting
    saved: Any


Record = SegmentRecord | CommunicationRecord


@dataclass(frozen=True)
class _Deferred:
    """Cotangents of weights that are still to be computed.

    Attributes:
        step: whose they are.
        rest: computes them.
        names: parameters whose gradient is complete with them.
    """

    step: Communicate
    rest: Rest
    names: Sequence[str]


class BackwardPass:
    """One run of a tape backward.

    Args:
        tape: that was run forward.
        comm_of: the communicator of a step.
        parameters: value name -> parameter; gradients are added to their ``grad``.
        complete: called with the value names of parameters that get no more gradient, as soon as that is so: inside a
            segment, too, which may be the whole model.
    """

    def __init__(
        self,
        tape: Tape,
        comm_of: Callable[[Communicate], Communicator],
        parameters: Mapping[str, torch.Tensor],
        complete: Complete | None,
    ) -> None:
        self._tape, self._comm_of, self._parameters, self._complete = tape, comm_of, parameters, complete
        self._cotangents: Values = {}
        self._deferred: list[_Deferred] = []

    def run(self, records: list[Record], cotangents: Mapping[str, torch.Tensor], keep: bool) -> Values:
        """Run the records backward.

        Args:
            records: in forward order; unless ``keep``, emptied from the end so that what is done is freed.
            cotangents: of the answer's values.
            keep: whether the records will be run again.

        Returns:
            Cotangents of values that no record made.
        """
        self._cotangents = dict(cotangents)
        remaining = list(records) if keep else records
        last = _last_contributions(records, self._parameters) if self._complete is not None else {}
        while remaining:
            record = remaining.pop()
            names = last.get(len(remaining), [])
            if isinstance(record, CommunicationRecord):
                self._communicate_back(record, names, remaining)
            else:
                self._run_back(record, names, keep)
        self._flush()
        return self._cotangents

    def _run_back(self, record: SegmentRecord, names: Sequence[str], keep: bool) -> None:
        if self._complete is None:
            self._add(_differentiated(record, self._cotangents, keep))
            return
        with _completing_early(names, self._parameters, self._complete) as left:
            found = _differentiated(record, self._cotangents, keep)
        self._add(found)
        self._complete(left)

    def _communicate_back(self, record: CommunicationRecord, names: Sequence[str], before: Sequence[Record]) -> None:
        step = record.meeting.step
        if any(name in self._tape.active for name in step.inputs):
            given = tuple(self._cotangents.pop(name, None) if name is not None else None for name in step.outputs)
            wanted = tuple(name in self._tape.active for name in step.inputs)
            with torch.no_grad():
                results, rest = self._called_back(step, record.saved, given, wanted, before)
            del given
            self._add(self._named(step, results))
            if rest is not None:
                self._deferred.append(_Deferred(step, rest, names))
                return
        if self._complete is not None:
            self._complete(names)

    def _called_back(
        self, step: Communicate, saved: Any, given: Cotangents, wanted: Sequence[bool], before: Sequence[Record]
    ) -> tuple[Cotangents, Rest | None]:
        collective, comm = step.collective, self._comm_of(step)
        if self._deferred and isinstance(collective, Waiting):
            pending, finish = collective.start_back(comm, saved, given, tuple(wanted))
            del given
            with polled(pending):
                self._flush()
            pending.wait()
            return finish(), None
        if isinstance(collective, InTwo) and comm.size > 1 and self._may_defer(step, before):
            return collective.backward_first(comm, saved, given, tuple(wanted))
        return collective.backward(comm, saved, given, tuple(wanted)), None

    def _may_defer(self, step: Communicate, before: Sequence[Record]) -> bool:
        """Whether this rank will soon wait, and nothing but parameters needs the rest of the cotangents."""
        if not all(name is None or name in self._parameters for name in step.inputs[1:]):
            return False
        meetings = (record.meeting.step for record in reversed(before) if isinstance(record, CommunicationRecord))
        upcoming = next((found for found in meetings if found.kind != NO_MESSAGES), None)
        return upcoming is not None and isinstance(upcoming.collective, Waiting)

    def _flush(self) -> None:
        """Compute the deferred gradients of weights."""
        while self._deferred:
            deferred = self._deferred.pop(0)
            with torch.no_grad():
                results = deferred.rest()
            self._add(self._named(deferred.step, results))
            del results
            if self._complete is not None:
                self._complete(deferred.names)

    def _named(self, step: Communicate, results: Cotangents) -> Found:
        return [
            (name, result)
            for name, result in zip(step.inputs, results, strict=True)
            if name is not None and result is not None and name in self._tape.active
        ]

    def _add(self, found: Found) -> None:
        """Add what a step found to what it belongs to, and empty the list: the next step may then write over it."""
        while found:
            name, cotangent = found.pop(0)
            if name in self._parameters:
                _accumulate(self._parameters[name], cotangent)
            elif name in self._cotangents:
                both = (self._cotangents.pop(name), cotangent)
                del cotangent
                self._cotangents[name] = _sum(both)
            else:
                self._cotangents[name] = cotangent


def _differentiated(record: SegmentRecord, cotangents: Values, keep: bool) -> Found:
    """Return the cotangents of a segment's inputs; those of its outputs are used up."""
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
def _completing_early(
    names: Sequence[str], parameters: Mapping[str, torch.Tensor], complete: Complete
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
        names = record.segment.inputs if isinstance(record, SegmentRecord) else record.meeting.step.inputs
        for name in names:
            if name is not None and name in parameters and name not in seen:
                seen.add(name)
                result.setdefault(index, []).append(name)
    return result
