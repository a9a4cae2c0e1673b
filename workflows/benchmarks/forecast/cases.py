"""Networks and plans whose forecasts are compared with measurements."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from hyfi_core.models.amoebanet import amoebanet_d
from hyfi_core.models.resnet import resnet18, resnet50
from hyfi_core.plan.parallel_plan import ParallelPlan

BATCH = 4
"""Images of a step, over all replicas."""
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": lambda: resnet18(classes=2),
    "resnet50": lambda: resnet50(classes=2),
    "amoebanet": lambda: amoebanet_d(classes=2, layers=3, filters=64),
}
_ONE, _TWO = (1, 1), ((1, 1), (1, 1))
_ALONE = ParallelPlan(grids=(_ONE,))
PLANS: dict[str, tuple[ParallelPlan, ...]] = {
    "resnet18": (
        _ALONE,
        ParallelPlan(grids=(_ONE,), cells=(2, 1)),
        ParallelPlan(grids=((1, 2),)),
        ParallelPlan(grids=_TWO, microbatches=4),
        ParallelPlan(grids=_TWO, microbatches=4, schedule="zb_h1"),
        ParallelPlan(grids=_TWO, microbatches=2, schedule="chimera"),
        ParallelPlan(grids=(_ONE,), replicas=2),
        ParallelPlan(grids=((2, 2),)),
        ParallelPlan(grids=(_ONE,) * 4, microbatches=4),
        ParallelPlan(grids=((1, 2), _ONE, _ONE), microbatches=2),
        ParallelPlan(grids=(_ONE,), replicas=4),
    ),
    "resnet50": (
        _ALONE,
        ParallelPlan(grids=(_ONE,), recompute=True),
        ParallelPlan(grids=((2, 1),), fused_halo=1),
        ParallelPlan(grids=_TWO, microbatches=2, schedule="gpipe", recompute=True),
        ParallelPlan(grids=_TWO, microbatches=4, schedule="gems_master"),
        ParallelPlan(grids=_TWO, microbatches=2, replicas=2),
        ParallelPlan(grids=((1, 2),), replicas=2),
    ),
    "amoebanet": (
        _ALONE,
        ParallelPlan(grids=(_ONE,), microbatches=2),
        ParallelPlan(grids=((1, 2),)),
        ParallelPlan(grids=(_ONE,), branches=2),
        ParallelPlan(grids=_TWO, microbatches=2),
        ParallelPlan(grids=_TWO, schedule="sequential"),
        ParallelPlan(grids=(_ONE,) * 4, microbatches=4, schedule="chimera"),
        ParallelPlan(grids=(_ONE,), replicas=4),
    ),
}
"""Plans for one, two and four ranks."""


def label(plan: ParallelPlan) -> str:
    """Return the fields of a plan that are not at their defaults."""
    fields, defaults = plan.to_json(), _ALONE.to_json()
    return ", ".join(f"{key} {value}" for key, value in fields.items() if key == "grids" or value != defaults[key])
