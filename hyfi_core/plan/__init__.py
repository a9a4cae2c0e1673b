"""Plans and geometry: pure values, standard library only."""

from hyfi_core.plan.box import Box
from hyfi_core.plan.layout import Layout
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.plan.transfer import Strip, Transfer, plan_transfer
from hyfi_core.plan.window import AxisWindow, Window

__all__ = ["AxisWindow", "Box", "Layout", "ParallelPlan", "Strip", "Transfer", "Window", "plan_transfer"]
