"""The executor: runs a tape forward and backward, in the same order on all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from hyfi_core.capture.program import ValueInfo
from hyfi_core.cells.paged_steps import AllStays, StepMemory
from hyfi_core.comm.base import Communicator
from hyfi_core.comm.counted import KindCommunicator
from hyfi_core.comm.replay import Log
from hyfi_core.comm.waits import Waits, within
from hyfi_core.lowering.segments import OperatorStep, Segment, Tape
from hyfi_core.ops.base import HoldsBuffers
from hyfi_core.rules.instructions import CollectiveCall, CustomCall, KeepsStatistics, LocalCall
from hyfi_core.runtime.backward import (
    BackwardPass,
    Complete,
    LocalValues,
    OperatorRecord,
    Record,
    SegmentRecord,
    backward_triggers,
)

LocalFunction: TypeAlias = Callable[..., Any]
"""The function of a local call."""


class _Entry(torch.autograd.Function):
    """Entry of a value into a segment: autograd stores its gradient in a list.

    A leaf tensor would keep the value alive until backward; this keeps it only if an operator has saved it.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, value: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
        ctx.gradients = gradients
        # Not view_as: for a batch of one it changes a stride, so that channels-last is no longer recognised.
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        # Nothing flows on: the graph ends here, and ``BackwardPass`` passes the gradient to earlier steps.
        ctx.gradients.append(cotangents[0])
        return None, None, None


class Executor:
    """Runs one rank's tape.

    Args:
        tape: steps and the values that carry gradients.
        comm: the ranks of the stage.
        all_replicas: the ranks of the stage in all replicas, for synchronised norms; None: ``comm``.
        memory: callbacks around each step; ``AllStays``: no paging.
        between_planes: the ranks with the same position in all planes; None: ``comm``.
        statistics: wraps the function of each local call, for forwards that are recomputed: see ``recording`` and
            ``replaying``; None: functions run as they are.
    """

    def __init__(
        self,
        tape: Tape,
        comm: KindCommunicator,
        all_replicas: KindCommunicator | None = None,
        memory: StepMemory | None = None,
        between_planes: KindCommunicator | None = None,
        statistics: Callable[[LocalFunction], LocalFunction] | None = None,
    ) -> None:
        self.tape = tape
        self._comm = comm
        self._between_planes = comm if between_planes is None else between_planes
        self._all_replicas = comm if all_replicas is None else all_replicas
        self._memory = AllStays() if memory is None else memory
        self._statistics = statistics
        # Values enter a segment without a gradient of their own; autograd records ``_Entry`` because of this input.
        self._graph_anchor = torch.zeros((), requires_grad=True)

    def forward(self, values: LocalValues, record: bool) -> Waits[list[Record]]:
        """Run all steps; ``values`` has the inputs, and afterwards all values that were not dropped.

        Args:
            values: name -> local tensor; changed.
            record: whether to record for backward.

        Returns:
            Records for ``backward``, in forward order; empty without ``record``.
        """
        records: list[Record] = []
        for step in self.tape.steps:
            self._memory.begin(step, values)
            if isinstance(step, OperatorStep):
                step_record = yield from self._operate(step, values, record)
            else:
                step_record = self._run(step, values, record)
            kept_record = step_record if record else None
            if kept_record is not None:
                records.append(kept_record)
            if isinstance(kept_record, OperatorRecord):
                # Only known after the call: a pager may keep a smaller form of what was saved.
                kept_record.saved = self._memory.end(step, values, kept_record.saved)
            else:
                self._memory.end(step, values, None)
        return records

    def _operate(self, step: OperatorStep, values: LocalValues, record: bool) -> Waits[Record | None]:
        """Run the forward of an operator that has its own backward; return what that needs, if it will run."""
        call = step.call
        inputs: Any = tuple(values[name] if name is not None else None for name in call.inputs)
        # ``BackwardPass`` calls the operator's own backward; autograd must not record a second one.
        if isinstance(call, CustomCall):
            with without_grad():
                outputs, saved = call.operator.forward(inputs)
        else:
            outputs, saved = yield from within(without_grad, call.operator.forward(self._comm_of(call), inputs))
        # Not strict: the program does not name outputs that are not used.
        values.update((n, out) for n, out in zip(call.outputs, outputs, strict=False) if n is not None)
        for name in step.drops:
            values.pop(name, None)
        if record and any(name in self.tape.active for name in backward_triggers(call)):
            return OperatorRecord(step, saved)
        # Without a backward, nothing else would give these buffers back.
        if isinstance(call.operator, HoldsBuffers):
            call.operator.give_back(saved)
        return None

    def _run(self, segment: Segment, values: LocalValues, record: bool) -> Record | None:
        """Run a segment; return its record for backward, None if no value of it carries a gradient."""
        segment_record = SegmentRecord(segment)
        local: LocalValues = {}
        active = record and any(name in self.tape.active for name in segment.outputs)
        # Explicitly: the tapes of cells run in ``no_grad`` (see ``cells.baton``).
        with torch.enable_grad() if active else without_grad():
            for name in segment.inputs if active else ():
                tensor = values[name]
                if name in self.tape.active and not tensor.requires_grad:  # parameters are used directly
                    # Autograd's backward appends the gradient of this input to the list.
                    gradients = segment_record.entries[name] = []
                    local[name] = _Entry.apply(self._graph_anchor, tensor, gradients)  # type: ignore[no-untyped-call]
            with self._memory.saving(segment, local) if active else contextlib.nullcontext():
                for call, drops in zip(segment.calls, segment.drops, strict=True):
                    _call(call, local, values, self._statistics)
                    for name in drops:
                        # From both: an input that carries a gradient is in each, as it is and as an entry.
                        local.pop(name, None)
                        values.pop(name, None)
        for name in segment.outputs:
            tensor = local[name]
            # The next segment has a graph of its own: through this tensor it would keep all earlier graphs alive.
            values[name] = tensor.detach()
            if active and name in self.tape.active and tensor.requires_grad:
                # The edge instead of the tensor: backward has to start there, but does not need the values.
                segment_record.exits[name] = torch.autograd.graph.get_gradient_edge(tensor)
        return segment_record if active else None

    def backward(
        self,
        records: list[Record],
        cotangents: Mapping[str, torch.Tensor],
        parameters: Mapping[str, torch.Tensor],
        keep: bool = False,
        complete: Complete | None = None,
    ) -> Waits[LocalValues]:
        """Run the records backward; gradients of parameters are added to their ``grad``.

        Args:
            records: result of ``forward``; unless ``keep``, removed from the end so that memory is freed.
            cotangents: cotangents of the output values.
            parameters: value name -> parameter.
            keep: whether the records will be used again.
            complete: called with the value names of parameters as soon as their gradients are complete, also inside of
                a segment, which may be the whole model.

        Returns:
            Cotangents of values that entered from outside.
        """
        backward = BackwardPass(self.tape, self._comm_of, parameters, complete, self._memory)
        return (yield from backward.run(records, cotangents, keep))

    def backward_in_two(
        self, records: list[Record], cotangents: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]
    ) -> Waits[tuple[LocalValues, BackwardPass]]:
        """Run the records backward without the gradients of weights that can wait.

        Args:
            records: result of ``forward``; removed from the end so that memory is freed.
            cotangents: cotangents of the output values.
            parameters: value name -> parameter.

        Returns:
            Cotangents of values that entered from outside, and the pass, whose ``run_rest`` computes what remains.
        """
        backward = BackwardPass(self.tape, self._comm_of, parameters, None, self._memory)
        return (yield from backward.run_first(records, cotangents)), backward

    def _comm_of(self, call: CollectiveCall) -> Communicator:
        """Return the communicator of a call, which counts traffic as its kind."""
        if call.between_planes:
            return self._between_planes.of(call.traffic)
        return (self._all_replicas if call.all_replicas else self._comm).of(call.traffic)


def recording(log: Log, copies: bool) -> Callable[[LocalFunction], LocalFunction]:
    """Return a function that wraps local functions for a first run: those that keep statistics also log them.

    Args:
        log: gets the statistics, in the order of calls, between the run's messages.
        copies: whether to log copies, since a pager may spill the tensors that the forward uses.
    """

    def replacement(function: LocalFunction) -> LocalFunction:
        return partial(measured, function) if isinstance(function, KeepsStatistics) else function

    def measured(function: KeepsStatistics, *inputs: torch.Tensor) -> Any:
        results, statistics = function.measure(*inputs)
        log.append([tensor.clone() if copies else tensor for tensor in statistics])
        return results

    return replacement


def replaying(log: Log) -> Callable[[LocalFunction], LocalFunction]:
    """Return a function that wraps local functions for a second run: they take statistics from ``log``, in order."""

    def replacement(function: LocalFunction) -> LocalFunction:
        return partial(function.with_known, log.pop(0)) if isinstance(function, KeepsStatistics) else function

    return replacement


def _call(
    call: LocalCall,
    local: LocalValues,
    values: LocalValues,
    statistics: Callable[[LocalFunction], LocalFunction] | None = None,
) -> None:
    """Run one local call and store its results in ``local``: empty tensors if this rank owns nothing of them.

    Inputs are taken from ``local`` first, where those that carry a gradient are entries of the segment's graph.
    ``statistics`` wraps functions, so that norms log their statistics, or take logged ones when they are recomputed.
    """
    inputs = [local[name] if name in local else values[name] for name in call.inputs]
    if call.empty is None:
        results = (call.function if statistics is None else statistics(call.function))(*inputs)
    else:
        results = tuple(_nothing(info, inputs) for info in call.empty)
    if isinstance(results, torch.Tensor):
        results = (results,)
    # Not strict: the program does not name outputs that are not used.
    for name, result in zip(call.outputs, results, strict=False):
        if name is not None:
            local[name] = result


def _nothing(info: ValueInfo, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.empty(info.shape, dtype=info.dtype, device=inputs[0].device)


class _WithoutGrad:
    """See ``without_grad``. Cells enter it at each of thousands of waits: only what differs is changed."""

    __slots__ = ("_caches", "_grad")

    def __enter__(self) -> None:
        self._grad, self._caches = torch.is_grad_enabled(), torch.is_autocast_cache_enabled()
        if self._grad:
            torch.set_grad_enabled(False)
        if self._caches:
            torch.set_autocast_cache_enabled(False)

    def __exit__(self, *error: object) -> None:
        if self._grad:
            torch.set_grad_enabled(True)
        if self._caches:
            torch.set_autocast_cache_enabled(True)


def without_grad() -> contextlib.AbstractContextManager[None]:
    """Return a context without gradients, in which autocast caches no converted weights.

    Before torch 2.11 it caches what is converted here without a graph, and a later use of the same weight would have no
    gradient: https://github.com/pytorch/pytorch/issues/158232. A weight that several layers share may have one use in
    an operator, which runs without autograd, and the next in a segment.
    """
    return _WithoutGrad()


def autocasting(
    device: torch.device, dtype: torch.dtype | None, cached: bool | None = None
) -> contextlib.AbstractContextManager[Any]:
    """Return the autocast context for ``dtype``; None: no autocast.

    Args:
        device: device of the computation.
        dtype: see above.
        cached: whether autocast caches converted weights, which needs memory; None: unless a context around it, such as
            ``without_grad``, has turned that off.
    """
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype, cache_enabled=cached)


@contextlib.contextmanager
def evaluating(model: nn.Module, device: torch.device, autocast: torch.dtype | None = None) -> Iterator[None]:
    """Context in which a model is in evaluation mode; flags of all modules are restored afterwards.

    It ends the caller's inference mode: buffers and constants that are made here are used in training, too.

    Args:
        model: any.
        device: device of the model.
        autocast: dtype of autocast; None: no autocast.
    """
    # One by one: ``model.train()`` afterwards would also switch modules that the user keeps in evaluation mode.
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.inference_mode(False), autocasting(device, autocast):
            yield
    finally:
        for module, flag in flags:
            module.training = flag
