"""What an engine says of itself, its model and its last step."""

from __future__ import annotations

from hyfi_core.cells.page import PagerCounts
from hyfi_core.cells.paging import Paging
from hyfi_core.comm.counted import Span
from hyfi_core.cost.model_flops import training_flops
from hyfi_core.lowering.compiling.segment_compiler import SegmentCompiler
from hyfi_core.plan.batch_shapes import BatchShapes, Shape
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.rules.batch_norm import has_live_statistics
from hyfi_core.runtime.calls.last_map import has_last_map
from hyfi_core.runtime.calls.replayed_steps import ReplayedSteps
from hyfi_core.runtime.calls.runners import Runners
from hyfi_core.runtime.groups import Groups
from hyfi_core.runtime.lowered_model import LoweredModel
from hyfi_core.runtime.subject import Subject
from hyfi_core.schedule.action import Schedule


class EngineFacts:
    """Facts of an engine on this rank. ``Engine`` sets the attributes.

    Attributes:
        plan: plan of the engine.
    """

    plan: ParallelPlan
    _subject: Subject
    _shapes: BatchShapes
    _groups: Groups
    _runners: Runners
    _paging: Paging | None
    _replayed: ReplayedSteps

    def _lowered(self, micro: Shape | None = None) -> LoweredModel:
        """Return the lowered model for micro-batches of a shape."""
        raise AssertionError("Engine has this method")

    def traffic(self) -> dict[str, dict[str, int]]:
        """Return messages and bytes sent by this rank in the last step, by kind; including those between its cells."""
        return self._groups.traffic(*self._runners.groups)

    def seconds(self) -> dict[str, float]:
        """Return the seconds that this rank waited in the last step, for ``halo``, ``stage``, ``reduce``, ``spill``."""
        return self._groups.seconds() | ({"spill": counts.wait_s} if (counts := self.spilled()) is not None else {})

    @property
    def segments(self) -> SegmentCompiler | None:
        """The compiler of the model's segments, with those compiled so far; None: segments run uncompiled."""
        return self._subject.compiler

    def record_spans(self, spans: list[Span] | None) -> None:
        """Append (kind, begin, end) of each time spent on messages to ``spans`` from now on; None: stop."""
        self._groups.record_spans(spans)
        self._replayed.allowed = spans is None

    def flops_per_image(self) -> float:
        """Return the operations of an image's forward and backward; see ``training_flops``."""
        lowered = self._lowered()
        return training_flops(lowered.program, lowered.trained) / self._shapes.micro[0]

    @property
    def normalises_batches(self) -> bool:
        """Whether the model has batch norm in training mode, which normalises the images of a micro-batch together."""
        return any(has_live_statistics(op) for op in self._lowered().program.operators)

    @property
    def pools_a_map(self) -> bool | None:
        """Whether the model reduces a feature map to its logits, which `explain` needs; None if the plan has stages."""
        return has_last_map(self._lowered().only.ranked) if self.plan.stages == 1 else None

    def spilled(self) -> PagerCounts | None:
        """Return the bytes that the last call wrote, read and recomputed; None if ``plan.spill`` is not set."""
        return None if self._paging is None else self._paging.pager.counts

    def schedule(self) -> Schedule:
        """Return the lowered schedule of a training step: all actions of the ranks of a replica, or of their cells."""
        return self._runners[0].schedule(self._lowered())
