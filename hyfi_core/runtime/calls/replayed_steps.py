"""Which training steps are recorded as CUDA graphs, and when a recorded step may be repeated."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

import torch

from hyfi_core.capture.program import KEY
from hyfi_core.comm.counted import TrafficCounts
from hyfi_core.runtime.calls.step_graph import CudaGraph, Graph, NotRecordableError, StepGraph
from hyfi_core.runtime.lowered_model import LoweredModel
from hyfi_core.runtime.pipeline import Event, Step
from hyfi_core.runtime.settings import GraphMode
from hyfi_core.runtime.subject import Subject

Train = Callable[[list[Step]], list[Event]]
UNRECORDED_STEPS = 2
"""Steps of a kind that run unrecorded before one is recorded: they allocate and load what graphs only use."""
_SENT = ("halo", "stage", "reduce")
"""Traffic that a repeated step does not count by itself."""


class ReplayedSteps:
    """The training steps of an engine, repeated as graphs where that is the same; one kind of step is kept at a time.

    A step is repeated if it computes with the same program on the same weights and buffers, by their memory. Programs
    that draw random numbers are not: the host computes their keys. Nor are steps of several ranks.

    Args:
        subject: the model.
        ranks: number of ranks of the plan.
        mode: whether steps are recorded.
        counts: counts of this rank's messages.

    Attributes:
        allowed: whether steps may be repeated now; not while the times of messages are recorded.
    """

    def __init__(self, subject: Subject, ranks: int, mode: GraphMode, counts: Sequence[TrafficCounts]) -> None:
        self._subject, self._counts = subject, counts
        self._may_record = mode == "auto" and subject.device.type == "cuda" and ranks == 1
        self.allowed = True
        self._key: Hashable = None  # of the kind of step that is counted in ``_runs``, or recorded
        # Held: its constants are memory that the graphs read.
        self._lowered: LoweredModel | None = None
        self._draws_numbers = False
        self._runs = 0
        self._recorded: tuple[StepGraph, list[_Sent]] | None = None

    def run(
        self, lowered: LoweredModel, make: Callable[[], list[Step]], train: Train, repeats: bool
    ) -> tuple[list[Step], list[Event]]:
        """Run a step; parameters have no gradients before.

        Args:
            lowered: the model.
            make: creates the step's inputs, images and losses, for this rank or for each of its cells.
            train: computes gradients and buffers from these, and returns its events; a repeated step repeats only its
                kernels.
            repeats: whether all that ``make`` does not create is as in the other steps of this model.

        Returns:
            What ``make`` and ``train`` returned; no events for a repeated step.
        """
        if lowered is not self._lowered:
            self.release()
            self._lowered, self._draws_numbers = lowered, _draws(lowered)
        key = self._key_of() if self._may_record and self.allowed and repeats and not self._draws_numbers else None
        if key is None or key != self._key:
            self.release()
            self._key = key
        if self._recorded is not None:
            graph, sent = self._recorded
            steps = make()
            graph.replay(steps)
            for counts, sent_by_kind in zip(self._counts, sent, strict=True):
                _add(counts, sent_by_kind)
            return steps, []
        self._runs += key is not None
        if self._runs <= UNRECORDED_STEPS:
            steps = make()
            return steps, train(steps)
        return self._record(make, train)

    def release(self) -> None:
        """Forget the recorded step, so that its memory can be used for something else."""
        self._recorded, self._runs = None, 0

    def _record(self, make: Callable[[], list[Step]], train: Train) -> tuple[list[Step], list[Event]]:
        """Record and run a step; if it cannot be recorded, run it as it is, and record none from here on."""
        buffers = [(buffer, buffer.clone()) for buffer in self._subject.model.buffers()]
        before = [_sent(counts) for counts in self._counts]
        recorded_or_reason = self._try_to_record(make, train)
        if not isinstance(recorded_or_reason, str):
            graph, steps, events = recorded_or_reason
            # What the step has sent: a repeated step adds it to the counts.
            self._recorded = graph, [_difference(_sent(c), was) for c, was in zip(self._counts, before, strict=True)]
            return steps, events
        self._may_record = False
        # The part of the step that has run may have changed buffers and counts, and its memory is needed again.
        for buffer, value in buffers:
            buffer.copy_(value)
        for counts, was in zip(self._counts, before, strict=True):
            _add(counts, _difference(was, _sent(counts)))
        for parameter in self._subject.bindings.parameters_once.values():
            if parameter.requires_grad:  # gradients of frozen parameters are the caller's
                parameter.grad = None
        _return_memory(self._subject.device)
        steps = make()
        events = train(steps)
        # Warned last: if the step also fails as it is, that error is raised instead.
        warnings.warn(
            f"steps are not recorded as CUDA graphs: {recorded_or_reason}; they run as they are, with the same results",
            stacklevel=4,
        )
        return steps, events

    def _try_to_record(
        self, make: Callable[[], list[Step]], train: Train
    ) -> tuple[StepGraph, list[Step], list[Event]] | str:
        """Record and run a step; return (its graph, its inputs, its events), or why it failed.

        Of an error only the text is returned: its traceback would keep the memory of the step.
        """
        events: list[Event] = []
        trained = self._subject.bindings.parameters_once.values()
        with self._recording() as new_graph:
            graph = StepGraph(new_graph, [parameter for parameter in trained if parameter.requires_grad])
            steps = make()
            try:
                graph.record(steps, lambda recorded: events.extend(train(recorded)))
            except Exception as error:
                kind = "" if isinstance(error, NotRecordableError) else f"{type(error).__name__}: "
                return f"{kind}{(str(error).splitlines() or [''])[0][:200]}"
        return graph, steps, events

    @contextlib.contextmanager
    def _recording(self) -> Iterator[Callable[[], Graph]]:
        """Context on a stream that can be recorded; yields a function that creates graphs."""
        device = self._subject.device
        torch.cuda.synchronize(device)
        # The graphs have memory of their own: memory that the allocator has kept from earlier steps would stay unused.
        _return_memory(device)
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        try:
            with torch.cuda.stream(stream):
                yield lambda: CudaGraph(pool)
        finally:
            # Also after an interrupt: the next step reads what the graphs so far have written.
            torch.cuda.current_stream(device).wait_stream(stream)

    def _key_of(self) -> Hashable:
        """Return a key, equal for steps with the same kernels on the same memory; None: do not repeat the step."""
        # The host looks for anomalies between kernels.
        if torch.is_autocast_enabled(self._subject.device.type) or torch.is_anomaly_enabled():
            return None
        compiler, bindings = self._subject.compiler, self._subject.bindings
        trained = bindings.parameters_once.values()
        tensors = (*trained, *bindings.buffers.values())
        memory = tuple([(tensor.data_ptr(), tensor.stride(), tensor.dtype) for tensor in tensors])
        segments = 0 if compiler is None else compiler.segments
        return segments, _arithmetic(), memory, tuple([parameter.requires_grad for parameter in trained])


def _arithmetic() -> Hashable:
    """Return the settings of torch by which kernels are chosen."""
    convolution, product = torch.backends.cudnn, torch.backends.cuda.matmul
    return (
        torch.are_deterministic_algorithms_enabled(),
        convolution.deterministic,
        convolution.enabled,
        # From torch 2.9, ``allow_tf32`` raises where these have been set one by one.
        getattr(getattr(convolution, "conv", None), "fp32_precision", None) or convolution.allow_tf32,
        getattr(product, "fp32_precision", None) or product.allow_tf32,
        product.allow_fp16_reduced_precision_reduction,
        product.allow_bf16_reduced_precision_reduction,
    )


_Sent = Mapping[str, tuple[int, int]]
"""Kind of traffic -> messages and bytes."""


def _sent(counts: TrafficCounts) -> _Sent:
    return {kind: (counts.messages[kind], counts.sent_bytes[kind]) for kind in _SENT}


def _difference(now: _Sent, before: _Sent) -> _Sent:
    return {kind: (now[kind][0] - before[kind][0], now[kind][1] - before[kind][1]) for kind in now}


def _add(counts: TrafficCounts, sent: _Sent) -> None:
    for kind, (messages, sent_bytes) in sent.items():
        counts.count(kind, messages, sent_bytes)


def _return_memory(device: torch.device) -> None:
    """Return memory that no tensor uses to a GPU."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _draws(lowered: LoweredModel) -> bool:
    """Whether any operator of this rank draws random numbers, by the key of the step."""
    ranked = [stage.ranked for stage in lowered.hosted.values()]
    return any(each.drawn or any(KEY in i.inputs for i in each.instructions) for each in ranked)
