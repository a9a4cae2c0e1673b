"""The parallel plan: one frozen value that says how a model is spread over ranks, checked when it is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from hyfi_core.errors import RequestError

Schedule = Literal["sequential", "gpipe", "1f1b", "gems_mast", "gems_master", "chimera"]


@dataclass(frozen=True)
class ParallelPlan:
    """How a model is spread over ranks.

    Attributes:
        grids: rows x columns of ranks, one entry for each stage.
        cuts: each stage but the last ends after this module of the user's model; or "auto".
        microbatches: micro-batches of one replica's batch.
        schedule: the order of forwards and backwards.
        replicas: data-parallel copies.
        fused_halo: most window operators for one exchange; 1 = an exchange before each; "auto" = by cost.

    Raises:
        RequestError: a field is not legal; the message names it and what would be.
    """

    grids: tuple[tuple[int, int], ...]
    cuts: tuple[str, ...] | Literal["auto"] = "auto"
    microbatches: int = 1
    schedule: Schedule = "1f1b"
    replicas: int = 1
    fused_halo: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        """Check every field against the others."""
        object.__setattr__(self, "grids", _parse_grids(self.grids))
        if self.cuts != "auto":
            object.__setattr__(self, "cuts", _parse_cuts(self.cuts, len(self.grids)))
        for name in ("microbatches", "replicas"):
            _check_count(name, getattr(self, name))
        if self.schedule not in get_args(Schedule):
            raise RequestError(f"plan.schedule is {self.schedule!r}; use one of {', '.join(get_args(Schedule))}")
        if self.fused_halo != "auto":
            _check_count("fused_halo", self.fused_halo, '"auto" or a whole number from 1')

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.grids)

    @property
    def ranks_per_replica(self) -> int:
        """Ranks of one replica."""
        return sum(rows * columns for rows, columns in self.grids)

    @property
    def ranks(self) -> int:
        """Trainers: ranks of all replicas."""
        return self.replicas * self.ranks_per_replica

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain lists, numbers and strings; ``from_json`` gives it back."""
        fields = asdict(self)
        fields["grids"] = [list(grid) for grid in self.grids]
        fields["cuts"] = self.cuts if self.cuts == "auto" else list(self.cuts)
        return fields

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> ParallelPlan:
        """Return the plan of ``to_json``.

        Raises:
            RequestError: a field is unknown, missing or not legal.
        """
        known = tuple(cls.__dataclass_fields__)
        unknown = sorted(set(fields) - set(known))
        if unknown:
            raise RequestError(f"a plan has no field {unknown[0]!r}; its fields are {', '.join(known)}")
        if "grids" not in fields:
            raise RequestError("a plan needs 'grids': rows x columns of ranks for each stage, e.g. [[1, 2]]")
        return cls(**fields)

    def describe(self) -> str:
        """Return stages, grids and ranks as text for people."""
        head = f"{self.ranks} trainers: {self.replicas} replica(s) of {self.ranks_per_replica}, {self.stages} stage(s)"
        lines = [f"{head}, {self.microbatches} micro-batch(es), schedule {self.schedule}"]
        for replica in range(self.replicas):
            first = replica * self.ranks_per_replica
            for stage, (rows, columns) in enumerate(self.grids):
                lines.append(f"replica {replica}, stage {stage}: {rows} x {columns} ranks")
                width = len(str(self.ranks - 1))
                for row in range(rows):
                    ranks = range(first + row * columns, first + (row + 1) * columns)
                    lines.append("    " + " │ ".join(f"{rank:>{width}}" for rank in ranks))
                first += rows * columns
        return "\n".join(lines)


def _check_count(name: str, value: Any, allowed: str = "a whole number from 1") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RequestError(f"plan.{name} is {value!r}; use {allowed}")


def _parse_grids(grids: Any) -> tuple[tuple[int, int], ...]:
    example = "use rows x columns for each stage, e.g. ((1, 2),)"
    try:
        parsed = tuple((rows, columns) for rows, columns in grids)
    except (TypeError, ValueError):
        raise RequestError(f"plan.grids is {grids!r}; {example}") from None
    if not parsed:
        raise RequestError(f"plan.grids is empty; {example}")
    for grid in parsed:
        if any(isinstance(side, bool) or not isinstance(side, int) or side < 1 for side in grid):
            raise RequestError(f"plan.grids has {grid!r}; both sides are whole numbers from 1: {example}")
    return parsed


def _parse_cuts(cuts: Any, stages: int) -> tuple[str, ...]:
    if isinstance(cuts, str) or not all(isinstance(cut, str) for cut in cuts):
        raise RequestError(f'plan.cuts is {cuts!r}; use "auto" or names of modules, one for each cut')
    if len(cuts) != stages - 1:
        raise RequestError(f"plan.cuts names {len(cuts)} module(s), but {stages} stage(s) need {stages - 1}")
    return tuple(cuts)
