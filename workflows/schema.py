"""The shape of a run's YAML: its sections, keys, defaults and what each may hold."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from hyfi_core.plan.parallel_plan import ParallelPlan
from workflows.sharing import check_sharing

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


def _user_path(value: Any) -> Any:
    return Path(value).expanduser() if isinstance(value, str) and value else value


def _pair(value: Any) -> Any:
    return (value, value) if isinstance(value, int) and not isinstance(value, bool) else value


UserPath = Annotated[Path, BeforeValidator(_user_path)]
Size = Annotated[tuple[Positive, Positive], BeforeValidator(_pair)]


class Section(BaseModel):
    """One block of the file: frozen, no key that is not named here."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, protected_namespaces=())


class AugmentConfig(Section):
    """How training images are varied; each is a function of (seed, epoch, slide) alone."""

    flips: bool = Field(True, description="true or false: mirror and turn by 90 degrees")
    stain: Share = Field(
        0.1, description="a number from 0 to 1: spread of the haematoxylin and eosin amounts; 0 turns it off"
    )
    colour: Share = Field(0.05, description="a number from 0 to 1: spread of brightness and contrast; 0 turns it off")


def _augment(value: Any) -> Any:
    if value is True:
        return AugmentConfig()
    return AugmentConfig(flips=False, stain=0.0, colour=0.0) if value is False or value is None else value


class DataConfig(Section):
    """Which slides, which labels, and how one training image is made of a slide."""

    store: UserPath = Field(description="the folder that `hyfi ingest --out` wrote")
    labels: UserPath | None = Field(
        None, description="a CSV keyed by slide_id or case_id; left out: the store's own manifest.csv"
    )
    target: str = Field("label", min_length=1, description="the column of the labels that holds the class")
    task: Literal["multiclass"] = Field("multiclass", description="multiclass")
    splits: UserPath | None = Field(None, description="a CSV of `hyfi split`; left out: a column of the labels")
    split_column: str = Field("split", min_length=1, description="the column that says train, val or test")
    size_px: Size = Field(description="a whole number of pixels, or [height, width], of one training image")
    mpp: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="microns per pixel > 0 that a level of the store has"
    )
    view: Literal["pack", "crop"] = Field("pack", description="pack or crop: how a slide becomes one image")
    align_px: Positive = Field(64, description="a whole number ≥ 1: grid on which tissue pieces are moved (the stride)")
    min_coverage: Share = Field(0.9, description="a number from 0 to 1: least share of the tissue in each image")
    batch_size: Positive = Field(1, description="a whole number ≥ 1: slides of one step, over all replicas")
    augment: Annotated[AugmentConfig, BeforeValidator(_augment)] = Field(
        default_factory=AugmentConfig, description="true, false, or the keys flips, stain, colour"
    )
    class_weights: Literal["none", "balanced"] = Field("none", description="none or balanced")
    case_aggregate: Literal["mean", "max", "none"] = Field(
        "mean", description="mean, max or none: how slides speak for their case in metrics by case"
    )
    sampling: Literal["shuffle", "balanced", "weighted"] = Field(
        "shuffle", description="shuffle (each slide once an epoch), balanced (classes alike often) or weighted"
    )
    weights_column: str | None = Field(
        None, min_length=1, description="a column of the labels: how often each slide is drawn (sampling: weighted)"
    )
    prefetch: Positive = Field(2, description="a whole number ≥ 1: batches made ready ahead of time")
    workers: Positive | None = Field(
        None, description="a whole number ≥ 1: decoding processes of each loader; left out: as many as it has threads"
    )
    cache_bytes: Count = Field(
        0, description="a whole number ≥ 0: bytes of decoded images kept in each loader's memory for later epochs"
    )

    @model_validator(mode="after")
    def _weights_are_named(self) -> DataConfig:
        if (self.sampling == "weighted") != (self.weights_column is not None):
            raise ValueError(
                f"sampling: {self.sampling} and weights_column: {self.weights_column}; weighted needs a column of the "
                "labels, the others take none"
            )
        return self


class ModelConfig(Section):
    """The classifier: an ordinary PyTorch module."""

    name: str = Field("resnet18", min_length=1, description="a built-in model, or package.module:factory")
    classes: Positive | tuple[str, ...] | None = Field(
        None, description="number of classes, or their names in order; left out: those of the labels, sorted"
    )
    weights: UserPath | None = Field(None, description="a local file of weights under torchvision's names")
    norm: Literal["train", "frozen", "group"] = Field("train", description="train, frozen or group")
    pool: Literal["avg", "max"] = Field("avg", description="avg or max")
    options: dict[str, Any] = Field(default_factory=dict, description="further arguments of the model, by name")


class PlanConfig(Section):
    """The fields of ``hyfi_core.ParallelPlan``, which checks how they fit together."""

    grids: tuple[tuple[Positive, Positive], ...] = Field(
        ((1, 1),), min_length=1, description="[rows, columns] of ranks for each stage, as in [[1, 2]]"
    )
    cuts: tuple[str, ...] | Literal["auto"] = Field("auto", description="modules that end a stage, or auto")
    microbatches: Positive = Field(1, description="a whole number ≥ 1: micro-batches of one replica")
    schedule: Literal["sequential", "gpipe", "1f1b", "gems_mast", "gems_master", "chimera"] = Field(
        "1f1b", description="sequential, gpipe, 1f1b, gems_mast, gems_master or chimera"
    )
    replicas: Positive = Field(1, description="a whole number ≥ 1: data-parallel copies")
    fused_halo: Positive | Literal["auto"] = Field(
        "auto", description="auto, or a whole number ≥ 1: most window operators for one exchange"
    )
    interleave: Positive = Field(1, description="a whole number ≥ 1: how often the grids are gone through (1f1b)")
    recompute: bool | tuple[int, ...] = Field(
        False, description="true, false, or the stages that compute their activations again in backward"
    )
    mirror: Literal["all_reduce", "point_to_point"] = Field(
        "all_reduce", description="all_reduce, or point_to_point: of two directions one owns the optimizer's state"
    )
    reduce_dtype: Literal["bfloat16"] | None = Field(None, description="null, or bfloat16: gradients on the wire")
    sync_batch_norm: bool = Field(False, description="true or false: batch norm over all replicas")
    memory_bytes: Positive | None = Field(
        None, description="null, or what a rank may need at most, as modelled; for cuts: auto"
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


def _with_design(value: Any) -> Any:
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
        0, description='a whole number ≥ 0, or a pattern of host names ("dpu-*"): ranks that validate meanwhile'
    )
    design: Design | None = Field(
        None,
        description="inline, offload_data, offload_validation, offload_all or offload_naive; left out: as the numbers "
        "say",
    )
    spare: Positive | Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description='a whole number ≥ 1, or a pattern of host names ("dpu-*"): ranks that train beside the plan\'s, as '
        "further replicas (offload_naive); left out: those of one replica",
    )
    shares: tuple[Positive, ...] | None = Field(
        None,
        description="slides of one step for each replica, as in [6, 2] (offload_naive); left out: by their speed, "
        "measured before the first step",
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


class OptimizerConfig(Section):
    """How gradients change weights."""

    name: Literal["sgd", "adamw"] = Field("adamw", description="sgd or adamw")
    lr: float = Field(1e-3, gt=0, allow_inf_nan=False, description="a number > 0: learning rate after the warm-up")
    momentum: Share = Field(0.9, description="a number from 0 to 1 (sgd)")
    betas: tuple[Share, Share] = Field((0.9, 0.999), description="two numbers from 0 to 1 (adamw)")
    weight_decay: Rate = Field(0.0, description="a number ≥ 0")
    max_norm: float | None = Field(None, gt=0, description="a number > 0: gradients are clipped to this global norm")
    accumulate: Positive = Field(1, description="a whole number ≥ 1: batches whose gradients make one update")
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        "none", description="none, linear or sqrt: how lr grows with the slides of one update"
    )
    lr_batch: Positive = Field(1, description="a whole number ≥ 1: slides of one update that lr is meant for")

    def scaled_lr(self, batch: int) -> float:
        """Return the learning rate for updates of ``batch`` slides."""
        power = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}[self.lr_scaling]
        return self.lr * (batch / self.lr_batch) ** power


class LrScheduleConfig(Section):
    """How the learning rate moves; counted in steps (updates)."""

    name: Literal["constant", "cosine", "step", "linear"] = Field(
        "constant", description="constant, cosine, step or linear"
    )
    warmup_steps: Count = Field(0, description="a whole number ≥ 0: steps of linear rise at the start")
    end_factor: Share = Field(0.0, description="a number from 0 to 1: last rate / first rate (cosine, linear)")
    every_steps: Positive | None = Field(None, description="a whole number ≥ 1: steps between two drops (step)")
    gamma: float = Field(0.1, gt=0, le=1, description="a number above 0, at most 1: factor of each drop (step)")

    @model_validator(mode="after")
    def _drops_are_placed(self) -> LrScheduleConfig:
        if self.name == "step" and self.every_steps is None:
            raise ValueError("name: step needs every_steps, the steps between two drops")
        return self


class ValidationConfig(Section):
    """When and on what the weights are judged."""

    every_steps: Positive | None = Field(None, description="a whole number ≥ 1; left out: after every epoch")
    split: Literal["val", "train"] = Field("val", description="val or train (test is for `hyfi validate`)")
    metric: Literal["auroc", "balanced_accuracy", "f1", "quadratic_kappa", "calibration_error", "loss"] = Field(
        "auroc",
        description="auroc, balanced_accuracy, f1, quadratic_kappa, calibration_error or loss: what makes a checkpoint "
        "the best",
    )
    policy: Literal["all", "latest"] = Field(
        "all", description="all (none is skipped) or latest (training never waits): where validators are behind"
    )
    grids: tuple[tuple[Positive, Positive], ...] | None = Field(
        None,
        min_length=1,
        description="[rows, columns] of validators for each stage, as in [[1, 2]]; left out: all of them in one row",
    )
    cells: tuple[Positive, Positive] | None = Field(
        None,
        description="[rows, columns] of cells, as in [4, 4]: each validator judges images of its own, one cell after "
        "the other, in the memory of a cell; left out: validators share each image as grids says",
    )

    @model_validator(mode="after")
    def _alone_with_its_cells(self) -> ValidationConfig:
        if self.cells is not None and self.grids not in (None, ((1, 1),)):
            raise ValueError(
                f"cells: {list(self.cells)} and grids: {[list(grid) for grid in self.grids or ()]}; with cells every "
                "validator has images of its own: leave grids out, or leave cells out"
            )
        return self


class RunConfig(Section):
    """Where the run writes, how long it is, how it computes."""

    dir: UserPath = Field(description="a folder for the run; must not exist unless --resume is given")
    epochs: Positive | None = Field(None, description="a whole number ≥ 1; either this or steps")
    steps: Positive | None = Field(None, description="a whole number ≥ 1; either this or epochs")
    seed: Count = Field(0, description="a whole number ≥ 0")
    precision: Literal["float32", "bfloat16", "float64"] = Field(
        "float32", description="float32, bfloat16 (autocast) or float64"
    )
    memory_format: Literal["channels_last", "contiguous"] = Field(
        "channels_last", description="channels_last or contiguous"
    )
    threads: Positive | None = Field(None, description="threads of each rank; left out: cores / ranks of the node")
    checkpoint_every_steps: Positive | None = Field(
        None, description="a whole number ≥ 1; left out: whenever the weights are validated"
    )
    keep: Positive = Field(3, description="a whole number ≥ 1: checkpoints kept beside latest and best")
    tensorboard: bool = Field(True, description="true or false: write TensorBoard events")
    ema: float | None = Field(
        None, gt=0, lt=1, description="a number between 0 and 1: decay of the weights' moving average; left out: none"
    )
    early_stop: Positive | None = Field(
        None, description="a whole number ≥ 1: validations without a better one that end the run; left out: none do"
    )

    @model_validator(mode="after")
    def _one_length(self) -> RunConfig:
        if (self.epochs is None) == (self.steps is None):
            given = "neither" if self.epochs is None else f"epochs: {self.epochs} and steps: {self.steps}"
            raise ValueError(f"give exactly one of epochs and steps (given: {given})")
        return self


class Config(Section):
    """A whole run. Built by :func:`workflows.config.load_config`; never changed."""

    data: DataConfig
    model: ModelConfig = Field(default_factory=ModelConfig)
    plan: PlanConfig = Field(default_factory=PlanConfig)
    roles: Annotated[RolesConfig, BeforeValidator(_with_design)] = Field(default_factory=RolesConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    lr_schedule: LrScheduleConfig = Field(default_factory=LrScheduleConfig)
    validation: ValidationConfig = Field(default_factory=ValidationConfig)
    run: RunConfig

    @property
    def ranks(self) -> int:
        """Processes of the whole run: trainers, loaders, validators; those chosen by host are not counted."""
        roles = (self.roles.loaders, self.roles.validators)
        return self.trainers + sum(role for role in roles if isinstance(role, int))

    @property
    def trainers(self) -> int:
        """Ranks that train: the plan's, and the spare ones that join them; those chosen by host are not counted."""
        spare = self.roles.spare
        if self.roles.design != "offload_naive" or isinstance(spare, str):
            return self.plan.ranks
        return self.plan.ranks + (spare or self.plan.ranks // self.plan.replicas)

    @model_validator(mode="after")
    def _batch_fits_plan(self) -> Config:
        if self.roles.design == "offload_naive":
            check_sharing(self)
            return self
        parts = self.plan.replicas * self.plan.microbatches
        if self.data.batch_size % parts:
            raise ValueError(
                f"data.batch_size: given {self.data.batch_size}; allowed: a multiple of plan.replicas × "
                f"plan.microbatches = {self.plan.replicas} × {self.plan.microbatches} = {parts}"
            )
        return self
