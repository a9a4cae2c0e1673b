"""Recomputations: cheap steps that recompute a map from maps that are kept anyway.

    kept      x ──norm──▶ · ──add──▶ · ──relu──▶ y      y is computed from x and z in three cheap steps;
                           ▲                             x and z are kept for backward anyway
    kept      z ───────────┘

Convolutions with few products per output (few input channels, or 1 x 1 kernels) are cheap, too: recomputing takes less
time than reading a file. Saved results such as a batch norm's statistics are reused, so nothing is sent again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, is_dataclass
from math import prod
from typing import Any

import torch

from hyfi_core.cost.machines.machine_file import reference_machine
from hyfi_core.lowering.segments import OperatorStep, Segment
from hyfi_core.ops.base import Recomputable
from hyfi_core.ops.redistribute import Redistribute
from hyfi_core.rules.instructions import CollectiveCall, CustomCall, LocalCall
from hyfi_core.rules.operator_facts import UNKNOWN
from hyfi_core.rules.table import facts_of

Shapes = Callable[[str], Sequence[int]]
"""Returns the shape of a value."""
Form = tuple[tuple[int, ...], tuple[int, ...], int]
"""(size, stride, offset) of a tensor in its storage."""
Call = Callable[[torch.Tensor | None], torch.Tensor]
"""Computes a map; an in-place call takes the result of the previous call."""
DEEPEST = 3
"""Largest depth of recomputations that depend on each other."""
_VALUE_BYTES = 4


@dataclass(frozen=True, eq=False, slots=True)
class Recomputation:
    """How a map is recomputed.

    Attributes:
        calls: the calls, in order.
        sources: their input maps; kept, possibly spilled, as long as the recomputation.
        form: (size, stride, offset) in its storage.
        dtype: dtype of the map.
        depth: length of the longest chain of recomputations on which the map depends, including its own.
        context: creates the context (autocast) in which the map was computed.
    """

    calls: tuple[Call, ...]
    sources: tuple[torch.Tensor, ...]
    form: Form
    dtype: torch.dtype
    depth: int
    context: Callable[[], Any]

    def fill(self, storage: torch.UntypedStorage) -> None:
        """Compute the map into its storage."""
        size, stride, offset = self.form
        target = torch.empty(0, dtype=self.dtype, device=storage.device)
        target.set_(storage, offset, size, stride)
        with torch.no_grad(), self.context():
            result: torch.Tensor | None = None
            for call in self.calls:
                result = call(result)
            assert result is not None
            # Into the page's storage, to which the tape's tensors refer; the result itself has other memory.
            target.copy_(result)


@dataclass(frozen=True)
class Made:
    """A step of a tape that has run, with its inputs and one of its results.

    Attributes:
        step: the step that made the result.
        inputs: value name -> input.
        name: name of the result.
        result: a map.
        saved: what the operator saved for backward; None for a segment, or if no backward follows.
    """

    step: Segment | OperatorStep
    inputs: Mapping[str, torch.Tensor]
    name: str
    result: torch.Tensor
    saved: Any


def call_of(source: Made) -> tuple[Call, tuple[torch.Tensor, ...], bool] | None:
    """Return (call that computes the result again, its input maps, whether it is in place); None if not cheap."""
    overwritten = [name for name, tensor in source.inputs.items() if same_memory(tensor, source.result)]
    if len(overwritten) > 1:  # a call takes the value of one overwritten input
        return None
    if isinstance(source.step, OperatorStep):
        call = _operator_call(source, overwritten)
    else:
        call = _segment_call(source.step, source, overwritten)
    if call is None:
        return None
    # Without tensors in the result's own memory: a page whose recomputation refers to itself would never be freed.
    sources = tuple(t for t in tensors_in([source.inputs, source.saved]) if not same_memory(t, source.result))
    return call, sources, bool(overwritten)


def _operator_call(source: Made, overwritten: Sequence[str]) -> Call | None:
    """Return the function that computes a result of an operator again; None if that is not cheap.

    Args:
        source: the operator, and what it has computed.
        overwritten: at most one name, of the input that it has overwritten: the function takes its value as argument.
    """
    assert isinstance(source.step, OperatorStep)
    operator, names, saved = source.step.call.operator, source.step.call.inputs, source.saved
    # An operator without backward has saved nothing, so ``recompute`` would lack what it may read.
    if not is_cheap(source.step.call, lambda name: source.inputs[name].shape) or saved is None:
        return None
    assert isinstance(operator, Recomputable)
    inputs = {name: tensor for name, tensor in source.inputs.items() if name not in overwritten}
    if isinstance(saved, torch.Tensor):
        saved = None  # what was saved is the map itself, which its recomputation must not keep alive

    def call(overwritten_value: torch.Tensor | None) -> torch.Tensor:
        values = {**inputs, **dict.fromkeys(overwritten, overwritten_value)}
        arguments: Any = tuple(None if name is None else values[name] for name in names)
        return operator.recompute(arguments, saved)

    return call


def _segment_call(segment: Segment, source: Made, overwritten: Sequence[str]) -> Call | None:
    """Return the function that computes a result of a segment again; None if that is not cheap.

    Args:
        segment: the step of ``source``.
        source: the segment's inputs, and its result.
        overwritten: at most one name, of the input in whose memory the result is: the function takes its value.
    """
    calls = cheap_calls(segment, source.name, lambda name: source.inputs[name].shape)
    if calls is None:
        return None
    inputs = {name: tensor.detach() for name, tensor in source.inputs.items() if name not in overwritten}
    name = source.name  # the function must not refer to ``source``, which keeps the map and its sources alive

    def call(overwritten_value: torch.Tensor | None) -> torch.Tensor:
        """Return the result, computed by the segment's calls from its inputs and the value that it overwrites."""
        values: dict[str, Any] = {**inputs, **dict.fromkeys(overwritten, overwritten_value)}
        for step in calls:
            results = step.function(*(values[name] for name in step.inputs))
            results = (results,) if isinstance(results, torch.Tensor) else results
            # Outputs that nothing uses have no name, and trailing ones may be left out.
            values.update((n, r) for n, r in zip(step.outputs, results, strict=False) if n is not None)
        result: torch.Tensor = values[name]
        return result

    return call


def is_cheap(call: CollectiveCall | CustomCall, shape_of: Shapes) -> bool:
    """Whether recomputing the first output of an operator is faster than spilling it."""
    if not isinstance(call.operator, Recomputable):
        return False
    shapes = [() if name is None else shape_of(name) for name in call.inputs]
    return reference_machine().recomputes(call.operator.flops_of_value(shapes), _VALUE_BYTES)


def cheap_calls(segment: Segment, name: str, shape_of: Shapes) -> tuple[LocalCall, ...] | None:
    """Return the calls of a segment that compute a value, in order; None if they are not cheap.

    Args:
        segment: the segment that computes it.
        name: name of the value.
        shape_of: returns the shape of an input of the segment.
    """
    unresolved, chosen = {name}, []
    # From the value back to its inputs, so that only calls on which it depends are chosen.
    for call in reversed(segment.calls):
        if unresolved.intersection(call.outputs):
            if call.empty is not None or not _is_cheap_call(call, segment, shape_of):
                return None
            chosen.append(call)
            unresolved.update(call.inputs)
    return tuple(reversed(chosen))


def _is_cheap_call(call: LocalCall, segment: Segment, shape_of: Shapes) -> bool:
    if call.source is None:
        # Without an operator of the program: cheap if it only copies received strips into place.
        return isinstance(getattr(call.function, "__self__", None), Redistribute)
    if _is_convolution(call) and call.inputs[1] in segment.inputs:
        return reference_machine().recomputes(2.0 * prod(shape_of(call.inputs[1])[1:]), _VALUE_BYTES)
    return facts_of(call.source).cheap


def _is_convolution(call: LocalCall) -> bool:
    """Whether a call is a convolution over height and width."""
    facts = UNKNOWN if call.source is None else facts_of(call.source)
    return facts.kind == "convolution" and facts.window is not None


def convolved_by(segment: Segment, saved: torch.Tensor, values: Mapping[str, torch.Tensor]) -> str | None:
    """Return the name of the input of a convolution that ``saved`` is, or is a copy of; None if it is neither.

    Under autocast, a convolution saves a copy with another dtype. Values are compared, because other operators of the
    segment save maps of the same shape, too.

    Args:
        segment: the segment that runs.
        saved: a tensor that autograd saves for the backward of one of its calls.
        values: the segment's inputs, and what it has computed so far.
    """
    for call in segment.calls:
        operand = values.get(call.inputs[0]) if _is_convolution(call) else None
        if operand is None or operand.shape != saved.shape or operand.stride() != saved.stride():
            continue
        if same_memory(operand, saved) or torch.equal(operand.to(saved.dtype), saved):
            return call.inputs[0]
    return None


def form_of(tensor: torch.Tensor) -> Form:
    """Return (size, stride, offset) of a tensor in its storage."""
    return tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())


def image_of(
    pixels: torch.Tensor, image: torch.Tensor, prepare: Callable[[torch.Tensor], torch.Tensor]
) -> Recomputation:
    """Return the recomputation of an image.

    Its depth is 0, like that of a kept map: it is computed faster than it could be read.

    Args:
        pixels: the source of the image.
        image: what ``prepare`` has computed from the pixels.
        prepare: computes the image; returns the same each time.
    """
    return Recomputation(
        calls=(lambda so_far: prepare(pixels),),
        sources=(pixels,),
        form=form_of(image),
        dtype=image.dtype,
        depth=0,
        context=nullcontext,
    )


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors share their memory."""
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


def tensors_in(holder: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in tuples, lists, mappings and dataclasses."""
    if isinstance(holder, torch.Tensor):
        yield holder
    elif isinstance(holder, Mapping):
        for item in holder.values():
            yield from tensors_in(item)
    elif isinstance(holder, (tuple, list)):
        for item in holder:
            yield from tensors_in(item)
    elif is_dataclass(holder) and not isinstance(holder, type):
        for item in fields(holder):
            yield from tensors_in(getattr(holder, item.name))
