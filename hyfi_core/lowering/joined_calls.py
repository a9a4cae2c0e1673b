"""Joined calls: a run of local instructions as one function, so that it can be compiled.

    conv │ norm │ add │ relu │ collective │ relu │ collective
    └────── one call ──────┘              └ alone: nothing to fuse it with

Only what does not communicate is joined, so messages and their order stay as they are. A long run is cut where a
single map is alive: equal blocks of a model become equal functions, which are compiled once, several at a time.

    conv │ norm │ relu │ conv │ norm │ add │ relu ┊ conv │ norm │ relu │ conv │ norm │ add │ relu
    └─────────────── one block ───────────────────┘└─────────── an equal one ────────────────────┘
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from hyfi_core.capture.program import KEY
from hyfi_core.rules.instructions import Instruction, LocalCall, RankProgram
from hyfi_core.rules.table import facts_of

FUSED_FROM = 2
"""Number of operators on maps from which a run is joined: one alone has nothing to be fused with."""


_PIECE_CALLS = 8
"""Fewest calls of a piece of a long run: entering a piece takes tens of microseconds."""


@dataclass(frozen=True, eq=False)
class JoinedCalls:
    """A function that makes some local calls, one after the other.

    Attributes:
        calls: calls in their order; none of them is skipped on this rank.
        inputs: names of the arguments.
        outputs: names of the results.
    """

    calls: tuple[LocalCall, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the results; autograd differentiates them."""
        return self._run(tensors, traced=False)

    def traceable(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the results, computed by operators that can be traced into a graph."""
        return self._run(tensors, traced=True)

    def _run(self, tensors: Sequence[torch.Tensor], traced: bool) -> tuple[torch.Tensor, ...]:
        """Return the results of all calls; ``traced``: with functions that declare what they change."""
        values: dict[str, Any] = dict(zip(self.inputs, tensors, strict=True))
        for call, ended in zip(self.calls, self._ended, strict=True):
            # A norm changes its statistics unseen by a trace: such functions have a form that declares it.
            function = getattr(call.function, "traceable", call.function) if traced else call.function
            results = function(*(values[name] for name in call.inputs))
            results = (results,) if isinstance(results, torch.Tensor) else results
            values.update((o, r) for o, r in zip(call.outputs, results, strict=False) if o is not None)
            # Otherwise the tuple keeps a value alive that the next lines free.
            del results
            for name in ended:
                del values[name]
        return tuple(values[name] for name in self.outputs)

    @cached_property
    def _ended(self) -> tuple[tuple[str, ...], ...]:
        """For each call, the values to free after it: no later call reads them, and they are no outputs."""
        # In reverse order, the first call that reads a value is its last user.
        ended: list[tuple[str, ...]] = []
        used_later = set(self.outputs)
        for call in reversed(self.calls):
            names = dict.fromkeys(name for name in (*call.inputs, *call.outputs) if name is not None)
            ended.append(tuple(name for name in names if name not in used_later))
            used_later.update(call.inputs)
        return tuple(reversed(ended))


def join_calls(ranked: RankProgram) -> RankProgram:
    """Return the program with runs of local calls joined, where there is something to fuse.

    Not joined are calls that draw random numbers, and calls that this rank skips because its part is empty.

    Args:
        ranked: the program of one rank, before the in-place pass.
    """
    drawn = {name for op in ranked.drawn for name in op.outputs if name is not None}
    uses = Counter(name for instruction in ranked.instructions for name in instruction.inputs if name is not None)
    # A result of the program is used once more, outside of it: it must leave the joined call.
    uses.update(ranked.results)
    instructions: list[Instruction] = []
    run: list[LocalCall] = []
    for instruction in ranked.instructions:
        if isinstance(instruction, LocalCall) and _can_join(instruction, drawn):
            run.append(instruction)
            continue
        instructions.extend(_joined(run, ranked, uses))
        instructions.append(instruction)
        run = []
    instructions.extend(_joined(run, ranked, uses))
    return replace(ranked, instructions=tuple(instructions))


def unjoined(instructions: Iterable[Instruction]) -> tuple[Instruction, ...]:
    """Return the instructions with joined calls apart again."""
    apart: list[Instruction] = []
    for instruction in instructions:
        parts = instruction.parts if isinstance(instruction, LocalCall) else ()
        apart.extend(parts or (instruction,))
    return tuple(apart)


def _can_join(call: LocalCall, drawn: Set[str]) -> bool:
    # Numbers of the key would become constants of a graph, and compiled code draws from a generator of its own.
    return call.empty is None and KEY not in call.inputs and drawn.isdisjoint(o for o in call.outputs if o is not None)


def _joined(run: list[LocalCall], ranked: RankProgram, uses: Counter[str]) -> list[LocalCall]:
    """Return one call for each piece of a run; its calls themselves where there is nothing to fuse."""
    calls: list[LocalCall] = []
    for piece in _pieces(run, ranked):
        calls.extend(_as_one(piece, uses) if sum(_fusible(call, ranked) for call in piece) >= FUSED_FROM else piece)
    return calls


def _as_one(run: list[LocalCall], uses: Counter[str]) -> list[LocalCall]:
    """Return, as a list, one call for all of ``run``; ``uses``: how often the whole program reads each value."""
    within = Counter(name for call in run for name in call.inputs)
    computed = dict.fromkeys(name for call in run for name in call.outputs if name is not None)
    inputs = tuple(dict.fromkeys(name for call in run for name in call.inputs if name not in computed))
    # With more users than those in the joined call, a user outside reads it.
    outputs = tuple(name for name in computed if uses[name] > within[name])
    return [LocalCall(JoinedCalls(tuple(run), inputs, outputs), inputs, outputs, parts=tuple(run))]


def _pieces(run: list[LocalCall], ranked: RankProgram) -> list[list[LocalCall]]:
    """Return a run in pieces, cut where one map is alive and the next call, such as a convolution, is not fused."""
    last_use = {name: at for at, call in enumerate(run) for name in call.inputs if _is_map(name, ranked)}
    computed = {name for call in run for name in call.outputs}
    alive = last_use.keys() - computed
    pieces: list[list[LocalCall]] = [[]]
    for at, call in enumerate(run):
        # A cut before an operator that is fused would leave it to a pass of its own over the map.
        is_fused = call.source is None or facts_of(call.source).fusible
        if len(pieces[-1]) >= _PIECE_CALLS and len(alive) <= 1 and not is_fused:
            pieces.append([])
        pieces[-1].append(call)
        alive = {name for name in alive.union(call.outputs) if name is not None and last_use.get(name, 0) > at}
    return pieces


def _is_map(name: str, ranked: RankProgram) -> bool:
    """Whether a value is a map or features, not a weight or a statistic."""
    info = ranked.values.get(name)
    activation = name not in ranked.program.parameters and name not in ranked.program.buffers
    return activation and info is not None and info.differentiable and len(info.shape) > 1


def _fusible(call: LocalCall, ranked: RankProgram) -> bool:
    """Whether a call computes a map or features value by value, and not only statistics or counters."""
    if call.source is not None and not facts_of(call.source).fusible:
        return False
    info = ranked.values.get(call.outputs[0]) if call.outputs[0] is not None else None
    return info is not None and info.differentiable and len(info.shape) > 1
