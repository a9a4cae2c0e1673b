"""Plans and geometry: pure values, standard library only."""

from hyfi_core.plan.box import Box
from hyfi_core.plan.layout import Layout
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.plan.transfer import Strip, Transfer, plan_transfer
from hyfi_core.plan.window import Window, Window1d

__all__ = ["Box", "Layout", "ParallelPlan", "Strip", "Transfer", "Window", "Window1d", "plan_transfer"]
