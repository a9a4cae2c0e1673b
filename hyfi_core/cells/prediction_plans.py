"""Plans for prediction and evaluation: how many ranks share a slide, in which cells, and whether maps leave memory.

    ranks 0 1 2 3      four slides at a time     two slides at a time     one slide at a time
    slide of each      a b c d                   a a b b                  a a a a
    memory of each     most                      less, with halos         least

The cost is that of a training step's forward, in evaluation mode: no backward, no gradients, norms frozen. More ranks
for a slide and more cells only cost time, so each is tried with the fewest cells with which it fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch

from hyfi_core.capture.program import Program
from hyfi_core.cells.budget import evaluation_bytes, spilled_bytes, with_cells
from hyfi_core.cells.fused_memory import CellCosts
from hyfi_core.cells.large_maps import fewest_cells
from hyfi_core.cost.machine import MachineModel
from hyfi_core.cost.memory.forecast import enough_gb
from hyfi_core.cost.operators import value_bytes
from hyfi_core.cost.step.lowered_stages import LoweredPlans
from hyfi_core.cost.step.stage_cost import StageCosts
from hyfi_core.errors import MemoryLimitError, RequestError
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.plan.strategy import squarest

_CELLS = (1, 2, 4, 8, 16)
"""Rows, and columns, of cells to try."""


@dataclass(frozen=True)
class PredictionNeeds:
    """What is to be planned.

    Attributes:
        command: ``predict``: the ranks of a slide are the squarest grid of any number of ranks that divides ``ranks``;
            ``validate``: all ranks share each slide in columns or, with cells, each rank has slides of its own.
        ranks: number of ranks of the run.
        machine: the machine model.
        memory_bytes: memory limit of a rank.
        held_bytes: bytes of it that a rank uses before it has a model.
        spills: whether maps may leave memory if nothing fits otherwise.
        dtype: dtype of convolutions and matrix products under autocast; None: that of their values.
    """

    command: Literal["predict", "validate"]
    ranks: int
    machine: MachineModel
    memory_bytes: int
    held_bytes: int = 0
    spills: bool = True
    dtype: str | None = None


@dataclass(frozen=True)
class PredictionForecast:
    """One way to predict slides.

    Attributes:
        grid: ranks that share a slide.
        cells: (rows, columns) of cells of each rank's part; None: none.
        spills: whether maps leave memory.
        groups: number of slides that are computed at the same time.
        memory_bytes: memory of each rank, the process included; with ``spills``, its limit.
        parts_s: seconds of a slide by part: compute, halo, sums, cells, spill.
    """

    grid: tuple[int, int]
    cells: tuple[int, int] | None
    spills: bool
    groups: int
    memory_bytes: int
    parts_s: dict[str, float]

    @property
    def slide_s(self) -> float:
        """Time from the first pixel of a slide to its logits."""
        return sum(self.parts_s.values())

    @property
    def each_s(self) -> float:
        """Seconds per slide, of many slides: several are in work at a time."""
        return self.slide_s / self.groups

    @property
    def bound_by(self) -> str:
        """The largest part of the time."""
        return max(self.parts_s, key=lambda name: self.parts_s[name])


@dataclass(frozen=True)
class PredictionSearch:
    """The ways that fit, fastest first, and why others do not.

    Attributes:
        plans: the ways that fit, those with the fewest seconds per slide first; of equals, those with the shorter
            time of a slide.
        refused: a way that does not fit or work, in words -> why.
    """

    plans: tuple[PredictionForecast, ...]
    refused: dict[str, str]


def prediction_plans(program: Program, needs: PredictionNeeds) -> PredictionSearch:
    """Return the ways to predict one slide after the other that fit into memory.

    Args:
        program: the captured model in evaluation mode, for one image.
        needs: ranks, machine and limits.

    Raises:
        RequestError: nothing fits, or the model cannot be divided so; the message says how much memory would do.
    """
    trials = _PredictionTrials(program, needs)
    fitting = [forecast for grid in _grids(needs) for forecast in trials.fitting(grid)]
    if not fitting and needs.spills:
        fitting = [forecast for grid in _grids(needs) for forecast in trials.spilling(grid)]
    if not fitting:
        raise RequestError(trials.why_none())
    fastest_first = sorted(fitting, key=lambda forecast: (forecast.each_s, forecast.slide_s))
    return PredictionSearch(tuple(fastest_first), trials.refused)


def _grids(needs: PredictionNeeds) -> list[tuple[int, int]]:
    """Return the grids of ranks to try for a slide."""
    if needs.command == "validate":
        return list(dict.fromkeys([(1, needs.ranks), (1, 1)]))
    return [squarest(size) for size in range(1, needs.ranks + 1) if needs.ranks % size == 0]


class _PredictionTrials:
    """Forecasts ways to predict a slide; the model is lowered once for each grid, of ranks and of cells."""

    def __init__(self, program: Program, needs: PredictionNeeds) -> None:
        self._program, self._needs = program, needs
        weights = sum(value_bytes(program, name) for name in (*program.parameters, *program.buffers))
        self._held = needs.held_bytes + weights
        self._least_bytes: int | None = None
        self._lowered = LoweredPlans()
        self._costs = CellCosts(program)
        self.refused: dict[str, str] = {}

    def fitting(self, grid: tuple[int, int]) -> Iterator[PredictionForecast]:
        """Yield the forecast with the fewest cells that fits into memory without spilling, if there is one."""
        sides = [side for side in _CELLS if side >= self._fewest(grid)] if self._may_have_cells(grid) else [1]
        for side in sides:
            cells = None if side == 1 and not self._always_has_cells(grid) else (side, side)
            try:
                rank_bytes = evaluation_bytes(self._costs, grid, cells or (1, 1), self._held)
                if rank_bytes > self._needs.memory_bytes:
                    self._note_need(rank_bytes)
                    self.refused[_named(grid, cells)] = f"needs {rank_bytes / 1e9:.3g} GB a rank"
                    continue
                yield self._forecast(grid, cells, rank_bytes)
            except RequestError as error:
                self.refused[_named(grid, cells)] = str(error)
                continue
            return

    def spilling(self, grid: tuple[int, int]) -> Iterator[PredictionForecast]:
        """Yield the forecast in cells whose maps leave memory, if that fits."""
        if not self._may_have_cells(grid):
            return
        limit = self._needs.memory_bytes
        plan = ParallelPlan((grid,), cells="auto", spill="memory", memory_bytes=limit)
        try:
            device, fewest = torch.device(self._needs.machine.device), self._fewest(grid)
            resolved = with_cells(
                plan, self._program, self._held, device, trains=False, costs=self._costs, fewest=fewest
            )
            yield self._forecast(grid, resolved.cell_grid, limit, spills=True)
        except MemoryLimitError as error:
            self._note_need(error.least_bytes)
            self.refused[f"{_named(grid, None)}, maps out of memory"] = f"needs {error.least_bytes / 1e9:.3g} GB a rank"
        except RequestError as error:
            self.refused[f"{_named(grid, None)}, maps out of memory"] = str(error)

    def why_none(self) -> str:
        """Return the message of the error if no way fits."""
        needs = self._needs
        if self._least_bytes is None:
            return f"no plan for {needs.command} works: {next(iter(self.refused.values()), 'none was tried')}"
        return (
            f"no way to {needs.command} with {needs.ranks} rank(s) fits into {needs.memory_bytes / 1e9:.3g} GB a rank; "
            f"the smallest needs {enough_gb(self._least_bytes)} GB: give more memory (--memory), "
            f"{'' if needs.spills else 'a folder for maps (--spill), '}more ranks (--ranks), or smaller images"
        )

    def _note_need(self, rank_bytes: int) -> None:
        """Note the bytes of a way that does not fit; the message of `why_none` names the fewest of all."""
        self._least_bytes = min(rank_bytes, self._least_bytes or rank_bytes)

    def _always_has_cells(self, grid: tuple[int, int]) -> bool:
        """Whether a plan must have cells, if only 1 x 1: ``hyfi validate`` gives ranks slides of their own by them."""
        return self._needs.command == "validate" and self._needs.ranks > 1 and prod(grid) == 1

    def _may_have_cells(self, grid: tuple[int, int]) -> bool:
        """Whether a rank may compute its part in cells: messages between GPUs have no tags, which cells need."""
        shared = prod(grid) > 1
        return not shared or (self._needs.machine.device != "cuda" and self._needs.command == "predict")

    def _fewest(self, grid: tuple[int, int]) -> int:
        """Return the fewest rows (and columns) of cells with which the kernels of a GPU are fast; 1 on a CPU."""
        if self._needs.machine.device != "cuda":
            return 1
        return min(fewest_cells(self._program, ParallelPlan((grid,))), _CELLS[-1])

    def _forecast(
        self, grid: tuple[int, int], cells: tuple[int, int] | None, memory_bytes: int, spills: bool = False
    ) -> PredictionForecast:
        """Return the forecast of a prediction by the ranks of a grid, each in these cells; None: in one piece."""
        needs, machine = self._needs, self._needs.machine
        plan = ParallelPlan((grid,), replicas=needs.ranks // prod(grid))
        (stage,) = StageCosts(self._program, plan, machine, needs.dtype, self._lowered).stages
        halo_s, sums_s = stage.halo_s / 2, stage.sums_s / 2  # the other half is in backward
        parts = {"compute": stage.forward_s - halo_s - sums_s, "halo": halo_s, "sums": sums_s}
        count = prod(cells or (1, 1))
        if count > 1:
            assert cells is not None
            cost = self._costs.of((grid[0] * cells[0], grid[1] * cells[1]))
            # Each cell but the first starts every kernel once more.
            starts_s = (count - 1) * len(self._program.operators) * machine.kernel_s
            parts["cells"] = (cost.work - 1) * parts["compute"] + starts_s
            if spills:
                out_bytes = spilled_bytes(int(cost.peak_bytes) // prod(grid), needs.memory_bytes)
                parts["spill"] = machine.spill_s(out_bytes, needs.ranks)
        return PredictionForecast(grid, cells, spills, plan.replicas, memory_bytes, parts)


def _named(grid: tuple[int, int], cells: tuple[int, int] | None) -> str:
    """Return a way as text: ``2 ranks a slide, 4 x 4 cells``."""
    ranks = f"{prod(grid)} rank{'s' if prod(grid) > 1 else ''} a slide"
    return ranks if cells is None else f"{ranks}, {cells[0]} x {cells[1]} cells"
