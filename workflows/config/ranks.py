"""The sections ``plan`` and ``roles`` of a run's YAML: which ranks there are, and what each does."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from hyfi_core.plan.parallel_plan import GATHER_BYTES, ParallelPlan
from workflows.config.section import Count, Positive, Section


class PlanConfig(Section):
    """How images and layers are spread over ranks: the fields of ``hyfi_core.ParallelPlan``, which checks them."""

    grids: tuple[tuple[Positive, Positive], ...] = Field(
        ((1, 1),),
        min_length=1,
        description="a list of [rows, columns], as in [[1, 2]]: ranks that each stage's images are spread over, a "
        "grid for each stage",
    )
    cuts: tuple[str, ...] | Literal["auto"] = Field(
        "auto",
        description="auto, or a list of modules, as in [layer2]: each stage but the last ends after one; auto: by cost",
    )
    microbatches: Positive = Field(
        1,
        description="a whole number ≥ 1: parts in which each replica's batch goes through the model; more need less "
        "memory",
    )
    schedule: Literal["sequential", "gpipe", "1f1b", "gems_mast", "gems_master", "chimera"] = Field(
        "1f1b",
        description="sequential, gpipe, 1f1b, gems_mast, gems_master or chimera: order of forwards and backwards; the"
        " last three run two pipelines in opposite directions",
    )
    replicas: Positive = Field(
        1, description="a whole number ≥ 1: data-parallel copies of the grids, each with its part of every batch"
    )
    fused_halo: Positive | Literal["auto"] = Field(
        "auto",
        description="auto, or a whole number ≥ 1: most window operators (convolutions, pools) for one exchange of "
        "borders; auto: by cost",
    )
    interleave: Positive = Field(
        1,
        description="a whole number ≥ 1: how often the grids are gone through, as further stages (1f1b on two grids "
        "or more)",
    )
    recompute: bool | tuple[int, ...] = Field(
        False,
        description="true, false, or a list of stages from 0: which compute their activations again in backward, to "
        "save memory",
    )
    mirror: Literal["all_reduce", "point_to_point"] = Field(
        "all_reduce",
        description="all_reduce or point_to_point: how the two directions of a schedule share weights: both update "
        "them (all_reduce), or one, which alone holds the optimizer's state (point_to_point)",
    )
    reduce_dtype: Literal["bfloat16"] | None = Field(
        None, description="null or bfloat16: type of gradients on the wire between replicas; null: their own"
    )
    sync_batch_norm: bool = Field(
        False,
        description="true or false: whether batch norm takes its statistics over all replicas, not over each alone",
    )
    memory_bytes: Positive | None = Field(
        None,
        description="null, or a whole number ≥ 1: bytes that a rank may need at most: as modelled, where cuts are "
        "auto; as held in fact, where maps may leave memory (plan.spill)",
    )

    gather_bytes: Count = Field(
        GATHER_BYTES,
        description="a whole number ≥ 0: bytes of the largest map that every rank may gather for an operator that "
        "cannot be computed by parts; beyond it the model is refused",
    )

    cells: tuple[Positive, Positive] | Literal["auto"] | None = Field(
        None,
        description="null, auto, or rows and columns, each a whole number ≥ 1, as in [4, 4]: each trainer computes its "
        "part of the image in so many cells, one after the other, with the same result; auto: as many as memory_bytes "
        "asks for, none where all fits",
    )

    spill: str | None = Field(
        None,
        description="null, memory, or a folder: where maps go that no cell needs now (plan.cells), so that a trainer "
        "holds no more than memory_bytes, or half of what is free; the file there has no name, and ends with the run",
    )

    @model_validator(mode="after")
    def _is_a_plan(self) -> PlanConfig:
        self.build()
        return self

    def build(self) -> ParallelPlan:
        """Return the plan itself."""
        return ParallelPlan(**self.model_dump())

    @property
    def ranks(self) -> int:
        """Trainers: replicas × Σ rows × columns."""
        return self.build().ranks


Design = Literal["inline", "offload_data", "offload_validation", "offload_all", "offload_naive"]
DESIGNS = {
    "inline": (False, False),
    "offload_data": (True, False),
    "offload_validation": (False, True),
    "offload_all": (True, True),
    "offload_naive": (False, False),
}
"""Names of the DPU papers' designs (baseline, O-DA, O-MV, O-Hy, O-N): whether others load, whether others validate."""


def with_design(value: Any) -> Any:
    """Fill in one rank for each role that a design has and that is not given."""
    if not isinstance(value, dict) or value.get("design") not in DESIGNS:
        return value
    roles = zip(("loaders", "validators"), DESIGNS[value["design"]], strict=True)
    return {**{role: int(wanted) for role, wanted in roles}, **value}


class RolesConfig(Section):
    """Ranks beside the plan's; without them trainers do that work themselves, with the same numbers.

    ``offload_naive`` has them train, too: as further replicas, with shares of each batch in proportion to speed.
    """

    loaders: Count | Annotated[str, Field(min_length=1)] = Field(
        0, description='a whole number ≥ 0, or a pattern of host names ("dpu-*"): ranks that read slides ahead of time'
    )
    validators: Count | Annotated[str, Field(min_length=1)] = Field(
        0,
        description='a whole number ≥ 0, or a pattern of host names ("dpu-*"): ranks that validate while training '
        "continues",
    )
    design: Design | None = Field(
        None,
        description="inline, offload_data, offload_validation, offload_all or offload_naive: loaders and validators "
        "by one word: none, one loader, one validator, one of each, or ranks that train, too (spare); "
        "left out: as their numbers say",
    )
    spare: Positive | Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description='a whole number ≥ 1, or a pattern of host names ("dpu-*"): ranks that train beside the plan\'s, as'
        " further replicas (offload_naive); left out: those of one replica",
    )
    shares: tuple[Positive, ...] | None = Field(
        None,
        description="a list of whole numbers ≥ 1, as in [6, 2]: slides of one batch for each replica (offload_naive);"
        " left out: by their speed, measured before the first step",
    )

    @property
    def by_host(self) -> bool:
        """Whether how many ranks there are is known only where they run."""
        return any(isinstance(role, str) for role in (self.loaders, self.validators, self.spare))

    @model_validator(mode="after")
    def _is_the_design(self) -> RolesConfig:
        if self.design != "offload_naive" and (self.spare is not None or self.shares is not None):
            raise ValueError(
                f"spare: {self.spare} and shares: {self.shares} are for design: offload_naive, whose spare ranks train "
                f"on shares of each batch; given design: {self.design}"
            )
        has = (bool(self.loaders), bool(self.validators))
        if self.design is not None and has != DESIGNS[self.design]:
            needs = " and ".join(f"{role}: {'some' if w else 0}" for role, w in self._wanted(self.design))
            raise ValueError(
                f"design: {self.design} means {needs}; given loaders: {self.loaders}, validators: {self.validators}"
            )
        return self

    @staticmethod
    def _wanted(design: str) -> list[tuple[str, bool]]:
        return list(zip(("loaders", "validators"), DESIGNS[design], strict=True))
