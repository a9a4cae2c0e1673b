"""The sections ``optimizer``, ``lr_schedule`` and ``validation`` of a run's YAML: updates and their evaluation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from workflows.config.section import OWN, Count, Positive, Rate, Section, Share
from workflows.config.tasks import TASKS


def _patterns(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Patterns = Annotated[tuple[str, ...], BeforeValidator(_patterns)]


class GroupConfig(Section):
    """Parameters with a learning rate or a weight decay of their own."""

    match: Patterns = Field(
        min_length=1,
        description='a pattern or a list of patterns, as in head or [fc, "*.bias"]: names of parameters, or of '
        "modules with all of theirs",
    )
    lr: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="a number > 0: their learning rate; default: optimizer.lr"
    )
    weight_decay: Rate | None = Field(
        None, description="a number ≥ 0: their weight decay, norms and biases included; default: that of the others"
    )

    @model_validator(mode="after")
    def _differs(self) -> GroupConfig:
        if self.lr is None and self.weight_decay is None:
            raise ValueError("a group needs lr, weight_decay or both")
        return self


_CLASSES = {
    "radam": "torch.optim:RAdam",
    "nadam": "torch.optim:NAdam",
    "adamax": "torch.optim:Adamax",
    "rmsprop": "torch.optim:RMSprop",
    "adafactor": "torch.optim:Adafactor",
}
"""Optimizers whose names users know, with the classes to give instead of these names."""
_SPELLED = {
    **{name: name for name in ("sgd", "adam", "adamw", "lamb", "lion")},
    **dict.fromkeys(("schedulefree", "schedulefreeadamw", "adamwschedulefree"), "schedulefree"),
    **dict.fromkeys(("schedulefreesgd", "sgdschedulefree"), "schedulefree_sgd"),
}
"""Name in lower case, without hyphens and underscores -> the name in the run's resolved configuration."""
_BETAS = {"lion": (0.9, 0.99)}


def _known_optimizer(name: Any) -> Any:
    """Return a name in the spelling of the resolved configuration; other values as they are.

    Raises:
        ValueError: It is the name of an optimizer for which a class is to be given.
    """
    plain = name.lower().replace("_", "").replace("-", "") if isinstance(name, str) else ""
    if plain in _CLASSES:
        raise ValueError(f"given {name!r}; give its class: {_CLASSES[plain]}")
    return _SPELLED.get(plain, name)


class OptimizerConfig(Section):
    """The optimizer: how gradients update the weights."""

    name: Annotated[str, BeforeValidator(_known_optimizer)] = Field(
        "adamw",
        pattern=r"^(sgd|adamw?|lamb|lion|schedulefree(_sgd)?|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$",
        description="sgd, adam, adamw, lamb, lion, schedulefree (AdamW), schedulefree_sgd, or package.module:Class: "
        "the optimizer; a class of your own is called with the parameters, lr, weight_decay if it takes it, and "
        "optimizer.options",
    )
    lr: float = Field(1e-3, gt=0, allow_inf_nan=False, description="a number > 0: learning rate after the warm-up")
    momentum: Share = Field(0.9, description="a number from 0 to 1: momentum (sgd, schedulefree_sgd)")
    betas: tuple[Share, Share] | None = Field(
        None,
        description="two numbers from 0 to 1: decay of the running averages of the gradient and its square (adam, "
        "adamw, lamb, schedulefree), of the momentum in the update and of the momentum itself (lion); default: "
        "[0.9, 0.999], of lion [0.9, 0.99]",
    )
    weight_decay: Rate = Field(0.0, description="a number ≥ 0: weight decay")
    decay_norms: bool | None = Field(
        None,
        description="true or false: whether weight_decay applies to norms and biases (parameters of one dim), too; "
        "default: true for sgd, adam and classes of your own, false for the others",
    )
    groups: tuple[GroupConfig, ...] = Field(
        (),
        description="a list of groups (match, lr, weight_decay): parameters with their own lr or weight_decay, as in "
        "[{match: fc, lr: 0.01}]; match is a pattern or a list of them, as in model.freeze, and the first group that "
        "matches a parameter counts",
    )
    layer_decay: float | None = Field(
        None,
        gt=0,
        le=1,
        description="a number above 0, at most 1: factor of the learning rate from each layer to the one before it, "
        "so that the first layers change least; default: no decay",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="keyword arguments of the optimizer's class: as in {nesterov: true}"
    )
    max_norm: float | None = Field(
        None, gt=0, description="a number > 0: gradients are clipped to this global norm; default: no clipping"
    )
    accumulate: Positive = Field(
        1, description="a whole number ≥ 1: batches whose gradients are averaged for one update (a step)"
    )
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        "none",
        description="none, linear or sqrt: how lr depends on the number of slides of one update: not at all, "
        "proportional to slides / lr_batch, or to its square root",
    )
    lr_batch: Positive = Field(
        1, description="a whole number ≥ 1: slides of one update for which lr is given (lr_scaling: linear, sqrt)"
    )

    @model_validator(mode="after")
    def _betas_of_the_name(self) -> OptimizerConfig:
        if self.betas is None:  # resolved here, so that RUN/config.yaml has them
            object.__setattr__(self, "betas", _BETAS.get(self.name, (0.9, 0.999)))
        return self

    @property
    def decays_norms(self) -> bool:
        """Whether weight decay applies to parameters of one dim."""
        decays = self.name in ("sgd", "adam") or ":" in self.name
        return decays if self.decay_norms is None else self.decay_norms

    @property
    def is_schedule_free(self) -> bool:
        """Whether the optimizer averages the weights instead of lowering the learning rate."""
        return self.name.startswith("schedulefree")

    def scaled_lr(self, batch: int, lr: float | None = None) -> float:
        """Return a learning rate, by default ``optimizer.lr``, for updates of ``batch`` slides."""
        power = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}[self.lr_scaling]
        return float((self.lr if lr is None else lr) * (batch / self.lr_batch) ** power)


class LrScheduleConfig(Section):
    """The learning rate over the run, in steps (updates)."""

    name: Literal["constant", "cosine", "step", "linear"] = Field(
        "constant", description="constant, cosine, step or linear: the learning rate after the warm-up"
    )
    warmup_steps: Count = Field(0, description="a whole number ≥ 0: steps of linear warm-up at the start")
    end_factor: Share = Field(
        0.0, description="a number from 0 to 1: rate at the end of the run / rate after the warm-up (cosine, linear)"
    )
    every_steps: Positive | None = Field(
        None, description="a whole number ≥ 1: steps between two drops (step, which needs it)"
    )
    gamma: float = Field(0.1, gt=0, le=1, description="a number above 0, at most 1: factor of each drop (step)")

    @model_validator(mode="after")
    def _drops_are_placed(self) -> LrScheduleConfig:
        if self.name == "step" and self.every_steps is None:
            raise ValueError("name: step needs every_steps, the number of steps between two drops")
        return self


class ValidationConfig(Section):
    """When and on what the weights are evaluated."""

    every_steps: Positive | None = Field(
        None, description="a whole number ≥ 1: steps between two validations; default: one epoch"
    )
    split: Literal["val", "train"] = Field(
        "val", description="val or train: split to validate on (test is for `hyfi validate`)"
    )
    metric: str = Field(
        "",
        description="; ".join(f"{', '.join(facts.selecting)} ({name})" for name, facts in TASKS.items())
        + ": metric that selects the best checkpoint; default: the first of the task",
    )
    metrics: tuple[Annotated[str, Field(pattern=OWN)], ...] = Field(
        (),
        description="a list of package.module:function: your own metrics, called with the outputs and labels of all "
        "slides, higher is better; recorded under the function's name, which validation.metric accepts",
    )
    policy: Literal["all", "latest"] = Field(
        "all",
        description="all or latest: checkpoints to validate if validators fall behind: every one (all), or only the "
        "newest, so that training never waits (latest)",
    )
    grids: tuple[tuple[Positive, Positive], ...] | None = Field(
        None,
        min_length=1,
        description="a list of [rows, columns], as in [[1, 2]]: validators among which each image is divided, a grid "
        "for each stage; default: all in one row",
    )
    cells: tuple[Positive, Positive] | Literal["auto"] | None = Field(
        None,
        description="[rows, columns], as in [4, 4], or auto: each validator evaluates its own images, one cell after "
        "the other, to save memory, spilling as plan.spill says; auto: as many as plan.memory_bytes requires; default: "
        "each image is divided as grids says",
    )

    @model_validator(mode="after")
    def _alone_with_its_cells(self) -> ValidationConfig:
        """Refuse cells beside grids of several ranks."""
        if self.cells is not None and self.grids not in (None, ((1, 1),)):
            cells = self.cells if self.cells == "auto" else list(self.cells)
            raise ValueError(
                f"cells: {cells} and grids: {[list(grid) for grid in self.grids or ()]}; use either: with "
                f"cells, every validator evaluates its own images"
            )
        return self
