"""The parallel plan: one frozen value that says how a model is distributed over ranks, validated on creation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any, Literal, get_args

from hyfi_core.errors import RequestError
from hyfi_core.plan.placement import Placement
from hyfi_core.plan.plan_fields import (
    check_count,
    check_flag,
    check_spill,
    parse_cells,
    parse_cuts,
    parse_grids,
    parse_recompute,
    parse_shares,
)

ScheduleName = Literal["sequential", "gpipe", "1f1b", "zb_h1", "gems_mast", "gems_master", "chimera"]
Mirror = Literal["all_reduce", "point_to_point"]
GATHER_BYTES = 32 * 2**20
"""Default of the largest map that every rank gathers: about 20 ms over shared memory."""
BUCKET_BYTES = 4 << 20
"""Approximate size of the buckets in which gradients are reduced."""
_ENDS = 4
"""Number of replicas, and of rows or columns of a grid, that ``describe`` shows at either end of a long list."""
BIDIRECTIONAL = ("gems_mast", "gems_master", "chimera")
"""Schedules in which two pipelines run through the same ranks in opposite order."""
DIVIDING = ("zb_h1",)
"""Schedules that divide a backward into the gradients of a stage's inputs and, later, those of its weights."""


@dataclass(frozen=True)
class ParallelPlan:
    """How a model is distributed over ranks.

    Attributes:
        grids: rows x columns of ranks, one entry for each stage.
        cuts: for each stage but the last, the module of the user's model after which it ends; or "auto".
        microbatches: micro-batches of one replica's batch.
        schedule: the order of forwards and backwards.
        replicas: data-parallel copies.
        fused_halo: largest number of window operators that share one exchange; 1: an exchange before each; "auto": by
            cost.
        interleave: virtual stages of each grid: stage s is on grid s mod the number of grids (schedule 1f1b). On one
            grid, they are pieces of the model: with ``recompute``, backward keeps the maps of one piece in memory.
        recompute: stages that recompute their activations in backward: all, none, or a list.
        mirror: how two directions share weights: gradients are summed over both, or sent to direction 0, which has the
            only optimizer state and sends new weights back.
        reduce_dtype: dtype of gradients in messages; None: their own.
        sync_batch_norm: whether batch norm computes its statistics over all replicas instead of each one.
        memory_bytes: limit of a rank: modelled for cuts="auto", actual with ``spill`` or ``tiles``; None: no limit.
        gather_bytes: most bytes of a map that ranks gather if an operator needs it whole; larger ones are refused.
        cells: rows x columns of cells in which each rank computes its part, one after the other, also in training;
            "auto": as many as ``memory_bytes`` requires, with ``spill``; None: no cells.
        spill: where activations that no cell currently needs are moved: a folder, or "memory" of the host; None:
            not moved. The limit is ``memory_bytes``, or half of the memory that is free when training begins.
        shares: samples of one step that each replica takes, None for equally many; see below.
        branches: planes of each replica. A plane has ranks for all grids and the replica's samples, and computes some
            of the model's parallel branches, so that there are replicas x branches x (ranks of all grids) ranks.
        tiles: ranks that share the tiles of a slide, for ``parallelize_tiles``; sets ``grids``. None: whole images.

    With ``shares``, every sample has the same weight in any replica, and micro-batch m of the whole batch is
    micro-batch m of every replica, in the order of replicas::

        sample           0 1 2 │ 3 4 5         shares = (4, 2), microbatches = 2
        replica          0 0 1 │ 0 0 1         replica 0 gets samples 0 1 3 4, replica 1 samples 2 5
        micro-batch        0   │   1

    So gradients, loss, random numbers and, if synchronised, statistics of batch norms are those of one process with the
    whole batch in as many micro-batches, for any ``shares``. Without ``shares`` all replicas have batches of the same
    size and weight.

    Raises:
        RequestError: a field is invalid; the message names it and what is allowed.
    """

    grids: tuple[tuple[int, int], ...] = ()
    cuts: tuple[str, ...] | Literal["auto"] = "auto"
    microbatches: int = 1
    schedule: ScheduleName = "1f1b"
    replicas: int = 1
    fused_halo: int | Literal["auto"] = "auto"
    interleave: int = 1
    recompute: bool | tuple[int, ...] = False
    mirror: Mirror = "all_reduce"
    reduce_dtype: Literal["bfloat16"] | None = None
    sync_batch_norm: bool = False
    memory_bytes: int | None = None
    gather_bytes: int = GATHER_BYTES
    shares: tuple[int, ...] | None = None
    cells: tuple[int, int] | Literal["auto"] | None = None
    spill: str | None = None
    branches: int = 1
    tiles: int | None = None

    def __post_init__(self) -> None:
        """Validate all fields."""
        if self.tiles is not None:
            _check_tiles(self)
            object.__setattr__(self, "grids", ((1, self.tiles),))
        object.__setattr__(self, "grids", parse_grids(self.grids))
        for name in ("microbatches", "replicas", "interleave", "branches"):
            check_count(name, getattr(self, name))
        check_flag("sync_batch_norm", self.sync_batch_norm)
        if self.cuts != "auto":
            object.__setattr__(self, "cuts", parse_cuts(self.cuts, self.stages))
        for name, kind in (("schedule", ScheduleName), ("mirror", Mirror)):
            if getattr(self, name) not in get_args(kind):
                raise RequestError(f"plan.{name} is {getattr(self, name)!r}; use one of {', '.join(get_args(kind))}")
        if self.fused_halo != "auto":
            check_count("fused_halo", self.fused_halo, '"auto" or a whole number from 1')
        if isinstance(self.gather_bytes, bool) or not isinstance(self.gather_bytes, int) or self.gather_bytes < 0:
            raise RequestError(f"plan.gather_bytes is {self.gather_bytes!r}; use a whole number from 0")
        if self.memory_bytes is not None:
            check_count("memory_bytes", self.memory_bytes, "null, or a number of bytes from 1")
        if self.reduce_dtype not in (None, "bfloat16"):
            raise RequestError(f"plan.reduce_dtype is {self.reduce_dtype!r}; use null or bfloat16")
        if self.cells is not None and self.cells != "auto":
            object.__setattr__(self, "cells", parse_cells(self.cells))
        check_spill(self.spill, self.cells)
        object.__setattr__(self, "recompute", parse_recompute(self.recompute, self.stages))
        if self.shares is not None:
            object.__setattr__(self, "shares", parse_shares(self.shares, self.replicas, self.microbatches))
        self._check_together()

    def _check_together(self) -> None:
        """Validate combinations of fields."""
        if self.directions == 2 and self.microbatches % 2:
            raise RequestError(
                f"plan.schedule {self.schedule!r} sends half of the micro-batches in each of two directions, but "
                f"plan.microbatches is {self.microbatches}; use an even number, such as {self.microbatches + 1}"
            )
        if self.interleave > 1 and self.schedule != "1f1b":
            raise RequestError(f"plan.interleave is {self.interleave} with schedule {self.schedule}; use schedule 1f1b")
        if self.interleave > 1 and len(self.grids) == 1 and self.spill is not None:
            raise RequestError(
                f"plan.interleave is {self.interleave} on one grid with plan.spill {self.spill!r}, but pieces compute "
                f"again what spilling would move; use spill=None, with named cells if any, or interleave=1"
            )
        if self.mirror == "point_to_point" and self.directions == 1:
            raise RequestError(
                f"plan.mirror is point_to_point, but schedule {self.schedule} has one direction and nothing to mirror; "
                f"use all_reduce, or one of {', '.join(BIDIRECTIONAL)}"
            )
        if self.divides_backwards and self.spill is not None:
            raise RequestError(
                f"plan.schedule is {self.schedule} with plan.spill {self.spill!r}, but what the gradients of weights "
                f"need later is not moved out of memory; use schedule 1f1b, or spill=None"
            )
        if self.branches > 1 and self.cells is not None:
            raise RequestError(
                f"plan.branches is {self.branches} with plan.cells {self.cells!r}, but cells of one rank take turns "
                f"and cannot wait for another plane's; use branches=1 or cells=None"
            )

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.grids) * self.interleave

    @property
    def directions(self) -> int:
        """2 for two pipelines through the same ranks in opposite order, else 1."""
        return 2 if self.schedule in BIDIRECTIONAL else 1

    @property
    def divides_backwards(self) -> bool:
        """Whether backwards have two parts: gradients of inputs, and later those of weights."""
        return self.schedule in DIVIDING

    def recomputes(self, stage: int) -> bool:
        """Whether a stage recomputes its activations in backward."""
        return self.recompute if isinstance(self.recompute, bool) else stage in self.recompute

    def weight(self, replica: int) -> Fraction:
        """Return a replica's fraction of the whole batch."""
        return Fraction(self.shares[replica], sum(self.shares)) if self.shares else Fraction(1, self.replicas)

    def share_of(self, replica: int) -> tuple[int, int] | None:
        """Return (samples of earlier replicas, samples of all replicas) in a micro-batch; None without shares."""
        if self.shares is None:
            return None
        before, total = sum(self.shares[:replica]), sum(self.shares)
        return before // self.microbatches, total // self.microbatches

    @property
    def mean_over(self) -> int:
        """Divisor of sums over replicas: their number; 1 with ``shares``, because losses are weighted beforehand."""
        return 1 if self.shares else self.replicas

    @property
    def ranks_per_plane(self) -> int:
        """Number of ranks of all grids, which together hold the model once."""
        return sum(rows * columns for rows, columns in self.grids)

    @property
    def ranks_per_replica(self) -> int:
        """Number of ranks of all planes of a replica."""
        return self.branches * self.ranks_per_plane

    @property
    def ranks(self) -> int:
        """Number of trainers: the ranks of all replicas."""
        return self.replicas * self.ranks_per_replica

    @property
    def cell_grid(self) -> tuple[int, int] | None:
        """Rows x columns of cells, after "auto" has been resolved; None without cells."""
        assert self.cells != "auto", "cells must be resolved first"
        return self.cells

    def by_cells(self) -> ParallelPlan:
        """Return the same plan with every cell as a rank; ``Placement.by_cells`` says which rank each cell is."""
        cells = self.cell_grid
        if cells is None:
            return self
        rows, columns = cells
        grids = tuple((rows * y, columns * x) for y, x in self.grids)
        fused_halo = 1 if self.fused_halo == "auto" else self.fused_halo  # an exchange between cells is a small copy
        return replace(self, grids=grids, cells=None, spill=None, fused_halo=fused_halo)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain lists, numbers and strings; the inverse of ``from_json``."""
        fields = asdict(self)
        fields["grids"] = [list(grid) for grid in self.grids]
        fields["cuts"] = self.cuts if self.cuts == "auto" else list(self.cuts)
        fields["recompute"] = self.recompute if isinstance(self.recompute, bool) else list(self.recompute)
        fields["shares"] = self.shares and list(self.shares)
        fields["cells"] = list(self.cells) if isinstance(self.cells, tuple) else self.cells
        return fields

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> ParallelPlan:
        """Return the plan whose fields ``to_json`` returned.

        Raises:
            RequestError: a field is unknown, missing or not legal.
        """
        names = tuple(cls.__dataclass_fields__)
        unknown = sorted(set(fields) - set(names))
        if unknown:
            raise RequestError(f"a plan has no field {unknown[0]!r}; its fields are {', '.join(names)}")
        if "grids" not in fields and fields.get("tiles") is None:
            raise RequestError("a plan needs 'grids': rows x columns of ranks for each stage, e.g. [[1, 2]]")
        return cls(**fields)

    def describe(self) -> str:
        """Return a readable text with stages, grids and ranks."""
        return _draw(self)


def _check_tiles(plan: ParallelPlan) -> None:
    """Refuse fields that divide images in a plan that divides the tiles of slides."""
    check_count("tiles", plan.tiles, "null, or a number of ranks from 1")
    if plan.grids and parse_grids(plan.grids) != ((1, plan.tiles),):
        raise RequestError(
            f"plan.tiles is {plan.tiles} with plan.grids {plan.grids!r}: ranks share either tiles of slides or parts "
            f"of images; leave grids out"
        )
    allowed = ("grids", "tiles", "replicas", "memory_bytes", "reduce_dtype", "microbatches", "gather_bytes")
    for name, field in ParallelPlan.__dataclass_fields__.items():
        if name not in allowed and (value := getattr(plan, name)) not in (field.default, ()):
            raise RequestError(
                f"plan.{name} is {value!r}, which does not go with plan.tiles: an encoder is computed tile by tile, in "
                f"chunks that fit memory_bytes; leave {name} out"
            )


def _count(number: int, noun: str) -> str:
    """Return ``1 rank``, ``2 ranks``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith('ch') else 's'}"


def _draw(plan: ParallelPlan) -> str:
    """Return a readable text with stages, grids, directions and ranks."""
    placement = Placement.of(plan)
    replicas = f"{_count(plan.replicas, 'replica')} of {_count(plan.ranks_per_replica, 'rank')}"
    if plan.tiles:
        shared = f"; the {plan.tiles} ranks of a replica share the tiles of each slide" if plan.tiles > 1 else ""
        return f"{_count(plan.ranks, 'trainer')}: {replicas}{shared}"
    parts = f"{replicas}, {_count(plan.stages, 'stage')}, {_count(plan.microbatches, 'micro-batch')}"
    lines = [f"{_count(plan.ranks, 'trainer')}: {parts}, schedule {plan.schedule}"]
    if plan.shares:
        lines.append(f"of every {sum(plan.shares)} samples, the replicas take {', '.join(map(str, plan.shares))}")
    if plan.cells == "auto":
        lines.append("each rank computes its part in as many cells as its memory requires")
    elif plan.cells:
        lines.append(f"each rank computes its part in {plan.cells[0]} x {plan.cells[1]} cells, one after the other")
    if plan.spill:
        where = "the host's memory" if plan.spill == "memory" else plan.spill
        most = f", so that a rank needs at most {plan.memory_bytes:,} bytes" if plan.memory_bytes else ""
        lines.append(
            f"activations that no cell needs are moved to {where} until they are needed{most}; cheap ones "
            f"are recomputed"
        )
    if plan.branches > 1:
        lines.append(f"parallel branches are divided among the {plan.branches} planes of a replica")
    width = len(str(plan.ranks - 1))
    for number in _shown(list(range(plan.replicas * plan.branches))):
        if number is None:
            lines.append("⋮")
            continue
        for direction in range(plan.directions):
            for stage in range(plan.stages):
                lines += _stage(plan, placement, number, direction, stage, width)
    return "\n".join(lines)


def _stage(plan: ParallelPlan, placement: Placement, number: int, direction: int, stage: int, width: int) -> list[str]:
    """Return the lines about a stage and its ranks in plane ``number``, counted over all replicas."""
    replica, plane = divmod(number, plan.branches)
    head = f"replica {replica}, plane {plane}" if plan.branches > 1 else f"replica {replica}"
    if plan.directions == 2:
        head += f", direction {direction}"
    rows, columns = placement.grids[stage]
    head += f", stage {stage}: {rows} x {columns} ranks"
    if plan.cuts != "auto" and stage < plan.stages - 1:
        head += f", to the end of {plan.cuts[stage]}"
    if plan.recomputes(stage):
        head += ", recomputed"
    lines = [head]
    first = number * plan.ranks_per_plane
    group = [first + rank for rank in placement.group(stage, direction)]
    for row in _shown(list(range(rows))):
        if row is None:
            lines.append(f"    {'⋮':>{width}}")
            continue
        ranks = _shown(group[row * columns : (row + 1) * columns])
        lines.append("    " + " │ ".join(f"{'…' if rank is None else rank:>{width}}" for rank in ranks))
    return lines


def _shown(items: list[int]) -> list[int | None]:
    """Return the items; of a long list only both ends, with None in place of the items between them."""
    return [*items[:_ENDS], None, *items[-_ENDS:]] if len(items) > 2 * _ENDS + 1 else [*items]
