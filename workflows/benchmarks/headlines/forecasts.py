"""Steps of published networks and plans on a machine; each network is captured once for each shape."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from hyfi_core.capture.export import capture
from hyfi_core.capture.program import Program
from hyfi_core.cells.spill_forecast import SpillForecast
from hyfi_core.cost.machine import MachineModel
from hyfi_core.cost.machines.machine_file import load_machine
from hyfi_core.cost.search.cuts import with_cuts
from hyfi_core.cost.step.lowered_stages import LoweredPlans
from hyfi_core.cost.step.simulator import StepForecast, forecast_step
from hyfi_core.cost.step.stage_cost import StageCosts
from hyfi_core.models.amoebanet import amoebanet_d
from hyfi_core.models.blocks import Bottleneck
from hyfi_core.models.resnet import ResNet, resnet50, resnet_v2
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.schedule.in_flight import recomputes
from workflows.training.memory import PROCESS_BYTES

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "AmoebaNet-D (18, 208)": lambda: amoebanet_d(1000, 18, 208),
    "AmoebaNet-D (18, 256)": lambda: amoebanet_d(1000, 18, 256),
    "AmoebaNet-D (18, 416)": lambda: amoebanet_d(1000, 18, 416),
    "ResNet-50": lambda: resnet50(1000),
    "ResNet-101": lambda: ResNet(Bottleneck, (3, 4, 23, 3), 1000),
    "ResNet-1001": lambda: resnet_v2(1001, classes=10),
}


class Forecasts:
    """Forecasts of training steps on the machines of the package."""

    def __init__(self) -> None:
        self._programs: dict[tuple[str, int, int], Program] = {}
        # For each machine, the plans that are lowered already.
        self._lowered: dict[str, LoweredPlans] = {}

    def step(self, network: str, size: int, images: int, plan: ParallelPlan, machine: str) -> StepForecast:
        """Return the forecast of a step.

        Args:
            network: One of ``NETWORKS``.
            size: Height and width of the images.
            images: Number of images in a replica's batch.
            plan: The plan, with automatic or named cuts.
            machine: One of ``machine_names()``.
        """
        program, model = self._program(network, size, images // plan.microbatches), self.machine(machine)
        # A cache for each machine: plans that are lowered already, and their costs.
        lowered_plans = self._lowered.setdefault(machine, LoweredPlans())
        spills = SpillForecast(model, PROCESS_BYTES)
        return forecast_step(
            program, with_cuts(plan, program, model), model, lowered_plans=lowered_plans, spills=spills
        )

    def step_s(self, network: str, size: int, images: int, plan: ParallelPlan, machine: str) -> float:
        """Return the seconds of a step; see ``step``."""
        return self.step(network, size, images, plan, machine).step_s

    def torchgpipe_step_s(
        self, network: str, size: int, images: int, plan: ParallelPlan, machine: str, but_last: bool
    ) -> float:
        """Return the seconds of a step of torchgpipe, which recomputes activations while it waits for cotangents.

        Our schedules recompute after the cotangents have arrived. In a GPipe schedule, only the first micro-batch to go
        back waits: while it is in one stage, all earlier stages wait for its cotangents, and torchgpipe recomputes its
        forward there meanwhile. This saves the forward of each stage but the last, which has its cotangents at once.

        Args:
            network: As for ``step``.
            size: As for ``step``.
            images: As for ``step``.
            plan: As for ``step``; the plan recomputes.
            machine: As for ``step``.
            but_last: Whether all micro-batches but the last are recomputed: the last goes back first, and torchgpipe
                can keep its activations.
        """
        program, model = self._program(network, size, images // plan.microbatches), self.machine(machine)
        stages = StageCosts(
            program, plan, model, lowered_plans=self._lowered.setdefault(machine, LoweredPlans())
        ).stages
        *others_s, last_s = (stage.forward_s for stage in stages)
        # Whether the last stage recomputes that micro-batch: in our schedules only where that saves memory.
        theirs, ours = int(not but_last), int(recomputes(plan, plan.stages - 1))
        # Our step, less the forwards that torchgpipe recomputes while it waits.
        return self.step_s(network, size, images, plan, machine) - sum(others_s) + last_s * (theirs - ours)

    def machine(self, name: str) -> MachineModel:
        """Return a machine of the package."""
        return load_machine(name).with_tf32()

    def _program(self, network: str, size: int, images: int) -> Program:
        key = network, size, images
        if key not in self._programs:
            self._programs[key] = capture(NETWORKS[network](), (images, 3, size, size), torch.float32)
        return self._programs[key]
