"""Fused runs: where ranks compute margins that others own, so that several windows need one exchange.

How they are chosen is in ``lowering.fused_halo`` and ``cost.fused_depth``; this is what was chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hyfi_core.plan.box import Box

Boxes = tuple[Box, ...]
"""One box for each rank."""


@dataclass(frozen=True)
class FusedRuns:
    """The fused runs of a program on a grid; empty where every window operator exchanges by itself.

    Attributes:
        inside: operators that may work on more than what a rank owns; any other ends the run.
        computed: operator -> what each rank computes of its results, where that is more than its part.
        shared: value -> what each rank is brought of it by one exchange that several operators share.
    """

    inside: frozenset[str] = frozenset()
    computed: Mapping[str, Boxes] = field(default_factory=dict)
    shared: Mapping[str, Boxes] = field(default_factory=dict)


def covers(held: Sequence[Box], need: Sequence[Box], whole: Box) -> bool:
    """Whether every rank holds what it needs within the map."""
    return all(has.contains(wanted.intersect(whole)) for has, wanted in zip(held, need, strict=True))
