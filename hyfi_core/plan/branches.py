"""Branches: which plane of a replica computes which operators of a stage.

A replica has ``plan.branches`` planes, each with the ranks of all stages and the same samples. Operators of parallel
branches are divided among the planes, all others are computed in every plane that uses them:

    plane 0    stem ── 1x1 ─────────────── cat ── head
                    ── 3x3 ──┐           ↗
    plane 1    stem ── 5x5 ──┴─ exchange ─ cat ── head

``cost.branch_packing`` chooses which plane computes what.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Branches:
    """The division of a stage's operators among planes.

    Attributes:
        planes: number of planes.
        regions: names of all operators, in the order in which every plane computes those that it has. Planes exchange
            values between regions.
        owners: operator -> the only plane that computes it; others are computed in every plane that uses them.
    """

    planes: int = 1
    regions: tuple[tuple[str, ...], ...] = ()
    owners: Mapping[str, int] = field(default_factory=dict)

    @property
    def order(self) -> dict[str, int]:
        """Operator -> its position in the order of computation."""
        names = (name for region in self.regions for name in region)
        return {name: at for at, name in enumerate(names)}
