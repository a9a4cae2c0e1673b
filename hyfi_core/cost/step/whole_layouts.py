"""Layouts of a whole model; most stages of plans have the same layouts and need not be lowered to know them.

    model on 1 x 4 ranks    a ── b ── c ── d ── e ── f        lowered once, without fused runs
    stage of a plan                   c ── d ── e             the same layouts, if its inputs are divided alike
    stage of another             b ── c ── d ── e ── f        likewise

The same model for another micro-batch size has the same layouts if all maps are B × C × H × W: none is cut along the
batch. An operator's layout follows from that of its inputs. A stage receives values in even parts; in a whole model,
windows may have made them uneven. Operators may also differ at the ends of a stage, and a few depend on what follows
them. Such stages are lowered by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
        program: the captured model.
        ranked: the program lowered for one rank.
        operators: name -> operator, as it was lowered.
    """

    program: Program
    ranked: RankProgram
    operators: Mapping[str, Operator]

    @classmethod
    def of(cls, program: Program, target: Target) -> WholeLayouts | None:
        """Lower a captured model as a whole for the grid of ``target``; return None if that cannot be done."""
        pooled = pool_before_relu(program, refs_in(program.outputs))
        try:
            ranked = lower(pooled, replace(target, entries={}))
        except RequestError:
            return None
        return cls(program, ranked, {op.name: op for op in lowered_operators(pooled, pooled.outputs, ())})

    def serve(self, program: Program) -> bool:
        """Whether a program has the same layouts: it is the same model with another number of images."""
        if program is self.program:
            return True
        if self.ranked.gathered:  # whether ranks gather a map depends on its size
            return False
        # Only maps (B, C, H, W): where height and width share a dim with other sizes, as in ``x.view(B * H * W, C)``,
        # layouts may depend on the number of images.
        if any(split.dims != (2, 3) or not split.has_own_dims for split in self.ranked.splits.values()):
            return False
        own, other = self.program.values, program.values
        return own.keys() == other.keys() and all(
            own[name].shape[1:] == other[name].shape[1:] for name in self.ranked.splits if name in own
        )

    def hold_for(self, operators: Sequence[Operator], entries: Mapping[str, Split | None]) -> bool:
        """Whether a stage, lowered by itself, would have the same layouts as in the whole model.

        Args:
            operators: the stage's operators, as they would be lowered.
            entries: value that the stage receives -> how it is split; None for a replicated value.
        """
        splits = self.ranked.splits
        # Layouts of the operators in `ahead` depend on later operators, which may be in another stage.
        return all(splits.get(name) == split for name, split in entries.items()) and all(
            op.name not in self.ranked.ahead and self._same(op) for op in operators
        )

    def _same(self, op: Operator) -> bool:
        """Whether the whole model has an operator with the same name and layouts."""
        whole, splits = self.operators.get(op.name), self.ranked.splits
        if whole is op or whole == op:
            return True
        # They may differ in sizes that contain the batch, as those of a view, if none of their values is split.
        return whole is not None and whole.inputs == op.inputs and not any(name in splits for name in _names(op, whole))


def _names(*operators: Operator) -> Iterator[str]:
    """Yield the inputs and results of operators."""
    for op in operators:
        yield from op.inputs
        yield from (name for name in op.outputs if name is not None)
