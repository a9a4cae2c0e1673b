"""Layouts of a whole model, from which those of most of its stages are read instead of lowering each stage to see.

    model on 1 x 4 ranks    a ── b ── c ── d ── e ── f        lowered once, without fused runs
    stage of a plan                   c ── d ── e             the same layouts, if what it receives is divided so
    stage of another             b ── c ── d ── e ── f        likewise

An operator's layout follows from that of its inputs. Stages receive values in even parts; in a whole model, windows may
have made them uneven. Operators may also differ at the ends of a stage, and a few look at what follows them. Such
stages are lowered for themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hyfi_core.capture.program import Operator, Program, refs_in
from hyfi_core.errors import RequestError
from hyfi_core.lowering.lower import Target, lower, lowered_operators
from hyfi_core.lowering.pool_before_relu import pool_before_relu
from hyfi_core.rules.instructions import RankProgram, Split


@dataclass(frozen=True)
class WholeLayouts:
    """A model lowered as a whole, without fused runs.

    Attributes:
        ranked: for one rank.
        operators: name -> operator, as it was lowered.
    """

    ranked: RankProgram
    operators: Mapping[str, Operator]

    @classmethod
    def of(cls, program: Program, target: Target) -> WholeLayouts | None:
        """Return that of a captured model for the grid of ``target``; None if it cannot be lowered as a whole."""
        program = pool_before_relu(program, refs_in(program.outputs))
        try:
            ranked = lower(program, replace(target, entries={}))
        except RequestError:
            return None
        return cls(ranked, {op.name: op for op in lowered_operators(program, program.outputs, ())})

    def hold_for(self, operators: Sequence[Operator], entries: Mapping[str, Split | None]) -> bool:
        """Whether the layouts are those of a stage.

        Args:
            operators: of the stage, as they would be lowered.
            entries: how the values that it receives are split, None for replicated ones.
        """
        splits = self.ranked.splits
        return all(splits.get(name) == split for name, split in entries.items()) and all(
            op.name not in self.ranked.ahead and self._same(op) for op in operators
        )

    def _same(self, op: Operator) -> bool:
        whole = self.operators.get(op.name)
        return whole is op or whole == op
