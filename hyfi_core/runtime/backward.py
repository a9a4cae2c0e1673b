"""Backward of a tape, in the same order on all ranks; weight gradients are deferred into waiting times.

```
convolution     cotangent of its map ── weight gradient: deferred
relu            in place
batch norm      sums ── all-reduce under way ── deferred weight gradients ── cotangent of its map
```

Ranks are never equally fast. A convolution's weight gradient takes about half of the time of its backward. Computed
between sending a norm's sums and receiving those of other ranks, it hides a delay of other ranks of up to this time. No
memory is held longer: relus and norms overwrite their cotangent, so there is no new map until the norm has run.

A schedule may defer them further: ``run_first`` computes the cotangents that earlier stages wait for, and keeps what
weights need (the input and the cotangent of each convolution and linear layer); ``run_rest`` computes the gradients of
weights when the schedule comes to it. Nothing is computed twice; everything else is freed in between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hyfi_core.cells.paged_steps import AllStays, StepMemory
from hyfi_core.comm.base import Communicator
from hyfi_core.comm.progress import polled
from hyfi_core.comm.waits import Waits, within
from hyfi_core.lowering.reuse import Over
from hyfi_core.lowering.segments import OperatorStep, Segment, Tape
from hyfi_core.ops.base import (
    AsyncBackward,
    Cotangents,
    HoldsBuffers,
    LocalSplitBackward,
    Rest,
    SplitBackward,
    is_expanded,
)
from hyfi_core.rules.instructions import CollectiveCall, CustomCall

LocalValues = dict[str, torch.Tensor]
Arrived = list[tuple[str, torch.Tensor]]
Complete = Callable[[Sequence[str]], None]
_SHORT_SEGMENT = 4
"""In segments of at most this many calls, gradients are not reported one by one: hooks take longer than they hide."""


@dataclass
class SegmentRecord:
    """A segment's record for backward: inputs and outputs of its graph."""

    segment: Segment
    entries: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    exits: dict[str, Any] = field(default_factory=dict)


@dataclass
class OperatorRecord:
    """The record for backward of an operator with its own backward."""

    step: OperatorStep
    saved: Any


Record = SegmentRecord | OperatorRecord


@dataclass(frozen=True)
class _DeferredGradients:
    """Deferred weight gradients.

    Attributes:
        record: record of the operator's forward.
        rest: computes the gradients.
        names: parameters whose gradients are complete with these.
    """

    record: OperatorRecord
    rest: Rest
    names: Sequence[str]


class BackwardPass:
    """One run of a tape backward.

    Args:
        tape: the tape that has run forward.
        comm_of: the communicator of a call.
        parameters: value name -> parameter; gradients are added to their ``grad``.
        complete: called with the value names of parameters as soon as their gradients are complete, also inside of a
            segment, which may be the whole model.
        memory: callbacks around each step.
    """

    def __init__(
        self,
        tape: Tape,
        comm_of: Callable[[CollectiveCall], Communicator],
        parameters: Mapping[str, torch.Tensor],
        complete: Complete | None,
        memory: StepMemory | None = None,
    ) -> None:
        self._tape, self._comm_of, self._parameters = tape, comm_of, parameters
        self._reports = complete is not None
        self._complete: Complete = (lambda names: None) if complete is None else complete
        self._memory = AllStays() if memory is None else memory
        self._can_defer = memory is None or isinstance(memory, AllStays)  # otherwise deferred tensors could be spilled
        self._cotangents: LocalValues = {}
        self._deferred: list[_DeferredGradients] = []
        self._keep = self._in_two_parts = False
        self._used: list[str] = []  # parameters whose gradients ``run_first`` and ``run_rest`` complete

    def run(self, records: list[Record], cotangents: Mapping[str, torch.Tensor], keep: bool) -> Waits[LocalValues]:
        """Run the records backward.

        Args:
            records: records in forward order; unless ``keep``, removed from the end so that memory is freed.
            cotangents: cotangents of the output values.
            keep: whether the records will be used again.

        Returns:
            Cotangents of values that entered from outside.
        """
        self._cotangents, self._keep = dict(cotangents), keep
        # Without ``keep`` the caller's list is emptied, so each record is freed as soon as it has run.
        remaining = list(records) if keep else records
        completed_by = _last_contributions(records, self._parameters) if self._reports else {}
        while remaining:
            record = remaining.pop()
            # After the pop this length is the record's index in forward order, the key of ``completed_by``.
            names = completed_by.get(len(remaining), [])
            if any(name in names for deferred in self._deferred for name in deferred.record.step.call.inputs):
                self._flush()  # a tied weight: the gradients deferred at its later uses belong to its sum
            if isinstance(record, OperatorRecord):
                self._memory.begin_back(record.step, record.saved, self._cotangents)
                yield from self._run_operator(record, names, remaining)
                self._memory.end_back(record.step, self._cotangents)
            else:
                # Autograd alone knows what a segment saved; the hooks of ``saving`` load it when it is asked for.
                self._memory.begin_back(record.segment, None, self._cotangents)
                self._run_segment(record, names)
                self._memory.end_back(record.segment, self._cotangents)
        self._flush()
        return self._cotangents

    def run_first(self, records: list[Record], cotangents: Mapping[str, torch.Tensor]) -> Waits[LocalValues]:
        """Run the records backward, except for the gradients of weights that can wait; ``run_rest`` computes these.

        Args:
            records: records in forward order; removed from the end so that memory is freed.
            cotangents: cotangents of the output values.

        Returns:
            Cotangents of values that entered from outside.
        """
        assert self._can_defer and not self._reports, "gradients are complete after the rest, and stay in memory"
        # Before the loop empties the records. ``run_rest`` reports these parameters, here none is reported.
        self._used = [name for names in _last_contributions(records, self._parameters).values() for name in names]
        self._in_two_parts, self._cotangents = True, dict(cotangents)
        while records:
            record = records.pop()
            if isinstance(record, OperatorRecord):
                yield from self._run_operator(record, names=(), before=records)
            else:
                self._run_segment(record, names=())
        entered, self._cotangents = self._cotangents, {}
        return entered

    def run_rest(self, complete: Complete | None = None) -> None:
        """Compute the gradients that ``run_first`` has deferred.

        Args:
            complete: called with the value names of parameters as soon as their gradients are complete; here that is
                after the last of several uses.
        """
        # A tied weight may have several deferred uses: the last index stays, at which its gradient is complete.
        users = {name: at for at, deferred in enumerate(self._deferred) for name in deferred.record.step.call.inputs}
        if complete is not None:
            complete([name for name in self._used if name not in users])
        for at in range(len(self._deferred)):
            names = [name for name in self._deferred[0].record.step.call.inputs if name in self._used]
            # Popped: the input and the cotangent of one layer are freed before the next is computed.
            self._compute(self._deferred.pop(0))
            if complete is not None:
                complete([name for name in names if name is not None and users[name] == at])

    def _run_segment(self, record: SegmentRecord, names: Sequence[str]) -> None:
        """Run a local segment backward; report the gradients of the parameters ``names`` when they are complete."""
        if not self._reports or len(record.segment.calls) <= _SHORT_SEGMENT:
            self._add(_differentiated(record, self._cotangents, self._keep), record.segment.sum_overwrites)
            self._complete(names)
            return
        # In a long segment, each is reported once autograd has it: its reduction starts while autograd goes on.
        with _completing_early(names, self._parameters, self._complete) as unreported:
            cotangents = _differentiated(record, self._cotangents, self._keep)
        self._add(cotangents, record.segment.sum_overwrites)
        self._complete(unreported)

    def _run_operator(self, record: OperatorRecord, names: Sequence[str], before: Sequence[Record]) -> Waits[None]:
        """Run an operator's own backward; report the gradients of parameters ``names``, unless they are deferred."""
        call = record.step.call
        between_planes = isinstance(call, CollectiveCall) and call.between_planes
        # Nothing to compute if no input carries a gradient; between planes, if no output does, either.
        if any(name in self._tape.active for name in (backward_triggers(call) if between_planes else call.inputs)):
            # None for an output that nothing differentiable has used: operators take it as zero.
            cotangents = tuple(self._cotangents.pop(name, None) if name is not None else None for name in call.outputs)
            if isinstance(call, CustomCall):
                with torch.no_grad():
                    results, deferred = self._run_local(call, record.saved, cotangents)
            else:
                steps = self._run_collective(call, record.saved, cotangents, before)
                # Cells run without gradients anyway, and enter no context at each of their waits.
                results, deferred = yield from (within(torch.no_grad, steps) if torch.is_grad_enabled() else steps)
            # The last reference: the results that are added next can take this memory.
            del cotangents
            self._add(self._named(call, results), record.step.sum_overwrites)
            if deferred is not None:
                self._deferred.append(_DeferredGradients(record, deferred, names))
                return
            self._give_back(record)
        self._complete(names)

    def _run_local(self, call: CustomCall, saved: Any, cotangents: Cotangents) -> tuple[Cotangents, Rest | None]:
        """Run a local operator backward; return (cotangents of its inputs, function that computes deferred ones)."""
        if self._in_two_parts and isinstance(call.operator, LocalSplitBackward):
            return call.operator.backward_of_map(saved, cotangents, self._needs_grad(call))
        return call.operator.backward(saved, cotangents, self._needs_grad(call)), None

    def _run_collective(
        self, call: CollectiveCall, saved: Any, cotangents: Cotangents, before: Sequence[Record]
    ) -> Waits[tuple[Cotangents, Rest | None]]:
        """Run a communicating operator backward; returns as ``_run_local``."""
        operator, comm, needs_grad = call.operator, self._comm_of(call), self._needs_grad(call)
        # In a backward of two parts, weight gradients have an action of their own: here they would delay other stages.
        if self._deferred and isinstance(operator, AsyncBackward) and not self._in_two_parts:
            pending, finish = operator.start_backward(comm, saved, cotangents, needs_grad)
            del cotangents
            # ``lowering.reuse`` relies on this flush: later steps may overwrite what deferred gradients read.
            with polled(pending):
                self._flush()
            yield pending
            return finish(), None
        # A single rank never waits, so there would be nothing to hide.
        if isinstance(operator, SplitBackward) and comm.size > 1 and self._may_defer(call, before):
            waits = not self._in_two_parts
            return (yield from operator.backward_of_map(comm, saved, cotangents, needs_grad, waits=waits))
        return (yield from operator.backward(comm, saved, cotangents, needs_grad)), None

    def _needs_grad(self, call: CustomCall | CollectiveCall) -> tuple[bool, ...]:
        """For each input of an operator, whether its cotangent is needed."""
        return tuple(name in self._tape.active for name in call.inputs)

    def _may_defer(self, call: CollectiveCall, before: Sequence[Record]) -> bool:
        """Whether an operator's other gradients can wait: all are of parameters, and a later wait has time for them."""
        if not self._can_defer or not all(name is None or name in self._parameters for name in call.inputs[1:]):
            return False
        if self._in_two_parts:
            return True
        # Deferred gradients hold memory until the next collective, so that must be one during whose wait they can run.
        calls = (record.step.call for record in reversed(before) if isinstance(record, OperatorRecord))
        upcoming = next((call for call in calls if isinstance(call, CollectiveCall)), None)
        return upcoming is not None and isinstance(upcoming.operator, AsyncBackward)

    def _flush(self) -> None:
        """Compute the deferred weight gradients."""
        while self._deferred:
            deferred = self._deferred.pop(0)
            self._compute(deferred)
            self._complete(deferred.names)

    def _compute(self, deferred: _DeferredGradients) -> None:
        """Compute deferred weight gradients, add them, and release what their operator has saved."""
        with torch.no_grad():
            results = deferred.rest()
        self._add(self._named(deferred.record.step.call, results), {})
        del results
        self._give_back(deferred.record)

    def _give_back(self, record: OperatorRecord) -> None:
        """Release the buffers that an operator has saved, unless it will run backward again."""
        operator = record.step.call.operator
        if isinstance(operator, HoldsBuffers) and not self._keep:
            operator.give_back(record.saved)

    def _named(self, call: CustomCall | CollectiveCall, results: Cotangents) -> Arrived:
        """Return (name, cotangent) for each input of an operator that has one and needs one."""
        return [
            (name, result)
            for name, result in zip(call.inputs, results, strict=True)
            if name is not None and result is not None and name in self._tape.active
        ]

    def _add(self, cotangents: Arrived, sum_overwrites: Mapping[str, Over]) -> None:
        """Add (name, cotangent) to existing ones, empty the list; a sum may overwrite what ``sum_overwrites`` says."""
        while cotangents:
            # Popped, so that the list keeps no cotangent alive while the following ones are added.
            name, cotangent = cotangents.pop(0)
            if name in self._parameters:
                _accumulate(self._parameters[name], cotangent)
            elif name in self._cotangents:
                self._cotangents[name] = _sum(self._cotangents[name], cotangent, sum_overwrites.get(name))
            else:
                self._cotangents[name] = cotangent


def backward_triggers(call: CustomCall | CollectiveCall) -> tuple[str | None, ...]:
    """Return the values that decide whether an operator runs backward: it does if one of them carries a gradient.

    Between planes both sides run backward: the plane that sends a value has it as an input, the others as an output.
    """
    between_planes = isinstance(call, CollectiveCall) and call.between_planes
    return (*call.inputs, *call.outputs) if between_planes else call.outputs


def _differentiated(record: SegmentRecord, cotangents: LocalValues, keep: bool) -> Arrived:
    """Return the cotangents of a segment's inputs; those of its outputs are consumed."""
    seeds = {name: cotangents.pop(name) for name in record.exits if name in cotangents}
    if seeds:
        edges = [record.exits[name] for name in seeds]
        # ``backward``, not ``grad``: autograd adds the gradients of parameters to their ``grad``, which may be views of
        # buckets; those of inputs go to the lists of ``_Entry``.
        torch.autograd.backward(edges, list(seeds.values()), retain_graph=keep)
    totals = []
    for name, gradients in record.entries.items():
        if gradients:
            # Not added in place: autograd may have given one tensor to several entries.
            total = gradients[0]
            for gradient in gradients[1:]:
                total = total + gradient
            totals.append((name, total))
            # With ``keep`` the record runs again, and its entries must begin empty.
            gradients.clear()
    return totals


@contextlib.contextmanager
def _completing_early(
    names: Sequence[str], parameters: Mapping[str, torch.Tensor], complete: Complete
) -> Iterator[list[str]]:
    """Call ``complete`` for each parameter as autograd finishes its gradient; yield those that it has not yet reported.

    Only on the CPU, where autograd runs in the thread that called it: communicators belong to that thread.
    """
    unreported = list(names)

    def hook_of(name: str) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            unreported.remove(name)
            complete([name])

        return hook

    handles = [
        # AccumulateGrad runs once in a backward, with the sum over all uses in the segment: one call for each name.
        parameters[name].register_post_accumulate_grad_hook(hook_of(name))
        for name in names
        if parameters[name].requires_grad and parameters[name].device.type == "cpu"
    ]
    try:
        yield unreported
    finally:
        for handle in handles:
            handle.remove()


def _sum(total: torch.Tensor, addend: torch.Tensor, over: Over | None) -> torch.Tensor:
    """Return the sum of two cotangents; ``over`` says which of them it may overwrite, None: neither."""
    into, added = (total, addend) if over == "held" else (addend, total)
    # In place the result has the dtype of ``into``, not the promoted one, and an expanded tensor cannot be written.
    if over is None or total.dtype != addend.dtype or total.shape != addend.shape or is_expanded(into):
        return total + addend
    return into.add_(added)


def _accumulate(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add to a parameter's gradient as autograd does: in place if it exists."""
    # Under autocast the cotangent of a weight may have 16 bits.
    gradient = gradient.to(parameter.dtype)
    if parameter.grad is None:
        # Laid out like its parameter, as autograd's own accumulation would be.
        as_parameter = gradient.stride() == parameter.stride()
        parameter.grad = gradient if as_parameter else torch.empty_like(parameter).copy_(gradient)
    else:
        parameter.grad.add_(gradient)


def _last_contributions(records: Sequence[Record], parameters: Mapping[str, Any]) -> dict[int, list[str]]:
    """Return index of a record -> parameters that it is the first to use: its backward completes their gradients."""
    counted: set[str] = set()
    result: dict[int, list[str]] = {}
    for index, record in enumerate(records):
        names = record.segment.inputs if isinstance(record, SegmentRecord) else record.step.call.inputs
        for name in names:
            if name is not None and name in parameters and name not in counted:
                counted.add(name)
                result.setdefault(index, []).append(name)
    return result
