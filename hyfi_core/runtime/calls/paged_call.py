"""A call of an engine that spills, as far as it decides how much of the maps stays in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hyfi_core.cells.page_forecast import PagedForecast, forecast_pages
from hyfi_core.cells.paging import Paging
from hyfi_core.cells.spill_forecast import SpillForecast
from hyfi_core.cost.machine import MachineModel
from hyfi_core.cost.memory.forecast import STATE_COPIES
from hyfi_core.cost.step.simulator import forecast_step
from hyfi_core.plan.batch_shapes import Shape
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.runtime.batch_reader import Images, PixelParts
from hyfi_core.runtime.lowered_model import LoweredModel
from hyfi_core.runtime.subject import Subject
from hyfi_core.schedule.in_flight import microbatches_in_flight


@dataclass(frozen=True)
class PagedCall:
    """A training step or an evaluation, described by what its memory depends on.

    Attributes:
        micro: shape of a micro-batch.
        trains: whether it is a training step.
        pixels: dtype of the pixels from which images are computed; None: images are kept.
    """

    micro: Shape
    trains: bool
    pixels: torch.dtype | None = None

    def forecasts(self, subject: Subject, plan: ParallelPlan, of_cells: Iterable[LoweredModel]) -> list[PagedForecast]:
        """Return the forecast of each stage in each cell, with all micro-batches in flight.

        Args:
            subject: the model.
            plan: plan of the run.
            of_cells: the model as each cell of a process runs it.
        """
        flights = max(microbatches_in_flight(plan, stage) for stage in range(plan.stages)) if self.trains else 1
        return [
            forecast_pages(stage.ranked, stage.tape, stage.position, self.trains, self.pixels).times(flights)
            for lowered in of_cells
            for stage in lowered.hosted.values()
        ]

    def state_bytes_to_come(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
        """Return the bytes of gradients and optimizer state that do not exist yet, but must fit beside the call's maps.

        For an evaluation that is the optimizer's state, which exists between training steps.
        """
        weight_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad and not p.is_meta)
        # Each as large as the weights: the optimizer's moments if it has none yet, and the gradient of a training step.
        moments = STATE_COPIES - 1 if optimizer is not None and not optimizer.state else 0
        return weight_bytes * (moments + self.trains)

    def described(
        self,
        paging: Paging,
        forecasts: Sequence[PagedForecast],
        subject: Subject,
        plan: ParallelPlan,
        machine: MachineModel | None,
    ) -> list[str]:
        """Return lines of text: what a training step keeps and spills and, on a machine, how long it takes.

        Args:
            paging: paging of the process.
            forecasts: forecasts of all cells of the process.
            subject: the model.
            plan: plan of the run.
            machine: the machine model; None: no times.
        """
        lines, limit = [paging.describe(self, forecasts)], paging.pages_bytes(self)
        if machine is None or limit is None:
            return lines
        dtype = None if subject.settings.autocast is None else str(subject.settings.autocast).removeprefix("torch.")
        spills = SpillForecast(machine, pixels=self.pixels, pages_bytes=limit)
        forecast = forecast_step(subject.program(self.micro), plan, machine, dtype, spills=spills)
        lines.append(
            f"expected of a step on {machine.name}: at least {forecast.step_s:.3g} s, bound by {forecast.bound_by} "
            f"(compute {forecast.step_s - forecast.exposed_s['spill']:.3g} s, {forecast.recomputing_s:.3g} s of it for "
            f"what is computed again; spilled maps are written and read in {forecast.moving_s:.3g} s at the same time)"
        )
        return lines


def pixels_of(images: Images) -> torch.dtype | None:
    """Return the dtype of the pixels from which images are computed; None if they are not."""
    return images.pixel_dtype if isinstance(images, PixelParts) else None
