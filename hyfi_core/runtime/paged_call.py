"""A call of an engine that spills: what decides how much it keeps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from hyfi_core.capture.autocast import dtypes_under_autocast
from hyfi_core.cells.page_forecast import PagedForecast, forecast_pages
from hyfi_core.cost.memory import STATE_COPIES, microbatches_in_flight
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.runtime.batch_reader import Images, PixelParts, Shape
from hyfi_core.runtime.compiled import Compiled
from hyfi_core.runtime.subject import Subject


@dataclass(frozen=True)
class PagedCall:
    """A training step or an evaluation.

    Attributes:
        micro: shape of a micro-batch.
        trains: whether it is a training step.
        pixels: dtype of the pixels from which images are computed; None: images are kept.
    """

    micro: Shape
    trains: bool
    pixels: torch.dtype | None = None

    def forecasts(self, subject: Subject, plan: ParallelPlan, of_cells: Iterable[Compiled]) -> list[PagedForecast]:
        """Return what stages need, with all micro-batches in flight.

        Args:
            subject: the model.
            plan: of the run.
            of_cells: the model as each cell of a process runs it.
        """
        flights = max(microbatches_in_flight(plan, stage) for stage in range(plan.stages)) if self.trains else 1
        dtypes = dict[str, torch.dtype]()
        if subject.autocast is not None:
            program = subject.program(self.micro)
            dtypes.update(dtypes_under_autocast(program, subject.autocast, subject.device.type))
        return [
            forecast_pages(one.ranked, one.tape, one.position, dtypes, self.trains, self.pixels).times(flights)
            for compiled in of_cells
            for one in compiled.hosted.values()
        ]

    def new_bytes(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
        """Return the bytes of gradients and optimizer state that do not exist yet, and will afterwards."""
        if not self.trains:
            return 0
        weights = sum(p.nbytes for p in model.parameters() if p.requires_grad and not p.is_meta)
        return weights * (STATE_COPIES if optimizer is not None and not optimizer.state else 1)


def pixels_of(images: Images) -> torch.dtype | None:
    """Return the dtype of the pixels from which images are computed; None if they are not."""
    return images.pixel_dtype if isinstance(images, PixelParts) else None
