"""Paged steps: calls to the pager at each step of a tape, forward and backward, for one micro-batch in one cell.

    time       0  1  2  3 │ 4  5  6  7        a tape of four steps, then the same steps backward
    value v       ●─▶○         ●              computed at 1, used at 2, and saved there for its backward at 5

The next use of a page follows from the tape. Between two waits, cells run one after the other, so pages are ordered by
the number of waits before their next use, then by cell.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch

from hyfi_core.cells.page import PLACES, Page
from hyfi_core.cells.pager import Pager
from hyfi_core.cells.recomputation import DEEPEST, Made, Recomputation, call_of, convolved_by, form_of, tensors_in
from hyfi_core.lowering.segments import OperatorStep, Segment, Step, Tape, made_by, taken_by
from hyfi_core.ops.base import RemakesSaved
from hyfi_core.rules.instructions import CollectiveCall

NamedTensors = Mapping[str, torch.Tensor]


class StepMemory(Protocol):
    """Callbacks of a tape before and after each of its steps."""

    def need(self, tensors: Any) -> None:
        """Load tensors that are used outside of the tape's steps, before this cell's turn ends."""
        ...

    def stay(self, tensors: Any) -> None:
        """Never spill these tensors: their memory has another owner, such as a message."""
        ...

    def begin(self, step: Step, values: NamedTensors) -> None:
        """Called before a step runs forward."""
        ...

    def saving(self, segment: Segment, outputs: NamedTensors) -> contextlib.AbstractContextManager[None]:
        """Return the context in which autograd saves a segment's tensors for backward.

        Args:
            segment: the running one.
            outputs: values that it has computed so far and still needs.
        """
        ...

    def end(self, step: Step, values: NamedTensors, saved: Any) -> Any:
        """Called after a step has run forward with what its operator saved for backward; return what to keep of it."""
        ...

    def begin_back(self, step: Step, saved: Any, cotangents: NamedTensors) -> None:
        """Called before a step runs backward."""
        ...

    def end_back(self, step: Step, cotangents: NamedTensors) -> None:
        """Called after a step has run backward."""
        ...


class AllStays:
    """No paging: everything stays in memory."""

    def need(self, tensors: Any) -> None:
        """See ``StepMemory``."""

    def stay(self, tensors: Any) -> None:
        """See ``StepMemory``."""

    def begin(self, step: Step, values: NamedTensors) -> None:
        """See ``StepMemory``."""

    def saving(self, segment: Segment, outputs: NamedTensors) -> contextlib.AbstractContextManager[None]:
        """See ``StepMemory``."""
        return contextlib.nullcontext()

    def end(self, step: Step, values: NamedTensors, saved: Any) -> Any:
        """See ``StepMemory``."""
        if saved is None or not isinstance(step, OperatorStep) or not isinstance(step.call.operator, RemakesSaved):
            return saved
        return step.call.operator.compact(saved)

    def begin_back(self, step: Step, saved: Any, cotangents: NamedTensors) -> None:
        """See ``StepMemory``."""

    def end_back(self, step: Step, cotangents: NamedTensors) -> None:
        """See ``StepMemory``."""


class UseOrder:
    """The times at which the values of a tape are used.

    Args:
        tape: tape of one cell; those of all cells have the same structure.
    """

    def __init__(self, tape: Tape) -> None:
        self.steps = {id(step): at for at, step in enumerate(tape.steps)}
        # Value -> places in the tape of the steps that take it, and of the one that makes it.
        self._users: dict[str, list[int]] = {}
        self._maker: dict[str, int] = {}
        for at, step in enumerate(tape.steps):
            for name in taken_by(step):
                self._users.setdefault(name, []).append(at)
            self._maker.update((name, at) for name in made_by(step))
        self._times: list[int] = []  # of each step in forward, then in backward, from the last to the first
        waits = 0
        for index, step in enumerate((*tape.steps, *reversed(tape.steps))):
            collective = isinstance(step, OperatorStep) and isinstance(step.call, CollectiveCall)
            # An operator that waits counts twice, before and after its own time: what follows runs in a later turn.
            waits += collective
            # One integer, by which uses are sorted: first by the number of waits before them, then by the index.
            self._times.append(waits << PLACES | index)
            waits += collective

    def at(self, step: Step, back: bool = False) -> int:
        """Return the time at which a step runs, in forward or, with ``back``, in backward; see ``page.PLACES``."""
        index = self.steps[id(step)]
        return self._times[len(self._times) - 1 - index if back else index]

    def of_value(self, name: str, after: int = -1) -> list[int]:
        """Return the times at which steps after ``after`` (an index) use a value in forward."""
        return [self._times[at] for at in self._users.get(name, ()) if at > after]

    def of_cotangent(self, name: str) -> list[int]:
        """Return the time at which a value's cotangent is used: when the step that made the value runs backward."""
        return [self._times[len(self._times) - 1 - self._maker[name]]] if name in self._maker else []


class PagedSteps:
    """One micro-batch of a stage in one cell.

    Args:
        pager: pager of all cells of the process.
        order: order of uses of the stage's tape.
        context: creates the autocast context.
        recomputes: whether cheap maps are recomputed; in evaluation that would keep their inputs alive.
    """

    def __init__(
        self,
        pager: Pager,
        order: UseOrder,
        context: Callable[[], Any] = contextlib.nullcontext,
        recomputes: bool = True,
    ) -> None:
        self._pager, self._order, self._context, self._recomputes = pager, order, context, recomputes
        # Inputs of the running step: when it ends, a record of how to recompute its outputs keeps them.
        self._taken: dict[str, torch.Tensor] = {}
        self._backward_use = -1  # time at which the running step's backward uses its saved tensors; -1: no step runs

    def need(self, tensors: Any) -> None:
        """Load pages; see ``StepMemory``."""
        self._pager.begin(tensors)

    def stay(self, tensors: Any) -> None:
        """Exclude tensors with another owner; see ``StepMemory``."""
        self._pager.fix(tensors_in(tensors))

    def begin(self, step: Step, values: NamedTensors) -> None:
        """Load the inputs of a step; see ``StepMemory``."""
        self._taken = {name: values[name] for name in taken_by(step)}
        for name, tensor in self._taken.items():
            self._pager.track(tensor, self._order.of_value(name))
        # Before the step: autograd saves tensors while it runs.
        self._backward_use = self._order.at(step, back=True)
        self._pager.begin(self._taken, self._room(step, back=False))

    @contextlib.contextmanager
    def saving(self, segment: Segment, outputs: NamedTensors) -> Iterator[None]:
        """Context in which autograd saves a segment's tensors, each in a page that is loaded when backward needs it.

        Args:
            segment: the segment that runs.
            outputs: what it has computed so far.
        """
        uses = [self._backward_use]

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            """Register a tensor that autograd saves, and return it without its graph."""
            # Detached: a saved output of the segment refers to its graph, which refers to what was saved. This cycle
            # would never be freed.
            saved = tensor.detach()
            page = self._pager.track(saved, uses)
            # The input of a convolution (under autocast a copy of it) is recomputed like any other map.
            if page is not None and page.recomputation is None and self._recomputes:
                name = convolved_by(segment, saved, {**self._taken, **outputs})
                if name is not None:
                    recomputation = self._recomputation(page, Made(segment, self._taken, name, saved, None))
                    self._pager.note_recomputation(page, recomputation)
            return saved

        def unpack(saved: torch.Tensor) -> torch.Tensor:
            # Loaded here, because only now is it known which of the segment's saved tensors autograd needs next.
            self._pager.begin(saved)
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def end(self, step: Step, values: NamedTensors, saved: Any) -> Any:
        """Register the outputs of a step, and what it saves for backward, with the pager; return what it saves.

        Args:
            step: the step that has run.
            values: its outputs by name.
            saved: what its operator saves for backward; None for a segment.
        """
        index, made_bytes = self._order.steps[id(step)], 0
        for name in made_by(step):
            if name in values:
                uses = self._order.of_value(name, index)
                page = self._pager.track(values[name], uses)
                made_bytes += 0 if page is None else page.size
        saved = self._compacted(step, saved)
        for tensor in tensors_in(saved):
            self._pager.track(tensor, [self._order.at(step, back=True)])
        # Cells are alike: the next cell makes as much room before this step.
        self._pager.allocated[self._room_key(step, back=False)] = made_bytes
        if self._recomputes:
            self._note_recomputation(step, values, saved)
        # A reference from here would keep the inputs in memory until the next step begins.
        self._taken = {}
        self._pager.end(self._order.at(step))
        return saved

    def begin_back(self, step: Step, saved: Any, cotangents: NamedTensors) -> None:
        """Load the inputs of a step; see ``StepMemory``."""
        # Backward takes the cotangents of outputs, and may add to existing ones of inputs.
        touched = [cotangents[name] for name in (*made_by(step), *taken_by(step)) if name in cotangents]
        self._pager.begin([saved, touched], self._room(step, back=True))

    def end_back(self, step: Step, cotangents: NamedTensors) -> None:
        """Register the cotangents that the backward of a step has made, by the value to which they belong."""
        made_bytes = 0  # the room to make for this step in the next cell
        for name in taken_by(step):
            if name in cotangents:
                page = self._pager.track(cotangents[name], self._order.of_cotangent(name))
                if page is not None:  # it may share the memory of a saved tensor
                    self._pager.note_new(page)
                    made_bytes += page.size
        self._pager.allocated[self._room_key(step, back=True)] = made_bytes
        self._pager.end(self._order.at(step, back=True))

    def _room(self, step: Step, back: bool) -> int:
        """Return the bytes that a step will allocate, as counted in the previous cell; 0 in the first."""
        return self._pager.allocated.get(self._room_key(step, back), 0)

    def _room_key(self, step: Step, back: bool) -> tuple[int, int, bool]:
        # By position, because the tapes of cells have the same structure, but different step objects.
        return len(self._order.steps), self._order.steps[id(step)], back

    def _compacted(self, step: Step, saved: Any) -> Any:
        """Return what to keep of an operator's saved values: all, if they are recomputed, or a compacted form."""
        if not isinstance(step, OperatorStep) or not isinstance(step.call.operator, RemakesSaved) or saved is None:
            return saved
        # The operator can compute a part of what it saves again from its first input, such as indices of maxima.
        operator, own = step.call.operator, self._taken[str(step.call.inputs[0])]
        remade, source = operator.remade(saved), self._pager.page_of(own)
        # Only if the input is recomputed as well: otherwise it might have to be kept just for this.
        if remade is None or source is None or source.recomputation is None or source.recomputation.depth >= DEEPEST:
            return operator.compact(saved)
        page = self._pager.track(remade)
        if page is None or not self._recomputes:
            return operator.compact(saved)
        again = Recomputation(
            calls=(lambda so_far: operator.remake(own),),
            sources=(own,),
            form=form_of(remade),
            dtype=remade.dtype,
            depth=source.recomputation.depth + 1,
            context=self._context,
        )
        self._pager.note_recomputation(page, again)
        return saved

    def _note_recomputation(self, step: Step, values: NamedTensors, saved: Any) -> None:
        """Attach a recomputation to the output of a cheap step."""
        for name in made_by(step):
            page = self._pager.page_of(values[name]) if name in values else None
            if page is not None:
                # Of an operator, only the first output is a map.
                is_map = isinstance(step, Segment) or name == made_by(step)[0]
                source = Made(step, self._taken, name, values[name], saved)
                self._pager.note_recomputation(page, self._recomputation(page, source) if is_map else None)

    def _recomputation(self, page: Page, source: Made) -> Recomputation | None:
        """Return how a step's result is recomputed; None if that is not cheap.

        For an in-place step, this is the recomputation of its input with one more call.
        """
        cheap_call = call_of(source)
        if cheap_call is None:
            return None
        call, inputs, in_place = cheap_call
        # An in-place step has overwritten its input: the result can be recomputed only if the input can.
        if in_place and page.recomputation is None:
            return None
        # Sources are tensors with pages; all others, such as weights, stay in memory anyway.
        tensors, calls = [tensor for tensor in inputs if self._pager.page_of(tensor) is not None], [call]
        if in_place and page.recomputation is not None:
            calls = [*page.recomputation.calls, call]
            tensors = [*page.recomputation.sources, *tensors]
        sources = tuple(dict.fromkeys(tensors))
        recomputations = (p.recomputation for p in map(self._pager.page_of, sources) if p is not None)
        depth = 1 + max((again.depth for again in recomputations if again is not None), default=0)
        if depth > DEEPEST or not sources:
            return None
        return Recomputation(
            calls=tuple(calls),
            sources=sources,
            form=form_of(source.result),
            dtype=source.result.dtype,
            depth=depth,
            context=self._context,
        )
