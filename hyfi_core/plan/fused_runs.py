"""Fused runs: ranks compute margins of neighbouring parts, so that several windows need only one exchange.

They are chosen in ``lowering.fused_halo`` and ``cost.fused_depth``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hyfi_core.plan.boxes import Boxes


@dataclass(frozen=True)
class FusedRuns:
    """The fused runs of a program on a grid; empty if every window operator has its own exchange.

    Attributes:
        inside: operators that may compute margins; others end a fused run.
        computed: operator -> boxes of its results that ranks compute, if larger than their parts.
        shared: value -> boxes that ranks receive in one exchange for several operators.
    """

    inside: frozenset[str] = frozenset()
    computed: Mapping[str, Boxes] = field(default_factory=dict)
    shared: Mapping[str, Boxes] = field(default_factory=dict)
