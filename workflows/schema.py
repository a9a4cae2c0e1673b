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

    flips: bool = Field(
        True, description="true or false: mirror, and turn by quarters (by halves where the image is not square)"
    )
    stain: Share = Field(
        0.1,
        description="a number from 0 to 1: spread of the haematoxylin and eosin amounts, factors in 1 ± this; 0 turns"
        " it off",
    )
    colour: Share = Field(
        0.05, description="a number from 0 to 1: spread of brightness and contrast, factors in 1 ± this; 0 turns it off"
    )


def _augment(value: Any) -> Any:
    if value is True:
        return AugmentConfig()
    return AugmentConfig(flips=False, stain=0.0, colour=0.0) if value is False or value is None else value


class DataConfig(Section):
    """Which slides, which labels, and how one training image is made of a slide."""

    store: UserPath = Field(description="a folder: the one that `hyfi ingest --out` wrote")
    labels: UserPath | None = Field(
        None,
        description="a CSV file: the class of each slide, by slide_id or case_id; left out: the store's own "
        "manifest.csv",
    )
    target: str = Field(
        "label",
        min_length=1,
        description="a column of the labels: holds the class; where it is empty the slide is not used",
    )
    task: Literal["multiclass"] = Field(
        "multiclass", description="multiclass: the kind of question; each slide has one class of two or more"
    )
    splits: UserPath | None = Field(
        None, description="a CSV file: what `hyfi split` wrote; left out: the labels with their split_column"
    )
    split_column: str = Field(
        "split",
        min_length=1,
        description="a column of the splits: says train, val or test (split_2 where `hyfi split --folds` made folds)",
    )
    size_px: Size = Field(description="a whole number of pixels, or [height, width]: size of one training image")
    mpp: float = Field(
        1.0,
        gt=0,
        allow_inf_nan=False,
        description="a number > 0: microns per pixel of the training images; a level of the store must have it",
    )
    view: Literal["pack", "crop"] = Field(
        "pack",
        description="pack or crop: how a slide becomes one image: its tissue moved together (pack), or the window "
        "with most tissue (crop)",
    )
    align_px: Positive = Field(
        64,
        description="a whole number ≥ 1: pixels of the grid on which tissue pieces are moved; a multiple of the "
        "network's stride",
    )
    min_coverage: Share = Field(
        0.9,
        description="a number from 0 to 1: least share of its tissue that each slide's image shows; less is refused",
    )
    batch_size: Positive = Field(
        1,
        description="a whole number ≥ 1: slides of one batch, over all replicas; a multiple of plan.replicas × "
        "plan.microbatches",
    )
    augment: Annotated[AugmentConfig, BeforeValidator(_augment)] = Field(
        default_factory=AugmentConfig,
        description="true, false, or the keys flips, stain, colour: how training images are varied; true: as the "
        "defaults say",
    )
    class_weights: Literal["none", "balanced"] = Field(
        "none", description="none or balanced: what a class counts in the loss; balanced: the more, the rarer it is"
    )
    case_aggregate: Literal["mean", "max", "none"] = Field(
        "mean",
        description="mean, max or none: who speaks for a case of several slides: all of them alike (mean), the most "
        "advanced (max), or nobody (none: no metrics by case)",
    )
    sampling: Literal["shuffle", "balanced", "weighted"] = Field(
        "shuffle",
        description="shuffle, balanced or weighted: which slides an epoch draws: each once (shuffle), each class "
        "alike often (balanced), or as weights_column says (weighted)",
    )
    weights_column: str | None = Field(
        None,
        min_length=1,
        description="a column of the labels: numbers ≥ 0, how often each slide is drawn against others (sampling: "
        "weighted)",
    )
    prefetch: Positive = Field(
        2, description="a whole number ≥ 1: batches that loaders send ahead of the one being worked on"
    )
    workers: Positive | None = Field(
        None, description="a whole number ≥ 1: decoding processes of each loader; left out: as many as it has threads"
    )
    cache_bytes: Count = Field(
        0,
        description="a whole number ≥ 0: bytes of decoded images that each loader (each trainer where there are none)"
        " keeps in memory for later epochs",
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

    name: str = Field(
        "resnet18",
        min_length=1,
        description="resnet6, resnet10, resnet18, resnet34, resnet50, resnet_v1, resnet_v2, amoebanet_d, or "
        "package.module:factory: a built-in network, or a function of your own that returns one",
    )
    classes: Positive | tuple[str, ...] | None = Field(
        None,
        description="a whole number ≥ 1, or a list of names: the classes, in order; left out: those of the labels, "
        "sorted",
    )
    weights: UserPath | None = Field(
        None,
        description="a .safetensors or .pth file: weights to begin with, under torchvision's names; left out: random "
        "ones",
    )
    norm: Literal["train", "frozen", "group"] = Field(
        "train",
        description="train, frozen or group: what normalises in the built-in ResNets: batch norm (train), batch norm "
        "that stays as loaded (frozen), or group norm (group)",
    )
    pool: Literal["avg", "max"] = Field(
        "avg",
        description="avg or max: what the built-in ResNets take of their last map; max suits classes that one small "
        "focus decides",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="keys of the model: its further arguments by name, as in {width: 16}"
    )


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
        description="null, or a whole number ≥ 1: bytes that a rank may need at most, as modelled, where cuts are auto",
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
        0,
        description='a whole number ≥ 0, or a pattern of host names ("dpu-*"): ranks that validate while training '
        "goes on",
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


class OptimizerConfig(Section):
    """How gradients change weights."""

    name: Literal["sgd", "adamw"] = Field("adamw", description="sgd or adamw: how a gradient becomes an update")
    lr: float = Field(1e-3, gt=0, allow_inf_nan=False, description="a number > 0: learning rate after the warm-up")
    momentum: Share = Field(0.9, description="a number from 0 to 1: how much of the last update goes on (sgd)")
    betas: tuple[Share, Share] = Field(
        (0.9, 0.999),
        description="two numbers from 0 to 1: decays of the means of gradients and of their squares (adamw)",
    )
    weight_decay: Rate = Field(0.0, description="a number ≥ 0: how strongly weights are drawn to 0")
    max_norm: float | None = Field(
        None, gt=0, description="a number > 0: gradients are clipped to this global norm; left out: they are not"
    )
    accumulate: Positive = Field(
        1, description="a whole number ≥ 1: batches whose mean gradient makes one update (a step)"
    )
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        "none",
        description="none, linear or sqrt: how lr grows with the slides of one update: not, by slides / lr_batch, or "
        "by its root",
    )
    lr_batch: Positive = Field(
        1, description="a whole number ≥ 1: slides of one update that lr is meant for (lr_scaling: linear, sqrt)"
    )

    def scaled_lr(self, batch: int) -> float:
        """Return the learning rate for updates of ``batch`` slides."""
        power = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}[self.lr_scaling]
        return self.lr * (batch / self.lr_batch) ** power


class LrScheduleConfig(Section):
    """How the learning rate moves; counted in steps (updates)."""

    name: Literal["constant", "cosine", "step", "linear"] = Field(
        "constant", description="constant, cosine, step or linear: how the rate moves after the warm-up"
    )
    warmup_steps: Count = Field(0, description="a whole number ≥ 0: steps of linear rise at the start")
    end_factor: Share = Field(
        0.0, description="a number from 0 to 1: last rate / rate after the warm-up (cosine, linear)"
    )
    every_steps: Positive | None = Field(
        None, description="a whole number ≥ 1: steps between two drops (step, which needs it)"
    )
    gamma: float = Field(0.1, gt=0, le=1, description="a number above 0, at most 1: factor of each drop (step)")

    @model_validator(mode="after")
    def _drops_are_placed(self) -> LrScheduleConfig:
        if self.name == "step" and self.every_steps is None:
            raise ValueError("name: step needs every_steps, the steps between two drops")
        return self


class ValidationConfig(Section):
    """When and on what the weights are judged."""

    every_steps: Positive | None = Field(
        None, description="a whole number ≥ 1: steps between two validations; left out: those of an epoch"
    )
    split: Literal["val", "train"] = Field(
        "val", description="val or train: whose slides judge the weights (test is for `hyfi validate`)"
    )
    metric: Literal["auroc", "balanced_accuracy", "f1", "quadratic_kappa", "calibration_error", "loss"] = Field(
        "auroc",
        description="auroc, balanced_accuracy, f1, quadratic_kappa, calibration_error or loss: what makes a "
        "checkpoint the best",
    )
    policy: Literal["all", "latest"] = Field(
        "all",
        description="all or latest: what is judged where validators are behind: every checkpoint (all), or only the "
        "newest, so that training never waits (latest)",
    )
    grids: tuple[tuple[Positive, Positive], ...] | None = Field(
        None,
        min_length=1,
        description="a list of [rows, columns], as in [[1, 2]]: validators that each image is spread over, a grid for"
        " each stage; left out: all of them in one row",
    )
    cells: tuple[Positive, Positive] | None = Field(
        None,
        description="[rows, columns], as in [4, 4]: each validator judges images of its own, one cell after the "
        "other, in the memory of a cell; left out: validators share each image as grids says",
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

    dir: UserPath = Field(description="a folder: what the run writes; must not exist unless --resume is given")
    epochs: Positive | None = Field(
        None, description="a whole number ≥ 1: length of the run; give either this or steps"
    )
    steps: Positive | None = Field(
        None, description="a whole number ≥ 1: length of the run in updates; give either this or epochs"
    )
    seed: Count = Field(
        0, description="a whole number ≥ 0: first weights, order and variation of slides; the same seed, the same run"
    )
    precision: Literal["float32", "bfloat16", "float64"] = Field(
        "float32",
        description="float32, bfloat16 or float64: type that the model computes in; with bfloat16 (autocast) weights "
        "stay float32",
    )
    memory_format: Literal["channels_last", "contiguous"] = Field(
        "channels_last",
        description="channels_last or contiguous: how images and convolutions lie in memory; decides speed",
    )
    threads: Positive | None = Field(
        None, description="a whole number ≥ 1: threads of each rank; left out: cores / ranks of the node"
    )
    checkpoint_every_steps: Positive | None = Field(
        None,
        description="a whole number ≥ 1: steps between two checkpoints, beside those that are validated; left out: "
        "those alone",
    )
    keep: Positive = Field(3, description="a whole number ≥ 1: newest checkpoints that are kept; the best stays, too")
    tensorboard: bool = Field(True, description="true or false: whether TensorBoard events are written")
    ema: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="a number between 0 and 1: decay of the weights' moving average, which then is judged and "
        "predicts; left out: none is kept",
    )
    early_stop: Positive | None = Field(
        None,
        description="a whole number ≥ 1: validations in a row without a better one that end the run; left out: none do",
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
