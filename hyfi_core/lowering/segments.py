"""Segments: a rank's instructions cut at the communicating ones, with what enters, leaves and may be forgotten.

    compute compute │ communicate │ compute │ communicate │ compute
    └── segment ──┘                └ segment ┘             └ segment ┘

Autograd runs only inside a segment. The segments themselves run backward in one fixed order that all ranks share, so
ranks cannot wait for each other crosswise, whatever autograd would have made of their graphs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hyfi_core.capture.program import refs_in
from hyfi_core.rules.instructions import Communicate, Compute, Instruction, RankProgram


@dataclass(frozen=True)
class Segment:
    """A run of local calls.

    Attributes:
        computes: the calls.
        drops: after each call, the values that nothing uses any more.
        inputs: values that come from outside.
        outputs: values that others use.
    """

    computes: tuple[Compute, ...]
    drops: tuple[tuple[str, ...], ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Meeting:
    """A communicating instruction, and the values that nothing uses after it."""

    step: Communicate
    drops: tuple[str, ...]


Step = Segment | Meeting


@dataclass(frozen=True)
class Tape:
    """All steps of a rank in forward order.

    Attributes:
        steps: segments and meetings.
        active: values that carry a gradient: they depend on a source (a trained parameter), and the answer on them.
    """

    steps: tuple[Step, ...]
    active: frozenset[str]


def build_tape(ranked: RankProgram, sources: Iterable[str], start: int = 0, stop: int | None = None) -> Tape:
    """Group instructions into steps.

    Args:
        ranked: the rank's program.
        sources: names from which gradients are wanted: trained parameters.
        start: first instruction.
        stop: instruction before which to stop; None for all.
    """
    last_use = _last_uses(ranked)
    chosen = ranked.instructions[start:stop]
    active = _active(ranked, chosen, set(sources))
    steps: list[Step] = []
    run: list[tuple[int, Compute]] = []
    for index, instruction in enumerate(chosen, start):
        if isinstance(instruction, Communicate):
            _close(steps, run, last_use)
            steps.append(Meeting(instruction, _drops(index, instruction, last_use)))
        else:
            run.append((index, instruction))
    _close(steps, run, last_use)
    return Tape(tuple(steps), frozenset(active))


def _last_uses(ranked: RankProgram) -> dict[str, int]:
    """Return the index of the instruction after which a value is no longer needed."""
    last: dict[str, int] = {}
    for index, instruction in enumerate(ranked.instructions):
        for name in (*instruction.inputs, *instruction.outputs):
            if name is not None:
                last[name] = index
    program = ranked.program
    for name in ranked.results:
        last[name] = len(ranked.instructions)
    for name in (*program.parameters, *program.buffers, *program.constants):
        last[name] = len(ranked.instructions)
    return last


def _drops(index: int, instruction: Instruction, last_use: dict[str, int]) -> tuple[str, ...]:
    names = dict.fromkeys((*instruction.inputs, *instruction.outputs))
    return tuple(name for name in names if name is not None and last_use[name] == index)


def _active(ranked: RankProgram, chosen: tuple[Instruction, ...], sources: set[str]) -> set[str]:
    """Return values that depend on a source and on which the answer depends: the same on every rank."""
    reached = set(sources)
    for instruction in chosen:
        if any(name in reached for name in instruction.inputs):
            reached.update(o for o in instruction.outputs if o is not None and ranked.floating(o))
    wanted = {*refs_in(ranked.outputs), *ranked.exits}
    for instruction in reversed(chosen):
        if any(output in wanted for output in instruction.outputs):
            wanted.update(name for name in instruction.inputs if name is not None)
    return reached & wanted


def _close(steps: list[Step], run: list[tuple[int, Compute]], last_use: dict[str, int]) -> None:
    """Turn the run of local calls so far into a segment."""
    if not run:
        return
    computes = tuple(compute for _, compute in run)
    end = run[-1][0]
    made: dict[str, None] = {}
    inputs: dict[str, None] = {}
    for compute in computes:
        inputs.update((name, None) for name in compute.inputs if name not in made)
        made.update((name, None) for name in compute.outputs if name is not None)
    outputs = tuple(name for name in made if last_use[name] > end)
    drops = tuple(_drops(index, compute, last_use) for index, compute in run)
    steps.append(Segment(computes, drops, tuple(inputs), outputs))
    run.clear()
