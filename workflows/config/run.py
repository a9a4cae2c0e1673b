"""The section ``run`` of a run's YAML, and the whole configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from hyfi_core.errors import RequestError
from workflows.config.data import DataConfig, ModelConfig
from workflows.config.learning import LrScheduleConfig, OptimizerConfig, ValidationConfig
from workflows.config.ranks import PlanConfig, RolesConfig, with_design
from workflows.config.section import AutoOrOff, Count, Positive, Section, Switch, UserPath
from workflows.config.tasks import LOWER_IS_BETTER
from workflows.config.tiles import AggregatorConfig, without_meaning

OnNonfinite = Literal["stop", "skip", "continue"]


class RunConfig(Section):
    """Output folder, length, device and precision of the run."""

    dir: UserPath = Field(description="a folder: output of the run; must not exist unless --resume is given")
    epochs: Positive | None = Field(
        None, description="a whole number ≥ 1: length of the run in epochs; give either this or steps"
    )
    steps: Positive | None = Field(
        None, description="a whole number ≥ 1: length of the run in updates; give either this or epochs"
    )
    seed: Count = Field(
        0,
        description="a whole number ≥ 0: seed of initial weights, order of slides and augmentation; the same seed "
        "gives the same run",
    )
    precision: Literal["float32", "bfloat16", "float64"] = Field(
        "float32",
        description="float32, bfloat16 or float64: dtype of the computation; with bfloat16 (autocast) weights stay "
        "float32",
    )
    tf32: bool = Field(
        False,
        description="true or false: whether GPUs may round the operands of float32 products and convolutions to TF32, "
        "10 bits of mantissa, for speed; PyTorch by itself does so in convolutions",
    )
    deterministic: bool = Field(
        False,
        description="true or false: whether PyTorch uses only operators that repeat their results bit by bit on the "
        "same GPU with the same plan, which may be slower; an operator that cannot ends the run, with its name",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description="auto, cpu or cuda: device of the trainers; cuda: one GPU for each, refused if there are too "
        "few; auto: cuda if there are enough, else cpu; validators use GPUs that trainers leave free",
    )
    memory_format: Literal["channels_last", "contiguous"] = Field(
        "channels_last",
        description="channels_last or contiguous: memory format of images and convolutions; affects speed only",
    )
    compile: Switch = Field(
        "auto",
        description="auto, off or on: whether torch.compile fuses the operators between messages; auto: on GPUs, "
        "unless plan.spill is given; child processes compile while the first steps run uncompiled, or, with "
        "run.deterministic, the first step compiles; operators that cannot be compiled run as they are, with a "
        "warning; affects speed and rounding only",
    )
    cuda_graphs: AutoOrOff = Field(
        "auto",
        description="auto or off: whether equal steps are recorded as CUDA graphs and repeated; auto: with one trainer "
        "on a GPU, unless plan.spill is given or the model draws random numbers; the same results, in less time of "
        "the host; validation frees their memory, and later steps are recorded again",
    )
    compile_cache: UserPath | None = Field(
        None,
        description="null, or a folder that only you can write: where compiled operators are kept for later runs; "
        "null: TORCHINDUCTOR_CACHE_DIR, else hyfi/compile in your cache folder (~/.cache)",
    )
    threads: Positive | None = Field(
        None, description="a whole number ≥ 1: threads of each rank; default: cores / ranks of the node"
    )
    checkpoint_every_steps: Positive | None = Field(
        None,
        description="a whole number ≥ 1: steps between two checkpoints, in addition to validated ones; default: "
        "validated ones only",
    )
    keep: Positive = Field(
        3, description="a whole number ≥ 1: number of latest checkpoints to keep; the best is always kept"
    )
    trace: Count = Field(
        0,
        description="a whole number ≥ 0: steps in RUN/trace.json, which shows what every trainer did when (in "
        "Perfetto); the first step, which captures the model, is not among them unless it is the only one",
    )
    machine: str | None = Field(
        None,
        description="null, the name of a machine model (see hyfi plan --machine), or a file of hyfi doctor "
        "--measure: its peak FLOP/s, from which the run computes its utilisation; null: utilisation is not recorded",
    )
    tensorboard: bool = Field(True, description="true or false: whether TensorBoard events are written")
    loggers: tuple[Literal["mlflow", "wandb"], ...] = Field(
        (),
        description="a list of mlflow and wandb: where settings and metrics are recorded, too; offline in the run's "
        "folder, or where MLFLOW_TRACKING_URI and WANDB_MODE say; a logger that fails does not end the run",
    )
    ema: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="a number between 0 and 1: decay of the moving average of the weights, which is then validated "
        "and used for prediction; default: no average",
    )
    early_stop: Positive | None = Field(
        None,
        description="a whole number ≥ 1: the run ends after this many validations in a row without improvement; "
        "default: no early stopping",
    )

    stall_s: float | None = Field(
        None,
        ge=0,
        description="a number ≥ 0: seconds after which a rank that shows no sign of life (frozen) or makes no progress "
        "in training ends the run with its name; 0: never; default: 10 times the longest step, at least 300; while "
        "something compiles, a checkpoint is written or the first step runs, lack of progress is allowed for at least "
        "1800 s; after a request to stop, a frozen rank ends it in 10 s or 3 steps",
    )
    on_nonfinite: OnNonfinite = Field(
        "stop",
        description="stop, skip or continue: what happens to a step whose loss or gradient is not finite: the run ends "
        "with exit code 1 and without its update (stop), the step is left out and the run goes on (skip; on GPUs the "
        "host then waits for each step), or it is only recorded (continue); weights are saved only if finite",
    )

    @property
    def rounds_to_tf32(self) -> bool:
        """Whether GPUs with tensor cores round the operands of products and convolutions to TF32."""
        return self.tf32 and self.precision == "float32"

    @model_validator(mode="after")
    def _one_length(self) -> RunConfig:
        if (self.epochs is None) == (self.steps is None):
            given = "neither" if self.epochs is None else f"epochs: {self.epochs} and steps: {self.steps}"
            raise ValueError(f"give exactly one of epochs and steps (given: {given})")
        return self


class Config(Section):
    """The configuration of a run; built by :func:`workflows.config.load.load_config`, immutable."""

    data: DataConfig
    model: ModelConfig = Field(default_factory=ModelConfig)
    plan: PlanConfig = Field(default_factory=PlanConfig)
    roles: Annotated[RolesConfig, BeforeValidator(with_design)] = Field(default_factory=RolesConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    lr_schedule: LrScheduleConfig = Field(default_factory=LrScheduleConfig)
    validation: ValidationConfig = Field(default_factory=ValidationConfig)
    run: RunConfig

    @property
    def ranks(self) -> int:
        """Number of processes of the run: trainers, loaders, validators; roles given by host name are not counted."""
        roles = (self.roles.loaders, self.roles.validators)
        return self.trainers + sum(role for role in roles if isinstance(role, int))

    @property
    def meaningless(self) -> Mapping[str, str]:
        """Keys that have no meaning in a run of this kind -> what to use instead."""
        return without_meaning(self.data.kind, self.roles)

    @property
    def trainers(self) -> int:
        """Number of ranks that train: the plan's and the spare ones; spare ranks given by host name are not counted."""
        spare = self.roles.spare
        if self.roles.design != "offload_naive" or isinstance(spare, str):
            return self.plan.ranks
        # Without `roles.spare`, one replica more.
        return self.plan.ranks + (spare or self.plan.ranks // self.plan.replicas)

    @model_validator(mode="after")
    def _is_of_one_kind(self) -> Config:
        """Refuse keys of other kinds of input, and fill in the defaults of this kind."""
        _check_kind(self)
        if self.data.kind != "images":  # resolved here, so that RUN/config.yaml has these keys
            # `object.__setattr__`, as pydantic refuses an assignment to a frozen section.
            if self.plan.tiles is None:
                object.__setattr__(self, "plan", self.plan.model_copy(update={"tiles": 1}))
            if self.model.aggregator is None:
                chosen = self.model.model_copy(update={"aggregator": AggregatorConfig()})
                object.__setattr__(self, "model", chosen)
        return self

    @model_validator(mode="after")
    def _shards_suffice(self) -> Config:
        _check_shards(self)
        return self

    @model_validator(mode="after")
    def _one_average(self) -> Config:
        """Refuse two averages of the weights."""
        name, schedule = self.optimizer.name, self.lr_schedule.name
        if self.optimizer.is_schedule_free and schedule != "constant":
            raise ValueError(
                f"lr_schedule.name: given {schedule}; allowed with optimizer.name={name}: constant, with or without "
                f"warmup_steps: its average of the weights takes the place of a falling rate"
            )
        if self.optimizer.is_schedule_free and self.run.ema is not None:
            raise ValueError(
                f"run.ema: given {self.run.ema:g}; allowed with optimizer.name={name}: none: it keeps an average of "
                f"the weights itself, which is evaluated"
            )
        return self

    @model_validator(mode="after")
    def _metric_fits_task(self) -> Config:
        """Refuse a metric that the task does not have, and fill in its first one if none is given."""
        task, metric = self.data.facts, self.validation.metric
        if not metric:
            # Resolved here, so that RUN/config.yaml and its readers have the name of a metric.
            chosen = self.validation.model_copy(update={"metric": task.selecting[0]})
            # `object.__setattr__`, as pydantic refuses an assignment to a frozen section.
            object.__setattr__(self, "validation", chosen)
        own = [name.rpartition(":")[2] for name in self.validation.metrics]
        taken = {"loss", "slides", "case", "intervals", "calibration", "step", "kind", *task.metrics}
        # Also metrics of other tasks if lower is better: the lowest value would win, but own metrics are maximised.
        taken |= LOWER_IS_BETTER
        wrong = [name for name in own if name in taken or own.count(name) > 1]
        if wrong:
            raise ValueError(f"validation.metrics: {wrong[0]} is the name of another metric; rename the function")
        if metric and metric not in (*task.selecting, *own):
            allowed = ", ".join((*task.selecting, *own))
            raise ValueError(f"validation.metric: given {metric!r}; allowed for task {task.name}: {allowed}")
        return self

    @model_validator(mode="after")
    def _batch_fits_plan(self) -> Config:
        """Refuse a batch that cannot be divided among replicas and micro-batches."""
        if self.roles.design == "offload_naive":  # spare ranks train, too, and replicas may have different shares
            _check_sharing(self)
            return self
        parts = self.plan.replicas * self.plan.microbatches
        if self.data.batch_size % parts:
            raise ValueError(
                f"data.batch_size: given {self.data.batch_size}; allowed: a multiple of plan.replicas × "
                f"plan.microbatches = {self.plan.replicas} × {self.plan.microbatches} = {parts}"
            )
        return self


_ELEMENTWISE = ("sgd", "adam", "adamw", "lion")
"""Optimizers that update each number of a weight by itself, so that a part of a weight is enough."""


def _check_shards(config: Config) -> None:
    """Check that no other key needs whole weights if ``model.encoder.shard`` divides those of the encoder.

    Raises:
        ValueError: A key needs whole weights.
    """
    if config.model.encoder is None or not config.model.encoder.shard:
        return
    name, condition = config.optimizer.name, "with model.encoder.shard=true"
    if name not in _ELEMENTWISE:
        raise ValueError(f"optimizer.name: given {name}; allowed {condition}: {', '.join(_ELEMENTWISE)}")
    if config.run.ema is not None:
        raise ValueError(f"run.ema: given {config.run.ema:g}; allowed {condition}: none, averages are of whole weights")
    if config.model.freeze_epochs is not None:
        raise ValueError(
            f"model.freeze_epochs: given {config.model.freeze_epochs}; allowed {condition}: none, what is trained is "
            f"fixed when weights are divided; train in two runs, the second with model.encoder.weights of the first"
        )


def _check_sharing(config: Config) -> None:
    """Check ``roles.design: offload_naive``: every replica, spare ones too, must get a share of each batch.

    If ``roles.spare`` is a pattern of host names, the number of replicas is not known yet.

    Raises:
        ValueError: Keys are not compatible; the message has the key, what was given and what is allowed.
    """
    plan, roles, batch, microbatches = config.plan, config.roles, config.data.batch_size, config.plan.microbatches
    replica_ranks, count_is_known = plan.ranks // plan.replicas, not isinstance(roles.spare, str)
    replicas = config.trainers // replica_ranks
    if config.trainers % replica_ranks:
        raise ValueError(
            f"roles.spare: given {roles.spare}; allowed: a multiple of {replica_ranks}, the ranks of a replica (plan)"
        )
    if config.model.norm == "train" and not plan.sync_batch_norm:
        raise ValueError(
            "roles.design: given offload_naive, which gives replicas different numbers of slides: with batch norm "
            "over each replica this changes the result; allowed: with plan.sync_batch_norm=true, or with "
            "model.norm=group or frozen"
        )
    if batch % microbatches or batch < replicas * microbatches:
        raise ValueError(
            f"data.batch_size: given {batch}; allowed: a multiple of plan.microbatches = {microbatches}, from "
            f"{replicas * microbatches}: each of {replicas} replicas takes at least one slide of each micro-batch"
        )
    shares = roles.shares or ()
    # Each share is divided into the same number of micro-batches: replicas run them in step.
    uneven = any(share % microbatches for share in shares)
    if shares and (uneven or sum(shares) != batch or (count_is_known and len(shares) != replicas)):
        raise ValueError(
            f"roles.shares: given {list(shares)}; allowed: a multiple of plan.microbatches = {microbatches} for each "
            f"of {replicas if count_is_known else 'the'} replicas, together data.batch_size = {batch}"
        )


def _check_kind(config: Config) -> None:
    """Check that the keys of a run belong to its kind: whole images, tiles or features.

    Raises:
        ValueError: Some do not; the message has each of them, and what to use instead.
    """
    kind = config.data.kind
    if kind == "images":
        model = config.model
        given = {"model.encoder": model.encoder, "model.aggregator": model.aggregator, "plan.tiles": config.plan.tiles}
        wrong = [key for key, value in given.items() if value is not None]
        if wrong:
            raise ValueError(
                f"{', '.join(wrong)}: given without data.tiles; give data.tiles, as in {{size_px: 224}}, or "
                f"data.features for features that are computed already"
            )
        return
    instead = config.meaningless  # key -> what to use instead
    wrong = [key for key in instead if _is_given(config, key)]
    if wrong:
        lines = [f"{key}: has no meaning with data.{kind}; leave it out ({instead[key]})" for key in wrong]
        raise ValueError("\n  ".join(lines))
    if config.model.encoder is None and kind == "tiles":
        raise ValueError("model.encoder: missing; data.tiles needs it, as in {name: timm:vit_small_patch16_224}")


def refuse_tiles(config: Config, command: str) -> None:
    """Refuse a run with tiles or features in a command for whole images.

    Raises:
        RequestError: The run has tiles or features.
    """
    if config.data.kind != "images":
        raise RequestError(
            f"{command} works for whole images, not with data.{config.data.kind}; give plan.tiles (ranks that share a "
            f"slide) and plan.replicas"
        )


def _is_given(config: Config, key: str) -> bool:
    section, _, name = key.partition(".")
    part = getattr(config, section)
    # Defaults are in every section: only what the user wrote is refused.
    return name in part.model_fields_set and getattr(part, name) is not None
