"""Segments: runs of a rank's local instructions between those with their own backward.

    local local │ collective │ local │ custom │ local
    └─segment─┘               └segment┘        └segment┘

Autograd runs only inside a segment. Segments run backward in a fixed order that is the same on all ranks, so ranks
cannot deadlock, whatever order autograd would choose.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from hyfi_core.capture.program import refs_in
from hyfi_core.lowering.joined_calls import unjoined
from hyfi_core.lowering.reuse import BackwardMemory, Over, TapeFacts, writing_over
from hyfi_core.ops.plane_exchange import PlaneExchange
from hyfi_core.rules.instructions import CollectiveCall, CustomCall, Instruction, LocalCall, RankProgram


@dataclass(frozen=True)
class Segment:
    """A run of local calls.

    Attributes:
        calls: the calls, in order.
        drops: after each call, the values that are no longer used.
        inputs: values from outside of the segment.
        outputs: values used outside of the segment.
        sum_overwrites: inputs whose cotangent is added to an existing one -> which of the two the sum may overwrite.
    """

    calls: tuple[LocalCall, ...]
    drops: tuple[tuple[str, ...], ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    sum_overwrites: Mapping[str, Over] = field(default_factory=dict)


@dataclass(frozen=True)
class OperatorStep:
    """One instruction with its own backward.

    Attributes:
        call: the instruction.
        drops: values that are not used after it.
        sum_overwrites: see ``Segment``.
    """

    call: CustomCall | CollectiveCall
    drops: tuple[str, ...]
    sum_overwrites: Mapping[str, Over] = field(default_factory=dict)


Step = Segment | OperatorStep


def taken_by(step: Step) -> tuple[str, ...]:
    """Return the input values of a step, without duplicates."""
    names = step.inputs if isinstance(step, Segment) else step.call.inputs
    return tuple(name for name in dict.fromkeys(names) if name is not None)


def made_by(step: Step) -> tuple[str, ...]:
    """Return the output values of a step."""
    names = step.outputs if isinstance(step, Segment) else step.call.outputs
    return tuple(name for name in names if name is not None)


@dataclass(frozen=True)
class Tape:
    """All steps of a rank in forward order.

    Attributes:
        steps: segments and single operators.
        active: values that carry a gradient: they depend on a source (a trained parameter), and the output depends on
            them.
    """

    steps: tuple[Step, ...]
    active: frozenset[str]


def build_tape(
    ranked: RankProgram, sources: Iterable[str], start: int = 0, stop: int | None = None, in_two: bool = False
) -> Tape:
    """Group instructions into steps.

    Args:
        ranked: the rank's program.
        sources: values that need gradients: trained parameters.
        start: first instruction.
        stop: instruction before which to stop; None for all.
        in_two: whether its backward has two parts, so that deferred gradients are computed after the first.
    """
    last_use = _last_uses(ranked)
    chosen = ranked.instructions[start:stop]
    active = _active(ranked, ranked.of_all_planes or unjoined(chosen), set(sources))  # the same in all planes
    steps: list[Step] = []
    run: list[tuple[int, LocalCall]] = []
    for index, instruction in enumerate(chosen, start):
        # Only here is it known which values carry gradients; both sides of an exchange must agree on it.
        if isinstance(instruction, CollectiveCall) and isinstance(instruction.operator, PlaneExchange):
            instruction = replace(instruction, operator=instruction.operator.carrying(frozenset(active)))
        if isinstance(instruction, LocalCall):
            run.append((index, instruction))
        else:
            _close(steps, run, last_use)
            steps.append(OperatorStep(instruction, _drops(index, instruction, last_use)))
    _close(steps, run, last_use)
    return Tape(_writing_over(ranked, steps, active, in_two), frozenset(active))


def _writing_over(ranked: RankProgram, steps: list[Step], active: set[str], in_two: bool) -> tuple[Step, ...]:
    """Return the steps, each with the decision which cotangents its backward may overwrite; see ``lowering.reuse``.

    Args:
        ranked: the rank's program.
        steps: all steps, in forward order.
        active: values that carry a gradient.
        in_two: whether backward has two parts, so that deferred gradients are computed after the first.
    """
    outputs, exits = active.intersection(refs_in(ranked.outputs)), active.intersection(ranked.exits)
    memory = BackwardMemory(TapeFacts(active, ranked.program.parameters, outputs, exits, ranked.values), in_two)
    calls = [call for step in steps for call in (step.calls if isinstance(step, Segment) else (step.call,))]
    computed = {name for call in calls for name in call.outputs}
    new_steps: list[Step] = []
    # In the order of backward, which decides who holds a cotangent when another one arrives.
    for step in reversed(steps):
        if isinstance(step, Segment):
            new_steps.append(replace(step, sum_overwrites=memory.segment(step.calls, step.inputs, step.outputs)))
        else:
            may_overwrite, sums = memory.operator(step.call)
            new_steps.append(replace(step, call=writing_over(step.call, may_overwrite, computed), sum_overwrites=sums))
    return tuple(reversed(new_steps))


def _last_uses(ranked: RankProgram) -> dict[str, int]:
    """Return value -> index of the instruction after which it is no longer needed."""
    last: dict[str, int] = {}
    for index, instruction in enumerate(ranked.instructions):
        # Outputs, too: an output that is never read is dropped after the step that computes it.
        for name in (*instruction.inputs, *instruction.outputs):
            if name is not None:
                last[name] = index
    program = ranked.program
    # One after the last: results leave the tape, and weights are there in the next step, too.
    for name in ranked.results:
        last[name] = len(ranked.instructions)
    for name in (*program.parameters, *program.buffers, *program.constants):
        last[name] = len(ranked.instructions)
    return last


def _drops(index: int, instruction: Instruction, last_use: dict[str, int]) -> tuple[str, ...]:
    names = dict.fromkeys((*instruction.inputs, *instruction.outputs))
    return tuple(name for name in names if name is not None and last_use[name] == index)


def _active(ranked: RankProgram, chosen: tuple[Instruction, ...], sources: set[str]) -> set[str]:
    """Return values that depend on a source and on which the output depends: the same on every rank.

    A dependence counts if all values on its way are floating-point and none is a result of ``detach``: a parameter
    that only decides which position is taken has no gradient, and a gradient of zeros would let weight decay change it.
    """
    passing = tuple(instruction for instruction in chosen if not _detaches(instruction))
    reached = set(sources)
    for instruction in passing:
        if any(name in reached for name in instruction.inputs):
            reached.update(o for o in instruction.outputs if o is not None and ranked.floating(o))
    # Not through mutations: new values of buffers carry no gradient.
    needed_names = {*refs_in(ranked.outputs), *ranked.exits}
    for instruction in reversed(passing):
        if any(
            output in needed_names and ranked.floating(output) for output in instruction.outputs if output is not None
        ):
            needed_names.update(name for name in instruction.inputs if name is not None and ranked.floating(name))
    return reached & needed_names


def _detaches(instruction: Instruction) -> bool:
    source = instruction.source if isinstance(instruction, LocalCall) else None
    return source is not None and source.text == "aten.detach.default"


def _close(steps: list[Step], run: list[tuple[int, LocalCall]], last_use: dict[str, int]) -> None:
    """Append a segment of the local calls in ``run``, as (index, call), to the steps, and empty ``run``."""
    if not run:
        return
    calls = tuple(call for _, call in run)
    end = run[-1][0]
    computed: dict[str, None] = {}
    inputs: dict[str, None] = {}
    for call in calls:
        inputs.update((name, None) for name in call.inputs if name not in computed)
        # After the inputs: an instruction cannot read its own results.
        computed.update((name, None) for name in call.outputs if name is not None)
    outputs = tuple(name for name in computed if last_use[name] > end)
    drops = tuple(_drops(index, call, last_use) for index, call in run)
    steps.append(Segment(calls, drops, tuple(inputs), outputs))
    run.clear()
