"""The sections ``plan`` and ``roles`` of a run's YAML."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from hyfi_core.plan.parallel_plan import BIDIRECTIONAL, DIVIDING, Mirror, ParallelPlan, ScheduleName
from workflows.config.section import Count, Positive, Section

_DEFAULT = ParallelPlan(grids=((1, 1),))


def _either(choices: Iterable[str]) -> str:
    """Return ``a, b or c``."""
    *others, last = choices
    return f"{', '.join(others)} or {last}"


class PlanConfig(Section):
    """The parallel plan: how images and layers are divided among ranks. The fields of ``hyfi_core.ParallelPlan``."""

    # Defaults and choices are those of ParallelPlan, which refuses what does not fit together.

    grids: tuple[tuple[Positive, Positive], ...] = Field(
        _DEFAULT.grids,
        min_length=1,
        description="a list of [rows, columns], as in [[1, 2]]: ranks among which the images of each stage are "
        "divided, a grid for each stage",
    )
    cuts: tuple[str, ...] | Literal["auto"] = Field(
        _DEFAULT.cuts,
        description="auto, or a list of modules, as in [layer2]: the modules after which all stages but the last "
        "end; auto: by cost",
    )
    microbatches: Positive = Field(
        _DEFAULT.microbatches,
        description="a whole number ≥ 1: micro-batches of each replica's batch; with more, a rank needs less memory",
    )
    schedule: ScheduleName = Field(
        _DEFAULT.schedule,
        description=f"{_either(get_args(ScheduleName))}: the pipeline schedule; {', '.join(BIDIRECTIONAL)}: two "
        f"pipelines in opposite directions; {', '.join(DIVIDING)}: gradients of weights are computed while ranks would "
        "otherwise wait",
    )
    replicas: Positive = Field(
        _DEFAULT.replicas, description="a whole number ≥ 1: data-parallel replicas, each with its part of every batch"
    )
    fused_halo: Positive | Literal["auto"] = Field(
        _DEFAULT.fused_halo,
        description="auto, or a whole number ≥ 1: largest number of window operators (convolutions, pools) for one "
        "halo exchange; auto: by cost",
    )
    interleave: Positive = Field(
        _DEFAULT.interleave,
        description="a whole number ≥ 1: virtual stages of each grid (interleaved 1f1b); on one grid, with recompute, "
        "pieces of the model that are computed again one after the other",
    )
    recompute: bool | tuple[int, ...] = Field(
        _DEFAULT.recompute,
        description="true, false, or a list of stages from 0: stages that recompute their activations in backward, "
        "to save memory",
    )
    mirror: Mirror = Field(
        _DEFAULT.mirror,
        description="all_reduce or point_to_point: how two directions keep weights equal: both update them "
        "(all_reduce), or one does, with the only optimizer state, and sends them to the other (point_to_point)",
    )
    reduce_dtype: Literal["bfloat16"] | None = Field(
        _DEFAULT.reduce_dtype, description="null or bfloat16: dtype of gradients sent between replicas; null: their own"
    )
    sync_batch_norm: bool = Field(
        _DEFAULT.sync_batch_norm,
        description="true or false: whether batch norm computes its statistics over all replicas instead of each one",
    )
    memory_bytes: Positive | None = Field(
        _DEFAULT.memory_bytes,
        description="null, or a whole number ≥ 1: memory limit of a rank in bytes: of the memory model for cuts: "
        "auto, and of the process with plan.spill or plan.tiles",
    )

    gather_bytes: Count = Field(
        _DEFAULT.gather_bytes,
        description="a whole number ≥ 0: bytes of the largest map that every rank may gather for an operator that "
        "cannot be computed part by part; larger ones are refused",
    )

    cells: tuple[Positive, Positive] | Literal["auto"] | None = Field(
        _DEFAULT.cells,
        description="null, auto, or rows and columns, each a whole number ≥ 1, as in [4, 4]: each trainer computes "
        "its part of the image in this many cells, one after the other, with the same result; auto: as many as "
        "memory_bytes requires, none if everything fits",
    )

    spill: str | None = Field(
        _DEFAULT.spill,
        description="null, memory, or a folder: where activations that no cell currently needs are moved "
        "(plan.cells), so that a trainer needs at most memory_bytes, or half of the free memory; in a folder, they are "
        "in an unnamed file that ends with the run",
    )

    branches: Positive = Field(
        _DEFAULT.branches,
        description="a whole number ≥ 1: planes of each replica: each has ranks for all grids and the same images, and "
        "computes some of the model's parallel branches (Inception modules, cells of AmoebaNet)",
    )

    tiles: Positive | None = Field(
        _DEFAULT.tiles,
        description="null, or a whole number ≥ 1: ranks that share the tiles of each slide (data.tiles); default with "
        "data.tiles: 1",
    )

    @model_validator(mode="after")
    def _is_a_plan(self) -> PlanConfig:
        self.build()
        return self

    def build(self) -> ParallelPlan:
        """Return the ``ParallelPlan`` of these fields."""
        return ParallelPlan(**self.model_dump(exclude={"grids"} if self.tiles is not None else None))

    @property
    def ranks(self) -> int:
        """Number of trainers: replicas × branches × Σ rows × columns."""
        return self.build().ranks


Design = Literal["inline", "offload_data", "offload_validation", "offload_all", "offload_naive"]
DESIGNS = {
    "inline": (False, False),
    "offload_data": (True, False),
    "offload_validation": (False, True),
    "offload_all": (True, True),
    "offload_naive": (False, False),
}
"""(Loaders, validators): whether a design has such ranks. In the DPU papers: baseline, O-DA, O-MV, O-Hy, O-N."""


def with_design(value: Any) -> Any:
    """Return the section ``roles`` as given, with one rank for each role of its design that has no number."""
    design = value.get("design") if isinstance(value, dict) else None
    if not isinstance(design, str) or design not in DESIGNS:  # `in` takes no list
        return value
    return {**{role: int(has_role) for role, has_role in _roles_of(design).items()}, **value}


def _roles_of(design: str) -> dict[str, bool]:
    """Return whether a design has loaders, and whether it has validators, by the name of the key."""
    return dict(zip(("loaders", "validators"), DESIGNS[design], strict=True))


class RolesConfig(Section):
    """Ranks in addition to the trainers; without them, trainers load and validate themselves, with the same results.

    With ``offload_naive``, spare ranks train as additional replicas, with shares of each batch in proportion to speed.
    """

    loaders: Count | Annotated[str, Field(min_length=1)] = Field(
        0, description='a whole number ≥ 0, or a pattern of host names ("dpu-*"): ranks that load slides ahead of time'
    )
    validators: Count | Annotated[str, Field(min_length=1)] = Field(
        0,
        description='a whole number ≥ 0, or a pattern of host names ("dpu-*"): ranks that validate while training '
        "continues",
    )
    design: Design | None = Field(
        None,
        description="inline, offload_data, offload_validation, offload_all or offload_naive: sets loaders and "
        "validators: none, one loader, one validator, one of each, or spare ranks that train; default: the values of "
        "loaders and validators",
    )
    spare: Positive | Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description='a whole number ≥ 1, or a pattern of host names ("dpu-*"): ranks that train in addition to the'
        " plan's, as further replicas (offload_naive); default: one replica",
    )
    shares: tuple[Positive, ...] | None = Field(
        None,
        description="a list of whole numbers ≥ 1, as in [6, 2]: slides of one batch for each replica "
        "(offload_naive); default: by their speed, measured before the first step",
    )

    @property
    def by_host(self) -> bool:
        """Whether the number of ranks depends on the hosts."""
        return any(isinstance(role, str) for role in (self.loaders, self.validators, self.spare))

    @model_validator(mode="after")
    def _is_the_design(self) -> RolesConfig:
        """Refuse roles that are not those of the design."""
        if self.design != "offload_naive" and (self.spare is not None or self.shares is not None):
            raise ValueError(
                f"spare: {self.spare} and shares: {self.shares} need design: offload_naive; given design: {self.design}"
            )
        has = (bool(self.loaders), bool(self.validators))
        if self.design is not None and has != DESIGNS[self.design]:
            roles = _roles_of(self.design).items()
            needs = " and ".join(f"{role}: {'some' if has_role else 0}" for role, has_role in roles)
            raise ValueError(
                f"design: {self.design} means {needs}; given loaders: {self.loaders}, validators: {self.validators}"
            )
        return self
